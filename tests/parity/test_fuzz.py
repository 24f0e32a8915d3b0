"""Whole training runs drawn at random equal a naive reference (fuzz.py says how)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, environment

FUZZ = Path(__file__).with_name("fuzz.py")


def fuzz(*arguments: object, timeout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), cwd=ROOT)


def test_runs_drawn_at_random_equal_the_naive_reference():
    done = fuzz("--draws", 10, "--seed", 0, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["column order", "rows of a later epoch", "repeated documents"])
def test_a_fault_put_into_the_package_is_found_within_a_hundred_draws(fault):
    done = fuzz("--draws", 100, "--seed", 2, "--stop", "--fault", fault, timeout=3600)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
