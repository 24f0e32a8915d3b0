"""Optimizers and kernels of Trainer that live in packages of their own, so that a run without these ends before it
starts. Trainer finds out when it makes the optimizer, after data and models were loaded on every rank.

The module imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from hf_dist_ext.errors import UsageError

# Patterns of `optim`: the package as it is imported, and how it is installed; from transformers 5.23's
# trainer_optimizer.py.
PACKAGES = {
    r"adamw_torch_[48]bit": ("torchao", "torchao"),
    r"galore_.*": ("galore_torch", "galore-torch"),
    r"apollo_.*": ("apollo_torch", "apollo-torch"),
    r"(paged_|lion_|ademamix|rmsprop_bnb|adamw_(bnb_)?8bit).*": ("bitsandbytes", "bitsandbytes"),
    r"(ada)?lomo": ("lomo_optim", "lomo-optim"),
    r"grokadamw": ("grokadamw", "grokadamw"),
    r"schedule_free_.*": ("schedulefree", "schedulefree"),
    r"stable_adamw": ("optimi", "torch-optimi"),
    r"adamw_anyprecision": ("torchdistx", "torchdistx"),
    r"adamw_torch_xla": ("torch_xla", "torch-xla"),
    r"adamw_torch_npu_fused": ("torch_npu", "torch-npu"),
}
# What `optim_args` may hold, of optimizers for which Trainer reads some names or none and says nothing of others.
OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "adafactor": (),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
}
LIGER = ("liger_kernel", "liger-kernel")


def package_of(optim: str) -> tuple[str, str] | None:
    """None: torch and transformers have it."""
    return next((package for pattern, package in PACKAGES.items() if re.fullmatch(pattern, optim)), None)


def check(training: Mapping[str, Any]) -> None:
    """UsageError for `optim` or `use_liger_kernel` whose package is not installed, and for `optim_args` that `optim`
    does not take. `training`: Trainer's fields."""
    _check_options(training.get("optim") or "adamw_torch_fused", training.get("optim_args") or "")
    asked = {}
    if optim := training.get("optim"):
        asked[f'optim="{optim}"'] = package_of(optim)
    if training.get("use_liger_kernel"):
        asked["use_liger_kernel=true"] = LIGER
    for given, package in asked.items():
        if package is not None and importlib.util.find_spec(package[0]) is None:
            raise UsageError(
                f"{given} needs the package {package[1]}, which is not installed. Install it (pip install "
                f"{package[1]}), or remove {given.partition('=')[0]}."
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
