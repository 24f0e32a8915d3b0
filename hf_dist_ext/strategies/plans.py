"""Which layers of a model a group of ranks splits between them, and how: transformers' plan (module -> style).

Styles are transformers': "colwise" splits a layer by its outputs, "rowwise" by its inputs, "embedding_rowwise" word
embeddings by words. It has plans for decoders alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTIAL = "replicated_with_grad_allreduce"
# Styles of a plan that were measured to be exact; the others are for mixtures of experts and fused weights.
EXACT_STYLES = {"colwise", "rowwise", "embedding_rowwise", PARTIAL}


def planned(model: nn.Module) -> PreTrainedModel:
    """The part of a model that has a plan. Raises UsageError."""
    from transformers import PreTrainedModel

    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.tp_plan), None)
    if found is None:
        raise UsageError(f"no part of {type(model).__name__} has a plan of tensor parallelism. Use multi_gpu_fsdp.")
    return found


def styles_of(model: PreTrainedModel) -> dict[str, str]:
    """Of the modules that its plan names: name -> style."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan = model.tp_plan  # names have `*` for numbers of layers
    found = ((name, plan.get(replace_layer_number_by_wildcard(name))) for name, _ in model.named_modules())
    return {name: style for name, style in found if style is not None}


def check_can_be_split(config: Any, size: int) -> None:
    """UsageError for a model, by its config, whose layers a group of `size` can not split."""
    name, text = config.model_type, config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise UsageError(
            f'there is no tensor-parallel plan for "{name}": transformers has them for decoders such as llama and '
            "qwen3. Use multi_gpu_fsdp."
        )
    if unknown := set(plan.values()) - EXACT_STYLES:
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
