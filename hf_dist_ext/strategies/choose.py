"""Parallelism whose processes share rows, where a loss over embeddings is trained: what is exact, and the refusals.

(1) sizes: what an accelerate YAML or `parallelism_config` splits beside rows
(2) a model that transformers has split (`DistributedConfig`): tensor parallelism, alone or with FSDP2 over its groups
(3) what was not made exact under it

Such a loss counts every process's rows once, so ranks that hold the same rows would each weigh in, without an error.
`distributed.share_rows` says who shares; strategies/tensor_parallel.py does the rest.
"""

from __future__ import annotations

import os
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives, tensor_parallel

KINDS = {"cp": "context", "sp": "sequence"}
OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "sgd"}  # whose state is split as the parameter is


def check(model: Any, args: Any) -> tensor_parallel.SplitModel | None:
    """Before an `Accelerator` exists: the split model, None for one that is whole. Raises UsageError."""
    if shared := _sizes(args, KINDS):  # (1)
        name, size = next(iter(shared.items()))
        raise UsageError(
            f"{name}_size={size} in the parallelism_config: with {KINDS[name]} parallelism {size} processes hold the "
            "same rows, and a loss over embeddings counts the rows of each. Use multi_gpu_fsdp or multi_gpu_hsdp."
        )
    launched = _sizes(args, ("tp",)).get("tp", 1)
    collectives.share_rows(1)
    if model is None:  # model_init will make it
        return None
    if tensor_parallel.find_split(model) is None:
        if launched > 1:
            raise UsageError(
                f"tp_size={launched} in the parallelism_config, but {type(model).__name__} is whole on every process. "
                "Load it with EmbeddingModel.from_pretrained(..., distributed_config=DistributedConfig(tp_size="
                f"{launched}, fsdp_size=processes // {launched})), or use multi_gpu_fsdp."
            )
        return None
    _check_layout(model, launched)  # (2)
    _check_rest(model, args)
    found = tensor_parallel.SplitModel(model)
    collectives.share_rows(found.config.tp_size, found.peers)
    return found


def _sizes(args: Any, names: Any) -> dict[str, int]:
    config = getattr(args, "parallelism_config", None)
    if config is not None:
        found = {name: getattr(config, f"{name}_size") for name in names}
    elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        found = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in names}
    else:
        found = {}
    return {name: size for name, size in found.items() if size > 1}


def _check_layout(model: Any, launched: int) -> None:
    tensor_parallel.check_is_supported()
    found = tensor_parallel.find_split(model)
    config = found.config.distributed_config
    if found is not model and not getattr(model, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            f"{type(found).__name__} was split (distributed_config) inside {type(model).__name__}, which does not say "
            "so to Trainer. Use EmbeddingModel, or multi_gpu_fsdp."
        )
    others = [n for n in ("pp_size", "ep_size", "dp_replicate_size") if getattr(config, n) > 1]
    if others or config.tp_size == 1:
        what = f"{others[0]}={getattr(config, others[0])}" if others else "tp_size=1"
        raise UsageError(
            f"{type(found).__name__} was split with {what}: a loss over embeddings is exact with tp_size above 1, "
            "alone or with fsdp_size. Use multi_gpu_tp, multi_gpu_fsdp or multi_gpu_hsdp."
        )
    if launched not in (1, config.tp_size):
        raise UsageError(
            f"tp_size={launched} in the parallelism_config, but {type(found).__name__} was split with "
            f"tp_size={config.tp_size}. Make them equal."
        )
    tensor_parallel.check_can_be_split(found.config, config.tp_size)


def _check_rest(model: Any, args: Any) -> None:  # (3)
    is_partly_frozen = any(getattr(args, f"{kind}_modules", None) is not None for kind in ("trainable", "frozen"))
    if args.bf16 and is_partly_frozen and any(p.dtype.itemsize < 4 for p in model.parameters()):
        raise UsageError(
            "tensor parallelism with frozen parts and bf16=true needs weights in float32: what trains can not be made "
            "so once it is split. Load the model with dtype=float32."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    refused = {
        "adapters (use_lora)": any(hasattr(module, "peft_config") for module in model.modules()),
        "fp16=true": args.fp16,
        "torch_compile=true": args.torch_compile,
        "frozen_feature_cache": getattr(args, "frozen_feature_cache", None) is not None,
        "save_async=true": args.save_async,
        "DeepSpeed": bool(args.deepspeed) or collectives.launches_deepspeed(),
        "FSDP of accelerate": bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true",
        f"optim={optimizer}": optimizer not in OPTIMIZERS,
    }
    refused |= {
        f"{name}={getattr(args, name)!r}": getattr(args, name, None) is not None
        for name in ("ddp_comm_hook", "sharding")
    }
    if found := [what for what, is_given in refused.items() if is_given]:
        remedies = {"fp16=true": "Use bf16.", f"optim={optimizer}": f"Use one of {', '.join(sorted(OPTIMIZERS))}."}
        remedy = remedies.get(found[0], "Leave it out, or use multi_gpu_fsdp.")
        raise UsageError(f"tensor parallelism does not go with {found[0]}: it was not made exact there. {remedy}")
