"""A model that is trained with its own loss: by Trainer, or in stages of a pipeline.

Trainer hands `num_items_in_batch` to every model whose forward takes `**kwargs`, and trusts that the model divides by
it: Trainer then multiplies the loss by the processes and leaves the division by accumulation out. Many models take the
number and ignore it (transformers 5.23: BertForSequenceClassification and its like). So the number of the first step
is watched (`ItemsWatch`): a model that computes nothing with it has a loss, and a gradient, that is a multiple. The
loss stays what Trainer makes of it, which is what a drop-in promises; one warning says the factor and how to switch it
off.

In a pipeline (`OwnLossStep`) Trainer's `compute_loss` stays as it is: the last stage calls it per chunk, with a model
that goes on from what the stage before gave. So label smoothing, `compute_loss_func`, a `compute_loss` of a subclass
and the division by `num_items_in_batch` are Trainer's own code. The losses of chunks are added up, which is right for
a loss that divides by the number it is given. Whether it does is watched in the first batch that is trained on or
evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.running import Running

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


class OwnLossStep:
    """Made once for a trainer."""

    def __init__(self, run: Running):
        self.run = run
        self._was_watched = {True: False, False: False}  # with gradients, in an evaluation

    def train(self, inputs: Any, items: Any, is_last: bool) -> torch.Tensor:
        """One batch: gradients are added up, and complete on all ranks after the last batch of an update (`is_last`).
        Its loss, on every rank of a pipeline. `items`: Trainer's `num_items_in_batch`."""
        strategy, batch = self.run.strategy, self.run._prepare_inputs(inputs)
        items = self._of_one_pipeline(items, batch)
        strategy.check_batch({"rows": batch}, self.run.args.device)
        with self._watched(items) as items:
            loss = strategy.train_batch(batch, self._score(items), self.run.clock.phase)
        if is_last:
            strategy.finish_update(())
        return loss

    def predict(
        self, inputs: Mapping[str, Any], has_loss_only: bool, label_names: Sequence[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """(loss, logits, labels) as Trainer's `prediction_step` gives them; logits (B, T, V) are the only outputs."""
        batch = self.run._prepare_inputs(inputs)
        labels = tuple(batch[name] for name in label_names if batch.get(name) is not None)
        has_labels = 0 < len(labels) == len(label_names)
        score_batch, options = self.run.strategy.score_batch, {"wants_logits": not has_loss_only}
        if not has_labels:
            return *score_batch(batch, _logits_alone, has_loss=False, **options), None
        counted = self._of_one_pipeline(self.run._get_num_items_in_batch([batch], self.run.args.device), batch)
        with self._watched(counted) as items:
            loss, logits = score_batch(batch, self._score(items), has_loss=True, **options)
        if has_loss_only:
            return loss, None, None
        return loss, logits, labels[0] if len(labels) == 1 else labels

    def _of_one_pipeline(self, items: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Trainer divides the number by the ranks that hold the same rows, also where it did not add theirs up."""
        if items is None:
            raise UsageError(
                "a pipeline adds up the losses of chunks, and Trainer does not say by how many tokens to divide them: "
                f"the batch has no labels, only {', '.join(batch)}. Use a collator that makes labels "
                "(DataCollatorForLanguageModeling with mlm=False)."
            )
        return items if self.run.args.average_tokens_across_devices else items * self.run.strategy.rows.shared_by

    def _score(self, items: Any) -> Callable[[nn.Module, dict[str, Any]], tuple[torch.Tensor, Any]]:
        def score(model: nn.Module, features: dict[str, Any]) -> tuple[torch.Tensor, Any]:
            with self.run.compute_loss_context_manager():
                return self.run.compute_loss(model, features, return_outputs=True, num_items_in_batch=items)

        return score

    @contextmanager
    def _watched(self, items: torch.Tensor) -> Iterator[torch.Tensor]:
        """Around a batch, on every rank: the number, and after the first one an error if no loss was computed with
        it."""
        is_training = torch.is_grad_enabled()
        if self._was_watched[is_training]:
            yield items
            return
        watched = items.as_subclass(Watched)
        yield watched
        if not any(self.run.strategy.said_by_parts(watched.is_used)):
            raise UsageError(
                "a pipeline adds up the losses of chunks, so a loss must be a sum over tokens that is divided by "
                "num_items_in_batch, and this one does not use that number. Divide by it in compute_loss_func or "
                "compute_loss, or train without a pipeline."
            )
        self._was_watched[is_training] = True


def _logits_alone(model: nn.Module, features: dict[str, Any]) -> tuple[None, Any]:
    return None, model(**features)
