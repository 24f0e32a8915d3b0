"""`OwnLossStep`: one step of a causal language model with its own loss, whose layers lie in stages of a pipeline.

Trainer's `compute_loss` stays as it is: the last stage calls it per chunk, with a model that goes on from what the
stage before gave. So label smoothing, `compute_loss_func`, a `compute_loss` of a subclass and the division by
`num_items_in_batch` are Trainer's own code. The losses of chunks are added up, which is right for a loss that divides
by the number it is given. Whether it does is watched in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hf_dist_ext.engine.gradient_cache import Door
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.training.loss_scale import Watched


class OwnLossStep:
    """Made once for a trainer.

    Args:
        args: the run's.
        strategy: the one that runs, now.
        prepare: a batch of the data loader -> the batch on the device.
        compute_loss: Trainer's.
        count_items: batches, device -> Trainer's `num_items_in_batch`.
        around: context of Trainer around `compute_loss`.
        phase: watches the parts of a step.
    """

    def __init__(
        self,
        args: Any,
        strategy: Callable[[], Strategy],
        prepare: Callable[[Any], Any],
        compute_loss: Callable[..., Any],
        count_items: Callable[[list[Any], torch.device], Any],
        around: Callable[[], AbstractContextManager],
        phase: Door,
    ):
        self.args, self.strategy, self.prepare = args, strategy, prepare
        self.compute_loss, self.count_items, self.around, self.phase = compute_loss, count_items, around, phase
        self._is_watched = False

    def run(self, inputs: Any, items: Any, is_last: bool) -> torch.Tensor:
        """One batch: gradients are added up, and complete on all ranks after the last batch of an update (`is_last`).
        Its loss, on every rank of a pipeline. `items`: Trainer's `num_items_in_batch`."""
        strategy, batch = self.strategy(), self.prepare(inputs)
        if items is None:
            raise UsageError(
                "a pipeline adds up the losses of chunks, and Trainer does not say by how many tokens to divide them: "
                f"the batch has no labels, only {', '.join(inputs)}. Use a collator that makes labels "
                "(DataCollatorForLanguageModeling with mlm=False)."
            )
        items = self._of_one_pipeline(items)
        if self._is_watched:
            loss = strategy.train_batch(batch, self._score(items), self.phase)
        else:
            strategy.check_batch({"rows": batch}, self.args.device)
            watched = items.as_subclass(Watched)
            loss = strategy.train_batch(batch, self._score(watched), self.phase)
            self._check_is_used(watched)
            self._is_watched = True
        if is_last:
            strategy.finish_update(())
        return loss

    def predict(
        self, inputs: Mapping[str, Any], has_loss_only: bool, label_names: Sequence[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """(loss, logits, labels) as Trainer's `prediction_step` gives them; logits (B, T, V) are the only outputs."""
        batch = self.prepare(inputs)
        labels = tuple(batch[name] for name in label_names if batch.get(name) is not None)
        has_labels = 0 < len(labels) == len(label_names)
        items = self._of_one_pipeline(self.count_items([batch], self.args.device)) if has_labels else None
        score = self._score(items) if has_labels else _logits_alone
        loss, logits = self.strategy().score_batch(batch, score, has_labels, wants_logits=not has_loss_only)
        if has_loss_only or not has_labels:
            return loss, logits, None
        return loss, logits, labels[0] if len(labels) == 1 else labels

    def _of_one_pipeline(self, items: Any) -> Any:
        """Trainer divides the number by the ranks that hold the same rows, also where it did not add theirs up."""
        if self.args.average_tokens_across_devices or items is None:
            return items
        return items * self.strategy().rows.shared_by

    def _score(self, items: Any) -> Callable[[nn.Module, dict[str, Any]], tuple[torch.Tensor, Any]]:
        def score(model: nn.Module, features: dict[str, Any]) -> tuple[torch.Tensor, Any]:
            with self.around():
                return self.compute_loss(model, features, return_outputs=True, num_items_in_batch=items)

        return score

    def _check_is_used(self, items: Watched) -> None:
        """After the first step, on every rank."""
        if not any(self.strategy().said_by_parts(items.is_used)):
            raise UsageError(
                "a pipeline adds up the losses of chunks, so a loss must be a sum over tokens that is divided by "
                "num_items_in_batch, and this one does not use that number. Divide by it in compute_loss_func or "
                "compute_loss, or train without a pipeline."
            )


def _logits_alone(model: nn.Module, features: dict[str, Any]) -> tuple[None, Any]:
    return None, model(**features)
