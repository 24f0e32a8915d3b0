"""LoRA in layers that ranks split between them: W x + s B A x.

A layer that is split by its outputs has B split likewise and A whole. One that is split by its inputs has A split
likewise; what the ranks' parts of A give, a few numbers per token, is summed before B, which is whole. So a whole
factor has its whole gradient on every rank of a group, and factors are gathered, clipped and saved as weights are.

peft 0.21 splits a factor so, but only where the model that it is given says that it is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.tensors import is_split, put

FACTORS = {"colwise": "lora_B", "rowwise": "lora_A"}  # style of a layer's plan -> what is split with it
INITIAL = (True, False, "gaussian", "orthogonal")  # the others change the base's weights, or are computed of them


def configs_of(model: nn.Module) -> dict[str, Any]:
    """Name of a set of adapters -> peft's config of it; empty without adapters."""
    found = (getattr(module, "peft_config", None) or {} for module in model.modules())
    return {name: config for configs in found for name, config in configs.items()}


def check(model: nn.Module, split: nn.Module, styles: Mapping[str, str]) -> None:
    """UsageError for adapters that can not be split. `split`: the part of the model of which layers are, and their
    `styles`, by name."""
    for config in configs_of(model).values():
        kind, initial = str(getattr(config.peft_type, "value", config.peft_type)), "init_lora_weights"
        given = {
            f"adapters of the kind {kind}": kind != "LORA",
            "use_dora=true": getattr(config, "use_dora", False),
            f"{initial}={getattr(config, initial, True)!r}": getattr(config, initial, True) not in INITIAL,
        }
        if found := [what for what, is_given in given.items() if is_given]:
            raise UsageError(
                f"tensor parallelism does not go with {found[0]}: it was measured to be exact with plain LoRA. Use "
                "that, or multi_gpu_fsdp."
            )
    for name, module in split.named_modules():
        is_copied = "modules_to_save" in module._modules and any(f"{path}.".startswith(f"{name}.") for path in styles)
        if is_copied or ("lora_A" in module._modules and name in styles and styles[name] not in FACTORS):
            what = "modules_to_save" if is_copied else "adapters"
            raise UsageError(
                f"tensor parallelism splits {name!r}, and {what} were not made exact there: with them go the layers "
                f"of attention and feed-forward. Leave {name!r} out, or use multi_gpu_fsdp."
            )


def split(model: nn.Module, part: nn.Module, styles: Mapping[str, str], mesh: Any) -> None:
    """The factors of the layers that are here, in a `part` of the model. `styles`: of layers by name; `mesh`: torch's
    DeviceMesh of one dimension. Raises UsageError."""
    configs = configs_of(model)
    for name, layer in list(part.named_modules()) if configs else ():
        if "lora_A" not in layer._modules or name not in styles:
            continue
        from peft.tuners.lora.model import add_lora_tp_hooks_dtensor

        side = FACTORS[styles[name]]
        for adapter, config in configs.items():
            _make_whole(layer, adapter, config.init_lora_weights, name)
            factor, path = getattr(layer, side)[adapter], f"{name}.{side}.{adapter}"
            if not any(map(is_split, factor.parameters())):
                add_lora_tp_hooks_dtensor(factor, styles[name], mesh, base_layer=layer.base_layer, module_name=path)


def _make_whole(layer: Any, adapter: str, initial: bool | str, name: str) -> None:
    """peft 0.21 makes factors as large as what a process holds of the layer, of FSDP2's shard too. New ones are drawn,
    as large as the layer, while they add nothing to it. Remove when peft's are that large or are split already."""
    base, down, up = layer.base_layer, layer.lora_A[adapter], layer.lora_B[adapter]
    if (down.in_features, up.out_features) == (base.in_features, base.out_features):
        return
    if any(parameter.any() for parameter in up.parameters()):
        raise UsageError(
            f"the adapter of {name!r} has weights for {down.in_features} inputs and {up.out_features} outputs, the "
            f"part of the layer that one process holds. Put adapters with weights in before the model is split."
        )
    kind = {"device": down.weight.device, "dtype": down.weight.dtype}
    layer.lora_A[adapter] = nn.Linear(base.in_features, down.out_features, bias=False, **kind)
    layer.lora_B[adapter] = nn.Linear(up.in_features, base.out_features, bias=up.bias is not None, **kind)
    for old, new in ((down, layer.lora_A[adapter]), (up, layer.lora_B[adapter])):
        new.requires_grad_(old.weight.requires_grad)
    layer.in_features, layer.out_features = base.in_features, base.out_features
    layer.reset_lora_parameters(adapter, initial)


def held_here(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a folder of adapters holds, by peft's names: this rank's own tensors. peft 0.21 would gather copies."""
    from peft import get_peft_model_state_dict

    tensors = list(model.state_dict().items())
    numbers = {name: torch.tensor(number) for number, (name, _) in enumerate(tensors)}
    return {name: tensors[int(number)][1] for name, number in get_peft_model_state_dict(model, numbers).items()}


def load(model: nn.Module, folder: Path) -> bool:
    """Every rank takes its part of its layers' adapters from a folder, in which they have peft's names or the
    backbone's own. peft 0.21 would copy whole tensors over parts. False: the folder holds none."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
        return False
    with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
        names = set(file.keys())
        for name, tensor in held_here(model).items():
            stored = name if name in names else name.replace(".backbone.", ".", 1)
            if stored not in names:
                raise UsageError(f"{folder} does not fit this model: {name!r}. Use the options it was saved with.")
            put(tensor, file.get_tensor(stored))
    return True
