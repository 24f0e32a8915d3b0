"""Towers of CLIP and SigLIP: their folder is the dual encoder again, for transformers and sentence-transformers."""

from functools import partial

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, CLIPImageProcessorPil, CLIPProcessor, SiglipImageProcessorPil, SiglipProcessor

from hf_dist_ext.models.towers import TowerModel
from tests.tiny_models import tiny_tokenizer, tiny_towers

TEXTS = ["parse a date from text", "sort"]
PICTURES = [Image.new("RGB", (20, 30), (10, 200, 80)), Image.new("RGB", (16, 16), (250, 0, 30))]
PROMPT = "search : "


def build(family: str) -> tuple[TowerModel, object]:
    torch.manual_seed(0)
    size, tokenizer = {"height": 16, "width": 16}, tiny_tokenizer(max_length=40)
    if family == "clip":
        processor = CLIPProcessor(CLIPImageProcessorPil(size=size, crop_size=size), tokenizer)
    else:
        processor = SiglipProcessor(SiglipImageProcessorPil(size=size), tokenizer)
    model = TowerModel(tiny_towers(family), {"query": "text", "positive": "image"}).eval()
    model.prompts, model.default_prompt_name = {"query": PROMPT}, "query"
    return model, processor


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_sentence_transformers_embeds_texts_and_pictures_as_the_towers_do(tmp_path, family, normalize):
    model, processor = build(family)
    model.normalize = normalize
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    served = SentenceTransformer(str(tmp_path), device="cpu")
    padding = {"clip": {"padding": True}, "siglip": {"padding": "max_length", "max_length": 40}}[family]
    prompted = [PROMPT + text for text in TEXTS]
    plain = partial(served.encode, prompt="")
    for texts, encode in ((TEXTS, plain), (prompted, served.encode), (prompted, served.encode_query)):
        features = processor.tokenizer(texts, return_tensors="pt", truncation=True, **padding)
        with torch.no_grad():
            ours = model(column="query", **features).embeddings
        assert (encode(TEXTS, convert_to_tensor=True) - ours).abs().max() <= 1e-6 and ours.std(dim=0).max() > 1e-3
    with torch.no_grad():
        ours = model(column="positive", **processor.image_processor(images=PICTURES, return_tensors="pt")).embeddings
    assert (served.encode(PICTURES, convert_to_tensor=True) - ours).abs().max() <= 1e-6


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_transformers_loads_one_complete_model_of_weights_that_are_stored_once(tmp_path, family):
    model, _ = build(family)
    model.save_pretrained(tmp_path)
    whole, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert whole.config.model_type == family and not any(report.values())
    files = {name: load_file(tmp_path / name / "model.safetensors") for name in ("text", "image")}
    assert not list(tmp_path.glob("model*.safetensors"))
    weights = whole.state_dict()
    assert weights.keys() - {name for file in files.values() for name in file} == {"logit_scale"} | (
        {"logit_bias"} if family == "siglip" else set()
    )
    for file in files.values():
        assert all(torch.equal(weights[name], value) for name, value in file.items())
