"""Options inside of fields that Trainer hands on unread: a name or value that nobody takes is found before training.

Trainer would find it when the model is loaded, or in the first step.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_pt_utils import AcceleratorConfig

from hf_dist_ext.errors import UsageError, closest
from hf_dist_ext.run.fields import show


def check_of_accelerator(given: Any) -> None:
    """`accelerator_config`, where it is an object: before the arguments are made of it."""
    if isinstance(given, Mapping):
        _refuse_unknown("accelerator_config", given, [one.name for one in dataclasses.fields(AcceleratorConfig)])


def check(args: TrainingArguments) -> None:
    """`gradient_checkpointing_kwargs` and `lr_scheduler_kwargs`."""
    takes = [name for name in inspect.signature(checkpoint).parameters if name not in ("function", "args", "kwargs")]
    _refuse_unknown("gradient_checkpointing_kwargs", args.gradient_checkpointing_kwargs or {}, takes)
    _check_schedule(args)


def _check_schedule(args: TrainingArguments) -> None:
    options = args.lr_scheduler_kwargs or {}
    if not options:
        return
    name = args.lr_scheduler_type.value
    takes = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[args.lr_scheduler_type]).parameters
    known = [name for name in takes if name not in ("optimizer", "num_warmup_steps", "num_training_steps", "kwargs")]
    if "kwargs" not in takes and (wrong := [name for name in options if name not in known]):
        raise UsageError(
            f'lr_scheduler_kwargs has "{wrong[0]}", and lr_scheduler_type="{name}" takes {", ".join(known)}.'
        )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate or 1.0)
    try:
        get_scheduler(name, optimizer, 0, 10, options)
    except (TypeError, ValueError) as error:
        raise UsageError(f'lr_scheduler_kwargs={show(options)}: lr_scheduler_type="{name}" says: {error}.') from error


def _refuse_unknown(field: str, given: Iterable[str], known: list[str]) -> None:
    if wrong := [name for name in given if name not in known]:
        raise UsageError(f'{field} has "{wrong[0]}", and takes {", ".join(known)}.{closest(wrong[0], known)}')
