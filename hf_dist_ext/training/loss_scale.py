"""One warning when Trainer multiplies a model's own loss by the number of processes or of accumulated batches.

(1) Trainer hands `num_items_in_batch` to every model whose forward takes `**kwargs`, and trusts that it divides by it:
    it then multiplies the loss by the processes and leaves the division by accumulation out
(2) many models take it and ignore it (transformers 5.23: BertForSequenceClassification and its like). In the first
    step the number is watched: a model that computes nothing with it has a loss, and a gradient, that is a multiple
(3) numbers stay Trainer's, which is what a drop-in promises; the warning says the factor and how to switch it off
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

if TYPE_CHECKING:
    from hf_dist_ext.training.trainer import DistTrainer

logger = logging.get_logger(__name__)

# What wrappers ask of every tensor on its way into the model.
NOT_COMPUTING = {"__get__", "is_floating_point", "is_complex", "dim", "size"}


class Watched(torch.Tensor):
    """A number that notes whether something was computed with it; what is computed is plain."""

    is_used = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        arguments = [*args, *(kwargs or {}).values()]
        if function.__name__ not in NOT_COMPUTING:
            for one in arguments:
                if isinstance(one, cls):
                    one.is_used = True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def watched(trainer: DistTrainer, num_items: Any) -> Any:
    """(2) The number of the first step, to be given to `training_step`; others as they are."""
    trainer._watches_items = trainer._watches_items and isinstance(num_items, torch.Tensor) and _factor(trainer) > 1
    # A compiled model would be compiled anew for a tensor that watches.
    is_compiled = trainer.args.torch_compile or any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl for module in trainer.model.modules()
    )
    is_possible = trainer.compute_loss_func is None and trainer.model_accepts_loss_kwargs and not is_compiled
    if not (trainer._watches_items and is_possible):
        trainer._watches_items = False
        return num_items
    return num_items.as_subclass(Watched)


def warn_if_unused(trainer: DistTrainer, num_items: Any) -> None:
    """(3) After the step."""
    if not trainer._watches_items:
        return
    trainer._watches_items = False
    if num_items.is_used or not trainer.is_world_process_zero():
        return
    name = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
    logger.warning(
        f"{name} takes num_items_in_batch and does not use it, so Trainer makes its loss and gradient "
        f"{_factor(trainer)} times the mean ({_processes(trainer)} process(es) x "
        f"{trainer.current_gradient_accumulation_steps} accumulated). Set accepts_loss_kwargs = False on the model "
        "before the trainer is made to train on the mean."
    )


def _processes(trainer: DistTrainer) -> int:
    is_across = trainer.args.average_tokens_across_devices
    return trainer.accelerator.num_processes // trainer.get_tp_size() if is_across else 1


def _factor(trainer: DistTrainer) -> int:
    scales = trainer.loss_is_scaled_for_ga
    return _processes(trainer) * (1 if scales is False else trainer.current_gradient_accumulation_steps)
