"""Rows of texts, pictures and both: chunks of every family have the gradient of the whole batch, and ids tell rows
apart."""

from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoProcessor

from hf_dist_ext.data.collator import CONSTANTS, content_id
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.tasks.embedding import _collator as collator_of
from tests.engine.test_images import double_precision  # noqa: F401, a fixture of all tests here
from tests.tiny_models import embedding_model
from tests.tiny_processors import FAMILIES, mixed_row, picture, tiny_vision_language

COLUMNS = ["query", "positive", "negative"]
PROMPTS = {"query": "find it", "positive": "", "negative": ""}
SENTINELS = [("llava", "right"), ("smolvlm", "right"), ("qwen2_5_vl", "left"), ("internvl", "left")]


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("family, side, limits", [
    pytest.param(family, side, limits, marks=() if (family, side) in SENTINELS else pytest.mark.slow)
    for family in FAMILIES
    for side, limits in [("right", ChunkLimits(1)), ("left", ChunkLimits(max_tokens=90))]
])  # fmt: skip
def test_cached_gradients_are_those_of_the_whole_batch(family, side, limits):
    assert_cached_is_plain(family, side, limits, InfoNCELoss(temperature=0.1), pooling="last")


@pytest.mark.parametrize("family, side", [
    pytest.param(family, side, marks=() if (family, side) == ("qwen2_5_vl", "left") else pytest.mark.slow)
    for family in FAMILIES
    for side in ("right", "left")
])  # fmt: skip
def test_cached_gradients_of_token_vectors_are_those_of_the_whole_batch(family, side):
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


def test_ids_are_equal_for_equal_content_alone():
    one, same = {"text": "a", "image": picture(1)}, {"text": "a", "image": picture(1).copy()}
    others = [{"text": "b", "image": picture(1)}, {"text": "a", "image": picture(2)}, {"text": "a"}, "a", picture(1)]
    assert content_id(one) == content_id(same) and len({content_id(value) for value in [one, *others]}) == 6


def test_ids_of_messages_follow_from_their_pictures():
    def talk(image):
        return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "a"}]}]

    one, same, other = talk(picture(1)), talk(picture(1).copy()), talk(picture(2))
    assert content_id(one) == content_id(same) != content_id(other)
    pair, again = (picture(1), "a"), (picture(1).copy(), "a")
    assert content_id(pair) == content_id(again) != content_id((picture(2), "a"))
