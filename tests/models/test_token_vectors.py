"""A model of token vectors gives the same through the cache on either side of padding."""

import pytest
import torch

from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import real_in_front
from tests.tiny_models import WORDS, embed, embedding_model, model_config, tiny_tokenizer


def batch_of(padding_side: str, rows: int = 9) -> dict:
    tokenizer, columns = tiny_tokenizer(padding_side), {"query": 3, "positive": 5}
    words = lambda i, n: " ".join(WORDS[(i * n + k) % len(WORDS)] for k in range(1 + i * n % 8))  # noqa: E731
    texts = {name: [words(i, n) for i in range(rows)] for name, n in columns.items()}
    return {name: dict(tokenizer(of, padding=True, return_tensors="pt")) for name, of in texts.items()}


@pytest.mark.parametrize(("name", "padding_side"), [("bert", "right"), ("qwen3", "left"), ("bert", "left")])
@pytest.mark.parametrize("has_wide", [False, True])
def test_cached_gradients_are_those_of_the_full_batch(name, padding_side, has_wide):
    """Rows padded on the left are narrower in a small chunk than in a wide one, and their tokens stand elsewhere."""
    torch.manual_seed(0)
    config = model_config(name, **({} if name == "qwen3" else {"hidden_dropout_prob": 0.0}))
    model = embedding_model(config, pooling="tokens", projection_dim=6).eval().double()
    batch, loss = batch_of(padding_side), LateInteractionLoss(0.5)
    plain = loss({column: embed(model, **features) for column, features in batch.items()}).loss
    trained = dict(model.named_parameters())
    expected = torch.autograd.grad(plain, list(trained.values()), allow_unused=True)
    assert sum(gradient is not None and gradient.abs().max() > 1e-6 for gradient in expected) > 20
    options = {"can_shift": name == "qwen3"}
    wide = lay_out(batch, ChunkLimits(max_rows=7), **options) if has_wide else None
    chunked = lay_out(batch, ChunkLimits(max_rows=2), **options)
    step = cached_step(chunked, lambda chunk: embed(model, **chunk.features), loss, wide=wide)
    assert step.num_chunks >= 9 and step.loss.item() == pytest.approx(plain.item(), rel=1e-12)
    for (key, parameter), gradient in zip(trained.items(), expected, strict=True):
        if gradient is not None:
            assert (parameter.grad - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-3), key


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(UsageError, match=r"must be \(rows, tokens\)"):
        real_in_front(torch.zeros(4, 5, 2), torch.ones(4, 6))
