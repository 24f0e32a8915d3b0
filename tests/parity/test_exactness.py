"""Every case of the exactness table, on one process, DDP and FSDP2; `exactness_table.py` prints the same figures."""

import pytest

from tests.parity.exactness_table import RUNS, measure
from tests.tiny_models import needs_tensor_parallelism

MARKS = {"DDP 3": [pytest.mark.slow]} | {run: [needs_tensor_parallelism] for run in RUNS if run.startswith("TP")}


# Three processes on two cores take longest and differ from two in nothing but the number.
@pytest.mark.parametrize("run", [pytest.param(run, marks=MARKS.get(run, [])) for run in RUNS])
def test_cached_gradients_are_the_full_batch_gradients(run):
    errors = measure(run)
    assert len(errors) >= {"HSDP 2x2": 9, "TP 2": 6, "TP 2 x FSDP 2": 7}.get(run, 25), "cases went missing"
    wrong = {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}
    assert not wrong
