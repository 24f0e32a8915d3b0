"""The learning rate follows the effective batch, and the effective batch survives another number of devices.

`scale` multiplies the rate by (effective batch / base batch), or its square root, once, before the optimizer exists.
When a run resumes with another number of processes than it began with, `keep_effective_batch` changes gradient
accumulation so that a step learns from as many rows as before, where that divides. When a run resumes, `take_given`
keeps the rates and the optimizer's numbers of the arguments, which those of the checkpoint would replace without a
word.

The effective batch is the rows that an optimizer step learns from: rows per device x accumulation x data-parallel
processes. linear: https://huggingface.co/papers/1706.02677 (section 2.1), for SGD; sqrt suits Adam
(https://huggingface.co/papers/2205.10287).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.utils import logging

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.tensors import bare_optimizer

logger = logging.get_logger(__name__)


OF_PARTS = ("learning_rates", "learning_rate_mapping")
RATES = ("learning_rate", *OF_PARTS)


def check(args: Any) -> None:
    """Rules between the fields. Raises UsageError."""
    rule, base = args.lr_scale_rule, args.lr_base_batch_size
    if (rule == "none") != (base is None):
        raise UsageError(
            f"lr_scale_rule={rule!r} needs lr_base_batch_size, the batch that learning_rate was found with."
            if base is None
            else f'lr_base_batch_size={base} needs "lr_scale_rule": "linear" or "sqrt".'
        )


def scale(args: Any, devices: int) -> None:
    """Scale `learning_rate` and the rates of parts by the rule, once however many trainers share the arguments. Rates
    that a search has set since are scaled anew.

    devices: those, or groups of processes, that have rows of their own.
    """
    effective = args.train_batch_size * args.gradient_accumulation_steps * devices
    shared_by = args.world_size // devices
    each, more = ("group", f" of {shared_by} processes that share rows") if shared_by > 1 else ("device", "")
    words = (
        f"effective batch: {effective} rows = {args.train_batch_size} per {each} x "
        f"{args.gradient_accumulation_steps} accumulated x {devices} {each}(s){more}"
    )
    rule, base = args.lr_scale_rule, args.lr_base_batch_size
    if rule == "none":
        if args.process_index == 0:
            logger.info(f"{words}; learning_rate {args.learning_rate:g} as given.")
        return
    given = tuple(getattr(args, name) for name in RATES)
    before, scaled = getattr(args, "_scaled_rates", (given, [None] * len(given)))
    # Of each by itself: what sets one anew, as a search does, leaves the others scaled.
    before = tuple(old if now == was else now for old, was, now in zip(before, scaled, given, strict=True))
    factor = math.sqrt(effective / base) if rule == "sqrt" else effective / base
    for name, rate in zip(RATES, before, strict=True):
        by_part = {part: own * factor for part, own in rate.items()} if isinstance(rate, dict) else None
        setattr(args, name, by_part if rate is None or by_part is not None else rate * factor)
    args._scaled_rates, rate = (before, tuple(getattr(args, name) for name in RATES)), before[0]
    if args.process_index == 0:
        logger.warning(f"{words}; learning_rate {rate:g} for {base} rows becomes {args.learning_rate:g} ({rule}).")


def warn_of_warmup(args: Any, steps: int) -> None:
    """Where the run of `steps` updates is over before its warm-up is; a share of the steps never is."""
    takes = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[args.lr_scheduler_type]).parameters
    if 1 <= steps <= args.warmup_steps and "num_warmup_steps" in takes:
        _say(
            f"warmup_steps={args.warmup_steps:g}, and the run has {steps} steps: the learning rate grows to the end "
            f"and never reaches {args.learning_rate:g}. Lower warmup_steps, or give a share of the steps, such as 0.1."
        )


def keep_effective_batch(args: Any, content: Mapping[str, Any], now_parallel: int, why_fixed: str) -> None:
    """Change `gradient_accumulation_steps` so that a step learns from as many rows as in the run that is resumed. The
    number that was given stays known: a later start gives it again, and means the batch that it stood for.

    content: the manifest of that run's checkpoint, empty without one; now_parallel: ranks with rows of their own;
    why_fixed: why accumulation can not change any more, empty when it can.
    """
    given, used = getattr(args, "_accumulation", (None, None))  # of a training before, of the same arguments
    given = given if args.gradient_accumulation_steps == used else args.gradient_accumulation_steps
    args.gradient_accumulation_steps = given
    if content:
        _keep_effective_batch(args, content, now_parallel, why_fixed)
    args._accumulation = given, args.gradient_accumulation_steps


def _keep_effective_batch(args: Any, content: Mapping[str, Any], now_parallel: int, why_fixed: str) -> None:
    parallel, given = content["data_parallel_size"], args.gradient_accumulation_steps
    used = content["gradient_accumulation_steps"]
    given_before = content.get("given_accumulation_steps", used)
    is_chosen = given != given_before
    if parallel == now_parallel and (is_chosen or used == given_before):
        return
    before = content["per_device_train_batch_size"] * used * parallel
    per_micro_step = args.train_batch_size * now_parallel
    now = per_micro_step * given
    if now == before:
        return
    devices = f"{parallel} processes before, {now_parallel} now"
    contrastive = (
        f" The contrastive batch, the rows of one forward over all devices, is {per_micro_step}; "
        f"it was {before // used}."
    )
    if parallel == now_parallel:
        devices, contrastive = f"the run began with another number of processes than {parallel}", ""
    if is_chosen or before % per_micro_step or why_fixed:
        why = (
            "gradient_accumulation_steps was changed too"
            if is_chosen
            else why_fixed or f"{per_micro_step} rows of a forward over all devices do not divide it"
        )
        _say(f"{devices}: the effective batch is {now} rows, it was {before}, because {why}.")
        return
    args.gradient_accumulation_steps = before // per_micro_step
    _say(
        f"{devices}: gradient_accumulation_steps is now {args.gradient_accumulation_steps}, which keeps the effective "
        f"batch of {before} rows.{contrastive}"
    )


NUMBERS = ("weight_decay", "betas", "eps", "momentum")  # of an optimizer's groups, that the arguments set


def given(optimizer: Any, schedule: Any) -> tuple[list[float], list[dict[str, Any]]]:
    """(base rate of every group, its `NUMBERS`) of a new optimizer and schedule; empty without LambdaLR's base rates,
    which all schedules of transformers have but the one that follows a metric."""
    schedule = _bare(schedule)
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        return [], []
    groups = bare_optimizer(optimizer).param_groups
    return list(schedule.base_lrs), [{name: group[name] for name in NUMBERS if name in group} for group in groups]


def take_given(optimizer: Any, schedule: Any, before: tuple[list[float], list[dict[str, Any]]]) -> None:
    """After a checkpoint was loaded; `before` is what `given` found before that."""
    rates, numbers = before
    schedule, groups = _bare(schedule), bare_optimizer(optimizer).param_groups
    if not rates or len(rates) != len(groups) or len(schedule.base_lrs) != len(groups):
        return
    changed = {}
    for index, (group, rate, wanted) in enumerate(zip(groups, rates, numbers, strict=True)):
        saved = schedule.base_lrs[index]
        if saved != rate:
            changed["learning_rate", saved, rate] = None
            schedule.base_lrs[index] = group["initial_lr"] = rate
            group["lr"] = schedule._last_lr[index] = rate * schedule.lr_lambdas[index](schedule.last_epoch)
        for name, value in wanted.items():
            if _plain(group.get(name)) != _plain(value):
                changed[name, str(group.get(name)), str(value)] = None
                group[name] = value
    if changed:
        words = ", ".join(f"{name} {old} -> {new}" for name, old, new in changed)
        _say(f"the checkpoint was trained with other numbers, from here those given hold: {words}.")


def take_last(optimizer: Any, schedule: Any) -> None:
    """The rates where a loaded schedule stands: the optimizer's state has them too, but an empty one is not loaded."""
    for group, rate in zip(
        bare_optimizer(optimizer).param_groups, getattr(_bare(schedule), "_last_lr", ()), strict=False
    ):
        group["lr"] = rate


def _bare(schedule: Any) -> Any:
    """The schedule inside accelerate's wrapper."""
    return getattr(schedule, "scheduler", schedule)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _say(text: str) -> None:
    if collectives.rank() == 0:
        logger.warning(text)
