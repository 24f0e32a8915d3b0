"""Checkpoints of runs with frozen parts do not depend on how the run was spread: one mode saves, another resumes.

Every mode sees the same global batches and there is no dropout, so an uninterrupted run ends with the same weights in
all of them but for rounding. Looked at per pair: the largest difference to the end of the run that saved, how far
weights moved after the checkpoint, and whether the optimizer state that was read is bit for bit the saved one.
"""

import functools
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.checkpoints import safe_reading, trainable
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.strategies.tensors import gathered
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import MODES, Run

SAVED, STEPS = 4, 6  # in the middle of the second epoch, and its end
PAIRS = [
    ("ddp", "fsdp-full"), ("ddp", "single"), ("fsdp-sharded", "single"), ("fsdp-sharded", "ddp"),
    ("single", "fsdp-sharded"), ("fsdp-full", "ddp"), ("fsdp-full", "fsdp-sharded"),
]  # fmt: skip


def train(say, folder: Path, mode: str, resume: bool = False, saved: int = SAVED, **more) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    rows = [{"input_ids": (ids := torch.randint(1, 60, (8,))), "labels": ids} for _ in range(12)]  # 3 steps an epoch
    options = (
        dict(trainable_modules=["layers.1", "lm_head"], save_steps=SAVED, save_model=False, learning_rate=1e-2) | more
    )
    saves_model = options.pop("save_model")
    args = DistTrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4 // MODES[mode][0],
        report_to=[], disable_tqdm=True, use_cpu=True, seed=5, frozen_parts_fsdp="shard", logging_steps=10, **options,
    )  # fmt: skip
    read = {}

    class Reading(DistTrainer):
        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                state, _ = trainable.optimizer_state(self.model, self.optimizer)
                read.update(gathered(state, keep=True))

    trainer = Reading(LlamaForCausalLM(config), args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{saved}") if resume else None)
    if saves_model:
        trainer.save_model()
    weights = trainable.named(trainer.model.named_parameters())
    weights = dict(gathered(weights, keep=True))
    if trainer.is_world_process_zero():
        save_file(weights, folder / f"end-{mode}.safetensors")
        save_file(read, folder / "read.safetensors")
    return "done"


def run(mode: str, folder: Path, **options) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    Run(mode, folder / "run", partial(train, folder=folder, mode=mode, **options)).result()
    return load_file(folder / f"end-{mode}.safetensors")


def optimizer_saved(folder: Path) -> dict[str, torch.Tensor]:
    """The saved state, read without a run."""
    content = torch.load(folder / trainable.OPTIMIZER, weights_only=True)
    if "state" in content:
        return content["state"]
    shards = folder / trainable.SHARDED_OPTIMIZER
    entries = safe_reading.read_entries(shards, trust=False)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    safe_reading.load(tensors, shards, trust=False)
    return tensors


def check_whole(folder: Path) -> dict[str, bool]:
    """A sharded run in which everything trains: its model, its checkpoint merged, its weights in other modes."""
    run_folder, merged = folder / "whole", folder / "merged"
    end = run("fsdp-sharded", run_folder, trainable_modules=None, save_model=True)
    last, saved = run_folder / f"checkpoint-{STEPS}", run_folder / f"checkpoint-{SAVED}"
    merge(last, merged)
    found = {}
    for what, path in (("save_model", run_folder), ("merge", merged)):
        weights = LlamaForCausalLM.from_pretrained(path).state_dict()
        found[what] = all(torch.equal(weights[name], end[name]) for name in end)
    shutil.rmtree(saved)
    last.rename(saved)
    still = dict(trainable_modules=None, resume=True, resume_weights_only=True, learning_rate=0.0, save_steps=9)
    for mode in ("single", "fsdp-sharded"):
        weights = run(mode, run_folder, **still)
        found[f"weights only, {mode}"] = all(torch.equal(weights[name], end[name]) for name in end)
    return found


@functools.cache
def found() -> dict:
    seen: dict = {"pairs": {}, "files": {}, "model": {}}
    with TemporaryDirectory() as name:
        folders = {mode: Path(name, mode) for mode in MODES}
        ends = {mode: run(mode, folders[mode], save_model=True) for mode in MODES}
        start = LlamaForCausalLM(LlamaConfig.from_pretrained(folders["single"] / f"checkpoint-{SAVED}"))
        seen["num_parameters"] = sum(p.numel() for p in start.parameters())
        trained = [*start.model.layers[1].parameters(), *start.lm_head.parameters()]
        seen["num_trained"] = sum(p.numel() for p in trained)
        for mode in MODES:
            checkpoint = folders[mode] / f"checkpoint-{SAVED}"
            files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
            seen["files"][mode] = files
            seen["model"][mode] = sorted(path.name for path in folders[mode].glob("*.safetensors"))
        for saved, resumed in PAIRS:
            end = run(resumed, folders[saved], resume=True)
            checkpoint = folders[saved] / f"checkpoint-{SAVED}"
            theirs, read = optimizer_saved(checkpoint), load_file(folders[saved] / "read.safetensors")
            middle = {key: torch.empty(shape) for key, shape in trainable.stored_shapes(checkpoint).items()}
            trainable.read_into(middle, checkpoint)
            seen["pairs"][f"{saved} -> {resumed}"] = {
                "difference": max((end[key] - ends[saved][key]).abs().max().item() for key in end),
                "moved": max((end[key] - middle[key]).abs().max().item() for key in middle),
                "states": len(theirs),
                "state_equal": theirs.keys() == read.keys() and all(torch.equal(theirs[k], read[k]) for k in theirs),
                "state_size": max(value.abs().max().item() for key, value in theirs.items() if "exp_avg" in key),
            }
        seen["whole"] = check_whole(Path(name))
    return seen


def test_what_one_mode_saved_another_resumes():
    assert len(found()["pairs"]) == len(PAIRS)
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
    whole = run("ddp", tmp_path, **everything)
    start = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    for saved, mode in ((2, "fsdp-full"), (3, "single"), (4, "fsdp-full"), (5, "fsdp-sharded")):
        for step in range(saved + 1, STEPS + 1):
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
        end = run(mode, tmp_path, resume=True, saved=saved, **everything)
        assert (tmp_path / f"checkpoint-{saved + 1}" / "manifest.json").is_file()
        if mode == "fsdp-full":
            files = {path.name for path in (tmp_path / f"checkpoint-{saved + 1}").iterdir()}
            assert "model.safetensors" in files and "pytorch_model_fsdp.bin" not in files, "weights are there once"
    assert end.keys() == whole.keys() and max((end[n] - start[n]).abs().max() for n in end if n in start) > 1e-3
    assert max((end[name] - whole[name]).abs().max() for name in end) < 1e-6
