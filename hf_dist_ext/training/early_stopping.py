"""The end of a run that does not get better: `early_stopping_patience`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import EarlyStoppingCallback
from transformers.utils import logging

from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)


def check(args: Any) -> None:
    """UsageError for a patience that nothing would be counted for."""
    if args.early_stopping_patience is None:
        return
    missing = {"eval_strategy": args.eval_strategy != "no", "metric_for_best_model": bool(args.metric_for_best_model)}
    if wrong := [name for name, is_given in missing.items() if not is_given]:
        raise UsageError(
            f"early_stopping_patience={args.early_stopping_patience} counts evaluations in which "
            f"metric_for_best_model was no better than before. Set {' and '.join(wrong)}, or remove it."
        )


class EarlyStop(EarlyStoppingCallback):
    """Trainer's, whose count goes on at a resume. An evaluation without the figure (one of several datasets) does not
    count, nor does one before the first update: at a resume it is of weights that were evaluated before, unless it
    `is_made_up`."""

    started_at = 0  # update

    def __init__(self, patience: int, is_made_up: Callable[[], bool]):
        super().__init__(patience)
        self.is_made_up = is_made_up

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        super().on_train_begin(args, state, control, **others)
        self.started_at = state.global_step
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is not None:
            self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
            if self.early_stopping_patience_counter >= self.early_stopping_patience:
                logger.info("the run had ended by early_stopping_patience: nothing is trained. A larger one goes on.")
                control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict, **others: Any) -> None:
        has_figure = f"eval_{args.metric_for_best_model.removeprefix('eval_')}" in metrics
        if has_figure and (state.global_step > self.started_at or self.is_made_up()):
            super().on_evaluate(args, state, control, metrics, **others)
