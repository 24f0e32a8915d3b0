"""`SafeTrainer`: Trainer's hooks, wired to what keeps a run well: training/nonfinite.py, run/preemption.py,
failures.py and data/bad_rows.py.

(1) every micro-batch's loss is added up on the device; behind the last backward of an update the ranks start to tell
    each other their sums, whether a signal came, how many rows were bad: one small all-gather, which runs while the
    gradient is clipped
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
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_dist_ext.data.bad_rows import Tally, guard_rows, in_short, listing, name_of
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.failures import Watchdog, phase, set_collective_timeout
from hf_dist_ext.run import lease
from hf_dist_ext.run.preemption import StopSignals, remove_mark, write_mark
from hf_dist_ext.strategies import collectives, zero
from hf_dist_ext.training.nonfinite import LIMIT, NonFiniteGuard, bad_ranks, check_weights, describe_rows

logger = logging.get_logger(__name__)

EVALUATION_BATCHES = 8  # between two questions whether to leave an evaluation


class _LeaveEvaluation(Exception):
    pass


class SafeTrainer(Trainer):
    """Trainer that skips updates that are not finite, and that leaves with a checkpoint when a signal asks it to.

    `was_preempted`: `train()` returned because of a signal, behind a complete checkpoint (none before step 1).
    """

    was_preempted = False
    loss: Any = None  # DistTrainer's, over embeddings
    freeze_plan: Any = None  # what trains, when fields say so

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        limit = getattr(self.args, "max_nonfinite_steps", None)
        if limit == "auto":
            limit = LIMIT if self.loss is not None or self.freeze_plan is not None else None
        self.guard = None if limit is None else NonFiniteGuard(limit)
        self._stop = StopSignals() if getattr(self.args, "preemptible", False) else None
        self._loss_of_update: torch.Tensor | None = None
        self._answers: Any = None  # of (1), while it runs
        self._inputs: list = []  # of the update, for its report
        self._stop_at_step: int | None = None
        self._tally: Tally | None = None
        self._sizes: Any = None  # out_of_memory.FittingSizes, with a gradient cache
        self._bad_rows = 0  # of all ranks in this epoch
        self._bad_row_numbers: set[int] = set()
        self._bad_rows_before: list[int] = []  # of this rank's loader workers before this epoch
        self._bad_rows_resumed: tuple[int, set[int]] = (0, set())  # of this epoch before this run: how many, numbers
        if self._stop is not None or any(getattr(self.args, name, None) for name in ("step_timeout", "max_bad_rows")):
            self.add_callback(_RunWatch(self))
        if hasattr(self.args, "step_timeout"):
            set_collective_timeout(self.args.ddp_timeout)

    @property
    def stop_signal(self) -> str | None:
        """The name of the signal that asked this process to leave, if one did."""
        return None if self._stop is None else self._stop.received

    # ---- the run ----

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        self.was_preempted, self._stop_at_step = False, None
        self._answers, self._loss_of_update, self._inputs = None, None, []
        with self._running():
            try:
                if self._sizes is not None:
                    self._sizes.begin()
                return super().train(*arguments, **options)
            except RuntimeError as error:
                is_cause = self._sizes is None or isinstance(error, RunError)
                if is_cause or (cause := self._sizes.error_of_peer()) is None:
                    raise
                raise cause from error
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
            if self.was_preempted and self.is_world_process_zero() and self.stop_signal != "SIGINT":
                write_mark(self.args.output_dir, self.state.global_step, self._stop.received or "on another rank")

    def _finalize_training(self, *arguments: Any, **options: Any) -> TrainOutput:
        if self._tally is not None and self.args.max_bad_rows:
            self._say_bad_rows()
        if not self.was_preempted:
            return super()._finalize_training(*arguments, **options)
        # Trainer would now load the best checkpoint, which takes time that a signal may not leave.
        best, self.state.best_model_checkpoint = self.state.best_model_checkpoint, None
        try:
            return super()._finalize_training(*arguments, **options)
        finally:
            self.state.best_model_checkpoint = best

    def _time_limit(self) -> float:
        is_settled = phase.is_step and self.state.global_step > self._initial_global_step
        return self.args.step_timeout if is_settled else self.args.ddp_timeout

    # ---- (1) ----

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if hasattr(self.args, "max_bad_rows") and isinstance(loader, DataLoader):
            self._tally = guard_rows(loader, name_of(self.train_dataset), self.args.max_bad_rows)
        return loader

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        phase.enter("loading its batches", step=self.state.global_step + 1)
        try:
            found = super().get_batch_samples(*arguments, **options)
        except (UsageError, RunError) as error:
            raise in_short(error) from error
        phase.enter("forward and backward")
        return found

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self._backward_done(super().training_step(model, inputs, num_items_in_batch), inputs)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **options)
        if self.guard is None or not self.is_deepspeed_enabled or return_outputs or not torch.is_grad_enabled():
            return found
        return zero.poisoned(found, found.detach())

    def _backward_done(self, loss: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Call with every micro-batch's loss; gives it back."""
        may_replace = bool(getattr(self.args, "max_bad_rows", 0))
        if self.guard is None and self._stop is None and self._sizes is None and not may_replace:
            return loss
        own = loss.detach().float()
        self._loss_of_update = own if self._loss_of_update is None else self._loss_of_update + own
        self._inputs.append(inputs)
        if self.accelerator.sync_gradients:
            has_signal = self._stop is not None and self._stop.received is not None
            num_bad_rows = self._new_bad_rows() if may_replace and self._tally else 0
            rest = own.new_tensor([float(has_signal), float(num_bad_rows)])
            message = torch.cat([self._loss_of_update.reshape(1), rest])
            self._answers, self._loss_of_update = collectives.exchange_later(message), None
        return loss

    # ---- (2) ----

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        phase.enter("clipping gradients, update")
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.is_deepspeed_enabled and self.guard is not None:
            grad_norm = zero.norm_of_update(self, grad_norm)
        if hasattr(grad_norm, "full_tensor"):  # of FSDP2: a collective, once; logging it would be another
            grad_norm = grad_norm.full_tensor()
        if self._answers is not None:
            self._act_on_answers(grad_norm)
        return grad_norm

    def _act_on_answers(self, grad_norm: Any) -> None:
        """Before an update: what all ranks have to say about it."""
        answers, self._answers = self._answers(), None  # (W, 3)
        norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm).detach().to(answers)
        *numbers, norm = torch.cat([answers.flatten(), norm.reshape(1)]).tolist()  # the one copy to the host
        losses, signals, bad_rows = (numbers[i::3] for i in range(3))
        step = self.state.global_step + 1
        # A run that ends with this step has no need to leave early.
        if any(signals) and self._stop_at_step is None and step < self.state.max_steps:
            self._stop_at_step = step
            logger.warning(f"rank {signals.index(1.0)} was asked to stop; all leave behind step {step}.")
        self._count_bad_rows(int(sum(collectives.one_of_each(bad_rows))))
        if self._bad_rows > (self.args.max_bad_rows or 0):
            raise RunError(
                f"step {step}: {self._bad_rows} rows of this epoch could not be used, more than max_bad_rows="
                f"{self.args.max_bad_rows}. {'; '.join(self._listed_rows())}. Mend the dataset or raise the limit."
            )
        has_scaler = getattr(self.accelerator, "scaler", None) is not None
        has_scaler = has_scaler or (self.is_deepspeed_enabled and self.args.fp16)
        if self.guard is not None and self.guard.is_bad(losses, norm, has_scaler):
            if self.is_deepspeed_enabled:
                zero.check_skipped(self)
            self.optimizer.zero_grad()
            rows = "not known"
            if collectives.rank() in (bad_ranks(losses) or [collectives.rank()]):
                rows = ", ".join(describe_rows(inputs, self.processing_class) for inputs in self._inputs)
            rows = "; ".join(collectives.texts_of(rows, bad_ranks(losses)))
            self.guard.report(step, losses, norm, rows, has_scaler)
        self._inputs = []

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.guard is not None and self.guard.total and "loss" in logs:
            logs["nonfinite_steps"] = self.guard.total
        if self._bad_rows and "loss" in logs:
            logs["bad_rows"] = self._bad_rows
        super().log(logs, start_time)

    def _new_bad_rows(self) -> int:
        """Of this rank in this epoch, without those that a resumed run has read again."""
        count, before = self._tally.count() - sum(self._bad_rows_before), self._bad_rows_before
        if not count or not self._bad_rows_resumed[1]:
            return count
        return count - len(self._bad_rows_resumed[1].intersection(self._tally.rows(before)))

    def _count_bad_rows(self, new: int) -> None:
        count = self._bad_rows_resumed[0] + new
        if count != self._bad_rows:  # on every rank, and rarely
            own = "" if self._tally is None else " ".join(map(str, self._tally.rows(self._bad_rows_before)))
            everyone = collectives.texts_of(own, range(self.args.world_size))
            numbers = {int(number) for text in everyone for number in text.rpartition(":")[2].split()}
            self._bad_row_numbers = numbers | self._bad_rows_resumed[1]
        self._bad_rows = count

    def bad_rows_of_epoch(self) -> dict[str, Any] | None:
        """For the manifest. In a stream a row has no number that another run would know it by."""
        has_numbers = not isinstance(self.train_dataset, IterableDataset)
        numbers = sorted(self._bad_row_numbers) if has_numbers else []
        return {"count": self._bad_rows, "rows": numbers} if self._bad_rows else None

    def _listed_rows(self) -> list[str]:
        rows = getattr(self.callback_handler.train_dataloader, "dataset", None)
        text = f"{self._tally.count()} rows replaced, {listing(self._tally, rows)}" if self._tally.count() else ""
        ranks = range(0, self.args.world_size, collectives.ranks_per_rows())
        return [text for text in collectives.texts_of(text, ranks) if not text.endswith(": ")]

    def _say_bad_rows(self) -> None:
        listed = [text for text in self._listed_rows() if text]
        if listed:
            logger.warning(f"rows of {name_of(self.train_dataset)} that could not be used: {'; '.join(listed)}")

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


class _RunWatch(TrainerCallback):
    """An evaluation inside of `train()` may take longer than the time a signal leaves: ask every few batches."""

    def __init__(self, trainer: SafeTrainer):
        self.trainer = trainer
        self.batches = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer, begun = self.trainer, self.trainer.take_begun("bad_rows") or {"count": 0, "rows": ()}
        trainer._bad_rows_before = [] if trainer._tally is None else trainer._tally.counts()
        trainer._bad_rows_resumed = begun["count"], set(begun["rows"])
        trainer._bad_rows, trainer._bad_row_numbers = begun["count"], set(begun["rows"])

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        phase.touch()  # it goes on
        stop = self.trainer._stop
        self.batches += 1
        if stop is None or not stop.finishes_steps or self.batches % EVALUATION_BATCHES:
            return
        if any(row[0] for row in collectives.exchange([int(stop.received is not None)], args.device)):
            logger.warning("asked to stop: the evaluation is left.")
            self.trainer._stop_at_step = state.global_step
            raise _LeaveEvaluation
