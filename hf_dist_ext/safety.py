"""`SafeTrainer`: Trainer's hooks, wired to what ends a run well (guard.py, preemption.py, failures.py).

(1) every micro-batch's loss is added up on the device; behind the last backward of an update the ranks start to tell
    each other their sums and whether a signal came: one small all-gather, which runs while the gradient is clipped
(2) before the update it is read together with the gradient norm, in one copy to the host: skip it, or stop behind it
(3) a stop is one checkpoint after the step, and then the end of `train()`; an evaluation is left for it
(4) no checkpoint is written from weights that are not finite

One process has no collective. Without our fields (a plain TrainingArguments) every hook goes straight to Trainer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from . import distributed, lease
from .failures import Watchdog, phase, set_collective_timeout
from .guard import NonFiniteGuard, bad_ranks, check_weights, describe_rows
from .preemption import StopSignals, remove_mark, write_mark

logger = logging.get_logger(__name__)

EVALUATION_BATCHES = 8  # between two questions whether to leave an evaluation


class _LeaveEvaluation(Exception):
    pass


class SafeTrainer(Trainer):
    """Trainer that skips updates that are not finite, and that leaves with a checkpoint when a signal asks it to.

    `was_preempted`: `train()` returned because of a signal, behind a complete checkpoint (none before step 1).
    """

    was_preempted = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        limit = getattr(self.args, "max_nonfinite_steps", None)
        self.guard = None if limit is None or self.is_deepspeed_enabled else NonFiniteGuard(limit)
        self._stop = StopSignals() if getattr(self.args, "preemptible", False) else None
        self._loss_of_update: torch.Tensor | None = None
        self._answers: Any = None  # of (1), while it runs
        self._inputs: list = []  # of the update, for its report
        self._stop_at_step: int | None = None
        self.add_callback(_EvaluationWatch(self))
        if hasattr(self.args, "step_timeout"):
            set_collective_timeout(self.args.ddp_timeout)

    # ---- the run ----

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        self.was_preempted, self._stop_at_step = False, None
        self._answers, self._loss_of_update, self._inputs = None, None, []
        with self._running():
            try:
                return super().train(*arguments, **options)
            except _LeaveEvaluation:  # the one before the first step: there is nothing to save
                self.was_preempted = self.control.should_training_stop = True
                return TrainOutput(self.state.global_step, 0.0, {})

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            is_ours = hasattr(self.args, "preemptible") and self.hp_search_backend is None
            if is_ours and self.is_world_process_zero():
                entered.enter_context(lease.held(self.args.output_dir))
                remove_mark(self.args.output_dir)
            if self._stop is not None:
                entered.enter_context(self._stop)
                self._stop.finishes_steps = True
                entered.callback(setattr, self._stop, "finishes_steps", False)
            if getattr(self.args, "step_timeout", None) is not None:
                entered.enter_context(Watchdog(self._time_limit))
            phase.leave_step("preparing to train")
            yield
            phase.leave_step("after training")
            if self.was_preempted and self.is_world_process_zero():
                write_mark(self.args.output_dir, self.state.global_step, self._stop.received or "on another rank")

    def _finalize_training(self, *arguments: Any, **options: Any) -> TrainOutput:
        if not self.was_preempted:
            return super()._finalize_training(*arguments, **options)
        # Trainer would now load the best checkpoint and, with save_total_limit=1, delete the one just written.
        best, self.state.best_model_checkpoint = self.state.best_model_checkpoint, None
        try:
            return super()._finalize_training(*arguments, **options)
        finally:
            self.state.best_model_checkpoint = best

    def _time_limit(self) -> float:
        is_settled = phase.is_step and self.state.global_step > self._initial_global_step
        return self.args.step_timeout if is_settled else self.args.ddp_timeout

    # ---- (1) ----

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        phase.enter("loading its batches", step=self.state.global_step + 1)
        found = super().get_batch_samples(*arguments, **options)
        phase.enter("forward and backward")
        return found

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self._backward_done(super().training_step(model, inputs, num_items_in_batch), inputs)

    def _backward_done(self, loss: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Call with every micro-batch's loss; gives it back."""
        if self.guard is None and self._stop is None:
            return loss
        own = loss.detach().float()
        self._loss_of_update = own if self._loss_of_update is None else self._loss_of_update + own
        self._inputs.append(inputs)
        if self.accelerator.sync_gradients:
            has_signal = self._stop is not None and self._stop.received is not None
            message = torch.stack([self._loss_of_update, own.new_tensor(float(has_signal))])
            self._answers, self._loss_of_update = distributed.exchange_later(message), None
        return loss

    # ---- (2) ----

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        phase.enter("clipping gradients, update")
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if hasattr(grad_norm, "full_tensor"):  # of FSDP2: a collective, once; logging it would be another
            grad_norm = grad_norm.full_tensor()
        if self._answers is not None:
            self._before_update(grad_norm)
        return grad_norm

    def _before_update(self, grad_norm: Any) -> None:
        answers, self._answers = self._answers(), None  # (W, 2)
        norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm).detach().to(answers)
        *numbers, norm = torch.cat([answers.flatten(), norm.reshape(1)]).tolist()  # the one copy to the host
        losses, signals = numbers[0::2], numbers[1::2]
        step = self.state.global_step + 1
        # A run that ends with this step has no need to leave early.
        if any(signals) and self._stop_at_step is None and step < self.state.max_steps:
            self._stop_at_step = step
            logger.warning(f"rank {signals.index(1.0)} was asked to stop; all leave behind step {step}.")
        has_scaler = getattr(self.accelerator, "scaler", None) is not None
        if self.guard is not None and self.guard.is_bad(losses, norm, has_scaler):
            self.optimizer.zero_grad()
            rows = "not known"
            if distributed.rank() in (bad_ranks(losses) or [distributed.rank()]):
                rows = ", ".join(describe_rows(inputs, self.processing_class) for inputs in self._inputs)
            rows = "; ".join(distributed.texts_of(rows, bad_ranks(losses)))
            self.guard.report(step, losses, norm, rows, has_scaler)
        self._inputs = []

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.guard is not None and self.guard.total and "loss" in logs:
            logs["nonfinite_steps"] = self.guard.total
        super().log(logs, start_time)

    # ---- (3) ----

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: nn.Module, trial: Any, *more: Any, **options: Any
    ):
        if self._stop_at_step is not None:
            self.control.should_training_stop, self.control.should_evaluate = True, False
            self.control.should_save = not self.was_preempted  # it is called once more at the end of the epoch
            self.was_preempted = True
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *more, **options)
        except _LeaveEvaluation:
            self.was_preempted = self.control.should_training_stop = True
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        phase.leave_step("evaluating")
        return super().evaluate(*arguments, **options)

    # ---- (4) ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        phase.leave_step("writing a checkpoint")
        if self.guard is not None:
            check_weights(model.named_parameters(), f"checkpoint-{self.state.global_step}", self.args.device)
        super()._save_checkpoint(model, trial)


class _EvaluationWatch(TrainerCallback):
    """An evaluation inside of `train()` may take longer than the time a signal leaves: ask every few batches."""

    def __init__(self, trainer: SafeTrainer):
        self.trainer = trainer
        self.batches = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        phase.touch()  # it goes on
        stop = self.trainer._stop
        self.batches += 1
        if stop is None or not stop.finishes_steps or self.batches % EVALUATION_BATCHES:
            return
        if any(row[0] for row in distributed.exchange([int(stop.received is not None)], args.device)):
            logger.warning("asked to stop: the evaluation is left.")
            self.trainer._stop_at_step = state.global_step
            raise _LeaveEvaluation
