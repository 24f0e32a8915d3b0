"""`trainer.audit()` and `hf-dist audit`: is the gradient of this run right, with its model, rows and processes?

(1) Trainer's own loop runs the first update again and again, on the same rows and the same random numbers; in place of
    the optimizer's step `Audit.updates` looks at what it has made, and prepares the next one
(2) as the run makes it: the replay, the random numbers, what trained, the gradient of all ranks
(3) the loss itself moves by <gradient, direction> when the weights move a little; this needs no second model
(4) without dropout, whose masks a second model would draw anew: the gradient beside the plain step's (plain_step.py)
    on rank 0, which has the rows of all ranks
(5) rows and labels: which rank has which rows, and which row the loss takes for the positive

Afterwards weights, buffers and random numbers are as they were, and nothing was written into the run's folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import TrainerCallback

from hf_dist_ext.data.collator import CUTS
from hf_dist_ext.data.epoch_order import StandIn
from hf_dist_ext.engine.flat import first_rows, num_rows
from hf_dist_ext.engine.replay import RandomState
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.tensors import held_here, is_split, num_parts, put, split_as
from hf_dist_ext.training.meter import StepMeter
from hf_dist_ext.training.plain_step import PlainStep, on, trained
from hf_dist_ext.training.step import split

if TYPE_CHECKING:
    from hf_dist_ext.training.trainer import DistTrainer

# Relative to the largest: what rounding explains at least, of a gradient and of a loss.
GRADIENT_ROUNDING = {torch.float64: 1e-8, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LOSS_ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 2e-3}
LOSS_MOVES = {torch.float64: 1e-3, torch.float32: 3e-2, torch.float16: 5e-2, torch.bfloat16: 5e-2}  # along a direction
TIMES = 4  # so many times what the plain step itself rounds: a group of parameters,
TIMES_OF_ALL = 2  # and all together, where rounding of single numbers cancels
SMALL = 1e-3  # of the whole norm: a group with less is measured by this, as nothing but rounding may be left of it
DIRECTIONS, LINES = 2, 12
LARGE = 5e13  # floating point operations, from which on a CPU takes many minutes in float64
REFERENCES = ("auto", "float64", "float32")


@dataclass
class Check:
    """A line of the table. is_right None: not looked at; `note` says why."""

    name: str
    is_right: bool | None
    found: float | None = None
    allowed: float | None = None
    note: str = ""


@dataclass
class AuditReport:
    """What an audit found, the same on every rank."""

    run: str
    checks: list[Check] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return all(check.is_right is not False for check in self.checks)

    def as_json(self) -> str:
        return json.dumps({"is_right": self.is_right, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        lines, words = [self.run], {True: "ok", False: "WRONG", None: "-"}
        width = max(len(check.name) for check in self.checks)
        for one in self.checks:
            found, allowed = (f"{n:.1e}" if n is not None else "" for n in (one.found, one.allowed))
            lines.append(f"{words[one.is_right]:6}{one.name:{width}}  {found:>8}  {allowed:>8}  {one.note}".rstrip())
        lines.insert(1, f"{'':6}{'':{width}}  {'found':>8}  {'allowed':>8}")
        wrong = [check.name for check in self.checks if check.is_right is False]
        lines.append(f"WRONG: {'; '.join(wrong)}" if wrong else "Nothing differs by more than rounding explains.")
        return "\n".join(lines)


def audit(trainer: DistTrainer, num_rows: int | None = None, reference: str = "auto") -> AuditReport:
    """See `DistTrainer.audit`."""
    if trainer.loss is None:
        raise UsageError("an audit compares the gradient of a loss over embeddings, and this trainer has loss=None.")
    if trainer.model_init is not None:
        raise UsageError("model_init makes a model when training begins, so an audit has none. Give model instead.")
    if reference not in REFERENCES:
        raise UsageError(f'reference="{reference}": choose one of {", ".join(REFERENCES)}.')
    return _Audit(trainer, num_rows, reference).run()


class _Done(Exception):
    """The loop is left."""


class _Audit(TrainerCallback):
    def __init__(self, trainer: DistTrainer, num_rows: int | None, reference: str):
        self.trainer, self.num_rows, self.reference = trainer, num_rows, reference
        self.is_first = collectives.rank() == 0
        self.batches: list[Any] | None = None  # of the update, as the loader gave them
        self.loss = torch.zeros((), dtype=torch.float64)  # of the update, on this rank
        self.scored: list[tuple[Any, ...]] = []  # what the loss was given, as `EmbeddingStep._score` has it
        self.refused: tuple[Any, ...] | None = None  # by the comparison of both passes
        self.random: RandomState | None = None  # before the update
        self.buffers: list[torch.Tensor] = []
        self.plain, self.why_no_plain = self._copy()
        self.checks: list[Check] = []

    def _copy(self) -> tuple[PlainStep | None, str]:
        """Before the model is wrapped."""
        model, strategy = self.trainer.bare_model, self.trainer.strategy
        hook = getattr(self.trainer.args, "ddp_comm_hook", None)
        if strategy.comes_with_model:
            return None, "no process has the whole model; audit the run on one process, or under FSDP, too"
        if any(is_split(parameter) for parameter in model.parameters()):
            return None, "the model is sharded already: audit before train()"
        if not strategy.holds_gradients:
            return None, "DeepSpeed keeps no gradient: it takes the optimizer's step in the backward"
        if hook is not None and hook not in ("fp16", "bf16"):
            return None, f'ddp_comm_hook="{hook}" sends an approximation'
        if not all(p.is_floating_point() for p in model.parameters()):
            return None, "quantized weights have no copy in float64"
        return (PlainStep(model, self.trainer.loss) if self.is_first else None), ""

    # ---- (1) ----

    def run(self) -> AuditReport:
        trainer, args = self.trainer, self.trainer.args
        before, state, made = RandomState(), trainer.state, (trainer.optimizer, trainer.lr_scheduler)
        kept = [(buffer, buffer.clone()) for buffer in self._buffers()]
        changed: dict[str, Any] = {"max_grad_norm": math.inf, "max_steps": 10**6, "eval_on_start": False}
        changed |= {"resume_from_checkpoint": None, "step_timeout": None}
        rows = trainer._train_batch_size
        if self.num_rows is not None:
            rows = min(rows, max(1, self.num_rows // (trainer.strategy.rows.size * args.gradient_accumulation_steps)))
            changed["per_device_train_batch_size"] = rows
        handler, updates = trainer.callback_handler, self.updates()
        self._next = lambda: next(updates)
        with ExitStack() as entered:
            folder = entered.enter_context(tempfile.TemporaryDirectory())
            changed["output_dir"] = collectives.told_by_first(folder)
            changed = {name: value for name, value in changed.items() if hasattr(args, name)}
            entered.enter_context(_meanwhile(args, **changed))
            entered.enter_context(_meanwhile(handler, callbacks=[self]))
            entered.enter_context(_meanwhile(trainer.health, refuse=self._note_refusal))
            entered.enter_context(_meanwhile(trainer.step, _score=self._scoring(trainer.step._score)))
            hooks = {"get_batch_samples": self._again, "training_step": self._watched, "_run_epoch": self._long}
            hooks = {name: around(getattr(trainer, name)) for name, around in hooks.items()}
            entered.enter_context(_meanwhile(trainer, _train_batch_size=rows, **hooks))
            try:
                trainer.train()
            except _Done:
                pass
            finally:
                for stepping in (trainer.optimizer, trainer.lr_scheduler):
                    vars(stepping or self).pop("step", None)
            collectives.everyones(None)  # the folder is left together
        for buffer, content in kept:
            buffer.data.copy_(content)
        for parameter in trained(trainer.bare_model, trainer.loss).values():
            parameter.grad = None
        before.restore()
        trainer.optimizer, trainer.lr_scheduler = made
        may_pack = trainer.step.sizes.may_pack
        trainer.state, trainer.step = state, trainer._make_step()  # which has measured nothing yet
        trainer.step.sizes.may_pack, trainer.meter = may_pack, StepMeter(lambda: trainer.strategy.rows)
        trainer.clock.read()
        return AuditReport(self.described(), collectives.told_by_first(self.checks))

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        stays = lambda *given, **more: scaler and scaler.update(scaler.get_scale())  # noqa: E731
        vars(self.trainer.optimizer)["step"] = vars(self.trainer.lr_scheduler)["step"] = stays

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.random is None:
            self.random, self.buffers = RandomState(), [buffer.clone() for buffer in self._buffers()]
        self.random.restore()
        for buffer, before in zip(self._buffers(), self.buffers, strict=True):
            buffer.data.copy_(before)
        self.loss, self.scored, self.refused, self.trainer.health.replay_error = self.loss * 0, [], None, None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        try:
            with torch.no_grad():
                self._next()
        except StopIteration:
            raise _Done from None

    def _again(self, load: Callable) -> Callable:
        def again(*given: Any) -> Any:
            if self.batches is None:
                self.batches, self.items = load(*given)
            return self.batches, self.items

        return again

    def _watched(self, step: Callable) -> Callable:
        def watched(*given: Any) -> torch.Tensor:
            loss = step(*given)
            self.loss += loss.detach().to(self.loss)
            return loss

        return watched

    def _scoring(self, score: Callable) -> Callable:
        def scoring(embeddings: Any, facts: Any, layout: Any, *more: Any) -> Any:
            self.scored.append((embeddings, facts, layout))
            return score(embeddings, facts, layout, *more)

        self.score = score
        return scoring

    def _long(self, run_epoch: Callable) -> Callable:
        """An epoch of one dataset may be too short for all updates."""

        def long(**options: Any) -> None:
            most = min(options["steps_in_epoch"], self.trainer.args.gradient_accumulation_steps)
            with _meanwhile(self.trainer.args, gradient_accumulation_steps=most):
                run_epoch(**options | {"steps_in_epoch": 10**6 * most, "num_update_steps_per_epoch": 10**6})

        return long

    def _buffers(self) -> list[torch.Tensor]:
        own = self.trainer.loss.buffers() if isinstance(self.trainer.loss, nn.Module) else ()
        return [*self.trainer.bare_model.buffers(), *own]

    def _note_refusal(self, *given: Any) -> None:
        self.refused = given

    # ---- what is looked at ----

    def updates(self) -> Iterator[None]:
        """Called after every update; up to the next `yield` lies what is between two of them."""
        trainer, strategy = self.trainer, self.trainer.strategy
        model = trainer.bare_model
        self.parameters = trained(model, trainer.loss)
        self.check_rows()
        drawn = [*self.random.drawn_since()]
        self.check_replay(drawn)
        if not math.isfinite(loss := self.whole_loss()):
            self.add("loss", False, note=f"it is {loss}: the update would be skipped")
            return
        self.check_labels()
        if not strategy.holds_gradients:
            self.add("gradient", None, note=self.why_no_plain)
            return
        self.check_equal_on_ranks()
        whole = self.gathered()
        self.check_what_trains(whole)
        yield from self.check_directions(whole, loss)
        if self.why_no_plain:
            self.add("gradient beside the plain step", None, note=self.why_no_plain)
            return
        parts = [model, *(self.plain.parts if self.plain else [])]
        with without_dropout(parts):
            if collectives.told_by_first(bool(drawn)):
                yield
                whole, drawn = self.gathered(), self.random.drawn_since()
                self.add("dropout is off from here on", True, note="as the plain step would draw other masks")
            if any(collectives.everyones(bool(drawn))):
                why = f"the forward draws numbers from {', '.join(drawn)} beside dropout, and a second model others"
                self.add("gradient beside the plain step", None, note=why)
                return
            self.check_plain(whole)

    def add(self, name: str, is_right: bool | None, *figures: float | None, note: str = "") -> None:
        self.checks.append(Check(name, is_right, *figures, note=note))

    def whole_loss(self) -> float:
        rows = self.trainer.strategy.rows
        return sum(rows.one_of_each(collectives.everyones(self.loss.item()))) / rows.size

    def gathered(self, tensors: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Whole gradients (or `tensors`, by the same names) in float64, on rank 0."""
        if tensors is None:
            own = {name: p.grad for name, p in self.parameters.items()}
            tensors = {n: torch.zeros_like(p) if own[n] is None else own[n] for n, p in self.parameters.items()}
        found = self.trainer.strategy.collected(tensors, keep=self.is_first)
        return {name: tensor.double() for name, tensor in found.items()}

    # ---- (2) ----

    def check_replay(self, drawn: Sequence[str]) -> None:
        error = self.trainer.health.replay_error
        allowed = None if error is None else self.trainer.step.rounding
        note = "every graph is kept: nothing is encoded twice" if error is None else ""
        if self.refused:
            _, error, allowed, note = self.refused
            note += ": the second pass gives other embeddings than the first. The run would end here, and says why"
        self.add("both passes give the same embeddings", not self.refused, error, allowed, note=note)
        words = f"drawn from {', '.join(drawn)}, and drawn again" if drawn else "none are drawn"
        self.add("random numbers", True, note=words)

    def check_equal_on_ranks(self) -> None:
        if collectives.world_size() == 1:
            return
        own = {n: p.grad for n, p in self.parameters.items() if p.grad is not None and num_parts(p.grad) == 1}
        digests = {name: _digest(held_here(grad)) for name, grad in own.items()}
        everyone = collectives.everyones(digests)
        unequal = sorted({n for said in everyone for n in said if any(o.get(n, said[n]) != said[n] for o in everyone)})
        shards = len(self.parameters) - len(own)
        note = (
            f"not {_few(unequal)}" if unequal else f"{shards} of {len(self.parameters)} are shards" if shards else ""
        )
        self.add("gradient equal on all ranks", not unequal, note=note)

    def check_what_trains(self, whole: Mapping[str, torch.Tensor]) -> None:
        without = sorted(name for name, grad in whole.items() if not grad.count_nonzero())
        frozen = [p.grad is not None and bool(held_here(p.grad).count_nonzero()) for p in self._frozen()]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in whole.values()))
        note = f"{len(whole)} tensors, gradient norm {norm:.3e}"
        note += f"; zero in {_few(without)}" if without else ""
        self.add("what trains", math.isfinite(norm) and norm > 0, note=note)
        self.add("what is frozen has no gradient", not any(frozen), note=f"{len(frozen)} tensors")

    def _frozen(self) -> list[nn.Parameter]:
        return [p for p in self.trainer.bare_model.parameters() if not p.requires_grad]

    # ---- (3) ----

    def check_directions(self, whole: Mapping[str, torch.Tensor], loss: float) -> Iterator[None]:
        """Central differences with two steps each, whose difference tells how curved the loss is."""
        if any(p.dtype.itemsize < 4 for p in self.parameters.values()):
            self.add("loss along two directions", None, note="weights in half precision can not move a little")
            return
        dtype = self.coarsest(with_loss=True)
        norm = math.sqrt(sum(grad.square().sum().item() for grad in whole.values()))
        norm = collectives.told_by_first(norm)
        if not norm:
            return
        before = {name: held_here(p.detach()).clone() for name, p in self.parameters.items()}
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}
        for number in range(DIRECTIONS):
            direction = {n: self._direction(number, n, p, gradients[n], norm) for n, p in self.parameters.items()}
            ours = sum((whole[n] * one).sum().item() for n, one in self.gathered(direction).items())
            ours = collectives.told_by_first(ours)
            step, found = LOSS_MOVES[dtype] * max(abs(loss), 1e-3) / abs(ours or norm), []
            for size in (step, step / 2):
                losses = []
                for signed in (size, -size):
                    for name, parameter in self.parameters.items():
                        held_here(parameter.detach()).add_(held_here(direction[name]), alpha=signed)
                    yield
                    losses.append(self.whole_loss())
                    for name, parameter in self.parameters.items():
                        held_here(parameter.detach()).copy_(before[name])
                found.append((losses[0] - losses[1]) / 2 / size)
            measured = (4 * found[1] - found[0]) / 3
            doubt = abs(found[1] - found[0]) + TIMES * LOSS_ROUNDING[dtype] * max(abs(loss), 1e-3) / step
            error, allowed = abs(ours - measured) / max(abs(measured), 1e-30), doubt / max(abs(measured), 1e-30)
            is_right, is_coarse = error <= allowed, allowed > 0.5 and error <= TIMES * allowed
            note = f"<gradient, direction> {ours:.6g}, central differences {measured:.6g}"
            note += ", too coarse in this precision to tell" if is_coarse else ""
            self.add(f"loss along direction {number + 1}", None if is_coarse else is_right, error, allowed, note=note)

    def _direction(
        self, number: int, name: str, parameter: nn.Parameter, gradient: torch.Tensor | None, norm: float
    ) -> torch.Tensor:
        """Random, but for a share of the gradient in every tensor, by another factor in each: in so many dimensions a
        direction without any would hardly change the loss."""
        draw = torch.Generator().manual_seed(zlib.crc32(f"{number} {name}".encode()))
        direction = torch.empty_like(parameter.detach())
        everything = self._num_elements
        put(direction, torch.randn(parameter.shape, generator=draw) / math.sqrt(everything))
        if gradient is not None:
            share = 0.5 + torch.rand((), generator=draw).item()
            held_here(direction).add_(held_here(split_as(parameter, gradient)), alpha=share / norm)
        return direction

    @property
    def _num_elements(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    # ---- (4) ----

    def check_plain(self, whole: Mapping[str, torch.Tensor]) -> None:
        of_ranks = collectives.everyones([_as_sent(batch) for batch in self.batches or ()])
        update = [[one for one in given if one] for given in zip(*self._one_of_each(of_ranks), strict=True)]
        if self.plain is None:
            collectives.told_by_first()
            return
        device = self.trainer.args.device
        with torch.enable_grad():
            exact = self.plain.gradients(update, *self._exactly(update))
            rounded = self.plain.gradients(update, device, self.trainer._precision)
        groups: dict[str, list[str]] = {}
        for name in sorted({*whole, *exact}):
            groups.setdefault(group_of(name), []).append(name)
        floor, given = GRADIENT_ROUNDING[self.coarsest()], (whole, exact, rounded)
        lines = [_beside(name, names, *given, floor, TIMES) for name, names in groups.items()]
        of_all = _beside("all parameters", [*whole], *given, floor / TIMES, TIMES_OF_ALL)
        lines.sort(key=lambda line: -(line.found or 0) / (line.allowed or 1))
        left = len(lines) - LINES
        self.checks += [of_all, *lines[:LINES]]
        if left > 0:
            self.add(f"{left} more groups", all(line.is_right for line in lines[LINES:]), note="closer than these")
        collectives.told_by_first()

    def _exactly(self, update: Any) -> tuple[torch.device, Callable, torch.dtype]:
        """Where and in which numbers the reference is computed."""
        tokens = sum(t.numel() for t in _tensors(update) if t.dtype == torch.int64)
        work = 6 * tokens * sum(p.numel() for p in self.plain.model.parameters())
        device = self.trainer.args.device
        if self.reference == "float32" or (self.reference == "auto" and device.type != "cpu" and work > LARGE):
            self.add("plain step", True, note=f"in float32 on {device}")
            return device, nullcontext, torch.float32
        self.add("plain step", True, note="in float64 on the CPU")
        return torch.device("cpu"), nullcontext, torch.float64

    def coarsest(self, with_loss: bool = False) -> torch.dtype:
        """Of what is computed in, or sent."""
        kind, dtypes = self.trainer.args.device.type, {p.dtype for p in self.trainer.bare_model.parameters()}
        dtypes |= {p.dtype for p in self.trainer._loss_parameters()} if with_loss else set()
        with self.trainer._precision():
            if torch.is_autocast_enabled(kind):
                dtypes.add(torch.get_autocast_dtype(kind))
        sent = getattr(self.trainer.args, "ddp_comm_hook", None)
        dtypes |= {{"fp16": torch.float16, "bf16": torch.bfloat16}[sent]} if sent in ("fp16", "bf16") else set()
        known = [dtype for dtype in GRADIENT_ROUNDING if dtype in dtypes]
        return max(known, key=GRADIENT_ROUNDING.__getitem__, default=torch.bfloat16)

    # ---- (5) ----

    def _one_of_each(self, of_ranks: Sequence[Any]) -> list[Any]:
        return self.trainer.strategy.rows.one_of_each(of_ranks)

    def check_rows(self) -> None:
        """Which rows every rank has, by their content."""
        own = [digest for batch in self.batches or () for digest in row_digests(batch)]
        everyone, shared_by = collectives.everyones(own), self.trainer.strategy.rows.shared_by
        alike = all(rows == everyone[i - i % shared_by] for i, rows in enumerate(everyone))
        groups = self._one_of_each(everyone)
        same = [
            f"{i} and {j}"
            for j in range(len(groups))
            for i in range(j)
            if groups[i] and groups[j] and not ({*groups[j]} - {*groups[i]} and {*groups[i]} - {*groups[j]})
        ]
        note = f"{' + '.join(str(len(rows)) for rows in groups)} in {len(self.batches or ())} micro-batch(es)"
        if same:
            note = f"groups of ranks {', '.join(same)} train on the same rows"
        if not alike:
            note = f"ranks that share a model have other rows than each other, in groups of {shared_by}"
        self.add("every rank has rows of its own", alike and not same, note=note)

    def check_labels(self) -> None:
        """Every row gets a vector of its own, its anchor and its positive the same one: the loss must be lower than
        where positives are those of other rows."""
        name, kinds = "the loss takes a row's own positive", collectives.everyones(bool(self.scored))
        why = self._why_no_labels() if self.scored else ""
        if any(reasons := collectives.everyones(why)):
            self.add(name, None, note=next(filter(None, reasons)))
            return
        losses: list[float] = []
        embeddings, facts, layout = self.scored[-1] if self.scored else ({}, None, None)
        for shift in range(4) if any(kinds) else ():
            if self.scored:
                output, _ = self.score(self._vectors(embeddings, layout, shift), facts, layout)
                losses.append(output.item())
        own = next(iter(layout.counts.values()))[self.trainer.strategy.rows.index] if self.scored else 0
        right, *others = losses or [0.0, 1.0]
        is_lower = not own or right < min(others) - (max(others) - min(others))
        wrong = [str(rank) for rank, said in enumerate(collectives.everyones(is_lower)) if not said]
        note = f"on rank {', '.join(wrong)} another row's positive costs no more" if wrong else "by row, on every rank"
        self.add(name, not wrong, note=note)

    def _why_no_labels(self) -> str:
        embeddings, facts, layout = self.scored[-1]
        if facts.targets:
            return "the loss compares with labels of the data"
        if len(embeddings) < 2 or not all(isinstance(one, torch.Tensor) for one in embeddings.values()):
            return "the loss does not compare one vector of an anchor with one of a positive"
        return "one row has no other to compare with" if sum(next(iter(layout.counts.values()))) < 2 else ""

    def _vectors(self, embeddings: Mapping[str, torch.Tensor], layout: Any, shift: int) -> dict[str, torch.Tensor]:
        made, index = {}, self.trainer.strategy.rows.index
        for place, (name, rows) in enumerate(embeddings.items()):
            counts = layout.counts[name]
            numbers = torch.arange(sum(counts[:index]), sum(counts[:index]) + len(rows))
            numbers = (numbers + shift * (place == 1)) % sum(counts) + 10**6 * max(0, place - 1)
            vectors = [torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(int(n))) for n in numbers]
            made[name] = nn.functional.normalize(torch.stack(vectors), dim=1).to(rows) if vectors else rows
        return made

    def described(self) -> str:
        trainer, sharding = self.trainer, self.trainer.strategy.name
        ranks = collectives.world_size()
        return (
            f"audit of {type(trainer.bare_model).__name__}, {type(trainer.loss).__name__}, {ranks} process(es), "
            f"{'one model each' if sharding == 'none' else sharding}, {trainer.args.device.type}, "
            f"{str(self.coarsest()).removeprefix('torch.')}"
        )


# ---- small parts ----


@contextmanager
def _meanwhile(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of one object have other values while inside."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name)
        vars(owner).update(before)


@contextmanager
def without_dropout(models: Sequence[nn.Module]) -> Iterator[None]:
    """Modules and their rates that have "drop" in their names."""
    before = []
    for module in {id(one): one for model in models for one in model.modules()}.values():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, _DropoutNd))):
                before.append((module, name, value))
    for module, name, _ in before:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _beside(
    name: str, names: Sequence[str], whole: Mapping, exact: Mapping, rounded: Mapping, floor: float, times: float
) -> Check:
    """Gradients by name: the run's, the plain step's, and the plain step's in the run's precision."""
    zero = torch.zeros(())

    def norm(of: Mapping[str, torch.Tensor], less: Mapping[str, torch.Tensor], names: Iterable[str] = names) -> float:
        parts = [of.get(n, zero) - less.get(n, zero) for n in names]
        return math.sqrt(sum(part.double().square().sum().item() for part in parts))

    size = norm(exact, {})
    scale = max(size, SMALL * norm(exact, {}, exact), 1e-30)
    error, of_rounding = norm(whole, exact) / scale, norm(rounded, exact) / scale
    allowed = max(times * of_rounding, floor)
    note = f"norm {size:.2e}; the plain step rounds {of_rounding:.1e}"
    return Check(f"gradient of {name}", error <= allowed, error, allowed, note)


def group_of(name: str) -> str:
    """Parameters of one layer belong together: the name up to its last number, or its first parts."""
    parts = name.split(".")[:-1] or [name]
    numbers = [place for place, part in enumerate(parts) if part.isdigit() and place]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:3])


def row_digests(batch: Mapping[str, Any]) -> list[str]:
    """One per anchor, of its own features and those of its positive."""
    if isinstance(batch, StandIn):
        return []
    columns = list(split(batch)[0].values())[:2]
    return ["".join(parts) for parts in zip(*map(_digests_of_rows, columns), strict=False)]


def _digests_of_rows(features: Mapping[str, Any]) -> list[str]:
    if "input_ids" in features and features["input_ids"].dim() < 3:
        mask, ids = features.get("attention_mask"), first_rows(features, num_rows(features))
        if mask is not None and mask.shape == features["input_ids"].shape:
            ids = [[i for i, real in zip(*pair, strict=True) if real] for pair in zip(ids, mask.tolist(), strict=True)]
        return [_digest(torch.tensor(row)) for row in ids]
    tensors = [tensor for tensor in features.values() if isinstance(tensor, torch.Tensor) and tensor.dim()]
    rows = min((len(tensor) for tensor in tensors), default=0)
    return ["".join(_digest(tensor[i]) for tensor in tensors if len(tensor) == rows) for i in range(rows)]


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _as_sent(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    if isinstance(batch, StandIn):
        return None
    return {name: on(value, "cpu") for name, value in batch.items() if name != CUTS}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _tensors(one)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
