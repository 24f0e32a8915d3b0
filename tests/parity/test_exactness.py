"""Every case of the exactness table, on one process, DDP and FSDP2; `exactness_table.py` prints the same figures."""

import pytest

from tests.parity.exactness_table import RUNS, measure
from tests.tiny_models import needs_tensor_parallelism

# Three processes differ from two in nothing but the number, four on two cores take longest: of these, the cases that
# differ most by default, and all of them with -m slow.
SLOW = ("DDP 3", "HSDP 2x2", "TP 2 x FSDP 2")
SENTINELS = {
    "HSDP 2x2": ["chunk 4, does not divide", "accumulation, temperature", "first tower frozen"],
    "TP 2 x FSDP 2": [
        "decoder, last token, left padding", "decoder, accumulation, temperature", "decoder, frozen layers",
    ],
}  # fmt: skip


def marks(run: str) -> list:
    return [pytest.mark.slow] * (run in SLOW) + [needs_tensor_parallelism] * run.startswith("TP")


def check(errors: dict) -> None:
    wrong = {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}
    assert not wrong


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run)) for run in RUNS])
def test_cached_gradients_are_the_full_batch_gradients(run):
    errors = measure(run)
    assert len(errors) >= {"HSDP 2x2": 9, "TP 2": 6, "TP 2 x FSDP 2": 7}.get(run, 25), "cases went missing"
    check(errors)


@pytest.mark.parametrize("run", ["HSDP 2x2", pytest.param("TP 2 x FSDP 2", marks=needs_tensor_parallelism)])
def test_so_they_are_in_groups_of_processes(run):
    errors = measure(run, *SENTINELS[run])
    assert len(errors) == 3
    check(errors)
