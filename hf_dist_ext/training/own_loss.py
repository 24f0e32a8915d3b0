"""`OwnLossStep`: one step of a causal language model with its own loss, whose layers lie in stages of a pipeline.

Trainer's `compute_loss` stays as it is: the last stage calls it per chunk, with a model that goes on from what the
stage before gave. So label smoothing, `compute_loss_func`, a `compute_loss` of a subclass and the division by
`num_items_in_batch` are Trainer's own code. The losses of chunks are added up, which is right for a loss that divides
by the number it is given. Whether it does is watched in the first batch that is trained on or evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hf_dist_ext.engine.gradient_cache import PhaseContext
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.loss_scale import Watched


class OwnLossStep:
    """Made once for a trainer.

    Args:
        args: the run's.
        strategy: the pipeline that runs, now.
        prepare: a batch of the data loader -> the batch on the device.
        compute_loss: Trainer's.
        count_items: batches, device -> Trainer's `num_items_in_batch`.
        around: context of Trainer around `compute_loss`.
        phase: watches the parts of a step.
    """

    def __init__(
        self,
        args: Any,
        strategy: Callable[[], Any],
        prepare: Callable[[Any], Any],
        compute_loss: Callable[..., Any],
        count_items: Callable[[list[Any], torch.device], Any],
        around: Callable[[], AbstractContextManager],
        phase: PhaseContext,
    ):
        self.args, self.strategy, self.prepare = args, strategy, prepare
        self.compute_loss, self.count_items, self.around, self.phase = compute_loss, count_items, around, phase
        self._was_watched = {True: False, False: False}  # with gradients, in an evaluation

    def run(self, inputs: Any, items: Any, is_last: bool) -> torch.Tensor:
        """One batch: gradients are added up, and complete on all ranks after the last batch of an update (`is_last`).
        Its loss, on every rank of a pipeline. `items`: Trainer's `num_items_in_batch`."""
        strategy, batch = self.strategy(), self.prepare(inputs)
        items = self._of_one_pipeline(items, batch)
        strategy.check_batch({"rows": batch}, self.args.device)
        with self._watched(items) as items:
            loss = strategy.train_batch(batch, self._score(items), self.phase)
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
        score_batch, options = self.strategy().score_batch, {"wants_logits": not has_loss_only}
        if not has_labels:
            return *score_batch(batch, _logits_alone, has_loss=False, **options), None
        counted = self._of_one_pipeline(self.count_items([batch], self.args.device), batch)
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
        return items if self.args.average_tokens_across_devices else items * self.strategy().rows.shared_by

    def _score(self, items: Any) -> Callable[[nn.Module, dict[str, Any]], tuple[torch.Tensor, Any]]:
        def score(model: nn.Module, features: dict[str, Any]) -> tuple[torch.Tensor, Any]:
            with self.around():
                return self.compute_loss(model, features, return_outputs=True, num_items_in_batch=items)

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
        if not any(self.strategy().said_by_parts(watched.is_used)):
            raise UsageError(
                "a pipeline adds up the losses of chunks, so a loss must be a sum over tokens that is divided by "
                "num_items_in_batch, and this one does not use that number. Divide by it in compute_loss_func or "
                "compute_loss, or train without a pipeline."
            )
        self._was_watched[is_training] = True


def _logits_alone(model: nn.Module, features: dict[str, Any]) -> tuple[None, Any]:
    return None, model(**features)
