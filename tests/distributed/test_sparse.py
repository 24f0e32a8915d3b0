"""The hooks that send a part of a gradient do what a few plain lines say, also after a resume and a bad update."""

import json
import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hf_dist_ext.strategies import sparse
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.strategies.ddp import DDP
from tests.distributed.forked import Run

UPDATES, RESUMED_AT, WORLD, RATIO = 6, 3, 2, 0.13
SHAPES = {"wide": (40, 7), "long": (301,), "one": (1,)}


def gradients(update: int, process: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * update + process)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


class Model(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.zeros(shape).double() for name, shape in SHAPES.items()})

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.weights[name] * value).sum() for name, value in given.items())


class Wrapped:
    def __init__(self, hook: str):
        self.model = DistributedDataParallel(Model(), bucket_cap_mb=0.001)  # several messages, in another order soon
        self.state = sparse.LeftOut(self.model.module, hook, RATIO, seed=3)
        self.model.register_comm_hook(self.state, sparse.hook)

    def update(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        self.model(given).backward()
        return {name: p.grad.clone() for name, p in self.model.module.weights.items()}


def expected(places: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """`places`: of each update and parameter for random_k; empty for top_k, which has its own on each process."""
    left_out = [{name: torch.zeros(math.prod(shape)).double() for name, shape in SHAPES.items()} for _ in range(WORLD)]
    means = []
    for update in range(UPDATES):
        total = {name: torch.zeros(math.prod(shape)).double() for name, shape in SHAPES.items()}
        for process in range(WORLD):
            for name, gradient in gradients(update, process).items():
                whole = gradient.flatten() + left_out[process][name]
                count = math.ceil(RATIO * len(whole))
                chosen = places[update][name] if places else whole.abs().argsort(descending=True)[:count]
                sent = torch.zeros_like(whole)
                sent[chosen] = whole[chosen]
                left_out[process][name] = whole - sent
                total[name] += sent / WORLD
        means.append(total)
    return means


def compare(say, hook: str) -> str:
    torch.distributed.init_process_group("gloo")
    wrapped, drawn, seen, content = Wrapped(hook), [], [], {}
    parameters = dict(wrapped.model.module.weights)
    for update in range(UPDATES):
        if update == RESUMED_AT:
            wrapped = Wrapped(hook)
            assert wrapped.state.read(content, WORLD) == ""
        if hook == "random_k":
            state = wrapped.state
            names = {name: p for name, p in wrapped.model.module.weights.items()}
            drawn.append({name: state.places(p, parameters[name].flatten()) for name, p in names.items()})
        seen.append(wrapped.update(gradients(update, rank())))
        content = wrapped.state.content(WORLD)
    differences = [
        (one[name].flatten() - mean[name]).abs().max().item()
        for one, mean in zip(seen, expected(drawn), strict=True)
        for name in SHAPES
    ]
    counts = [{name: len(set(places[name].tolist())) for name in SHAPES} for places in drawn]
    bad = gradients(0, rank())
    if rank() == 1:
        bad["long"][17] = math.nan
    reached = [name for name, g in wrapped.update(bad).items() if g.isnan().any()]
    wrapped.state.forget()
    finite = all(g.isfinite().all() for g in wrapped.update(gradients(1, rank())).values())
    other = wrapped.state.read(content | {"ddp_compression_ratio": 0.5}, WORLD)
    changes = hook != "random_k" or any(not torch.equal(drawn[0]["long"], one["long"]) for one in drawn[1:])
    found = {"worst": max(differences), "reached": reached, "finite": finite, "other": other, "changes": changes}
    return json.dumps(found | {"counts": counts})


@pytest.mark.parametrize("hook", sparse.HOOKS)
def test_what_is_sent_and_what_is_left_out_are_those_of_plain_lines(tmp_path, hook):
    found = json.loads(Run("ddp", tmp_path / "log", partial(compare, hook=hook)).result())
    assert found["worst"] < 1e-14
    assert found["reached"] == ["long"]  # a number that is not finite reaches every process
    assert found["finite"]  # and nothing of it stays behind the update that is left out
    assert "0.5 (now 0.13)" in found["other"]
    assert found["changes"] and all(count == {"wide": 37, "long": 40, "one": 1} for count in found["counts"])


def count_copies(say) -> str:
    """Copies of a message that a process fills up, in an update of one message."""
    torch.distributed.init_process_group("gloo")
    wrapped = Wrapped("top_k")
    wrapped.update(gradients(0, rank()))  # DDP orders its messages after it
    with mock.patch.object(sparse, "_bytes", side_effect=sparse._bytes) as filled:
        wrapped.update(gradients(1, rank()))
    messages = len(list(wrapped.model.reducer._get_zeros_like_grad_buckets()))
    return json.dumps([filled.call_count, messages])


def test_a_message_is_copied_once_whatever_the_number_of_processes(tmp_path):
    copies, messages = json.loads(Run("ddp@3", tmp_path / "log", count_copies).result())
    assert copies == 2 * messages > 0  # its places, and its values


def after_a_bad_update(say) -> str:
    """Whether gradients of PowerSGD are finite: in a bad update, after it is left out, and from then on."""
    torch.distributed.init_process_group("gloo")
    model, strategy = DistributedDataParallel(Model()), DDP()
    model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)  # after DDP's first buckets
    strategy.wrapped(model, SimpleNamespace(ddp_comm_hook="power_sgd"), has_loss=True)
    optimizer, finite = torch.optim.SGD(model.parameters(), 0.1), []
    for update in range(6):
        given = gradients(update, rank())
        if update == 3 and rank() == 1:
            given["wide"][17, 3] = math.nan
        optimizer.zero_grad()
        model(given).backward()
        found = [p.grad for p in model.parameters()]
        assert all(g.any() for g in found)
        finite.append(all(bool(g.isfinite().all()) for g in found))
        if not finite[-1]:
            strategy.drop_update(optimizer, update)
    return json.dumps({"finite": finite, "remembers": strategy.power_sgd.error_dict[0].norm().item()})


def test_an_update_that_is_left_out_leaves_nothing_in_power_sgd(tmp_path):
    found = json.loads(Run("ddp", tmp_path / "log", after_a_bad_update).result())
    assert found["finite"] == [True, True, True, False, True, True]
    assert 0 < found["remembers"] < math.inf  # it compresses, and goes on with what it did not send
