"""The cases of the exactness table; `exactness_table.py` prints the same figures.

One process and two that split layers have all their cases by default. Of other ways of running those that differ most
are run by default, and the whole with -m slow.
"""

import pytest

from tests.parity.exactness_table import RUNS, measure
from tests.tiny_models import needs_tensor_parallelism

WHOLE = ("single", "TP 2")
# Each kind of chunks, column, frozen part, loss and window once. bf16 by number of chunks is in test_precision.py too.
OF_TWO = [
    "no cache", "chunk 4, does not divide", "64 tokens per chunk", "packed chunks, three columns",
    "packed chunks, dropout and gradient checkpointing", "2 graphs kept", "4 layers: a wider first pass",
    "automatic chunk size", "three columns, 3 hard negatives", "other kinds in other columns on each rank",
    "tower per column, symmetric", "three columns, symmetric, ranks with different row counts", "first tower frozen",
    "frozen backbone, accumulation, temperature",
    "frozen tower, encoded once", "two Dense modules, activation and residual", "static embeddings",
    "routes of queries and documents", "decoder, accumulation, temperature", "decoder, frozen layers",
    "gradient checkpointing", "LoRA with LoRA dropout", "dropout", "symmetric",
    "own negatives only", "max_grad_norm",
    "a row's hard negatives alone",
    "accumulation 2, short last window", "ranks with different row counts", "bf16 autocast",
]  # fmt: skip
# The loss sees embeddings only; test_columns.py and test_precision.py have FSDP's runs of other kinds and of bf16.
OF_LOSS = {
    "three columns, 3 hard negatives", "symmetric", "own negatives only", "a row's hard negatives alone",
    "three columns, symmetric, ranks with different row counts",
}  # fmt: skip
ELSEWHERE = {"other kinds in other columns on each rank", "bf16 autocast"}
OF_FSDP = [name for name in OF_TWO if name not in OF_LOSS | ELSEWHERE]
SENTINELS = {
    "DDP 2": OF_TWO,
    "FSDP2 2": [*OF_FSDP, "frozen backbone, sharded", "FSDP, every chunk reduced, accumulation"],
    "HSDP 2x2": ["chunk 4, does not divide", "accumulation, temperature", "first tower frozen"],
    "TP 2 x FSDP 2": [
        "decoder, last token, left padding", "decoder, accumulation, temperature", "decoder, frozen layers",
    ],
}  # fmt: skip


def marks(run: str) -> list:
    return [needs_tensor_parallelism] * run.startswith("TP")


def check(errors: dict) -> None:
    wrong = {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}
    assert not wrong


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[*marks(run), *[pytest.mark.slow] * (run not in WHOLE)]) for run in RUNS]
)
def test_cached_gradients_are_the_full_batch_gradients(run):
    errors = measure(run)
    assert len(errors) >= {"HSDP 2x2": 9, "TP 2": 6, "TP 2 x FSDP 2": 7}.get(run, 25), "cases went missing"
    check(errors)


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run)) for run in SENTINELS])
def test_so_they_are_in_several_processes(run):
    errors = measure(run, *SENTINELS[run])
    assert set(errors) == set(SENTINELS[run])
    check(errors)
