"""Adapters of peft: which a model has, those of a folder, and their weights made a part of the base's.

A model of transformers is wrapped by peft. A SentenceTransformer has them inside, put there by its `add_adapter`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hf_dist_ext.errors import UsageError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HALF = (torch.float16, torch.bfloat16)
OF_A_SCALE = ("lora_alpha", "use_rslora", "alpha_pattern")
PREFIX = "base_model.model."  # what peft puts before the names of the model it wraps


def adapters_of(model: Any) -> Mapping[str, Any]:
    """Name -> configuration. `model`: the bare one."""
    inside = getattr(model, "transformers_model", None)  # of a SentenceTransformer
    holder = model if inside is None else inside
    return getattr(holder, "peft_config", None) or {}


def adapter_scales(model: Any) -> dict[str, dict[str, Any]]:
    """Name -> what peft multiplies the trained adapters with."""
    return {
        name: {field: getattr(config, field, None) for field in OF_A_SCALE}
        for name, config in adapters_of(model).items()
    }


def trains_beside(model: Any) -> bool:
    """Whether parts of the base train too, of a SentenceTransformer those of its model of transformers, which a folder
    of adapters does not hold."""
    inside = getattr(model, "transformers_model", None)
    own = tuple(f".{name}." for name in adapters_of(model))
    trained = [f"{name}." for name, p in (model if inside is None else inside).named_parameters() if p.requires_grad]
    return any(not any(one in name for one in own) for name in trained)


def base_of(folder: Path) -> tuple[str, str | None]:
    """The base that adapters were trained on, and its revision."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not config.get("base_model_name_or_path"):
        raise UsageError(f"{folder / CONFIG} names no base model, so its adapters have nothing to be put into.")
    return config["base_model_name_or_path"], config.get("revision")


def put_in(model: Any, folder: Path, weights: Mapping[str, torch.Tensor] | None = None, inside: bool = False) -> Any:
    """A model of transformers with the adapters of `folder`, not merged; all of them or an error.

    `weights`: those of a folder that holds them in another form than peft's. `inside`: the model is not wrapped, and
    has them as its `add_adapter` puts them in.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    weights = load_file(folder / WEIGHTS) if weights is None else weights
    try:
        if inside:
            weights = {name.removeprefix(PREFIX): value for name, value in weights.items()}
            model.add_adapter(PeftConfig.from_pretrained(folder))
            keep_wide(model)
        else:
            model = get_peft_model(model, PeftConfig.from_pretrained(folder))
    except ValueError as error:
        raise UsageError(f"{folder}: its adapters do not fit {type(model).__name__}: {error}") from error
    own = get_peft_model_state_dict(model)
    wanted, found = ({(name, value.shape) for name, value in of.items()} for of in (own, weights))
    if differing := sorted({name for name, _ in wanted ^ found}):
        raise UsageError(
            f"{folder}: {len(differing)} of its adapters do not fit the base model, such as {differing[0]}. Use the "
            "base that adapter_config.json names, as it was when the adapters were trained."
        )
    set_peft_model_state_dict(model, weights)
    return model.eval()


def keep_wide(backbone: Any) -> None:
    """Adapters that `add_adapter` has put in are float32 also over a base in half precision, as those of peft are:
    small updates would be rounded away."""
    for parameter in parameters_of_adapters(backbone):
        if parameter.dtype in HALF:
            parameter.data = parameter.data.float()


def parameters_of_adapters(backbone: Any) -> list[nn.Parameter]:
    """Those that peft has put into a model of transformers, of inactive adapters too."""
    named = [one for _, layer in _adapted(backbone) for one in layer.named_parameters()]
    return [parameter for name, parameter in named if "base_layer" not in name]


def merge_inside(backbone: Any) -> None:
    """Adapters that `add_adapter` has put into a model of transformers become a part of its weights, in place."""
    from peft.utils.other import AuxiliaryTrainingWrapper  # around modules_to_save, and of trainable_token_indices

    around = [(n, one) for n, one in backbone.named_modules() if isinstance(one, AuxiliaryTrainingWrapper)]
    for name, wrapper in around:
        backbone.set_submodule(name, wrapper.unload_and_optionally_merge_module(True, True, None))
    for _, layer in _adapted(backbone):
        weight = layer.get_base_layer().weight
        is_half, dtype = weight.dtype in HALF, weight.dtype
        if is_half:  # peft would round the update, and then the sum
            weight.data = weight.data.float()
        layer.merge(safe_merge=True)
        if is_half:
            weight.data = weight.data.to(dtype)
    remove_from(backbone)


def name_without_adapters(name: str) -> str | None:
    """The name that a parameter of a peft model has in its base; None for an adapter's own."""
    if ".lora_" in name:
        return None
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def merged_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered weights of a model with LoRA -> those of its base with the adapters merged: W + scaling * B A. peft
    merges in place, which a model can not do that is sharded or cut into stages."""
    merged = {}
    for name, value in weights.items():
        plain = name_without_adapters(name)
        if plain is None:
            continue
        layer, is_adapted, _ = name.rpartition(".base_layer.weight")
        if is_adapted:
            module, wide = model.get_submodule(layer), torch.promote_types(value.dtype, torch.float32)
            is_table = f"{layer}.lora_embedding_A.default" in weights
            form = f"{layer}.lora_embedding_%s.default" if is_table else f"{layer}.lora_%s.default.weight"
            down, up = (weights[form % side].to(wide) for side in "AB")
            delta = up @ down * module.scaling["default"]
            is_turned = is_table or module.fan_in_fan_out
            value = (value.to(wide) + (delta.T if is_turned else delta)).to(value.dtype)
        merged[plain] = value
    return merged


def why_not_by_weights(model: Any) -> str | None:
    """Why `merged_weights` does not know these adapters; None: it does."""
    for config in adapters_of(model).values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            return f"they are {kind} ones"
        others = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices")
        if given := [name for name in others if getattr(config, name, False)]:
            return f"{given[0]}={getattr(config, given[0])}"
    return None


def remove_from(backbone: Any) -> None:
    """The same model without them."""
    for name, layer in _adapted(backbone):
        backbone.set_submodule(name, layer.get_base_layer())
    if getattr(backbone, "peft_config", None):
        del backbone.peft_config
        backbone._hf_peft_config_loaded = False  # transformers' own mark (5.23, integrations/peft.py)


def _adapted(backbone: Any) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in backbone.named_modules() if isinstance(module, BaseTunerLayer)]
