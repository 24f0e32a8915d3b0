"""Checkpoints of frozen runs do not depend on how the run was spread: saved in one mode, resumed in another."""

import functools
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from safetensors.torch import load_file

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


def test_whole_tensors_go_from_one_way_of_spreading_to_the_next(tmp_path):
    """A run of all weights; a step in each way after the other ends as the run that none interrupted."""
    everything = dict(trainable_modules=None, save_steps=1)
    whole = resume_worker.run("ddp", tmp_path, **everything)
    start = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    for saved, mode in ((2, "fsdp-full"), (3, "single"), (4, "fsdp-full"), (5, "fsdp-sharded")):
        for step in range(saved + 1, resume_worker.STEPS + 1):
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
        end = resume_worker.run(mode, tmp_path, resume=True, saved=saved, **everything)
        assert (tmp_path / f"checkpoint-{saved + 1}" / "manifest.json").is_file()
        if mode == "fsdp-full":
            files = {path.name for path in (tmp_path / f"checkpoint-{saved + 1}").iterdir()}
            assert "model.safetensors" in files and "pytorch_model_fsdp.bin" not in files, "weights are there once"
    assert end.keys() == whole.keys() and max((end[n] - start[n]).abs().max() for n in end if n in start) > 1e-3
    assert max((end[name] - whole[name]).abs().max() for name in end) < 1e-6
