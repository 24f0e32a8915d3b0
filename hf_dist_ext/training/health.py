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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.utils import logging

from hf_dist_ext.data.bad_rows import BatchMaker
from hf_dist_ext.data.mixture import RowNumbers
from hf_dist_ext.engine import replay
from hf_dist_ext.engine.replay import ReplayError
from hf_dist_ext.engine.rows import moved
from hf_dist_ext.errors import RunError, UsageError, in_short
from hf_dist_ext.failures import Watchdog, activity, end_with_launcher, set_collective_timeout
from hf_dist_ext.run import lease
from hf_dist_ext.run.preemption import StopSignals, write_mark
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.training.nonfinite import LIMIT, NonFiniteGuard, bad_ranks, check_weights, describe_rows
from hf_dist_ext.training.out_of_memory import FittingSizes
from hf_dist_ext.training.running import Running

logger = logging.get_logger(__name__)

NOT_REPLAYED = -1.0  # in the place of a replay error
EVALUATION_BATCHES = 8  # between two questions whether to leave an evaluation


class LeaveEvaluation(Exception):
    """A signal came during an evaluation of `train()`."""


class Health(TrainerCallback):
    """Made once for a trainer, whose hooks call it in the order below.

    Args:
        is_guarded: max_nonfinite_steps="auto" is a limit, not off.
        sizes: those of a gradient cache, which may have ended the run on another rank.
    """

    def __init__(self, run: Running, is_guarded: bool, sizes: FittingSizes | None):
        self.run, self.args, self.sizes, options = run, run.args, sizes, run.options
        self.has_scaler = run.strategy.has_scaler(run.args)
        limit = options.max_nonfinite_steps
        if limit == "auto":
            limit = LIMIT if is_guarded else None
        self.guard = None if limit is None else NonFiniteGuard(limit)
        self.stop = StopSignals() if options.preemptible else None
        self.bad_rows = BadRowCount(options.max_bad_rows)
        self.was_preempted = False
        self.inputs: list[Any] = []  # micro-batches of the update that runs
        self.replay_error: float | None = None  # the largest since it was logged
        self.end_for_replay_error: Callable[..., Any] = replay.end_for_replay_error  # a step whose passes differ
        self._loss_of_update: torch.Tensor | None = None
        self._replays: list[ReplayError] = []  # those of the update that runs
        self._allowed = 0.0  # the largest that explains one of them
        self._answers: Callable[[], torch.Tensor] | None = None  # of all ranks, while they are gathered
        self._stop_at_step: int | None = None
        self._put_off: set[str] = set()
        self._num_evaluation_batches = 0
        if run.has_own_arguments:
            set_collective_timeout(run.args.ddp_timeout)

    @property
    def is_called_back(self) -> bool:
        """Whether it must be one of the trainer's callbacks, which without our fields are those of Trainer."""
        options = self.run.options
        asked = options.step_timeout is not None or options.save_async or self.bad_rows.limit is not None
        return asked or self.guard is not None or self.stop is not None

    @property
    def is_update_skipped(self) -> bool:
        """Whether the update at hand is left out."""
        return self.guard is not None and self.guard.in_a_row > 0

    # ---- the run ----

    @contextlib.contextmanager
    def running(self, is_search: bool) -> Iterator[None]:
        """Around `train()`. A search of hyperparameters has its trials in folders of their own."""
        end_with_launcher()
        self.was_preempted, self._stop_at_step, self._put_off = False, None, set()
        self._answers, self._loss_of_update, self.inputs, self._replays = None, None, [], []
        self._allowed, self.replay_error = 0.0, None
        if self.guard is not None:
            self.guard.total = self.guard.in_a_row = 0
        is_first = self.args.process_index == 0
        with contextlib.ExitStack() as entered:
            if self.run.has_own_arguments and not is_search and is_first:
                entered.enter_context(lease.held(self.args.output_dir))
            if self.stop is not None:
                entered.enter_context(self.stop)
                entered.enter_context(meanwhile(self.stop, finishes_steps=True))
            if self.run.options.step_timeout is not None:
                entered.enter_context(Watchdog(self._time_limit, collectives.store_of_group()))
            activity.leave_step("preparing to train")
            with self._error_of_peer():
                yield
            activity.leave_step("after training")
            if self.was_preempted and is_first and self.stop.received != "SIGINT":
                write_mark(self.args.output_dir, self.run.progress()[0], self.stop.received or "on another rank")

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
        step, first = self.run.progress()
        return self.args.step_timeout if activity.is_step and step > first else self.args.ddp_timeout

    # ---- an update ----

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.bad_rows.begin_epoch()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around the loading of an update's batches."""
        activity.enter("loading its batches", step=self.run.progress()[0] + 1)
        try:
            yield
        except (UsageError, RunError) as error:
            raise in_short(error) from error
        activity.enter("forward and backward")

    def after_backward(
        self, loss: torch.Tensor, inputs: Any, is_last: bool, again: ReplayError | None = None, allowed: float = 0.0
    ) -> torch.Tensor:
        """Call with every micro-batch's loss, which it gives back. `is_last`: of an update. `again`: how embeddings
        differ that were encoded again, `allowed`: by how much they may."""
        if self.guard is None and self.stop is None and self.sizes is None and not self.bad_rows.limit:
            return loss
        own = loss.detach().float()
        self._loss_of_update = own if self._loss_of_update is None else self._loss_of_update + own
        self.inputs.append(inputs)
        if again is not None:
            self._replays.append(again)
            self._allowed = max(allowed, self._allowed)
        if is_last:
            has_signal = self.stop is not None and self.stop.received is not None
            error = [torch.stack([one.largest.float() for one in self._replays]).amax()] if self._replays else []
            rest = [float(has_signal), float(self.bad_rows.of_rank()), self._allowed, *[NOT_REPLAYED] * (not error)]
            rest = moved(rest, own.device)
            message = torch.cat([self._loss_of_update.reshape(1), rest, *(one.reshape(1) for one in error)])
            self._answers, self._loss_of_update, self._allowed = collectives.exchange_later(message), None, 0.0
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
        step = self.run.progress()[0] + 1
        # An engine has skipped the update whose passes differ by a norm that is not finite.
        is_used = all(map(math.isfinite, losses)) and (math.isfinite(norm) or not self.run.strategy.holds_gradients)
        self._check_replays(step, errors, most, is_used)
        # A run that ends with this step has no need to leave early.
        if any(signals) and self._stop_at_step is None and step < max_steps:
            self._stop_at_step = step
            logger.warning(
                f"rank {signals.index(1.0)} was asked to stop: all stop after step {step}, with a checkpoint."
            )
        self.bad_rows.add_up(int(sum(self.run.strategy.rows.one_of_each(bad_rows))), step)
        if self.guard is not None and self.guard.count_update(losses, norm, self.has_scaler):
            drop_update()
            rows = "not known"
            if collectives.rank() in (bad_ranks(losses) or [collectives.rank()]):
                rows = ", ".join(describe_rows(inputs, self.run.processing_class) for inputs in self.inputs)
            rows = "; ".join(collectives.texts_of(rows, bad_ranks(losses)))
            self.guard.report(
                step, losses, norm, rows, self.has_scaler, self.run.keeper.go_back() if self.guard.is_over else ""
            )
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
            own = max((one.worst() for one in replays), default=(0.0, ""), key=lambda worst: worst[0])
            _, place = collectives.everyones(own)[rank]
            place = f"rank {rank}: {place}" if collectives.world_size() > 1 else place
            self.end_for_replay_error(step, errors[rank], most[rank], place)

    def for_log(self) -> dict[str, float]:
        found = {"nonfinite_steps": self.guard.total if self.guard is not None else 0, "bad_rows": self.bad_rows.count}
        error, self.replay_error = self.replay_error, None
        again = {} if error is None else {"replay_error": error}
        if again and (tolerance := self.run.options.replay_tolerance) is not None:
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
            self._stop_at_step, self.was_preempted = state.global_step, True
            raise LeaveEvaluation

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After a step whose update was skipped evaluation, checkpoint and stop wait for the next one that is not. A
        run that is asked to stop saves and ends, in place of an evaluation."""
        self.run.keeper.background.collect()
        if not self.is_update_skipped:
            self.run.keeper.prove(state.global_step, state.best_model_checkpoint)
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
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = not self.was_preempted  # it is called once more at the end of the epoch
            self.was_preempted = True

    on_epoch_end = on_step_end

    def may_save(self, model: nn.Module) -> bool:
        """Before a checkpoint is written: not while updates are skipped. Raises RunError for weights that are not
        finite."""
        if self.is_update_skipped:
            return False
        activity.leave_step("writing a checkpoint")
        if self.guard is not None:
            check_weights(model.named_parameters(), f"checkpoint-{self.run.progress()[0]}")
        return True


class BadRowCount:
    """How many rows of this epoch were replaced since the start, on all ranks.

    Each loader worker counts its own rows in shared memory (data/bad_rows.py). The ranks tell each other their counts
    with every update. `limit`: rows of an epoch that may be replaced; None or 0: none.
    """

    def __init__(self, limit: int | None):
        self.limit, self.count = limit, 0
        self._of_workers = torch.zeros(1, dtype=torch.long)  # of this rank's loader
        self._before = 0  # this epoch

    def watch(self, loader: DataLoader, name: str, then: Sequence[Callable[[Any], Any]]) -> None:
        """Let the training loader replace rows, or name the one that it fails at. `then`: what becomes of batches
        where they are made."""
        loader = getattr(loader, "base_dataloader", loader)  # inside of accelerate's, which asks it for everything
        self._of_workers = torch.zeros(max(1, loader.num_workers), dtype=torch.long).share_memory_()
        dataset = None
        if not isinstance(loader.dataset, IterableDataset):
            dataset = loader.dataset
            object.__setattr__(loader, "dataset", RowNumbers(dataset))  # DataLoader guards the name
        can_replace = bool(self.limit)
        loader.collate_fn = BatchMaker(loader.collate_fn, dataset, name, can_replace, self._of_workers, then)

    def begin_epoch(self) -> None:
        self.count, self._before = 0, int(self._of_workers.sum())

    def of_rank(self) -> int:
        return 0 if not self.limit else int(self._of_workers.sum()) - self._before

    def add_up(self, count: int, step: int) -> None:
        """`count`: that of all ranks. Every rank calls it with the same number.

        Raises:
            RunError: more than the limit.
        """
        self.count = count
        if count > (self.limit or 0):
            raise RunError(
                f"step {step}: {count} rows of this epoch (of a stream: so far) could not be used, more than "
                f"max_bad_rows={self.limit}. Warnings above name them. Mend the dataset or raise the limit."
            )


class EarlyStop(EarlyStoppingCallback):
    """Trainer's, whose count goes on at a resume. An evaluation without the figure (one of several datasets) does not
    count, nor does one before the first update: at a resume it is of weights that were evaluated before."""

    started_at = 0  # update

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        super().on_train_begin(args, state, control, **others)
        self.started_at = state.global_step
        self.early_stopping_patience_counter = 0
        # A state that was not read from a checkpoint holds what this very object had counted in a training before.
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if saved is not None:
            self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
            if self.early_stopping_patience_counter >= self.early_stopping_patience:
                logger.info("the run had ended by early_stopping_patience: nothing is trained. A larger one goes on.")
                control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict, **others: Any) -> None:
        has_figure = f"eval_{args.metric_for_best_model.removeprefix('eval_')}" in metrics
        if has_figure and state.global_step > self.started_at:
            super().on_evaluate(args, state, control, metrics, **others)
