"""The rows that every process trains on: those of the uninterrupted run behind a resume, and none to fill a batch."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed import order_worker
from tests.distributed.forked import needs_deepspeed
from tests.distributed.order_worker import SAMPLERS, STOPS


@functools.cache
def found(*options: str) -> dict:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        order_worker.main(["--output", str(output), *options])
        return json.loads(output.read_text())


def check_resumed(table: list[dict]) -> None:
    for row in table:
        assert row["repeated"] == row["missing"] == 0 and row["begun epoch in order"], row
        if row["saved"] == row["resumed"]:
            assert row["rows of each process"] and row["largest difference of a loss"] == 0, row


def check_short(runs: dict) -> None:
    for rows, modes in runs.items():
        alone = modes["single"]
        assert len({len(batch) for _, batch in alone["rows"]}) == 2, "an epoch ends with a shorter batch"
        for mode, other in modes.items():
            assert other["rows"] == alone["rows"], (rows, mode)
            for ours, theirs in zip(other["logs"], alone["logs"], strict=True):
                assert ours["contrastive_batch_size"] == theirs["contrastive_batch_size"], (rows, mode)
                for name in ("loss", "grad_norm", "accuracy"):
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (rows, mode, name)


def test_a_resumed_epoch_repeats_no_row_and_skips_none():
    table = found()["resumed"]
    assert len(table) == 9 and any(row["stop"] > 8 for row in table), "later epochs than the first"
    check_resumed(table)


def test_a_short_last_batch_has_the_same_rows_and_the_same_loss_on_any_number_of_processes():
    short = found()["short"]
    assert {"single", "ddp", "ddp-3", "fsdp-sharded"} == set(short["26 rows"])
    assert [] in [rows for _, rows in short["26 rows"]["ddp-3"]["by process"][0]], "a process without rows"
    assert min(log["grad_norm"] for log in short["26 rows"]["single"]["logs"]) > 1e-3
    check_short(short)


@pytest.mark.slow
@needs_deepspeed
def test_so_it_has_under_every_strategy_and_with_accumulation():
    short = found("--whole", "--modes", "short")["short"]
    assert len(short) == 4
    check_short(short)


# The mode that saves, and the modes that resume. Under ZeRO-2 and ZeRO-3, which need long to start, the first sampler.
WHOLE = [(mode, sampler) for mode in ("single", "ddp", "fsdp-sharded") for sampler in SAMPLERS]
UNDER_ZERO = [("zero1", sampler) for sampler in SAMPLERS] + [("zero2", SAMPLERS[0]), ("zero3", SAMPLERS[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sampler"), [*WHOLE, *(pytest.param(*case, marks=needs_deepspeed) for case in UNDER_ZERO)]
)
def test_every_sampler_strategy_and_change_of_processes_resumes_every_epoch(mode, sampler):
    table = found("--whole", "--modes", mode, "--samplers", sampler)["resumed"]
    others = {"single": {"ddp", "fsdp-sharded"}, "ddp": {"single"}, "fsdp-sharded": {"single", "ddp"}}
    assert {row["resumed"] for row in table} == {mode} | others.get(mode, set())
    assert {row["sampler"] for row in table} == {sampler} and {row["stop"] for row in table} == set(STOPS)
    assert len({str(row["options"]) for row in table}) == (3 if mode in ("single", "ddp") else 1)
    check_resumed(table)
