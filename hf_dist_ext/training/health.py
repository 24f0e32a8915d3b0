"""`Health` leaves out updates that are not finite, ends a run on a signal or a wrong gradient, and watches over its
time and its rows.

Every micro-batch's loss is added up on the device. After the last backward of an update the ranks start to tell each
other their sums, whether a signal came, how many rows were bad and how far embeddings lay apart that a gradient cache
encoded twice: one small all-gather, which runs while the gradient is clipped. Before the update the answers are read
together with the gradient norm, in one copy to the host. The update is then left out, or it is the last one: a stop is
one checkpoint after the step, and then the end of `train()`. A running evaluation is left for it. No checkpoint is
written from weights that are not finite.

One process has no collective. Without our fields (a plain TrainingArguments) nothing here acts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from hf_dist_ext.data.bad_rows import in_short
from hf_dist_ext.engine import replay
from hf_dist_ext.engine.replay import ReplayError
from hf_dist_ext.engine.rows import moved
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.failures import Watchdog, activity, end_with_launcher, set_collective_timeout
from hf_dist_ext.run import lease
from hf_dist_ext.run.preemption import StopSignals, write_mark
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.rows import Rows
from hf_dist_ext.training.bad_row_count import BadRowCount
from hf_dist_ext.training.nonfinite import LIMIT, NonFiniteGuard, bad_ranks, check_weights, describe_rows
from hf_dist_ext.training.out_of_memory import FittingSizes

logger = logging.get_logger(__name__)

NOT_REPLAYED = -1.0  # in the place of a replay error
EVALUATION_BATCHES = 8  # between two questions whether to leave an evaluation


class LeaveEvaluation(Exception):
    """A signal came during an evaluation of `train()`."""


class Health(TrainerCallback):
    """Made once for a trainer, whose hooks call it in the order below.

    Args:
        args: the run's.
        is_guarded: max_nonfinite_steps="auto" is a limit, not off.
        has_scaler: fp16, whose scaler skips updates itself.
        processor: turns ids back into text, for the report of a bad batch.
        sizes: those of a gradient cache, which may have ended the run on another rank.
        progress: (finished updates, those of this run's checkpoint) now.
        rows: those of the run's strategy now.
        pop_resumed: what the resumed checkpoint tells of bad rows in the epoch that begins.
        find_causes: (number of a chunk, what rounding explains) -> why its embeddings differ when they are encoded
            again, in words; "" where that is not known. All ranks call it.
        go_back: called when too many updates were not finite; says which checkpoint is good.
    """

    def __init__(
        self,
        args: Any,
        is_guarded: bool,
        has_scaler: bool,
        processor: Any,
        sizes: FittingSizes | None,
        progress: Callable[[], tuple[int, int]],
        rows: Callable[[], Rows],
        pop_resumed: Callable[[], dict[str, Any] | None],
        go_back: Callable[[], str],
        find_causes: Callable[[int, float], str],
    ):
        self.args, self.has_scaler, self.processor, self.sizes = args, has_scaler, processor, sizes
        self.progress, self.rows, self.pop_resumed, self.go_back = progress, rows, pop_resumed, go_back
        self.find_causes = find_causes
        limit = getattr(args, "max_nonfinite_steps", None)
        if limit == "auto":
            limit = LIMIT if is_guarded else None
        self.guard = None if limit is None else NonFiniteGuard(limit)
        self.stop = StopSignals() if getattr(args, "preemptible", False) else None
        self.bad_rows = BadRowCount(getattr(args, "max_bad_rows", None), rows)
        self.was_preempted = False
        self.inputs: list[Any] = []  # micro-batches of the update that runs
        self.replay_error: float | None = None  # the largest since it was logged
        self.refuse: Callable[..., Any] = replay.refuse  # a step whose passes differ
        self._loss_of_update: torch.Tensor | None = None
        self._replays: list[ReplayError] = []  # those of the update that runs
        self._rounding = 0.0  # the largest that explains one of them
        self._answers: Callable[[], torch.Tensor] | None = None  # of all ranks, while they are gathered
        self._stop_at_step: int | None = None
        self._put_off: set[str] = set()
        self.evaluation_is_due = self.makes_up = False  # a signal has interrupted it; it runs after all
        self.evaluation_follows = False  # after what the step saves: that of its epoch
        self._num_evaluation_batches = 0
        if hasattr(args, "step_timeout"):
            set_collective_timeout(args.ddp_timeout)

    @property
    def is_called_back(self) -> bool:
        """Whether it must be one of the trainer's callbacks."""
        return self.stop is not None or any(
            getattr(self.args, name, None) for name in ("step_timeout", "max_bad_rows")
        )

    @property
    def is_update_skipped(self) -> bool:
        """Whether the update at hand is left out."""
        return self.guard is not None and self.guard.in_a_row > 0

    # ---- the run ----

    @contextlib.contextmanager
    def running(self, is_search: bool) -> Iterator[None]:
        """Around `train()`. A search of hyperparameters has its trials in folders of their own."""
        end_with_launcher()
        self.was_preempted, self._stop_at_step, self._put_off, self.evaluation_is_due = False, None, set(), False
        self._answers, self._loss_of_update, self.inputs, self._replays = None, None, [], []
        self._rounding = 0.0
        is_first = self.args.process_index == 0
        with contextlib.ExitStack() as entered:
            if hasattr(self.args, "preemptible") and not is_search and is_first:
                entered.enter_context(lease.held(self.args.output_dir))
            if self.stop is not None:
                entered.enter_context(self.stop)
                self.stop.finishes_steps = True
                entered.callback(setattr, self.stop, "finishes_steps", False)
            if getattr(self.args, "step_timeout", None) is not None:
                entered.enter_context(Watchdog(self._time_limit, collectives.store_of_group()))
            activity.leave_step("preparing to train")
            with self._error_of_peer():
                yield
            activity.leave_step("after training")
            if self.was_preempted and is_first and self.stop.received != "SIGINT":
                write_mark(self.args.output_dir, self.progress()[0], self.stop.received or "on another rank")

    @contextlib.contextmanager
    def _error_of_peer(self) -> Iterator[None]:
        """A rank that only lost a peer raises the peer's lack of memory."""
        if self.sizes is None:
            yield
            return
        try:
            self.sizes.begin()
            yield
        except RuntimeError as error:
            if isinstance(error, RunError) or (cause := self.sizes.error_of_peer()) is None:
                raise
            raise cause from error

    def _time_limit(self) -> float:
        step, first = self.progress()
        return self.args.step_timeout if activity.is_step and step > first else self.args.ddp_timeout

    # ---- an update ----

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.bad_rows.begin_epoch(self.pop_resumed())

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around the loading of an update's batches."""
        activity.enter("loading its batches", step=self.progress()[0] + 1)
        try:
            yield
        except (UsageError, RunError) as error:
            raise in_short(error) from error
        activity.enter("forward and backward")

    def after_backward(
        self, loss: torch.Tensor, inputs: Any, is_last: bool, again: ReplayError | None = None, rounding: float = 0.0
    ) -> torch.Tensor:
        """Call with every micro-batch's loss, which it gives back. `is_last`: of an update. `again`: how embeddings
        differ that were encoded again, `rounding`: by how much they may."""
        if self.guard is None and self.stop is None and self.sizes is None and not self.bad_rows.limit:
            return loss
        own = loss.detach().float()
        self._loss_of_update = own if self._loss_of_update is None else self._loss_of_update + own
        self.inputs.append(inputs)
        if again is not None:
            self._replays.append(again)
            self._rounding = max(rounding, self._rounding)
        if is_last:
            has_signal = self.stop is not None and self.stop.received is not None
            error = [torch.stack([one.largest.float() for one in self._replays]).amax()] if self._replays else []
            rest = [float(has_signal), float(self.bad_rows.new_ones()), self._rounding, *[NOT_REPLAYED] * (not error)]
            rest = moved(rest, own.device)
            message = torch.cat([self._loss_of_update.reshape(1), rest, *(one.reshape(1) for one in error)])
            self._answers, self._loss_of_update, self._rounding = collectives.exchange_later(message), None, 0.0
        return loss

    def before_update(self, grad_norm: Any, max_steps: int, drop_update: Callable[[], None]) -> None:
        """Act on what all ranks have to say about the update.

        Raises:
            RunError: too many updates that are not finite, too many bad rows, or embeddings that differ when they are
                encoded again.
        """
        if self._answers is None:
            return
        answers, self._answers = self._answers(), None  # (W, 5)
        norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm).detach().to(answers)
        *numbers, norm = torch.cat([answers.flatten(), norm.reshape(1)]).tolist()  # the one copy to the host
        losses, signals, bad_rows, most, errors = (numbers[i::5] for i in range(5))
        step = self.progress()[0] + 1
        self._check_replays(step, errors, most, is_used=all(map(math.isfinite, [*losses, norm])))
        # A run that ends with this step has no need to leave early.
        if any(signals) and self._stop_at_step is None and step < max_steps:
            self._stop_at_step = step
            logger.warning(
                f"rank {signals.index(1.0)} was asked to stop: all stop after step {step}, with a checkpoint."
            )
        self.bad_rows.add_up(int(sum(self.rows().one_of_each(bad_rows))), step)
        if self.guard is not None and self.guard.count_update(losses, norm, self.has_scaler):
            drop_update()
            rows = "not known"
            if collectives.rank() in (bad_ranks(losses) or [collectives.rank()]):
                rows = ", ".join(describe_rows(inputs, self.processor) for inputs in self.inputs)
            rows = "; ".join(collectives.texts_of(rows, bad_ranks(losses)))
            self.guard.report(step, losses, norm, rows, self.has_scaler, self.go_back() if self.guard.is_over else "")
        self.inputs = []

    def _check_replays(self, step: int, errors: list[float], most: list[float], is_used: bool) -> None:
        """Of every rank: the largest replay error, and what rounding explains. `is_used`: not of an update that is
        left out anyway, whose weights may be so large that rounding explains any difference."""
        if not is_used:
            self._replays = []
            return
        if (largest := max(errors)) > NOT_REPLAYED:
            self.replay_error = max(largest, self.replay_error or 0.0)
        replays, self._replays = self._replays, []
        wrong = [rank for rank, (error, bound) in enumerate(zip(errors, most, strict=True)) if error > bound]
        if wrong:
            rank = max(wrong, key=errors.__getitem__)
            own = max((one.worst() for one in replays), default=(0.0, 0, ""), key=lambda worst: worst[0])
            _, number, place = collectives.everyones(own)[rank]
            place = f"rank {rank}: {place}" if collectives.world_size() > 1 else place
            self.refuse(step, errors[rank], most[rank], place, self.find_causes(number, most[rank]))

    def for_log(self) -> dict[str, float]:
        found = {"nonfinite_steps": self.guard.total if self.guard is not None else 0, "bad_rows": self.bad_rows.count}
        error, self.replay_error = self.replay_error, None
        again = {} if error is None else {"replay_error": error}
        if again and (tolerance := getattr(self.args, "replay_tolerance", None)) is not None:
            again["replay_tolerance"] = tolerance
        return {name: n for name, n in found.items() if n} | again

    # ---- evaluation, checkpoints, the end ----

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """An evaluation inside of `train()` may take longer than the time a signal leaves: ask every few batches."""
        activity.touch()  # it goes on
        self._num_evaluation_batches += 1
        if self.stop is None or not self.stop.finishes_steps or self._num_evaluation_batches % EVALUATION_BATCHES:
            return
        if any(row[0] for row in collectives.exchange([int(self.stop.received is not None)])):
            logger.warning("asked to stop: the evaluation is left.")
            self._stop_at_step, self.was_preempted, self.evaluation_is_due = state.global_step, True, True
            raise LeaveEvaluation

    @contextlib.contextmanager
    def making_up(self) -> Iterator[None]:
        """Around the evaluation that a signal has interrupted, after the resume."""
        self.makes_up = True
        try:
            yield
            self.evaluation_is_due = False
        finally:
            self.makes_up = False

    def after_update(self, control: Any, epoch: float) -> None:
        """After a step whose update was skipped evaluation, checkpoint and stop wait for the next one that is not. A
        run that is asked to stop saves and ends, in place of an evaluation, which its resume makes up for. `epoch`:
        how many have passed."""
        ends_epoch = self.args.eval_strategy == "epoch" and float(epoch).is_integer()
        self.evaluation_follows = ends_epoch and not control.should_evaluate  # this is called once more then
        if self.is_update_skipped:
            if not control.should_training_stop:
                self._put_off |= {name for name in ("should_evaluate", "should_save") if getattr(control, name)}
                control.should_evaluate = False
            control.should_save = False
            return
        for name in self._put_off:
            setattr(control, name, True)
        self._put_off = set()
        if self._stop_at_step is not None:
            self.evaluation_is_due |= not self.was_preempted and (control.should_evaluate or ends_epoch)
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = not self.was_preempted  # it is called once more at the end of the epoch
            self.was_preempted = True

    def may_save(self, model: nn.Module) -> bool:
        """Before a checkpoint is written: not while updates are skipped. Raises RunError for weights that are not
        finite."""
        if self.is_update_skipped:
            return False
        activity.leave_step("writing a checkpoint")
        if self.guard is not None:
            check_weights(model.named_parameters(), f"checkpoint-{self.progress()[0]}")
        return True

    @contextlib.contextmanager
    def finalizing(self, state: Any) -> Iterator[None]:
        """Around the end of `train()`. Trainer would load the best checkpoint, which takes time that a signal may not
        leave."""
        self.bad_rows.say()
        best = state.best_model_checkpoint
        if self.was_preempted:
            state.best_model_checkpoint = None
        try:
            yield
        finally:
            if self.was_preempted:
                state.best_model_checkpoint = best
