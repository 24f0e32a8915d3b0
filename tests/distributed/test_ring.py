"""Candidates that go round real processes: messages counted, and gradients of the cached step through DistTrainer."""

import json
import signal

import pytest
import torch
import torch.distributed as dist

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.gathering import GatheredColumns, Rows, row_weight
from tests.distributed.forked import Run, look
from tests.engine.test_losses import make_columns
from tests.parity import exactness_worker

COUNTS = {"query": [3, 0, 5], "positive": [3, 0, 5], "negative0": [4, 0, 6]}
WIDTH = 10


class Sent:
    """What this rank hands to torch.distributed: messages and numbers in them, by kind."""

    def __init__(self, patch):
        self.messages, self.numbers = {}, {}
        start = dist.batch_isend_irecv
        patch.setattr(
            dist, "batch_isend_irecv", lambda ops: [self.add(op.op.__name__, op.tensor) for op in ops] and start(ops)
        )
        for name in ("all_gather", "reduce_scatter"):
            patch.setattr(collectives, name, self.counted(name, getattr(collectives, name)))

    def add(self, kind, tensor):
        self.messages[kind] = self.messages.get(kind, 0) + 1
        self.numbers[kind] = self.numbers.get(kind, 0) + tensor.numel()

    def counted(self, kind, function):
        def count(output, own, **options):
            self.add(kind, own)
            return function(output, own, **options)

        return count


def gradients(own, rows, exchange, symmetric):
    loss = InfoNCELoss(0.1, symmetric=symmetric, cross_device_exchange=exchange, rows_per_tile=2)
    parts = {name: values.detach().clone().requires_grad_() for name, values in own.items()}
    everyone = GatheredColumns(rows, parts, COUNTS)
    offset = sum(COUNTS["query"][: rows.index])
    value = loss(parts, everyone, row_offset=offset).loss * row_weight(COUNTS["query"][rows.index], COUNTS["query"])
    value.backward()
    return torch.cat([values.grad.flatten() for values in parts.values()])


def compare(say) -> str:
    signal.alarm(600)
    dist.init_process_group("gloo")
    rows, found = Rows(), {}
    whole = make_columns(rows=8, negatives=(10,), width=WIDTH)
    own = {}
    for name, values in whole.items():
        start = sum(COUNTS[name][: rows.index])
        own[name] = values[start : start + COUNTS[name][rows.index]]
    for symmetric in (False, True):
        wanted = gradients(own, rows, "gather", symmetric)
        with pytest.MonkeyPatch.context() as patch:
            sent = Sent(patch)
            ring = gradients(own, rows, "ring", symmetric)
        assert "reduce_scatter" not in sent.messages
        figures = torch.tensor(
            [float((ring - wanted).norm()), float(wanted.norm()), sent.messages.get("isend", 0),
             sent.numbers.get("isend", 0), sent.messages["all_gather"]], dtype=torch.float64,
        )  # fmt: skip
        of_all = figures.new_empty(rows.size * len(figures))
        collectives.all_gather(of_all, figures)
        found[str(symmetric)] = of_all.view(rows.size, -1).tolist()
    collectives.leave_together()
    return json.dumps(found)


def test_every_block_is_sent_once_round_and_gradients_are_those_of_the_gather(tmp_path):
    """Three processes, one without rows, whose empty block is no message."""
    found = json.loads(Run("ddp@3", tmp_path / "log", compare).result())
    for symmetric in (False, True):
        movers = [name for name in COUNTS if name == "query" or (symmetric and name == "positive")]
        travellers = [name for name in COUNTS if name != "query" or symmetric]
        of_rank = [sum(COUNTS[n][r] for n in travellers) + sum(COUNTS[n][r] for n in movers) for r in range(3)]
        for rank, (error, norm, messages, numbers, gathers) in enumerate(found[str(symmetric)]):
            assert error <= 1e-12 * max(norm, 1e-3) and (norm > 0.01) == (rank != 1)
            passed_on = [of_rank[other] for other in range(3) if other != (rank + 1) % 3]  # not the next one's own
            assert numbers == WIDTH * sum(passed_on)
            assert messages == 2 * sum(1 for count in passed_on if count)
            assert gathers == 1  # two sums of every row


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("preset", ["multi_gpu_ddp", "multi_gpu_fsdp"])
def test_cached_gradients_are_the_full_batch_gradients_when_candidates_go_round(preset, processes):
    names = [case.name for case in exactness_worker.CASES if case.name.startswith("in a ring")]
    assert len(names) == 4
    errors = look(preset, processes, exactness_worker.errors_of, {}, names)
    assert {name: found for name, found in errors.items() if not found["error"] <= 1e-10} == {}
    assert set(errors) == set(names)
