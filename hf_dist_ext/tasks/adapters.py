"""LoRA from the run file, through peft: `use_lora` and its fields -> the model with adapters, its base frozen.

(1) where adapters go: the modules that are named (peft's meaning: names or suffixes, "all-linear", or a regex), or
    peft's own choice for the architecture; in a vision-language model inside the language model only
(2) peft freezes the base. `trainable_modules` may name parts of it that train whole beside the adapters, such as the
    projector; then a checkpoint holds both, and `hf-dist merge` makes one model of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.models.backbones import one_line
from hf_dist_ext.run.config import RunConfig


def add_adapters(model: nn.Module, config: RunConfig) -> nn.Module:
    """The model itself when the run wants none."""
    if not config.use_lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = config.lora_target_modules if config.lora_target_modules is not None else _usual_targets(model)
    options = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        # "all-linear" means the backbone's; a projection trains whole (trainable_modules)
        exclude_modules=r"projection(\..*)?" if getattr(model, "projection", None) is not None else None,
    )
    try:
        return get_peft_model(model, options)
    except (ValueError, KeyError) as error:
        raise UsageError(f"lora_target_modules={config.lora_target_modules!r}: {one_line(error)}") from error


BASE = "base_model.model."  # what peft puts before the names of the model it wraps


def name_without_adapters(name: str) -> str | None:
    """The name that a parameter of a peft model has in its base; None for an adapter's own."""
    if ".lora_" in name:
        return None
    return name.removeprefix(BASE).replace(".base_layer.", ".")


def merged_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered weights of a model with LoRA -> those of its base with the adapters merged: W + scaling * B A. peft
    merges in place, which a sharded model can not do."""
    merged = {}
    for name, value in weights.items():
        plain = name_without_adapters(name)
        if plain is None:
            continue
        layer, is_adapted, _ = name.rpartition(".base_layer.weight")
        if is_adapted:
            module = model.get_submodule(layer)
            down, up = (weights[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
            delta = up @ down * module.scaling["default"]
            value = (value.float() + (delta.T if module.fan_in_fan_out else delta)).to(value.dtype)
        merged[plain] = value
    return merged


def _usual_targets(model: nn.Module) -> list[str]:
    """Full names, so that the image encoder's layers of the same name stay as they are."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    wanted = USUAL.get(getattr(text, "model_type", ""), ["q_proj", "v_proj"])
    groups = module_groups(model)
    roots = groups["language"].roots if "language" in groups else ("",)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    below = [name for name in linear if any(root == "" or name.startswith(f"{root}.") for root in roots)]
    targets = [name for name in below if name.rpartition(".")[2] in wanted]
    if not targets:
        raise UsageError(
            f"use_lora: {type(model).__name__} has no layer called {' or '.join(wanted)}. Name some in "
            f'lora_target_modules, or "all-linear". Its last ones: {", ".join(linear[-3:])}.'
        )
    return targets
