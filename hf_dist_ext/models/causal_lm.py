"""Causal language models for `DistTrainer` without a loss: whole, or the stages of a pipeline that a process has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import load_complete
from hf_dist_ext.strategies import choose
from hf_dist_ext.strategies.pipeline.stages import put_back


def load_causal_lm(name_or_path: str | Path, args: Any, **options: Any) -> PreTrainedModel:
    """A causal language model of a folder or the hub, for `DistTrainer(model, args)`.

    Without a pipeline it is what `AutoModelForCausalLM.from_pretrained` gives. With `pipeline_parallel_size` in `args`
    (DistTrainingArguments) a process reads the weights of its own stages; parameters of others are on the meta device.

    Args:
        options: of `from_pretrained` (dtype, attn_implementation, revision, ...).

    Raises:
        UsageError: the model can not be cut, or its files lack weights.
    """
    in_stages = choose.in_stages(args, has_own_loss=True)
    if in_stages is None:
        return AutoModelForCausalLM.from_pretrained(name_or_path, **options)
    named = {name: options[name] for name in ("revision", "token", "cache_dir") if name in options}
    config = options.pop("config", None) or AutoConfig.from_pretrained(name_or_path, **named)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f'"{name_or_path}" is of the kind "{config.model_type}", which is no causal language model.')
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # its values are classes, though it is declared with pairs of them
    kind = in_stages(kinds[type(config)])
    model: Any = put_back(load_complete(kind, name_or_path, **({"dtype": "auto"} | options), config=config))
    model.tie_weights()  # also those of which this process has neither
    return model
