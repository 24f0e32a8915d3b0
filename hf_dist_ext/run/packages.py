"""Trackers, optimizers and kernels of Trainer that live in packages of their own, so that a run without these ends
before it starts. Trainer finds out after data and models were loaded on every rank. No torch here.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hf_dist_ext.errors import UsageError

# Each tracker needs one package of each tuple, mostly of its own name; from transformers 5.23's integration_utils.py.
_NAMES = (
    "azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard trackio "
    "wandb"
).split()
TRACKERS: dict[str, list[tuple[str, ...]]] = {name: [(name,)] for name in _NAMES} | {
    "azure_ml": [("azureml",)],
    "dagshub": [("dagshub",), ("mlflow",)],
    "flyte": [("flytekit",)],
    "kubeflow": [],
    "tensorboard": [("tensorboard", "tensorboardX")],
}
# Patterns of `optim`: the package as it is imported; from transformers 5.23's trainer_optimizer.py.
OPTIMIZERS = {
    r"adamw_torch_[48]bit": "torchao",
    r"galore_.*": "galore_torch",
    r"apollo_.*": "apollo_torch",
    r"(paged_|lion_|ademamix|rmsprop_bnb|adamw_(bnb_)?8bit).*": "bitsandbytes",
    r"(ada)?lomo": "lomo_optim",
    r"grokadamw": "grokadamw",
    r"schedule_free_.*": "schedulefree",
    r"stable_adamw": "optimi",
    r"adamw_anyprecision": "torchdistx",
    r"adamw_torch_xla": "torch_xla",
    r"adamw_torch_npu_fused": "torch_npu",
}
LIGER = "liger_kernel"
INSTALLED_AS = {"optimi": "torch-optimi"}  # else as it is imported, with "-" for "_"
# What `optim_args` may hold, of optimizers for which Trainer reads some names or none and says nothing of others.
OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "adafactor": (),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
}


def package_of(optim: str) -> str | None:
    """None: torch and transformers have it."""
    return next((package for pattern, package in OPTIMIZERS.items() if re.fullmatch(pattern, optim)), None)


def check(training: Mapping[str, Any]) -> None:
    """UsageError for what needs a package that is not installed, a tracker that is unknown, and for `optim_args` that
    `optim` does not take. `training`: Trainer's fields."""
    _check_options(training.get("optim") or "adamw_torch_fused", training.get("optim_args") or "")
    for given, packages in _needed(training):
        if not any(map(importlib.util.find_spec, packages)):
            package = INSTALLED_AS.get(packages[0], packages[0].replace("_", "-"))
            raise UsageError(
                f"{given} needs the package {package}, which is not installed. Install it (pip install {package}), or "
                f"change {given.partition('=')[0]}."
            )


def _needed(training: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What was given, and packages of which it needs one."""
    trackers = training.get("report_to") or []
    for name in [trackers] if isinstance(trackers, str) else trackers:
        if name not in (*TRACKERS, "all", "none"):
            raise UsageError(
                f'report_to="{name}" is no tracker that Trainer knows. Choose from {", ".join(TRACKERS)}.'
            )
        yield from ((f'report_to="{name}"', packages) for packages in TRACKERS.get(name, ()))
    if (optim := training.get("optim")) and (package := package_of(optim)):
        yield f'optim="{optim}"', (package,)
    if training.get("use_liger_kernel"):
        yield "use_liger_kernel=true", (LIGER,)


def _check_options(optim: str, text: str) -> None:
    words = text.replace(" ", "").split(",") if text else []
    if wrong := [word for word in words if word.count("=") != 1]:
        raise UsageError(f'optim_args="{text}": "{wrong[0]}" is no name=value. Write "momentum=0.9,nesterov=true".')
    takes = OPTIONS.get(optim)
    names = [word.partition("=")[0] for word in words]
    if takes is not None and (wrong := [name for name in names if name not in takes]):
        which = f"takes {', '.join(takes)}" if takes else "takes none: adam_beta1, weight_decay and so on are fields"
        raise UsageError(f'optim_args has "{wrong[0]}", and optim="{optim}" {which}.')
