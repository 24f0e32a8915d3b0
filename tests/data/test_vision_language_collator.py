"""Texts, pictures and both become features row by row as the processor makes them, counted for whoever cuts them."""

import io
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor

from hf_dist_ext.data.collator import CONSTANTS, content_id
from hf_dist_ext.data.vision_language_collator import VisionLanguageCollator
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.tasks.embedding import _collator as collator_of
from tests.tiny_models import embedding_model
from tests.tiny_processors import FAMILIES, TEMPLATE, mixed_row, picture, tiny_vision_language

COLUMNS = ["query", "positive", "negative"]
PROMPTS = {"query": "find it", "positive": "", "negative": ""}
SENTINELS = [("llava", "right"), ("smolvlm", "right"), ("qwen2_5_vl", "left"), ("internvl", "left")]
BOTH = {"image": [picture(1), picture(2, 32, 32)], "text": "which one"}


def made(family: str, side: str = "right", max_length=None, **options) -> tuple[VisionLanguageCollator, dict]:
    processor, config = tiny_vision_language(family, side, max_length)
    options = {"prompts": PROMPTS, **options}
    return VisionLanguageCollator(processor.tokenizer, COLUMNS, processor=processor, **options), config


@pytest.fixture
def double_precision(monkeypatch):
    """As in tests/engine/test_images.py: code that casts to float32 inside would hide what chunks do."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    yield
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("family, side, limits", [
    pytest.param(family, side, limits, marks=() if (family, side) in SENTINELS else pytest.mark.slow)
    for family in FAMILIES
    for side, limits in [("right", ChunkLimits(1)), ("left", ChunkLimits(max_tokens=90))]
])  # fmt: skip
def test_cached_gradients_are_those_of_the_whole_batch(family, side, limits, double_precision):
    assert_cached_is_plain(family, side, limits, InfoNCELoss(temperature=0.1), pooling="last")


@pytest.mark.parametrize("family, side", [
    pytest.param(family, side, marks=() if (family, side) == ("qwen2_5_vl", "left") else pytest.mark.slow)
    for family in FAMILIES
    for side in ("right", "left")
])  # fmt: skip
def test_cached_gradients_of_token_vectors_are_those_of_the_whole_batch(family, side, double_precision):
    """Every token of words and pictures has a vector, as in ColQwen and ColPali."""
    loss = LateInteractionLoss(temperature=0.5)
    assert_cached_is_plain(family, side, ChunkLimits(max_tokens=60), loss, pooling="tokens", projection_dim=6)


def assert_cached_is_plain(family: str, side: str, limits: ChunkLimits, loss: nn.Module, **options) -> None:
    """Of the model and the collator that a run file makes."""
    processor, config = tiny_vision_language(family, side)
    torch.manual_seed(0)
    with mock.patch.object(AutoProcessor, "from_pretrained", lambda *args, **options: processor):  # without videos
        model = embedding_model(config, tokenizer=processor, dtype=torch.float64, **options).train()
    embedder, loss = embedder_of(model), loss.double()
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            nn.init.normal_(parameter.data, std=0.2)  # Gemma's projection, through which pictures would not be seen
    batch = collator_of(model, COLUMNS, PROMPTS)([mixed_row(i) for i in range(6)])
    batch.pop("ids")
    constants = batch.pop(CONSTANTS)
    embeddings = {name: embedder.call(model, of, name, constants[name]) for name, of in batch.items()}
    expected = gradients(model, loss(embeddings)[0])
    vision = [g for name, g in expected.items() if "visual" in name or "vision" in name]
    assert len(vision) > 5 and torch.stack([g.abs().max() for g in vision]).median() > 1e-6
    chunked = lay_out(batch, limits, model_config=model[0].model.config, shares_tower=not embedder.takes_column)
    assert len(chunked.chunks()) > 5 and {chunk.has_vision for chunk in chunked.chunks()} == {True, False}

    def encode(chunk):
        return embedder.call(model, chunk.features, chunk.column, constants[chunk.column])

    cached_step(chunked, encode, lambda found: loss(found))
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    scale = torch.cat([g.flatten() for g in expected.values()]).norm()
    error = torch.cat([(a - b).flatten() for a, b in zip(found, expected.values(), strict=True)]).norm()
    assert scale > 0.1 and error / scale < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_holds_what_the_processor_makes_of_each_row(family):
    collate, _ = made(family)
    values = ["a red boat", picture(3, 24, 16), BOTH, {"text": "", "image": picture(4)}, {"text": "a tree"}]
    batch, last = collate.features("query", values), dict.fromkeys(("num_images", "num_tiles"), 0)
    for row, value in enumerate(values):
        alone = collate.features("query", [value])
        is_real = batch["attention_mask"][row].bool()
        for key in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
            if key in batch:
                assert torch.equal(batch[key][row, is_real], alone[key][0]), key
        count = "num_tiles" if "num_tiles" in batch else "num_images"
        number = batch[count][row]
        assert number == alone.get(count, [0])[0] and batch["num_images"][row] == [0, 1, 2, 1, 0][row]
        if number and batch["pixel_values"].shape[0] == sum(batch[count]):
            own = batch["pixel_values"][last[count] : last[count] + number]
            assert torch.equal(own, alone["pixel_values"])
        last[count] += number


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_the_prompt_is_the_message_of_the_system_and_parts_keep_their_order(family):
    collate, _ = made(family)
    tokens = lambda column, value: collate.tokenizer.decode(collate.features(column, [value])["input_ids"][0])  # noqa: E731
    expected = "<|im_start|> system find it <|im_end|> <|im_start|> user a boat <|im_end|>"
    assert tokens("query", "a boat").split() == expected.split()
    assert "system" not in tokens("positive", "a boat")
    first, second = (tokens("positive", value) for value in (BOTH, dict(reversed(BOTH.items()))))
    assert first.index("<image>") < first.index("which one") and second.index("which one") < second.index("<image>")


def test_bytes_and_stored_pictures_are_the_pictures():
    collate, _ = made("llava")
    file = io.BytesIO()
    picture(7).save(file, "PNG")
    expected = collate.features("query", [picture(7)])
    for value in (file.getvalue(), {"bytes": file.getvalue(), "path": None}, {"image": file.getvalue()}):
        assert torch.equal(collate.features("query", [value])["pixel_values"], expected["pixel_values"])
    grey = picture(7).convert("L")
    assert collate.features("query", [grey])["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_long_text_keeps_what_the_template_writes_after_it(side):
    collate, _ = made("llava", side, max_length=12)
    long = collate.features("query", ["a red green small round boat tree house"])["input_ids"][0]
    words = collate.tokenizer.decode(long).split()
    assert words == "<|im_start|> system find it <|im_end|> <|im_start|> user a red green small <|im_end|>".split()
    collate, _ = made("llava", side)
    collate.max_length = {"query": 12}
    assert torch.equal(collate.features("query", ["a red green small round boat tree house"])["input_ids"][0], long)
    assert collate.features("positive", ["a " * 30])["input_ids"].shape == (1, 33)


def test_a_row_is_never_cut_through_a_picture():
    collate, _ = made("llava")
    collate.max_length = 30  # the picture ends at token 24 of 30, behind the prompt
    row = collate.features("query", [{"image": picture(1), "text": "a red green small round boat tree house"}])
    assert row["input_ids"].shape == (1, 30) and row["num_images"] == [1]
    collate.max_length = 20
    with pytest.raises(UsageError, match="a row with 1 image.s. has an image token at place 23, beyond max_length=20"):
        collate.features("query", ["a boat", picture(1)])


def test_a_batch_without_a_negative_has_features_of_no_row():
    collate, _ = made("qwen3_vl")
    batch = collate([mixed_row(i) | {"negative": [None, {"text": "", "image": None}]} for i in range(2)])
    assert batch["negative"]["input_ids"].shape[0] == 0 and len(batch["ids"]["negative"]) == 0


def test_ids_are_equal_for_equal_content_alone():
    one, same = {"text": "a", "image": picture(1)}, {"text": "a", "image": picture(1).copy()}
    others = [{"text": "b", "image": picture(1)}, {"text": "a", "image": picture(2)}, {"text": "a"}, "a", picture(1)]
    assert content_id(one) == content_id(same) and len({content_id(value) for value in [one, *others]}) == 6


def test_options_reach_the_template_and_the_processor():
    collate, _ = made("qwen3_vl", processing_kwargs={
        "chat_template": {"add_generation_prompt": True}, "image": {"size": {"shortest_edge": 64, "longest_edge": 64}},
    })  # fmt: skip
    features = collate.features("query", [picture(1, 32, 32)])
    assert features["image_grid_thw"].prod() == 4
    assert collate.tokenizer.decode(features["input_ids"][0]).endswith("<|im_start|> assistant")
    with pytest.raises(UsageError, match='processing_kwargs has no "template". It takes text, image'):
        made("llava", processing_kwargs={"template": {}})


@pytest.mark.parametrize("value, words", [
    (None, "holds None, which is neither text nor picture"),
    ({"text": None, "image": None}, "holds a row without text and image"),
    ({"text": "a", "sound": b"x"}, 'holds a row with "sound"'),
    (b"no picture", "holds a picture that cannot be read"),
    ({"image": "nowhere.png"}, "holds a picture that cannot be read.*nowhere.png"),
    ("an <image> too many", "writes 1 image token.*for 0 image.*Remove it from the text"),
])  # fmt: skip
def test_what_cannot_be_embedded_is_named_with_its_column(value, words):
    with pytest.raises(UsageError, match=f'[Cc]olumn "positive".*{words}'):
        made("llava")[0].features("positive", [value])


def test_templates_that_drop_something_are_refused():
    collate, _ = made("llava")
    collate.processor.chat_template = TEMPLATE.replace("IMAGE ", "")
    with pytest.raises(UsageError, match="writes 0 image token.*for 1 image.*Use a template for images"):
        collate.features("positive", [picture(1)])
    collate.processor.chat_template = "{{ messages[-1]['content'][0]['text'] }}"
    with pytest.raises(UsageError, match='does not write the message of the system, so the prompt of "query"'):
        collate.features("query", ["a boat"])
    processor, _ = tiny_vision_language("llava")
    processor.chat_template = None
    with pytest.raises(UsageError, match="has no chat template"):
        VisionLanguageCollator(processor.tokenizer, COLUMNS, processor=processor)


def test_widths_are_rounded_up_where_asked():
    collate, _ = made("llava", pad_to_multiple_of=32)
    features = collate.features("query", ["a boat", np.array(1) and Image.new("RGB", (16, 16))])
    assert features["input_ids"].shape == (2, 32) and features["attention_mask"].sum() < 64
