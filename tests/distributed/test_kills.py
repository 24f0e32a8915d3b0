"""SIGKILL near a save, for real: what is resumed must end bit for bit as the run that was never interrupted."""

import json
from pathlib import Path

import pytest

from tests.distributed import kill_worker
from tests.distributed.forked import needs_deepspeed

FULL_COUNTS = {"single": 20, "ddp": 12, "fsdp-sharded": 12, "fsdp-full": 4, "hsdp-sharded": 2}


def kills(folder: Path, modes: list[str], number: int, *options: str) -> dict:
    output = folder / "found.json"
    kill_worker.main(["--mode", *modes, "--kills", str(number), "--output", str(output), *options])
    return json.loads(output.read_text())


def check(found: dict) -> None:
    for mode, runs in found.items():
        for kill in runs["kills"]:
            assert kill.get("digest") == runs["digest"], (mode, kill)
            assert 1 <= len(kill["committed"]) <= 3, (mode, kill)


def check_until_a_save_is_torn(folder: Path, mode: str, number: int) -> None:
    """A few kills may all miss the saves: then so many others."""
    for seed in range(4):
        found = kills(folder, [mode], number, "--seed", str(seed))
        check(found)
        if any(kill["not_committed"] for kill in found[mode]["kills"]):
            return
    pytest.fail("no kill tore a save")


def test_a_killed_run_is_resumed_bit_for_bit(tmp_path):
    modes = ["single", "ddp", "fsdp-sharded", "fsdp-sharded+frozen", "fsdp-sharded+async"]
    found = kills(tmp_path, [*modes, "ddp+pipeline"], 1)
    check(found)
    assert found["fsdp-sharded+async"]["digest"] == found["fsdp-sharded"]["digest"]


def check_clocks(found: dict, number: int) -> None:
    for runs in found.values():
        assert sum(run["kills"] for run in runs["kills"]) == number
        for run in runs["kills"]:
            assert run["digest"] == runs["digest"], run
            assert all(start["from"] == start["newest"] for start in run["starts"] if "from" in start), run
            assert all(start["complete"] for start in run["starts"] if start["newest"]), run
        assert any(start["newest"] for run in runs["kills"] for start in run["starts"]), "nothing was resumed"


def test_a_run_that_is_killed_while_clocks_are_wrong_goes_on_from_its_newest_checkpoint(tmp_path):
    check_clocks(kills(tmp_path, ["single"], 4, "--clock"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_all_kills_while_clocks_are_wrong_are_resumed_bit_for_bit(tmp_path, mode):
    check_clocks(kills(tmp_path, [mode], 20, "--clock"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("mode, number", FULL_COUNTS.items())
@pytest.mark.parametrize("suffix", ["", "+frozen", "+async"], ids=["full", "frozen", "async"])
def test_all_kills_are_resumed_bit_for_bit(tmp_path, mode, number, suffix):
    check_until_a_save_is_torn(tmp_path, mode + suffix, number)


@pytest.mark.slow
@pytest.mark.parametrize("mode, number", [("ddp+pipeline", 12), ("multi_gpu_3d@8+pipeline", 4)])
def test_all_kills_of_a_pipeline_are_resumed_bit_for_bit(tmp_path, mode, number):
    check_until_a_save_is_torn(tmp_path, mode, number)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3", "zero1+frozen", "zero2+frozen", "zero3+frozen"])
def test_all_kills_under_zero_are_resumed_bit_for_bit(tmp_path, mode):
    check(kills(tmp_path, [mode], 4))
