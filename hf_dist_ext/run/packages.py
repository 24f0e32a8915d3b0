"""Trackers of `report_to` without their package, and options that an optimizer does not read, found before the start.

Trainer finds the first out after data and models were loaded on every rank, and says nothing of the second. What else
needs a package, Trainer says itself. No torch here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hf_dist_ext.errors import UsageError

TRACKERS = ("tensorboard", "wandb", "trackio")  # those of docs/configuration.md: each is a package of its own name
# What `optim_args` may hold, of optimizers for which Trainer reads some names or none and says nothing of others.
OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "adafactor": (),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
}


def check(training: Mapping[str, Any]) -> None:
    """UsageError for a tracker that is not installed, and for `optim_args` that `optim` does not take. `training`:
    Trainer's fields."""
    _check_options(training.get("optim") or "adamw_torch_fused", training.get("optim_args") or "")
    trackers = training.get("report_to") or []
    for name in [trackers] if isinstance(trackers, str) else trackers:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise UsageError(
                f'report_to="{name}" needs the package {name}, which is not installed. Install it (pip install '
                f"{name}), or change report_to."
            )


def _check_options(optim: str, text: str) -> None:
    words = text.replace(" ", "").split(",") if text else []
    if wrong := [word for word in words if word.count("=") != 1]:
        raise UsageError(f'optim_args="{text}": "{wrong[0]}" is no name=value. Write "momentum=0.9,nesterov=true".')
    takes = OPTIONS.get(optim)
    names = [word.partition("=")[0] for word in words]
    if takes is not None and (wrong := [name for name in names if name not in takes]):
        which = f"takes {', '.join(takes)}" if takes else "takes none: adam_beta1, weight_decay and so on are fields"
        raise UsageError(f'optim_args has "{wrong[0]}", and optim="{optim}" {which}.')
