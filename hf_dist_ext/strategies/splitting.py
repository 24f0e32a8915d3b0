"""How transformers splits a model over a group of ranks (`DistributedConfig`), and what can be split.

What can not be exact under a loss over embeddings is refused, where possible before anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

PARTIAL = "replicated_with_grad_allreduce"
# Styles of a plan that were measured to be exact; the others are for mixtures of experts and fused weights.
EXACT_STYLES = {"colwise", "rowwise", "embedding_rowwise", PARTIAL}
OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "sgd"}  # whose state is split as the parameter is


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
    name, text = config.model_type, config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise UsageError(
            f'transformers has no tensor-parallel plan for "{name}": it has them for decoders such as llama and '
            "qwen3. Use multi_gpu_fsdp."
        )
    if unknown := set(config.base_model_tp_plan.values()) - EXACT_STYLES:
        raise UsageError(
            f'the tensor-parallel plan of "{name}" uses {", ".join(sorted(unknown))}, which was not measured to be '
            "exact with several backwards per step. Use multi_gpu_fsdp."
        )
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None) or text.num_attention_heads
        if heads % size:
            raise UsageError(
                f'{field}={heads} of "{name}" can not be dealt to groups of {size} processes. Use a tp_size that '
                "divides it, or multi_gpu_fsdp."
            )


def split(model: PreTrainedModel, config: DistributedConfig) -> PreTrainedModel:
    """A model that is whole and the same on every rank, as `from_pretrained(distributed_config=config)` splits it."""
    config, device, meshes = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model.to(device or "cpu"), config, meshes)


def check_layout(model: nn.Module, part: nn.Module, asked: int) -> None:
    """Of `model`, of which transformers has split `part`. Raises UsageError."""
    check_is_supported()
    config = part.config.distributed_config
    if part is not model and not getattr(model, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            f"{type(part).__name__} was split (distributed_config) inside {type(model).__name__}, which does not say "
            "so to Trainer. Use EmbeddingModel, or multi_gpu_fsdp."
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


def check_rest(model: nn.Module, args: Any) -> None:
    """UsageError for what was not made exact under it."""
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
        "DeepSpeed": bool(args.deepspeed) or launched.uses_deepspeed(),
        "FSDP of accelerate": bool(args.fsdp) or launched.uses_fsdp(),
        f"optim={optimizer}": optimizer not in OPTIMIZERS,
    }
    refused |= {
        f"{name}={getattr(args, name)!r}": getattr(args, name, None) is not None
        for name in ("ddp_comm_hook", "sharding")
    }
    if given := [what for what, is_given in refused.items() if is_given]:
        remedies = {"fp16=true": "Use bf16.", f"optim={optimizer}": f"Use one of {', '.join(sorted(OPTIMIZERS))}."}
        remedy = remedies.get(given[0], "Leave it out, or use multi_gpu_fsdp.")
        raise UsageError(f"tensor parallelism does not go with {given[0]}: it was not made exact there. {remedy}")


def find_split(model: Any) -> Any:
    """The module that transformers has split; None."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((m for m in modules if vars(m).get("_is_distributed_loading_by_transformers")), None)
