"""A state dict for a model: compared with the model's own before it is loaded, and known by the names of files too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_dist_ext.errors import UsageError


def load_weights(module: nn.Module, state_dict: Mapping[str, torch.Tensor], source: str = "the checkpoint") -> None:
    """`module.load_state_dict`, all or nothing; UsageError that names what does not fit."""
    check_weights(module, state_dict, source)
    module.load_state_dict(state_dict)


def check_weights(module: nn.Module, state_dict: Mapping[str, torch.Tensor], source: str = "the checkpoint") -> None:
    """UsageError if `state_dict` lacks, adds or reshapes a key of `module`, which may be sharded by FSDP2."""
    found = differences(shapes(module.state_dict()), shapes(state_dict))
    problems = [f"{len(keys)} {kind}: {shortened(keys)}" for kind, keys in found.items() if keys]
    if problems:
        raise UsageError(
            f"{source} does not fit this model; weights {'; '.join(problems)}. Use the options it was saved with."
        )


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def differences(own: Mapping[str, tuple], given: Mapping[str, tuple]) -> dict[str, list[str]]:
    """How given shapes differ from a model's own, by name: kind of difference -> words."""
    return {
        "missing": [name for name in own if name not in given],
        "surplus": [name for name in given if name not in own],
        "of another shape": [
            f"{name} {given[name]} instead of {own[name]}"
            for name in own
            if name in given and given[name] != own[name]
        ],
    }


def names_without_adapters(model: nn.Module) -> list[str]:
    """The keys of the model's state dict as they are once its adapters are merged."""
    return [key.replace(".base_layer.", ".") for key in model.state_dict() if ".lora_" not in key]


def accept_names_of_backbone(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A hook before loading. The keys of an adapter's file have the backbone's own names, for AutoModel
    (models/adapter_folder.py); in place they become those of `model`, whose backbone is a part."""
    own = tuple(f"{prefix}{name}." for name, _ in model.named_children())
    foreign = [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]
    if foreign:
        # peft 0.21 puts an adapter's name only into names that it knows.
        full = {re.sub(r"(\.lora_\w+)\.\w+", r"\1", name): name for name, _ in model.named_parameters()}
    for key in foreign:
        name = f"backbone.{key.removeprefix(prefix)}"
        state_dict[prefix + full.get(name, name)] = state_dict.pop(key)


def shortened(names: list[str], limit: int = 5) -> str:
    """The first names and how many more, for a message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
