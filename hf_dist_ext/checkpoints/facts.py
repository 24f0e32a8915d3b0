"""What a manifest tells of a run beside its files: how to go on from a checkpoint, and what its model is made of.

The trainer adds the place in the data and who trains. `hf-dist merge` rebuilds the model from what stands there.
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from hf_dist_ext.models.adapters import adapter_scales
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.tensors import own_class

PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "hf_dist_ext")


def of_run(
    args: Any, state: Any, strategy: Strategy, per_device_train_batch_size: int, optimizer: str | None
) -> dict[str, Any]:
    """`state`: Trainer's; `optimizer`: its class, None before training."""
    return {
        "step": state.global_step,
        "epoch": state.epoch,
        "world_size": args.world_size,
        "data_parallel_size": strategy.rows.size,
        "tensor_parallel_size": strategy.ranks_per_layer,
        "pipeline_parallel_size": strategy.rows.shared_by // strategy.ranks_per_layer,
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": (accumulated := args.gradient_accumulation_steps),
        "given_accumulation_steps": getattr(args, "_accumulation", (accumulated,))[0],  # learning_rate.py changes it
        "seed": args.seed,
        "data_seed": args.data_seed,
        "optim": str(args.optim.value),
        "optimizer": optimizer,
        "lr_scheduler_type": str(args.lr_scheduler_type.value),
        "sharding": strategy.name,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def of_model(model: nn.Module, dtype: str) -> dict[str, Any]:
    """Of the bare one. `dtype`: what its base was loaded in, before an engine cast it."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        "model": own_class(bare).__name__,
        "embedder": _embedder(bare) if is_of_sentence_transformers(bare) else None,
        "dtype": dtype,
        "adapter_scales": adapter_scales(model),
        "base_model": base_model(model),
        "base_revision": getattr(getattr(bare, "config", None), "_commit_hash", None),
    }


def base_model(model: nn.Module) -> str | None:
    """The folder or hub id that the weights came from; None for a model that was built from a configuration."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def _embedder(model: Any) -> dict[str, Any]:
    """How a run file's model is built again (models/from_run.py), and what it says of itself. Of a model that a script
    has made nobody knows that."""
    from hf_dist_ext.models import from_run

    return {"built": getattr(model, "_built_from", None), "settings": from_run.settings_of(model)}


def dtype_of_base(model: nn.Module) -> str:
    """That of the first weights that do not train: what the base was loaded in, where nothing has cast it since."""
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]  # others are quantized
    parameters = sorted(floating, key=lambda parameter: parameter.requires_grad)
    return str(parameters[0].dtype).removeprefix("torch.") if parameters else "float32"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
