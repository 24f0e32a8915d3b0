"""SIGKILL near a save, for real: what is resumed must end bit for bit as the run that was never interrupted."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, environment

WORKER = Path(__file__).with_name("kill_worker.py")
FULL_COUNTS = {"single": 20, "ddp": 12, "fsdp-sharded": 12, "fsdp-full": 4, "hsdp-sharded": 2}


def kills(folder: Path, modes: list[str], number: int, *options: str) -> dict:
    output = folder / "found.json"
    command = [sys.executable, WORKER, "--mode", *modes, "--kills", number, "--output", output, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(output.read_text())


def check(found: dict) -> None:
    for mode, runs in found.items():
        for kill in runs["kills"]:
            assert kill.get("digest") == runs["digest"], (mode, kill)
            assert 1 <= len(kill["committed"]) <= 3, (mode, kill)


def test_a_killed_run_is_resumed_bit_for_bit(tmp_path):
    modes = ["single", "ddp", "fsdp-sharded", "ddp+frozen", "fsdp-sharded+frozen", "fsdp-sharded+async"]
    found = kills(tmp_path, modes, 1)
    check(found)
    assert found["fsdp-sharded+async"]["digest"] == found["fsdp-sharded"]["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("mode, number", FULL_COUNTS.items())
@pytest.mark.parametrize("suffix", ["", "+frozen", "+async"], ids=["full", "frozen", "async"])
def test_all_kills_are_resumed_bit_for_bit(tmp_path, mode, number, suffix):
    found = kills(tmp_path, [mode + suffix], number)
    check(found)
    assert any(kill["not_committed"] for kill in found[mode + suffix]["kills"]), "no kill tore a save"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed: an extra")
@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3", "zero1+frozen", "zero2+frozen", "zero3+frozen"])
def test_all_kills_under_zero_are_resumed_bit_for_bit(tmp_path, mode):
    check(kills(tmp_path, [mode], 4))
