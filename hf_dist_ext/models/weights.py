"""A state dict for a model: compared with the model's own before it is loaded, and known by the names of files too."""

from __future__ import annotations

from collections.abc import Mapping

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


def shortened(names: list[str], limit: int = 5) -> str:
    """The first names and how many more, for a message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
