"""Frozen-part training in a run: `who_trains.py` decides who trains, `run_mode.py` says how the rest runs.

Before anything wraps the model the plan is made and applied, and frozen modules get their run-time mode. Groups of
parameters may have learning rates of their own. `FreezeWatch` asserts the plan before the optimizer is made and at
every step, prints the report when training begins, and after the first backward asks every trainable parameter for its
gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging

from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.groups import backbone_of, below_adapters, image_arguments, match_depths, module_groups
from hf_dist_ext.frozen.image_stand_in import ImageStandIn
from hf_dist_ext.frozen.run_mode import release, set_frozen_mode
from hf_dist_ext.frozen.who_trains import FreezePlan, plan_freezing, report
from hf_dist_ext.models.embedder import embedder_of

logger = logging.get_logger(__name__)


# ---- who trains ----


def freeze(model: nn.Module | None, args: Any) -> FreezePlan | None:
    """Plan and apply what the arguments ask of a bare model; None when they ask for nothing."""
    fields = (getattr(args, "trainable_modules", None), getattr(args, "frozen_modules", None))
    if model is None:
        return None
    unread = embedder_of(model).freeze_unread()
    if fields == (None, None):
        release(model)  # what an earlier trainer of this model has left
        return None
    plan = plan_freezing(model, *fields, carried=getattr(model, "_carried_parameters", ()))
    plan = replace(plan, trainable=plan.trainable - unread)
    plan.apply(model, has_autocast=args.bf16 or args.fp16)
    set_frozen_mode(model)
    return plan


def stand_in_for_images(
    model: nn.Module, processor: Any, has_loss: bool, forwards_are_collective: Callable[[], bool]
) -> ImageStandIn | None:
    """Let batches without images run the image part on a blank picture, when the processor can make one.

    A loss over embeddings needs it where forwards are collectives, or where nothing but the image part trains;
    elsewhere zero gradients do for DDP (`Strategy.reaching_all`). `model`: without its wrappers.
    """
    if (backbone := backbone_of(model)) is not below_adapters(model):  # PEFT calls that one without its hooks
        model = backbone
    groups, makes_pictures = module_groups(model), getattr(processor, "image_processor", None)
    if makes_pictures is None or "vision" not in groups or not hasattr(model, "get_image_features"):
        return None
    language_trains = any(p.requires_grad and groups["language"].depth(name) for name, p in model.named_parameters())
    if has_loss and language_trains and not forwards_are_collective():
        return None
    from PIL import Image

    features = makes_pictures(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
    taken = image_arguments(model)
    blank = {key: value for key, value in features.items() if key in taken and isinstance(value, torch.Tensor)}
    return ImageStandIn(model, blank, is_collective=forwards_are_collective)


# ---- a learning rate per group ----


def split_by_learning_rate(
    optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float], keeps_empty: bool = False
) -> list[str]:
    """Give parameters of the named groups (names as in trainable_modules) their own rate; the deepest match wins.

    Returns the name of each of the optimizer's groups, "default" for those that keep the common rate. `keeps_empty`:
    groups without a parameter stay, where other ranks have parameters of theirs.

    Raises:
        UsageError: a name that matches nothing, or nothing that trains.
    """
    depths = {name: match_depths(model, [name], "learning_rates") for name in rates}
    owner: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        deepest = max(depths, key=lambda group: depths[group].get(name, 0))
        if depths[deepest].get(name, 0) and parameter.requires_grad:
            owner[id(parameter)] = deepest
    idle = [name for name in rates if name not in owner.values()]
    if idle:
        raise UsageError(f"learning_rates: nothing of {idle[0]!r} trains. Remove it, or add it to trainable_modules.")
    return _split(optimizer, owner, rates, keeps_empty)


def give_rates(
    optimizer: torch.optim.Optimizer, model: nn.Module, loss: Any, args: Any, keeps_empty: bool = False
) -> list[str]:
    """What `learning_rates` asks for, or `learning_rate_mapping`."""
    if args.learning_rates:
        return split_by_learning_rate(optimizer, model, args.learning_rates, keeps_empty)
    of_loss = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
    return split_by_pattern(optimizer, model, of_loss, args.learning_rate_mapping, keeps_empty)


def split_by_pattern(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    of_loss: Mapping[str, nn.Parameter],
    rates: Mapping[str, float],
    keeps_empty: bool = False,
) -> list[str]:
    """As split_by_learning_rate, by regular expressions that are searched in "model." and the name of a parameter;
    the last that is found counts. `of_loss`: parameters of the loss, whose rate is the common one.

    Raises:
        UsageError: a pattern that is found in no name of what trains, or in that of a parameter of the loss.
    """
    owner: dict[int, str] = {}
    for pattern in rates:
        found = [p for name, p in model.named_parameters() if p.requires_grad and re.search(pattern, f"model.{name}")]
        if other := next((name for name in of_loss if re.search(pattern, name)), None):
            raise UsageError(
                f"learning_rate_mapping: {pattern!r} is found in {other!r}, a parameter of the loss, and those train "
                "with learning_rate here. Remove it, or let it begin with ^model to mean parameters of the model."
            )
        if not found:
            first = next(iter(model.named_parameters()), ("", None))[0]
            raise UsageError(
                f"learning_rate_mapping: {pattern!r} is found in no name of a parameter that trains. The first is "
                f"model.{first}."
            )
        owner |= {id(parameter): pattern for parameter in found}
    return _split(optimizer, owner, rates, keeps_empty)


def _split(
    optimizer: torch.optim.Optimizer, owner: Mapping[int, str], rates: Mapping[str, float], keeps_empty: bool
) -> list[str]:
    """`owner`: of a parameter's id, which of the rates it has."""
    groups, names = [], []
    for group in optimizer.param_groups:
        for name in ["default", *rates]:
            parameters = [p for p in group["params"] if owner.get(id(p), "default") == name]
            if parameters or keeps_empty:
                rate = group["lr"] if name == "default" else rates[name]
                groups.append({**group, "params": parameters, "lr": rate})
                names.append(name)
    optimizer.param_groups[:] = groups
    return names


def rates_for_log(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, float]:
    """The present rate of every named part; groups that joined later (the loss's own) are not listed."""
    rates = zip(names, optimizer.param_groups, strict=False)
    return {f"learning_rate_{name}": float(group["lr"]) for name, group in rates if name != "default"}


# ---- the plan is asserted ----


class FreezeWatch(TrainerCallback):
    """Asserts the plan of a `run`, a DistTrainer, while it trains."""

    def __init__(self, run: Any):
        self.run, self._report = run, ""

    def check_before_optimizer(self, args: Any) -> None:
        """Raises UsageError when what trains is no longer what was planned."""
        model = self.run.bare_model
        self.run.freeze_plan.check(model, "before the optimizer is made")
        self._report = report(model, str(getattr(args.optim, "value", args.optim)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._has_checked_gradients = False
        if state.is_world_process_zero:
            tqdm.write(self._report)  # the progress bar is there already

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.run.freeze_plan.check(self.run.bare_model, f"step {state.global_step + 1}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.run.health.is_update_skipped:
            return  # its gradients are dropped, as in the first steps of fp16: look at the next
        is_due = not (self._has_checked_gradients or args.ddp_find_unused_parameters)
        if is_due and self.run.strategy.holds_gradients:  # DeepSpeed has used them by now
            self.run.freeze_plan.check_gradients(self.run.bare_model)
        self._has_checked_gradients = True
