r"""One process of the strategy tests: trains a tiny encoder with every knob that its launch can have, and writes what
the run was made of, what it sent and what its gradients were.

    accelerate launch --config_file configs/accelerate/multi_gpu_fsdp.yaml tests/distributed/strategy_worker.py \
        --cases fsdp --output found.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import ddp, sparse
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.trainer_worker import weights_of
from tests.launching import leave_together
from tests.parity.exactness_worker import BATCH, BERT, Case, collate
from tests.tiny_models import CHECKPOINTING, embedding_model

CASES = {
    "fsdp": {
        "preset": {},
        "FULL_SHARD": {"sharding": "FULL_SHARD"},
        "SHARD_GRAD_OP": {"sharding": "SHARD_GRAD_OP"},
        "SHARD_GRAD_OP, no cache": {"sharding": "SHARD_GRAD_OP", "gradient_cache_chunk_size": None},
        "NO_SHARD": {"sharding": "NO_SHARD"},
        "HYBRID_SHARD": {"sharding": "HYBRID_SHARD"},
        "cpu_offload": {"cpu_offload": True},
        "min_num_params": {"min_num_params": 10**9},
        "reduce_dtype": {"reduce_dtype": "bfloat16"},
        "activation_checkpointing": {CHECKPOINTING: True},
        "comm hook": {"ddp_comm_hook": "fp16"},
    },
    "hybrid": {"HYBRID_SHARD": {"sharding": "HYBRID_SHARD", "sharding_group_size": 2}},
    "ddp": {
        "preset": {},
        "fp16": {"ddp_comm_hook": "fp16"},
        "bf16": {"ddp_comm_hook": "bf16"},
        "power_sgd": {"ddp_comm_hook": "power_sgd", "ddp_power_sgd_rank": 2, "ddp_power_sgd_warmup_steps": 2},
        "batched_power_sgd": {"ddp_comm_hook": "batched_power_sgd", "ddp_power_sgd_warmup_steps": 2},
        "top_k": {"ddp_comm_hook": "top_k", "ddp_compression_ratio": 0.05},
        "random_k": {"ddp_comm_hook": "random_k", "ddp_compression_ratio": 0.05},
        "top_k, unused": {"ddp_comm_hook": "top_k", "ddp_find_unused_parameters": True},
        "random_k, all": {"ddp_comm_hook": "random_k", "ddp_compression_ratio": 1.0},
        "ddp_gradient_as_bucket_view": {"ddp_gradient_as_bucket_view": True},
        "ddp_static_graph": {"ddp_static_graph": True, "gradient_cache_chunk_size": None},
        "ddp_static_graph, cache": {"ddp_static_graph": True},
        "reduce_dtype": {"reduce_dtype": "bfloat16"},
        "NO_SHARD": {"sharding": "NO_SHARD"},
        "FULL_SHARD": {"sharding": "FULL_SHARD"},
        "lr linear": {"lr_scale_rule": "linear", "lr_base_batch_size": 2 * BATCH, "gradient_accumulation_steps": 3},
    },
}
NUM_STEPS = 4


class Sent(TorchDispatchMode):
    """Counts collectives with their dtype and elements."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.name()
        if name.startswith("c10d::"):
            flat = torch.utils._pytree.tree_leaves(arguments)
            tensor = max((a for a in flat if isinstance(a, torch.Tensor)), key=torch.Tensor.numel, default=None)
            if tensor is not None:
                key = f"{name.removeprefix('c10d::')} {tensor.dtype}"
                self.collectives[key] += 1
                self.elements[key] += tensor.numel()
        return function(*arguments, **(options or {}))


class Recorder(TrainerCallback):
    """Keeps the first step's gradients, whole."""

    gradients = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        if self.gradients is None:
            found = [p.grad for p in model.parameters() if p.requires_grad]
            whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
            self.gradients = torch.cat([g.detach().double().flatten() for g in whole])


def make_trainer(folder: str, recorder, steps: int = NUM_STEPS, **arguments) -> DistTrainer:
    torch.manual_seed(0)
    model = embedding_model(BERT).double()
    defaults = {"gradient_cache_chunk_size": 4, "gradient_cache_fsdp": "auto", "learning_rate": 0.01}
    args = DistTrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, max_steps=steps, optim="sgd", report_to=[], seed=7,
        lr_scheduler_type="constant", max_grad_norm=0, disable_tqdm=True, logging_strategy="no", use_cpu=True,
        train_sampling_strategy="sequential", save_steps=2, **(defaults | arguments),
    )  # fmt: skip
    case = Case("strategies")
    return DistTrainer(
        model=model,
        args=args,
        data_collator=lambda rows: collate(case, rows, rank()),
        train_dataset=list(range(8 * NUM_STEPS * BATCH * launched.processes())),
        loss=InfoNCELoss(temperature=0.1).double(),
        callbacks=[recorder],
    )


def examine(name: str, arguments: dict) -> dict:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make_trainer(folder, recorder, save_strategy="no", **arguments)
        except UsageError as error:
            return {"refused": str(error)}
        with Sent() as sent:
            trainer.train()
    wrapped = trainer.model_wrapped
    units = [m for m in wrapped.modules() if isinstance(m, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    groups = [group for group in groups if group is not None]
    mesh = next((p.device_mesh for p in wrapped.parameters() if hasattr(p, "device_mesh")), None)
    return {
        "wrapper": type(wrapped).__name__,
        "units": len(units),
        "offloads": [type(group.offload_policy).__name__ for group in groups],
        "reshards": [bool(group.post_forward_mesh_info) for group in groups],
        "mesh": None if mesh is None else list(mesh.shape),
        "collectives": dict(sent.collectives),
        "elements": dict(sent.elements),
        "gradients": recorder.gradients,
        "weights": weights_of(trainer.model),
        "is_checkpointing": bool(getattr(trainer.bare_model.transformers_model, f"is_{CHECKPOINTING}")),
        "learning_rate": trainer.args.learning_rate,
        "is_bucket_view": bool(getattr(wrapped, "gradient_as_bucket_view", False)),
        "is_static": bool(getattr(wrapped, "static_graph", False)),
    }


def resumed_power_sgd() -> dict:
    """Four steps, then a resume of four more: PowerSGD's state as it was saved and loaded, and what it sends."""
    arguments = CASES["ddp"]["power_sgd"]
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # every rank writes into the first one's folder
        make_trainer(folder[0], Recorder(), **arguments).train()
        checkpoint = Path(folder[0], "checkpoint-4")
        saved = torch.load(checkpoint / f"ddp_comm_hook_{rank()}.pt", weights_only=True)
        loaded: dict = {}

        class Look(TrainerCallback):
            def on_train_begin(self, args, state, control, **others):
                hook = ddp.power_sgd_state(self.trainer.model_wrapped)
                errors = {k: v.clone() for k, v in hook.error_dict.items()}
                loaded.update(errors=errors, iteration=hook.iter, hook=hook)

        look = Look()
        look.trainer = make_trainer(folder[0], look, steps=8, **arguments)
        with Sent() as sent:
            look.trainer.train(resume_from_checkpoint=str(checkpoint))
        files = sorted(path.name for path in checkpoint.glob("ddp_comm_hook*"))
        dist.barrier()
    return {
        "files": files,
        "saved_error": sum(error.norm().item() for error in saved["error_dict"].values()),
        "loaded_equal": all(torch.equal(error, loaded["errors"][k]) for k, error in saved["error_dict"].items()),
        "iterations": [saved["iter"], loaded["iteration"], loaded["hook"].iter],
        "moved_on": any(not torch.equal(e, saved["error_dict"][k]) for k, e in loaded["hook"].error_dict.items()),
        "elements": sent.elements["allreduce_ torch.float64"],
    }


def resumed_sparse(hook: str) -> dict:
    """Eight steps, and the last four of them once more from a checkpoint."""
    weights = []
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for checkpoint in (None, str(Path(folder[0], "checkpoint-4"))):
            trainer = make_trainer(folder[0], Recorder(), steps=8, **CASES["ddp"][hook])
            trainer.train(resume_from_checkpoint=checkpoint)
            weights.append(weights_of(trainer.model))
        trainer.train()  # once more, which has nothing to say
        saved = torch.load(Path(folder[0], "checkpoint-4", f"ddp_comm_hook_{rank()}.pt"), weights_only=True)
        dist.barrier()
    left_out = sum(error.norm().item() for error in saved["errors"].values())
    return {"is_equal": torch.equal(*weights), "left_out": left_out, "updates": saved["updates"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", choices=list(CASES), required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    gc.freeze()  # or every end of a training looks at all that was imported
    logging.disable(logging.WARNING)
    found = {name: examine(name, copy.deepcopy(arguments)) for name, arguments in CASES[options.cases].items()}
    base = found.get("preset")
    for entry in found.values():
        gradients, weights = entry.pop("gradients", None), entry.pop("weights", None)
        if base is not None and gradients is not None:
            entry["gradient_norm"] = gradients.norm().item()
            reference = base.setdefault("_gradients", gradients)
            entry["gradient_difference"] = ((gradients - reference).norm() / reference.norm()).item()
            reference = base.setdefault("_weights", weights)
            entry["weight_difference"] = (weights - reference).norm().item()
    if base is not None:
        del base["_gradients"], base["_weights"]
    if options.cases == "ddp":
        found["resumed"] = resumed_power_sgd()
        found["resumed sparse"] = {hook: resumed_sparse(hook) for hook in sparse.HOOKS}
    if rank() == 0:
        Path(options.output).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
    leave_together()
