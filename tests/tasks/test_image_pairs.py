"""Pairs of a caption and a picture from a run file: one tower trains against the other, which is locked."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoProcessor, CLIPModel, SiglipModel

from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.errors import UsageError
from hf_dist_ext.tasks.search import pictures_below
from tests.tasks.test_stages import main
from tests.tiny_models import WORDS, loaded, of_dual_encoder, save_dual_encoder, write_fields


@pytest.fixture
def run_file(tmp_path):
    def write(family: str = "clip", rows: list | None = None, **more) -> Path:
        save_dual_encoder(family, tmp_path / "model")
        (tmp_path / "pictures").mkdir(exist_ok=True)
        given = []
        for number in range(24):
            file = f"{number}.png"
            Image.new("RGB", (20, 20), (number * 10, 255 - number * 10, 80)).save(tmp_path / "pictures" / file)
            given.append({"caption": f"{WORDS[number % 12]} {WORDS[number // 2]} {number}", "file": file})
        text = "\n".join(json.dumps(row) for row in (given if rows is None else given + rows))
        (tmp_path / "pairs.jsonl").write_text(text)
        fields = {
            "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "pairs.jsonl"),
            "columns": {"query": "caption", "positive": "file"}, "image_columns": ["positive"],
            "image_folder": str(tmp_path / "pictures"), "trainable_modules": ["text"], "eval_holdout": 8,
            "per_device_train_batch_size": 8, "gradient_cache_chunk_size": 3, "max_steps": 4, "save_steps": 2,
            "learning_rate": 1e-2, "output_dir": str(tmp_path / "out"),
        }  # fmt: skip
        return write_fields(tmp_path, **fields | more)

    return write


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of both towers, by transformers' names; adapters are merged."""
    return loaded(folder)[0].model.state_dict()


def moved_towers(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys() and len(before) > 40
    kinds = {"text": "text", "vision": "image", "visual": "image", "logit": "logit"}
    return {kinds[name.split("_")[0]] for name, value in after.items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("family, trained", [("clip", "text"), ("siglip", "text"), ("siglip", "image")])
def test_one_tower_trains_and_the_other_stays_bit_identical(run_file, tmp_path, family, trained):
    main(run_file(family, trainable_modules=[trained]))
    whole = (CLIPModel if family == "clip" else SiglipModel).from_pretrained(tmp_path / "model")
    assert moved_towers(whole.state_dict(), weights_of(tmp_path / "out")) == {trained}
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert 0 < report["trained_share"] < 1 and report["contrastive_batch_size"] == 8 and report["num_chunks"] > 3
    assert 0 < report["after"]["mrr@10"] <= 1 and report["before"] != report["after"]


def test_a_run_of_towers_is_resumed_and_ends_with_the_same_weights(run_file, tmp_path):
    path = run_file()
    main(path)
    whole = weights_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    main(path, "--resume_from_checkpoint", "true")
    again = weights_of(tmp_path / "out")
    assert all(torch.equal(again[key], value) for key, value in whole.items())


def test_adapters_on_towers_end_merged_in_a_run_and_in_every_stage(run_file, tmp_path):
    lora = {"use_lora": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    single = {"max_steps": 2, "save_strategy": "no", "trainable_modules": ...}
    main(run_file(**single, **lora))
    alone = weights_of(tmp_path / "out")
    kinds = {
        "adapters": lora,
        "text": {"trainable_modules": ["text"]},
        "both": lora | {"trainable_modules": ["image"]},
    }
    listed = [{"name": name, "max_steps": 2} | more for name, more in kinds.items()]
    main(run_file(**single, stages=listed, output_dir=str(tmp_path / "staged")))
    folders = [tmp_path / "staged" / name for name in ("stage_0_adapters", "stage_1_text", ".")]
    first, second, last = (weights_of(folder) for folder in folders)
    assert alone.keys() == first.keys() == last.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(first[name], weight, rtol=0, atol=1e-6)
    before = CLIPModel.from_pretrained(tmp_path / "model").state_dict()
    moved = {name for name in alone if not torch.equal(alone[name], before[name])}
    assert moved and all("q_proj" in name or "v_proj" in name for name in moved)
    assert moved_towers(first, second) == {"text"} and "image" in moved_towers(second, last)


def test_a_folder_of_towers_starts_another_run_and_keeps_its_prompts(run_file, tmp_path):
    main(run_file(max_steps=1, prompts={"query": "search : "}))
    first = weights_of(tmp_path / "out")
    more = ("--trainable_modules", '["image"]', "--output_dir", str(tmp_path / "second"))
    main(run_file(max_steps=1), "--model_name_or_path", str(tmp_path / "out"), *more)
    assert moved_towers(first, weights_of(tmp_path / "second")) == {"image"}
    model = SentenceTransformer(str(tmp_path / "second"), device="cpu")  # whose run file names no prompt
    embedded = model.encode_query(["sort"])
    assert (embedded == model.encode(["search : sort"])).all() and (embedded != model.encode(["sort"])).any()


def test_towers_are_built_from_a_config(run_file, tmp_path):
    config = of_dual_encoder("clip")[0].to_dict()
    more = {"model_config": config, "model_name_or_path": None, "tokenizer_name": str(tmp_path / "model")}
    main(run_file(max_steps=1, **more))
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model[0].model.config.text_config.hidden_size == 32 and model.encode(["sort"]).shape == (1, 16)


@pytest.mark.parametrize("change, words", [
    ({"rows": [{"caption": "a", "file": "gone.png"}]}, "row 24 (counted from 0)"),
    ({"image_columns": ["picture"]}, 'image_columns has "picture"'),
    ({"image_folder": "nowhere"}, 'image_folder="nowhere" is no folder'),
    ({"max_length": 77}, "the model has positions for 16 tokens"),
    ({"trainable_modules": ["txt"]}, "txt"),
    ({"model_config": {"model_type": "bert"}, "model_name_or_path": None}, "the model embeds text only"),
    ({"model_config": {"model_type": "bert"}, "model_name_or_path": None, "image_columns": None,
      "columns": {"query": {"text": "caption", "image": "file"}, "positive": "caption"}}, 'column "query" holds pict'),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(run_file, capsys, change, words):
    with pytest.raises(SystemExit):
        main(run_file(**change))
    assert words in capsys.readouterr().err


def test_without_pillow_a_run_with_pictures_ends_in_one_line(run_file, monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "PIL" else find(name, *more))
    with pytest.raises(SystemExit):
        main(run_file())
    assert "error: pictures need Pillow, which is not installed. Run: pip install" in capsys.readouterr().err
    with pytest.raises(UsageError, match="pictures need Pillow"):
        pictures_below(tmp_path, None)


def test_siglips_texts_have_the_full_width(run_file, tmp_path, capsys):
    main(run_file("siglip", max_steps=1, save_strategy="no"))
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    texts = ["parse", "parse a date"]
    assert model.preprocess(texts)["input_ids"].shape == (2, 16)
    torch.testing.assert_close(model.encode(texts)[:1], model.encode(texts[:1]), rtol=0, atol=1e-6)
    with pytest.raises(SystemExit):
        main(run_file("siglip"), "--max_length", "8", "--output_dir", str(tmp_path / "other"))
    assert "this model reads texts of 16 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("trained", [["text"], None], ids=["one tower", "both"])
def test_a_checkpoint_of_towers_is_merged_into_the_folder_the_run_ends_with(run_file, tmp_path, family, trained):
    main(run_file(family, trainable_modules=trained))
    checkpoint, merged = tmp_path / "out" / "checkpoint-4", tmp_path / "merged"
    assert (checkpoint / "trainable.safetensors").is_file() == (trained is not None)
    merge(checkpoint, merged)
    assert moved_towers(weights_of(tmp_path / "out"), weights_of(merged)) == set()
    for end, again in zip(texts_and_pictures(tmp_path / "out"), texts_and_pictures(merged), strict=True):
        assert torch.equal(end, again)
    assert (merged / "tokenizer_config.json").is_file()
    if trained is not None:
        merge(checkpoint, tmp_path / "again", base=str(merged))  # the folder of a run is a base too
        weights = load_file(merged / "model.safetensors")
        save_file({name: value + 1 for name, value in weights.items()}, merged / "model.safetensors", {"format": "pt"})
        with pytest.raises(UsageError, match="frozen weights .* other values"):
            merge(checkpoint, tmp_path / "wrong", base=str(merged))


TEXTS = ["parse", "parse a date from text " * 9]


def some_pictures() -> list[Image.Image]:
    return [Image.new("RGB", (20, 20), (number * 50, 90, 80)) for number in range(4)]


def texts_and_pictures(folder: Path) -> list[torch.Tensor]:
    served = SentenceTransformer(str(folder), device="cpu")
    return [served.encode(values, convert_to_tensor=True) for values in (TEXTS, some_pictures())]


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_the_folder_of_a_run_is_served_with_texts_and_pictures(run_file, tmp_path, family):
    main(run_file(family, max_steps=2, trainable_modules=None))
    weights, (texts, pictures) = weights_of(tmp_path / "out"), texts_and_pictures(tmp_path / "out")
    whole = (CLIPModel if family == "clip" else SiglipModel).from_pretrained(tmp_path / "model").eval()
    assert moved_towers(whole.state_dict(), weights) >= {"text", "image"}
    whole.load_state_dict(weights)
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    tokens = processor.tokenizer(TEXTS, truncation=True, padding="max_length", max_length=16, return_tensors="pt")
    given = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
    pixels = processor.image_processor(images=some_pictures(), return_tensors="pt").pixel_values
    with torch.no_grad():
        expected = whole.get_text_features(**given), whole.get_image_features(pixel_values=pixels)
    for found, one in zip((texts, pictures), expected, strict=True):
        vectors = getattr(one, "pooler_output", one)
        assert (found - torch.nn.functional.normalize(vectors)).abs().max() <= 1e-6


@pytest.mark.parametrize("layout", ["new", "old"])
def test_a_dual_encoder_of_sentence_transformers_starts_a_run(run_file, tmp_path, layout):
    path = run_file(max_steps=1, save_strategy="no")
    served, start = SentenceTransformer(str(tmp_path / "model"), device="cpu"), tmp_path / "start"
    served.save(str(start))
    if layout == "old":  # the whole model in a folder of its own
        start.rename(tmp_path / "0_CLIPModel")
        start.mkdir()
        (tmp_path / "0_CLIPModel").rename(start / "0_CLIPModel")
        (start / "0_CLIPModel" / "modules.json").unlink()
        kind = "sentence_transformers.models.CLIPModel"
        modules = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": kind}]
        (start / "modules.json").write_text(json.dumps(modules))
    before = texts_and_pictures(start)
    main(path, "--model_name_or_path", str(start), "--learning_rate", "0")
    for old, new in zip(before, texts_and_pictures(tmp_path / "out"), strict=True):
        torch.testing.assert_close(torch.nn.functional.normalize(old), new, rtol=0, atol=1e-6)
