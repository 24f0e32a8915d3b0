"""A run whose gradient cache can not be exact ends before the update; one that is says so in the log."""

import json
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.replay import allowed_difference
from hf_dist_ext.errors import RunError
from tests.training.test_trainer import Tiny, trainer


class Observer(nn.Module):
    """A range of values that a forward widens before it reads it, as observers of quantization do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, hidden):
        self.largest.mul_(0.5).add_(hidden.detach().abs().max())
        return self.linear(hidden / self.largest.clone())


class Noisy(nn.Module):
    """Drops features in four ways that are replayed, and by a generator of its own that is not."""

    def __init__(self, own: np.random.Generator | torch.Generator | None = None):
        super().__init__()
        self.linear, self.dropout, self.own = nn.Linear(8, 8), nn.Dropout(0.2), own

    def forward(self, hidden):
        if not self.training:
            return self.linear(hidden)
        noise = np.random.random(hidden.shape) + random.random()
        if isinstance(self.own, torch.Generator):
            noise += torch.rand(hidden.shape, generator=self.own).numpy()
        elif self.own is not None:
            noise += self.own.random(hidden.shape)
        return self.linear(self.dropout(hidden) * torch.from_numpy(noise).float())


class EvalWithoutGraph(nn.Linear):
    def forward(self, hidden):
        self.train(torch.is_grad_enabled())
        return super().forward(hidden) * (2 if self.training else 1)


class FromElsewhere(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * (1 + int.from_bytes(os.urandom(4), "big") / 2**33)


FAULTS = {
    "an observer": Observer,
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "a generator of its own": lambda: Noisy(np.random.default_rng(0)),
    "a generator of torch": lambda: Noisy(torch.Generator().manual_seed(0)),
    "a mode": lambda: EvalWithoutGraph(8, 8),
    "elsewhere": lambda: FromElsewhere(8, 8),
}


def logged(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_numbers_that_a_forward_draws_anywhere_leave_no_replay_error(tmp_path):
    trainer(tmp_path, Tiny(Noisy())).train()
    assert [line["replay_error"] for line in logged(tmp_path)] == [0.0] * 3


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_forward_that_can_not_be_repeated_ends_the_run_before_its_first_update(tmp_path, fault, accumulated):
    """Also where it shows in the first micro-batch of an update alone."""
    model = Tiny(FAULTS[fault]())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    made = trainer(tmp_path, model, gradient_accumulation_steps=accumulated)
    with pytest.raises(
        RunError, match=r"step 1: .* by [0-9.]+ of .*\((query|positive).*, chunk \d of 6\).*moving averages"
    ):
        made.train()
    assert made.state.global_step == 0
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_an_update_that_is_skipped_anyway_is_not_judged_by_its_embeddings(tmp_path):
    """Weights that have blown up may give any embeddings: the end is that of updates that are not finite."""

    class InfiniteOnce(InfoNCELoss):
        def forward(self, own, *given, **more):
            self.calls = getattr(self, "calls", 0) + 1
            output = super().forward(own, *given, **more)
            return output._replace(loss=output.loss * (torch.inf if self.calls == 1 else 1))

    made = trainer(tmp_path, Tiny(FAULTS["a generator of its own"]()), loss=InfiniteOnce())
    with pytest.raises(RunError, match="step 2: the gradient cache encodes .* is not made. The usual"):
        made.train()
    assert made.health.guard.total == 1 and made.state.global_step == 1


def test_the_coarsest_micro_batch_says_what_rounding_explains_of_an_update(tmp_path, monkeypatch):
    """Whether pass 1 is wider may change from one batch to the next."""
    made = trainer(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    forward, explained = made.model.middle.forward, iter([1e-4, 1e-6])
    monkeypatch.setattr(made.step, "_allowed_difference", lambda *given: next(explained))
    monkeypatch.setattr(
        made.model.middle, "forward", lambda hidden: forward(hidden) * (1 + 1e-5 * torch.is_grad_enabled())
    )
    made.train()
    assert 5e-6 < logged(tmp_path)[0]["replay_error"] < 2e-5


def test_a_model_that_can_not_be_deterministic_says_by_how_much(tmp_path):
    trainer(tmp_path, Tiny(FAULTS["a generator of its own"]()), replay_tolerance=5.0).train()
    lines = logged(tmp_path)
    assert all(1e-5 < line["replay_error"] < line["replay_tolerance"] == 5.0 for line in lines) and len(lines) == 3


def test_graphs_that_are_all_kept_are_not_compared(tmp_path):
    trainer(tmp_path, Tiny(Observer()), gradient_cache_keep_graph=99).train()
    assert "replay_error" not in logged(tmp_path)[0] and len(logged(tmp_path)) == 3
    trainer(tmp_path / "off", Tiny(Observer()), gradient_cache_chunk_size=None).train()


def test_the_largest_error_since_the_last_line_is_logged(tmp_path, monkeypatch):
    """Below what rounding explains, once in three steps."""
    made = trainer(tmp_path, logging_steps=3)
    forward, calls = made.model.middle.forward, []

    def rounds_once(hidden):
        calls.append(torch.is_grad_enabled())
        return forward(hidden) * (1 + 5e-7 * (calls.count(True) == 2 and calls[-1]))

    monkeypatch.setattr(made.model.middle, "forward", rounds_once)
    made.train()
    (line,) = logged(tmp_path)
    assert 1e-7 < line["replay_error"] < 1e-6


def test_the_coarsest_numbers_say_what_rounding_explains():
    assert allowed_difference([torch.float32, torch.float64], False) < 1e-5 < allowed_difference([torch.float32], True)
    assert (
        allowed_difference([torch.float32, torch.bfloat16], False)
        == allowed_difference([torch.bfloat16], False)
        < 0.05
    )
    assert allowed_difference([torch.float8_e4m3fn], True) < 0.3, "a wrong embedding is off by more"


def test_tensors_with_a_graph_that_a_forward_leaves_in_its_module_end_no_second_training(tmp_path):
    made = trainer(tmp_path, Tiny(FAULTS["spectral norm"]()), replay_tolerance=5.0)
    made.train()
    assert made.model.middle.weight.grad_fn is not None
    made.train()
    assert made.state.global_step == 3
