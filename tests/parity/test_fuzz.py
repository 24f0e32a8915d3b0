"""Whole training runs drawn at random equal a naive reference (fuzz.py says how)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, environment
from tests.parity.fuzz import drawn, run_draw

FUZZ = Path(__file__).with_name("fuzz.py")
# Six draws of this seed hold every strategy, sampler and kind of column, dropout, random numbers of numpy and of the
# loss, a mixture, a stream with a hold-out, files beside others of similar names, evaluations between steps, a worker
# of the loader, and resumes with as many, more and fewer processes.
SEED, DRAWS = 397747, range(6)


def fuzz(*arguments: object, timeout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), cwd=ROOT)


@pytest.mark.parametrize("number", DRAWS)
def test_a_run_drawn_at_random_equals_the_naive_reference(number, tmp_path):
    run_draw(drawn(SEED, number), tmp_path)


def test_these_runs_differ_in_all_that_a_run_can_differ_in():
    draws = [drawn(SEED, number) for number in DRAWS]
    assert {draw.mode for draw in draws} == {"single", "ddp", "fsdp-full", "fsdp-sharded"}
    assert {draw.sampler for draw in draws} == {"no_duplicates", "random", "sequential", "by length", "own"}
    assert {kind for draw in draws for kind in draw.kinds.values()} == {"text", "types", "values"}
    assert {name for draw in draws for name in draw.loss} == {
        "learnable_temperature", "symmetric", "mask_false_negatives"
    }  # fmt: skip
    more = {(draw.resumed_processes > draw.processes) - (draw.resumed_processes < draw.processes) for draw in draws}
    assert more == {-1, 0, 1}
    for field in ("dropout", "noise", "loss_dropout", "workers", "max_grad_norm", "repeats", "is_stream", "held_out"):
        assert {getattr(draw, field) > 0 for draw in draws} == {True, False}, field
    for field in ("backbone", "optimizer", "evaluation_rows", "sources"):
        assert len({getattr(draw, field) for draw in draws}) == 2, field
    assert {draw.accumulation > 1 for draw in draws} == {True, False}
    is_same = [draw for draw in draws if draw.processes == draw.resumed_processes]
    assert any(draw.evaluating and draw.is_random for draw in is_same) and any(draw.sources > 1 for draw in is_same)
    assert any(draw.model_init for draw in draws)
    assert {Path(name).name for draw in draws for name in draw.names} == {"pairs.jsonl", "pairs*.jsonl", "json"}


@pytest.mark.slow
def test_more_runs_drawn_at_random_equal_the_naive_reference():
    done = fuzz("--draws", 10, "--seed", 0, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["column order", "rows of a later epoch", "repeated documents"])
def test_a_fault_put_into_the_package_is_found_within_a_hundred_draws(fault):
    done = fuzz("--draws", 100, "--seed", 2, "--stop", "--fault", fault, timeout=3600)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
