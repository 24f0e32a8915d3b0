"""Checkpoints of frozen runs do not depend on how the run was spread: saved in one mode, resumed in another."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed import resume_worker

PAIRS = 7


@functools.cache
def found() -> dict:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        resume_worker.main(["--output", str(output)])
        return json.loads(output.read_text())


def test_what_one_mode_saved_another_resumes():
    assert len(found()["pairs"]) == PAIRS
    for pair, result in found()["pairs"].items():
        assert result["moved"] > 1e-3 and result["states"] == 30 and result["state_size"] > 1e-4, pair
        assert result["state_equal"], pair
        assert result["difference"] < 1e-6, pair


@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp-full", "fsdp-sharded"])
def test_a_checkpoint_is_as_large_as_what_trains(mode):
    files, trained, everything = found()["files"][mode], found()["num_trained"], found()["num_parameters"]
    assert trained < everything / 1.9
    heads = 4096 * (1 + 2 * (mode == "fsdp-sharded"))  # names, and a zip header per tensor
    weights = sum(size for name, size in files.items() if name.startswith("trainable") and "optimizer" not in name)
    optimizer = sum(size for name, size in files.items() if name.startswith("trainable_optimizer"))
    assert 4 * trained < weights < 4 * trained + 12 * heads
    assert 8 * trained < optimizer < 8 * trained + 24 * heads
    assert {"manifest.json", "frozen.json", "config.json", "scheduler.pt"} <= set(files)
    assert not [name for name in files if name.startswith(("model", "pytorch_model", "optimizer"))]


@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp-full", "fsdp-sharded"])
def test_save_model_writes_weights_in_every_mode(mode):
    assert "model.safetensors" in found()["model"][mode]


def test_a_sharded_run_of_everything_ends_with_its_model_and_can_be_merged_or_begun_from():
    assert len(found()["whole"]) == 4
    for what, is_equal in found()["whole"].items():
        assert is_equal, what
