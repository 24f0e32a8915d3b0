"""Under autocast a step casts every weight once, whatever its chunks; gradients are those of casts per chunk."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.strategies.base import Strategy
from tests.training.test_trainer import Tiny, trainer


class Casts(TorchDispatchMode):
    """Of parameters."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        return function(*args, **(kwargs or {}))


def step(tmp_path, dropout: float, **more) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """(casts, chunks, gradients, the loss) of a first step."""
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8))
    made = trainer(tmp_path, Tiny(middle), bf16=True, gradient_cache_chunk_size=2, max_steps=1, **more)
    found = []
    made.accelerator.clip_grad_norm_ = lambda parameters, norm: found.extend(p.grad.clone() for p in parameters)
    with Casts() as casts:
        made.train()
    return casts.count, made.meter.usual_chunks, torch.cat([g.flatten() for g in found]), made.state.log_history[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("num_kept", [0, 3, 99])
def test_weights_are_cast_once_per_step(tmp_path, monkeypatch, num_kept, dropout):
    casts, chunks, gradients, log = step(tmp_path, dropout, gradient_cache_keep_graph=num_kept)
    assert chunks == 8 and casts == 4, "two layers' weights and biases"
    monkeypatch.setattr(Strategy, "sharing_casts", lambda *given: nullcontext())
    more_casts, _, wanted, before = step(tmp_path / "apart", dropout, gradient_cache_keep_graph=num_kept)
    assert more_casts >= 4 * chunks and wanted.abs().max() > 0
    assert torch.equal(gradients, wanted) and log["loss"] == before["loss"]


def test_gradients_of_kept_graphs_are_added_up_in_float32():
    """Those of graphs that go through one backward too, as under DDP: they share no copy of a weight."""
    torch.manual_seed(0)
    found, model = {}, nn.Linear(16, 16)
    batch = {name: {"x": torch.randn(64, 16)} for name in ("query", "positive")}

    def encode(chunk):
        with torch.autocast("cpu", torch.bfloat16):
            return model(chunk.features["x"])

    for is_joined in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", enabled=False), Casts() as casts:
            cached_step(
                lay_out(batch, ChunkLimits(max_rows=2)), encode, InfoNCELoss(0.05), keep_graph=99,
                backward_together=is_joined,
            )  # fmt: skip
        assert casts.count == (2 * 64 if is_joined else 2)
        found[is_joined] = model.weight.grad
    assert found[True].abs().max() > 0
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-6 * found[True].abs().max().item())


def test_scores_stay_in_float32(tmp_path):
    seen = []
    made = trainer(tmp_path, bf16=True, max_steps=1)
    scored = made.loss.forward
    made.loss.forward = lambda *given, **more: (
        seen.append((torch.is_autocast_enabled("cpu"), {e.dtype for e in given[0].values()})) or scored(*given, **more)
    )
    made.train()
    assert seen == [(False, {torch.float32})]
