"""Memory that runs out in a step of one process: smaller sizes, the same weights and losses as if it had not."""

import errno
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_dist_ext.errors import RunError
from hf_dist_ext.training.out_of_memory import FILE, LAST, LOSS, REPLAY, Reductions, is_lack_of_memory
from tests.training.test_trainer import Centered, Tiny, trainer


@pytest.mark.parametrize("error, is_lack", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
    (RuntimeError("CUDA driver error: out of memory"), True),
    (torch.distributed.DistBackendError("unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), True),
    (torch.distributed.DistBackendError("unhandled cuda error\nLast error:\nCuda failure 'out of memory'"), True),
    (RunError("step 3: rank 1 ran out of memory in a chunk, says /runs/CUDA/smaller_chunks.json"), False),
    (RuntimeError("CUDA error: device-side assert triggered"), False),
    (RuntimeError("not enough memory"), False),
    (ValueError("CUDA error: out of memory"), False),
], ids=str)  # fmt: skip
def test_a_lack_of_memory_is_known_whoever_tells_of_it(error, is_lack):
    assert is_lack_of_memory(error) is is_lack


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


def six_layers() -> nn.Module:
    """With a config, so that the pass without a graph takes wider chunks."""
    torch.manual_seed(1)
    model = Tiny(nn.Sequential(*[Layer() for _ in range(6)]))
    model.config = SimpleNamespace(num_hidden_layers=6, to_dict=dict)
    return model


def short_of_memory(of, at_call: int, largest: int, only_graphs: bool = False):
    """From its n-th call on, the model holds no more than so many rows with a graph, or in the pass without one."""
    encode, calls = of.step._encode, []

    def encoding(model, chunk, **options):
        calls.append(chunk.num_rows)
        is_counted = torch.is_grad_enabled() or not only_graphs
        if len(calls) >= at_call and chunk.num_rows > largest and is_counted:
            raise torch.OutOfMemoryError("not enough memory")
        return encode(model, chunk, **options)

    of.step._encode = encoding
    return calls


def weights(of) -> torch.Tensor:
    parameters = [*of.model.parameters(), *of.loss.parameters()]
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in parameters])


def losses(of) -> list[float]:
    return [line["loss"] for line in of.state.log_history if "loss" in line]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_step_that_ran_out_wrote_to_the_loss_is_taken_back(tmp_path, accumulation):
    """The pass with graphs runs out, when the loss has seen the batch."""
    found = []
    for name in ("whole", "short"):
        torch.manual_seed(2)
        run = trainer(tmp_path / name, loss=Centered(), gradient_cache_chunk_size=4, num_rows=64,
                      gradient_accumulation_steps=accumulation)  # fmt: skip
        if name == "short":
            short_of_memory(run, 6, 2, only_graphs=True)
        run.train()
        found.append((run.loss.seen, run.loss.center))
    assert found[0][0] == 3 * accumulation and found[0][1].any()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("at_call", [1, 11, 15, 16])  # the first call, and every pass of later steps
def test_the_step_is_run_again_in_smaller_chunks_with_the_same_result(tmp_path, at_call, accumulation, monkeypatch):
    said = []
    monkeypatch.setattr("hf_dist_ext.training.out_of_memory.logger.warning", said.append)
    options = dict(gradient_cache_chunk_size=4, num_rows=64, gradient_accumulation_steps=accumulation)
    options |= dict(learning_rate=0.01, lr_scheduler_type="constant", include_num_input_tokens_seen="all")
    whole = trainer(tmp_path / "whole", **options)
    start = weights(whole)
    whole.train()
    assert not torch.allclose(weights(whole), start)
    short = trainer(tmp_path / "short", **options)
    calls = short_of_memory(short, at_call, 2)
    short.train()
    assert len(said) == 1 and "rank 0 ran out of memory in" in said[0]
    assert "chunks of 0.5 of the size that was given" in said[0]
    assert max(calls[-4:]) == 2
    assert torch.allclose(weights(short), weights(whole), atol=1e-6) and losses(short) == pytest.approx(losses(whole))
    accuracy = [[line["accuracy"] for line in of.state.log_history if "accuracy" in line] for of in (short, whole)]
    assert accuracy[0] == accuracy[1] and short.health.guard.total == 0
    resumed = trainer(tmp_path / "short", **options)
    calls = short_of_memory(resumed, 1, 2)
    resumed.train()
    assert max(calls) == 2 and len(said) == 2 and str(tmp_path / "short" / FILE) in said[1]
    other = trainer(tmp_path / "short", **options | {"gradient_cache_chunk_size": 3})
    calls = short_of_memory(other, 10**9, 2)
    other.train()
    assert max(calls) == 3, "what is stored counts for the sizes that were given then"


class Graph:
    """Lives as long as the node of autograd that holds it."""


def test_kept_graphs_go_before_chunks_shrink(tmp_path):
    """A batch of eight chunks, of which six keep their graphs: there is room for two graphs of up to two rows."""
    options = dict(gradient_cache_chunk_size=2, num_rows=64, learning_rate=0.01, max_steps=6)
    options["gradient_cache_keep_graph"] = 6
    whole, short = (trainer(tmp_path / name, six_layers(), **options) for name in ("whole", "short"))
    whole.train()
    encode, alive, kept = short.step._encode, [], []

    def encoding(model, chunk, **more):
        kept.append(short.step.layout.num_kept)
        if torch.is_grad_enabled():
            if sum(graph() is not None for graph in alive) >= 3:
                raise torch.OutOfMemoryError("not enough memory")
        found = encode(model, chunk, **more)
        if torch.is_grad_enabled():
            found.grad_fn.metadata["graph"] = graph = Graph()
            alive.append(weakref.ref(graph))
        return found

    short.step._encode = encoding
    short.train()
    assert max(kept) >= 6 and kept[-1] == 0 and short.step.sizes.fitting.now == Reductions(keeps_graphs=False)
    assert torch.allclose(weights(short), weights(whole), atol=1e-6)


def test_a_step_is_run_again_also_where_the_sizes_can_not_be_stored(tmp_path, monkeypatch):
    short = trainer(tmp_path, gradient_cache_chunk_size=4)
    said = []
    monkeypatch.setattr("hf_dist_ext.training.out_of_memory.logger.warning", said.append)
    monkeypatch.setattr(short.step.sizes.fitting, "_store", full_disk)
    calls = short_of_memory(short, 1, 2)
    short.train()
    assert max(calls[-2:]) == 2 and len(said) == 2 and "No space left" in said[1] and FILE in said[1]


def full_disk(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_fits_in_no_chunk_ends_the_run(tmp_path):
    short = trainer(tmp_path, gradient_cache_chunk_size=4)
    short_of_memory(short, 10, 0)
    with pytest.raises(RunError, match="rank 0 ran out of memory in the pass.*, with the smallest chunks"):
        short.train()


def test_a_loss_that_does_not_fit_ends_the_run_with_what_helps(tmp_path):
    def loss(own, everyone=None, row_offset=0, ids=None):
        raise torch.OutOfMemoryError("not enough memory")

    with pytest.raises(RunError, match="step 1: rank 0 ran out of memory in the loss.*per_device_train_batch_size"):
        trainer(tmp_path, loss=loss).train()


def test_an_automatic_size_is_halved_in_later_steps_too(tmp_path):
    options = dict(gradient_cache_chunk_size="auto", gradient_cache_memory_gib=0.05, max_steps=8, num_rows=64)
    whole, short = (trainer(tmp_path / name, **options) for name in ("whole", "short"))
    usual = short_of_memory(whole, 10**9, 1)
    whole.train()
    late = len(usual) * 3 // 4
    largest = max(usual[late:])
    calls = short_of_memory(short, late, largest // 2)
    short.train()
    assert largest > 2 and max(calls[:late]) >= largest and max(calls[-2:]) <= largest // 2
    assert torch.allclose(weights(short), weights(whole), atol=1e-6)


@pytest.mark.parametrize("size", [4, "auto"])
def test_the_scaler_of_fp16_knows_nothing_of_a_step_that_is_run_again(tmp_path, size):
    """Memory runs out before the first backward, when the scaler has seen no gradient."""
    whole, short = (
        trainer(tmp_path / name, six_layers(), gradient_cache_chunk_size=given, learning_rate=0.01)
        for name, given in (("whole", 4), ("short", size))
    )
    start = weights(short)
    short_of_memory(short, 1, 2)
    for made in (whole, short):
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        made.train()
        assert made.accelerator.scaler.get_scale() == 8.0
    assert (weights(short) - start).abs().max() > 1e-3
    assert torch.allclose(weights(short), weights(whole), atol=1e-6)


def test_kept_graphs_go_first_and_a_loss_is_helped_by_nothing_else():
    left = dict(num_kept=5, can_halve=True)
    assert Reductions().smaller(REPLAY, **left) == Reductions(keeps_graphs=False) == Reductions().smaller(LOSS, **left)
    assert Reductions(0, False).smaller(LAST, **left | {"num_kept": 0}) == Reductions(1, False)
    assert Reductions().smaller(LOSS, num_kept=0, can_halve=True) is None
    assert Reductions().smaller(REPLAY, num_kept=0, can_halve=False) is None
    assert Reductions(1).smallest(Reductions(0, False)) == Reductions(1, False) and Reductions(1).share == 0.5
