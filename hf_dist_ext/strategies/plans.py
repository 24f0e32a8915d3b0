"""Which layers of a model a group of ranks splits between them, and how: transformers' plan (module -> style).

For encoders transformers 5.23 has none; here are some. Styles are transformers': "colwise" splits a layer by its
outputs, "rowwise" by its inputs, "embedding_rowwise" word embeddings by words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.pipeline.stages import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

_APART = {
    "embeddings.word_embeddings": "embedding_rowwise",
    **{f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
# Query, key and value are one matrix, both inputs of the gate another; a rank takes its part of each.
_FUSED = {
    "embeddings.tok_embeddings": "embedding_rowwise",
    "layers.*.attn.Wqkv": "packed_colwise_of_3",
    "layers.*.attn.Wo": "rowwise",
    "layers.*.mlp.Wi": "packed_colwise",
    "layers.*.mlp.Wo": "rowwise",
}
PARTIAL = "replicated_with_grad_allreduce"
# Styles of a plan that were measured to be exact; the others are for mixtures of experts and fused weights.
EXACT_STYLES = {"colwise", "rowwise", "embedding_rowwise", PARTIAL}
ENCODERS = dict.fromkeys(("bert", "roberta", "xlm-roberta"), _APART) | {"modernbert": _FUSED}


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Empty where there is none. Names have `*` for numbers of layers."""
    own = ENCODERS.get(model.config.model_type, {}) if model.base_model is model else {}
    return dict(model.tp_plan or own)


def planned(model: nn.Module) -> PreTrainedModel:
    """The part of a model that has a plan: a backbone, or a causal language model with its head. Raises UsageError."""
    from transformers import PreTrainedModel

    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and plan_of(m)), None)
    if found is None:
        raise UsageError(f"no part of {type(model).__name__} has a plan of tensor parallelism. Use multi_gpu_fsdp.")
    return found


def styles_of(model: PreTrainedModel) -> dict[str, str]:
    """Of the modules that its plan names: name -> style. peft puts one of which it trains a copy into another module,
    as `original_module`."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan, names = plan_of(model), (name.replace(".original_module", "") for name, _ in model.named_modules())
    found = ((name, plan.get(replace_layer_number_by_wildcard(name))) for name in names)
    return {name: style for name, style in found if style is not None}


def register_styles() -> None:
    """The one of three fused matrices, for which transformers has the code and no name."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, PackedColwiseParallel

    ALL_PARALLEL_STYLES.register("packed_colwise_of_3", PackedColwiseParallel(split_factor=3))


def with_plan(config: DistributedConfig, of_model: Any) -> DistributedConfig:
    """With the plans of an encoder, whose config is `of_model`: what a group splits, and what FSDP2 shards. Raises
    UsageError."""
    if of_model.model_type not in ENCODERS:
        return config
    check_is_sharded(of_model, config.fsdp_size > 1)
    register_styles()
    parts = layout_of(of_model)
    units = dict.fromkeys((*parts.before, f"{parts.stack}.*", *parts.after), "free_full_weight")
    return replace(config, tp_plan=ENCODERS[of_model.model_type], fsdp_plan=units)


def check_can_be_split(config: Any, size: int) -> None:
    """UsageError for a model, by its config, whose layers a group of `size` can not split."""
    name, text = config.model_type, config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if name in ENCODERS:
        check_encoder(config, size)
    elif not plan:
        raise UsageError(
            f'there is no tensor-parallel plan for "{name}": transformers has them for decoders such as llama and '
            f"qwen3, and there are some for {', '.join(sorted(ENCODERS))}. Use multi_gpu_fsdp."
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


def check_encoder(config: Any, size: int) -> None:
    """UsageError for one that groups of `size` can not split. Heads are looked at for every model."""
    if ENCODERS[config.model_type] is not _FUSED:
        return
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if biases or config.intermediate_size % size:
        given = f"{biases[0]}=true" if biases else f"intermediate_size={config.intermediate_size}"
        raise UsageError(
            f'{given} of "{config.model_type}" can not be dealt to groups of {size} processes: its fused matrices are '
            "split into parts of equal size, without biases. Use multi_gpu_fsdp."
        )


def check_is_sharded(config: Any, is_sharded: bool) -> None:
    """UsageError for fused matrices that FSDP2 would shard over groups too: torch 2.13 puts their parts together in
    another order, without an error."""
    if is_sharded and ENCODERS.get(config.model_type) is _FUSED:
        raise UsageError(
            f'"{config.model_type}" has fused matrices, which FSDP2 over groups that split them would mix up. Start '
            "one group, or pipelines whose copies are whole (no sharding); or use multi_gpu_fsdp."
        )
