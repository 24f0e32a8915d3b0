"""The first update of a run, again and again: Trainer's own loop, on the same rows and the same random numbers.

Batches, passes, collectives and accumulation are those of the run. What differs: the optimizer never steps, nothing is
logged, evaluated or saved, gradients are not clipped, and `output_dir` is a folder that goes afterwards. After every
update the loop asks a generator (`script`) what is to be changed before the next one, until that ends.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hf_dist_ext.audit.plain_step import trained
from hf_dist_ext.engine.replay import RandomState
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import meanwhile

MANY = 10**6  # updates


class _Done(Exception):
    """The loop is left."""


class RepeatedUpdate(TrainerCallback):
    """
    Args:
        num_rows: so many rows of all ranks and micro-batches; None: those of the run.

    Attributes of the update that ran last, but for the batches:
        batches: micro-batches, as the loader gave them.
        loss: of this rank, divided by accumulation.
        random: the generators before it.
        replay_error: between both passes, of all ranks; None: none was compared.
        refused: what the run would have been ended with: step, difference, bound, place.
    """

    def __init__(self, trainer: Any, num_rows: int | None):
        self.trainer, self.num_rows = trainer, num_rows
        self.batches: list[Any] = []
        self.loss = torch.zeros((), dtype=torch.float64)
        self.random: RandomState | None = None
        self.refused: tuple[Any, ...] | None = None
        self._buffers_before: list[torch.Tensor] = []

    @property
    def replay_error(self) -> float | None:
        return self.trainer.health.replay_error

    def run(self, script: Iterator[None]) -> None:
        trainer, args, self._script = self.trainer, self.trainer.args, script
        before, state, made = RandomState(), trainer.state, (trainer.optimizer, trainer.lr_scheduler)
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers().values()]
        rows = trainer._train_batch_size
        if self.num_rows is not None:
            rows = min(rows, max(1, self.num_rows // (trainer.strategy.rows.size * args.gradient_accumulation_steps)))
        changed = {
            "max_grad_norm": math.inf, "max_steps": MANY, "eval_on_start": False, "resume_from_checkpoint": None,
            "step_timeout": None, "per_device_train_batch_size": rows,
        }  # fmt: skip
        with ExitStack() as entered:
            changed["output_dir"] = collectives.told_by_first(entered.enter_context(tempfile.TemporaryDirectory()))
            changed = {name: value for name, value in changed.items() if hasattr(args, name)}
            around = {"get_batch_samples": self._again, "training_step": self._watched, "_run_epoch": self._long}
            hooks = {name: wrap(getattr(trainer, name)) for name, wrap in around.items()}
            for owner, values in (
                (args, changed),
                (trainer.callback_handler, {"callbacks": [self]}),
                (trainer.health, {"end_for_replay_error": self._note_refusal}),
                (trainer, {"_train_batch_size": rows, **hooks}),
            ):
                entered.enter_context(meanwhile(owner, **values))
            try:
                trainer.train()
            except _Done:
                pass
            finally:
                for stepping in filter(None, (trainer.optimizer, trainer.lr_scheduler)):
                    vars(stepping).pop("step", None)
            collectives.everyones(None)  # the folder goes when all have left the loop
        for buffer, content in buffers:
            buffer.data.copy_(content)
        for parameter in trained(trainer.bare_model, trainer.loss).values():
            parameter.grad = None
        before.restore()
        trainer.optimizer, trainer.lr_scheduler = made
        may_pack, trainer.state = trainer.step.sizes.may_pack, state
        trainer.step = trainer._make_step()  # which has measured nothing yet
        trainer.step.sizes.may_pack, trainer.meter = may_pack, type(trainer.meter)(trainer)
        trainer.clock.read()

    def _buffers(self) -> dict[str, torch.Tensor]:
        own = self.trainer.loss.named_buffers("loss") if isinstance(self.trainer.loss, nn.Module) else ()
        return {**dict(self.trainer.bare_model.named_buffers()), **dict(own)}

    def written_buffers(self) -> list[str]:
        """Those that the update has changed."""
        before = zip(self._buffers().items(), self._buffers_before, strict=True)
        return [name for (name, now), then in before if not torch.equal(now, then)]

    # ---- as Trainer calls them ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        stays = lambda *given, **more: scaler and scaler.update(scaler.get_scale())  # noqa: E731
        vars(self.trainer.optimizer)["step"] = vars(self.trainer.lr_scheduler)["step"] = stays

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.random is None:
            self.random, self._buffers_before = RandomState(), [one.clone() for one in self._buffers().values()]
        self.random.restore()
        for buffer, before in zip(self._buffers().values(), self._buffers_before, strict=True):
            buffer.data.copy_(before)
        self.loss, self.refused, self.trainer.health.replay_error = self.loss * 0, None, None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        try:
            with torch.no_grad():
                next(self._script)
        except StopIteration:
            raise _Done from None

    # ---- around methods ----

    def _again(self, load: Callable) -> Callable:
        def again(*given: Any) -> Any:
            if not self.batches:
                self.batches, self._items = load(*given)
            return self.batches, self._items

        return again

    def _watched(self, step: Callable) -> Callable:
        def watched(*given: Any) -> torch.Tensor:
            loss = step(*given)
            self.loss += loss.detach().to(self.loss)
            return loss

        return watched

    def _long(self, run_epoch: Callable) -> Callable:
        """The epoch of a small dataset has fewer updates than a script."""

        def long(**options: Any) -> None:
            most = min(options["steps_in_epoch"], self.trainer.args.gradient_accumulation_steps)
            with meanwhile(self.trainer.args, gradient_accumulation_steps=most):
                run_epoch(**options | {"steps_in_epoch": MANY * most, "num_update_steps_per_epoch": MANY})

        return long

    def _note_refusal(self, *given: Any) -> None:
        self.refused = given
