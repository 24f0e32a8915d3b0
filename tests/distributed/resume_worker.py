r"""Checkpoints of runs with frozen parts, saved in one mode and resumed in another.

    python tests/distributed/resume_worker.py --output found.json

Every mode sees the same global batches and there is no dropout, so an uninterrupted run ends with the same weights in
all of them but for rounding. Reported per pair: the largest difference to the end of the run that saved, how far
weights moved after the checkpoint, and whether the optimizer state that was read is bit for bit the saved one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.checkpoints import safe_reading, trainable
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.strategies.tensors import gathered
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import MODES, Run
from tests.launching import leave_together

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


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    options = parser.parse_args(words)
    found: dict = {"pairs": {}, "files": {}, "model": {}}
    with TemporaryDirectory() as name:
        folders = {mode: Path(name, mode) for mode in MODES}
        ends = {mode: run(mode, folders[mode], save_model=True) for mode in MODES}
        start = LlamaForCausalLM(LlamaConfig.from_pretrained(folders["single"] / f"checkpoint-{SAVED}"))
        found["num_parameters"] = sum(p.numel() for p in start.parameters())
        trained = [*start.model.layers[1].parameters(), *start.lm_head.parameters()]
        found["num_trained"] = sum(p.numel() for p in trained)
        for mode in MODES:
            checkpoint = folders[mode] / f"checkpoint-{SAVED}"
            files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
            found["files"][mode] = files
            found["model"][mode] = sorted(path.name for path in folders[mode].glob("*.safetensors"))
        for saved, resumed in PAIRS:
            end = run(resumed, folders[saved], resume=True)
            checkpoint = folders[saved] / f"checkpoint-{SAVED}"
            theirs, read = optimizer_saved(checkpoint), load_file(folders[saved] / "read.safetensors")
            middle = {key: torch.empty(shape) for key, shape in trainable.stored_shapes(checkpoint).items()}
            trainable.read_into(middle, checkpoint)
            found["pairs"][f"{saved} -> {resumed}"] = {
                "difference": max((end[key] - ends[saved][key]).abs().max().item() for key in end),
                "moved": max((end[key] - middle[key]).abs().max().item() for key in middle),
                "states": len(theirs),
                "state_equal": theirs.keys() == read.keys() and all(torch.equal(theirs[k], read[k]) for k in theirs),
                "state_size": max(value.abs().max().item() for key, value in theirs.items() if "exp_avg" in key),
            }
        found["whole"] = check_whole(Path(name))
    Path(options.output).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
    leave_together()
