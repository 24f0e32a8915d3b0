"""How transformers splits a model over a group of ranks (`DistributedConfig`), and what can be split.

What can not be exact under a loss over embeddings is refused, where possible before anything is loaded. One style of
splitting goes wrong with several backwards per update and is taken out of transformers' hands: `without_own_reduction`
and `sum_partial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_dist_ext import launched, policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import plans
from hf_dist_ext.strategies.tensors import held_here, is_split

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig


def launched_config() -> DistributedConfig | None:
    """What the launcher's YAML asks for: groups of its `tp_size`, FSDP2 over as many groups as its processes make."""
    size, processes = launched.mesh_size("tp"), launched.processes()
    if size == 1:
        return None
    if processes % size:
        raise UsageError(
            f"{processes} processes do not make groups of {size} (parallelism_config_tp_size). Start a multiple of "
            f"{size}."
        )
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=size, fsdp_size=processes // size)


def is_supported() -> bool:
    """transformers 5.20 splits models too, without the plan that (2) reads; 5.23 is what was measured to be exact.
    Remove when the minimum is 5.23."""
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "_expand_parallel_plan")


def check_is_supported() -> None:
    if not is_supported():
        raise UsageError(
            "tensor parallelism needs transformers 5.23 or newer, on Python 3.11. Update it, or use multi_gpu_fsdp."
        )


def check_can_be_split(config: Any, size: int) -> None:
    """Of a model's config, before its weights are read. Raises UsageError."""
    check_is_supported()
    plans.check_can_be_split(config, size)


def split(model: PreTrainedModel, config: DistributedConfig) -> PreTrainedModel:
    """A model that is whole and the same on every rank, as `from_pretrained(distributed_config=config)` splits it."""
    config, device, meshes = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model.to(device or "cpu"), config, meshes)


def split_layers(model: PreTrainedModel, mesh: Any) -> None:
    """Split the layers that are there, whole and the same on every rank or without memory, over a mesh of one
    dimension (torch's DeviceMesh). `model`: `plans.planned`. Raises UsageError."""
    if any(map(is_split, model.parameters())):
        return
    check_can_be_split(model.config, mesh.size())
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    modules = dict(model.named_modules())
    for name, style in model._expand_parallel_plan(model.tp_plan).items():
        owner, _, parameter = name.rpartition(".")
        if name not in modules:
            ALL_PARALLEL_STYLES[style].shard_param(modules[owner], parameter, mesh)
        elif any(True for _ in modules[name].parameters()):
            ALL_PARALLEL_STYLES[style].install_forward(modules[name], mesh)


def without_own_reduction(backbone: PreTrainedModel) -> list[nn.Module]:
    """The modules of style plans.PARTIAL, with the forward that sums their gradients by itself put back.

    transformers 5.23 (distributed/tensor_parallel.py, ReplicatedWithGradAllReduce) sums `.grad` over the group after
    every backward, and with it what earlier backwards of the step have left there: chunks and micro-batches are
    counted again. Remove this and `sum_partial` when it sums the new gradient only; tests/distributed/test_upstream.py
    tells.
    """
    modules, plan = dict(backbone.named_modules()), backbone._expand_parallel_plan(backbone.tp_plan)
    partial = [modules[name] for name, style in plan.items() if style == plans.PARTIAL and name in modules]
    for module in partial:
        vars(module).pop("forward", None)  # its class's own; the style's was set on the instance
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters()):
            raise UsageError(
                f"{type(backbone).__name__} has run with gradients since it was split, which leaves hooks that "
                "reduce them wrongly. Give it to DistTrainer before."
            )
    return partial


def sum_partial(modules: Sequence[nn.Module], group: Any) -> None:
    """Gradients of `modules`, of which each rank of a group has those of its heads, summed over the group."""
    parameters = [p for module in modules for p in module.parameters() if p.grad is not None]
    if not parameters:
        return
    gradients = [held_here(p.grad) for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def check_layout(model: nn.Module, part: nn.Module, asked: int) -> None:
    """Of `model`, of which transformers has split `part`. Raises UsageError."""
    check_is_supported()
    config = part.config.distributed_config
    if getattr(model, "transformers_model", None) is part:
        say_split(model)
        for name in ("_tp_size", "_fsdp_size", "tp_size"):
            setattr(model, name, getattr(part, name, None))
    if part is not model and not getattr(model, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            f"{type(part).__name__} was split (distributed_config) inside {type(model).__name__}, which does not say "
            "so to Trainer. Use a SentenceTransformer, or multi_gpu_fsdp."
        )
    others = [n for n in ("pp_size", "ep_size", "dp_replicate_size") if getattr(config, n) > 1]
    if others or config.tp_size == 1:
        what = f"{others[0]}={getattr(config, others[0])}" if others else "tp_size=1"
        raise UsageError(
            f"{type(part).__name__} was split with {what}: a loss over embeddings is exact with tp_size above 1, "
            "alone or with fsdp_size. Use multi_gpu_tp, multi_gpu_fsdp or multi_gpu_hsdp."
        )
    if asked not in (1, config.tp_size):
        raise UsageError(
            f"tp_size={asked} in the parallelism_config, but {type(part).__name__} was split with "
            f"tp_size={config.tp_size}. Make them equal."
        )
    check_can_be_split(part.config, config.tp_size)


def say_split(model: Any) -> None:
    """Trainer then leaves the model where it is, and accelerate puts no wrapper around it. A SentenceTransformer has
    no such property, only an attribute that is set here."""
    model._is_distributed_loading_by_transformers = True
    if not hasattr(type(model), "is_distributed_loading_by_transformers"):
        model.is_distributed_loading_by_transformers = True


def check_rest(model: nn.Module, args: Any) -> None:
    """UsageError for what was not made exact under tensor parallelism alone."""
    check_what_trains(model, args)
    refused = {
        "fp16=true": args.fp16,
        "torch_compile=true": args.torch_compile,
        "dynamo in the accelerate configuration": launched.compiles(),
        "frozen_feature_cache": getattr(args, "frozen_feature_cache", None) is not None,
        "save_async=true": args.save_async,
        "DeepSpeed": bool(args.deepspeed) or launched.uses_deepspeed(),
        "FSDP of accelerate": bool(args.fsdp) or launched.uses_fsdp(),
    }
    refused |= {
        f"{name}={value!r}": bool(value)
        for name in (*policy.DDP_FIELDS, "sharding")
        for value in [getattr(args, name, None)]
    }
    if given := [what for what, is_given in refused.items() if is_given]:
        remedy = "Use bf16." if given[0] == "fp16=true" else "Leave it out, or use multi_gpu_fsdp."
        raise UsageError(f"tensor parallelism does not go with {given[0]}: it was not made exact there. {remedy}")


def check_what_trains(model: nn.Module, args: Any) -> None:
    """UsageError for what trains and can not be split, alone or inside the stages of a pipeline."""
    is_partly_frozen = any(getattr(args, f"{kind}_modules", None) is not None for kind in ("trainable", "frozen"))
    if args.bf16 and is_partly_frozen and any(p.dtype.itemsize < 4 for p in model.parameters()):
        raise UsageError(
            "tensor parallelism with frozen parts and bf16=true needs weights in float32: what trains can not be made "
            "so once it is split. Load the model with dtype=float32."
        )
    if any(getattr(module, "peft_config", None) for module in model.modules()):
        raise UsageError(
            "tensor parallelism does not go with adapters: they were not made exact there. Leave out use_lora, or use "
            "multi_gpu_fsdp."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in policy.SPLIT_OPTIMIZERS:  # whose state is split as the parameter is
        raise UsageError(
            f"tensor parallelism does not go with optim={optimizer}: it was not made exact there. Use one of "
            f"{', '.join(sorted(policy.SPLIT_OPTIMIZERS))}."
        )


def find_split(model: Any) -> Any:
    """The module that transformers has split; None."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((m for m in modules if vars(m).get("_is_distributed_loading_by_transformers")), None)
