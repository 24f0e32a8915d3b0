"""A model that is trained by Trainer with its own loss.

Trainer hands `num_items_in_batch` to every model whose forward takes `**kwargs`, and trusts that the model divides by
it: Trainer then multiplies the loss by the processes and leaves the division by accumulation out. Many models take the
number and ignore it (transformers 5.23: BertForSequenceClassification and its like). So the number of the first step
is watched (`ItemsWatch`): a model that computes nothing with it has a loss, and a gradient, that is a multiple. The
loss stays what Trainer makes of it, which is what a drop-in promises; one warning says the factor and how to switch it
off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)


# What wrappers ask of every tensor on its way into the model.
NOT_COMPUTING = {"__get__", "is_floating_point", "is_complex", "dim", "size"}


class Watched(torch.Tensor):
    """A number that notes whether something was computed with it; what is computed is plain."""

    is_used = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.__name__ not in NOT_COMPUTING:
            for argument in filter(lambda value: isinstance(value, cls), [*args, *(kwargs or {}).values()]):
                argument.is_used = True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class ItemsWatch:
    """Watches `num_items_in_batch` of a trainer's first step.

    Args:
        num_processes: by which Trainer multiplies the loss.
        may_watch: Trainer hands the number to a model that is not compiled.
        is_first: whether this process prints warnings.
    """

    def __init__(self, num_processes: int, may_watch: bool, is_first: bool):
        self.num_processes, self.may_watch, self.is_first = num_processes, may_watch, is_first
        self._watched: Watched | None = None

    def watched(self, num_items: Any, model: nn.Module, num_accumulated: int) -> Any:
        """The number of the first step, to be given to Trainer's `training_step`; those of later steps as they are.

        num_accumulated: batches of this update; 1 where Trainer divides by them.
        """
        may_watch, self.may_watch = self.may_watch and isinstance(num_items, torch.Tensor), False
        if not may_watch or self.num_processes * num_accumulated == 1:
            return num_items
        # A compiled model would be compiled anew for a tensor that watches.
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in model.modules()):
            return num_items
        self._watched = num_items.as_subclass(Watched)
        return self._watched

    def warn_if_unused(self, model: nn.Module, num_accumulated: int) -> None:
        """After the step. `model`: without its wrappers."""
        items, self._watched = self._watched, None
        if items is None or items.is_used or not self.is_first:
            return
        logger.warning(
            f"{type(model).__name__} takes num_items_in_batch and does not use it, so Trainer makes its loss and "
            f"gradient {self.num_processes * num_accumulated} times the mean ({self.num_processes} process(es) x "
            f"{num_accumulated} accumulated). Set accepts_loss_kwargs = False on the model before the trainer is made "
            "to train on the mean."
        )
