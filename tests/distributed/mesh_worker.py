r"""Runs of DistTrainer as pipelines whose layers are split (tensor parallelism) or whose copies shard them (FSDP2).

    accelerate launch --config_file configs/accelerate/multi_gpu_3d.yaml --num_processes 4 \
        tests/distributed/mesh_worker.py FOLDER --fields '{"pipeline_parallel_size": 2}'

(1) a folder with a small model, by the first process
(2) what a process holds: of the loaded model, and of weights and optimizer state after an update
(3) runs as in pipeline_worker.py: resumed, with frozen parts, not finite, evaluated, read by other processes
(4) what is refused, in the layout of four processes
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.models.adapters import WEIGHTS
from hf_dist_ext.strategies import adapters, choose
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.strategies.tensors import bare_optimizer, gathered, held_here
from hf_dist_ext.training.arguments import DistTrainingArguments
from tests import tiny_models
from tests.distributed import pipeline_worker as worker
from tests.distributed.tensor_parallel_worker import DrawsByRank
from tests.launching import leave_together

FSDP_COLLECTIVES = ("foreach_all_gather", "foreach_reduce")


def save_base(folder: Path) -> None:
    worker.save_base(folder, num_attention_heads=4, num_key_value_heads=2)


def everyone(of_rank) -> list:
    found: list = [None] * launched.processes()
    dist.all_gather_object(found, of_rank)
    return found


# ---- (2) ----


def loaded(base: Path, folder: Path, **fields) -> list[int]:
    """Elements that each process holds of a model that was just read."""
    args = DistTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], gradient_cache_chunk_size=2, **fields
    )
    model = tiny_models.loaded(base, in_stages=choose.in_stages(args))
    return everyone(sum(held_here(p).numel() for p in model.parameters() if p.device.type != "meta"))


def held(base: Path, folder: Path, **fields) -> list[dict[str, int]]:
    """Of each process, after an update of two batches: elements of weights and of optimizer state, layers and other
    units, and how often FSDP2 gathered and reduced one."""
    trainer = worker.make_trainer(base, folder, max_steps=1, save_strategy="no", **fields)
    counts, before = Counter(), {name: getattr(_fsdp_param_group, name) for name in FSDP_COLLECTIVES}

    def counted(name: str, *arguments, **options):
        counts[name] += 1
        return before[name](*arguments, **options)

    for name in FSDP_COLLECTIVES:
        setattr(_fsdp_param_group, name, partial(counted, name))
    trainer.train()
    for name in FSDP_COLLECTIVES:
        setattr(_fsdp_param_group, name, before[name])
    modules = [module for stage in trainer.strategy.cut.modules() for module in stage]
    units = [module for module in modules if any(True for _ in module.parameters())]
    of_optimizer = [v for values in bare_optimizer(trainer.optimizer).state.values() for v in values.values()]
    return everyone(
        {
            "weights": sum(held_here(p).numel() for p in trainer.model.parameters()),
            "units": len(units),
            "gathered": counts["foreach_all_gather"],
            "reduced": counts["foreach_reduce"],
            "optimizer": sum(held_here(v).numel() for v in of_optimizer if v.dim()),
        }
    )


def draws(base: Path, folder: Path, **fields) -> list[list[int]]:
    """A number that each process draws in the midst of a run, and in the midst of one that goes on from it."""
    drawn = []

    class Draws(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 3:
                drawn.append(int(torch.randint(2**40, ())))

    for checkpoint in (None, str(folder / "checkpoint-2")):
        trainer = worker.make_trainer(base, folder, **fields)
        trainer.add_callback(Draws())
        trainer.train(resume_from_checkpoint=checkpoint)
    return everyone(drawn)


def replayed(base: Path, folder: Path, **fields) -> list[bool]:
    """Of each process, whether its stages dropped the same in both passes."""
    options = {"max_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": 1}
    trainer = worker.make_trainer(base, folder, **options, **fields)
    outputs = worker.watched_outputs(trainer.strategy.cut)
    trainer.train()
    return everyone(worker.are_replayed(outputs, trainer.strategy.cut.own))


def adapters_elsewhere(base: Path, folder: Path, **fields) -> dict[str, bool]:
    """The end of a finished run with adapters, read by processes that have other stages."""
    trainer, found = worker.make_trainer(base, folder, has_adapters=True, **fields), {}

    class Read(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **others):
            saved, inner = load_file(folder / "checkpoint-4" / WEIGHTS), "base_model.model."
            own = dict(gathered(adapters.held_here(model.transformers_model), keep=True))
            own = {f"{inner}{name}": value for name, value in own.items()}
            of_optimizer = bare_optimizer(trainer.optimizer).state
            moments = [of_optimizer[p]["exp_avg_sq"] for p in model.parameters() if p.requires_grad]
            equal = [torch.equal(value, saved[name]) for name, value in own.items() if name in saved]
            found["weights"] = worker.all_ranks(len(equal) > 4 and all(equal))
            found["moments"] = worker.all_ranks(all(held_here(moment).norm() > 0 for moment in moments))

    trainer.add_callback(Read())
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    return found


# ---- (4) ----


def refusals(base: Path, folder: Path) -> dict[str, str]:
    has_groups = launched.mesh_size("tp") > 1
    options = {"base": base, "folder": folder / "no", "save_strategy": "no"}

    def train_with_numbers_of_its_own() -> None:
        trainer = worker.make_trainer(**options)
        trainer.add_callback(DrawsByRank())
        trainer.train()

    if has_groups:
        attempts = {
            "optimizer": lambda: worker.make_trainer(optim="adafactor", **options),
            "one pipeline": lambda: worker.make_trainer(sharding="FULL_SHARD", **options),
            "processes": lambda: worker.make_trainer(pipeline_parallel_size=4, **options),
            "other numbers": train_with_numbers_of_its_own,
        }
    else:
        attempts = {
            "zero bubble": lambda: worker.make_trainer(
                sharding="FULL_SHARD", pipeline_schedule="zero_bubble", **options
            ),
            "hybrid": lambda: worker.make_trainer(sharding="HYBRID_SHARD", **options),
            "sharded optimizer": lambda: worker.make_trainer(sharding="SHARD_GRAD_OP", optim="adafactor", **options),
            "offload": lambda: worker.make_trainer(sharding="FULL_SHARD", cpu_offload=True, **options),
        }
    return {name: worker.said_by(attempt) for name, attempt in attempts.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON: of every run")
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    folder, fields = options.folder, options.fields
    DistTrainingArguments(output_dir=str(folder / "none"), use_cpu=True, report_to=[])  # makes the process group
    base = folder / "base"
    if rank() == 0:  # (1)
        save_base(base)
    dist.barrier()
    frozen = {"frozen_modules": ["embed_tokens", "layers.0", "layers.5"]}
    frozen["learning_rates"] = {"projection": 5e-3, "layers.1": 2e-3}
    parts = {
        "loaded": lambda: loaded(base, folder / "loaded", **fields),
        "held": lambda: held(base, folder / "held", **fields),
        "counted": lambda: worker.counted(base, folder / "counted", **fields),
        "draws": lambda: draws(base, folder / "draws", **fields),
        "replayed": lambda: replayed(base, folder / "replayed", **fields),
        "resumed": lambda: worker.resumed(base, folder / "run", **fields),
        "elsewhere": lambda: worker.goes_on_elsewhere(
            base, folder / "run", **({"pipeline_schedule": "interleaved_1f1b"} | fields)
        ),
        "frozen": lambda: worker.resumed(base, folder / "frozen", **fields, **frozen),
        "head": lambda: worker.resumed(base, folder / "head", **fields, trainable_modules=["projection"]),
        "adapters": lambda: worker.resumed(base, folder / "adapters", has_adapters=True, **fields),
        "adapters_elsewhere": lambda: adapters_elsewhere(
            base, folder / "adapters", **({"pipeline_schedule": "interleaved_1f1b"} | fields)
        ),
        "not_finite": lambda: worker.not_finite(base, folder / "not_finite", **fields),
        "evaluation": lambda: worker.evaluated(base, folder / "eval", **fields),
        "said": lambda: refusals(base, folder),
    }
    found = {name: parts[name]() for name in options.only or parts}
    if rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    leave_together()
