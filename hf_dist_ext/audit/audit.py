"""`trainer.audit()` and `hf-dist audit`: is the gradient of this run right, with its model, rows and processes?

(1) the first update runs again and again (repeated_update.py); `_Audit.updates` looks at what it has made
(2) as the run makes it: both passes, the random numbers, what trained, the gradient of all ranks
(3) without dropout, whose masks a second model would draw anew: the gradient beside that of the plain step
    (plain_step.py), on rank 0, which is given the rows of all ranks
(4) which rank has which rows (row_checks.py)

Afterwards weights, buffers and random numbers are as they were, and the run's folder holds what it held.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from hf_dist_ext.audit import row_checks
from hf_dist_ext.audit.plain_step import PlainStep, on, trained
from hf_dist_ext.audit.repeated_update import RepeatedUpdate
from hf_dist_ext.audit.row_checks import digest_of, few
from hf_dist_ext.checkpoints.sentence_model import whole_copy
from hf_dist_ext.checkpoints.trainable import named
from hf_dist_ext.data.collator import CUTS
from hf_dist_ext.data.order import StandIn
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.strategies.tensors import held_here, is_split, num_parts

# Relative to the largest: what rounding explains at least of a gradient. Where the plain step rounds by more, it must
# give the same again: the same numbers round alike, but for the order in which a GPU adds them up.
GRADIENT_ROUNDING = {torch.float64: 1e-8, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
TIMES = 4  # so many times what the plain step itself rounds: a group of parameters,
TIMES_OF_ALL = 2  # and all together, where rounding of single numbers cancels
SMALL = 1e-3  # of the whole norm: a group with less is measured by this, as nothing but rounding may be left of it
LINES = 12
ROWS = "every rank has rows of its own"
PLAIN = "gradient beside the plain step"  # the line where none was compared
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
        verdict = "Nothing differs by more than rounding explains."
        for one in self.checks:
            if one.name == PLAIN:
                verdict = f"Gradients were not compared with those of a plain step, as {one.note}."
        lines.append(f"WRONG: {'; '.join(wrong)}" if wrong else verdict)
        return "\n".join(lines)


def audit(trainer: Any, num_rows: int | None = None, reference: str = "auto") -> AuditReport:
    """See `DistTrainer.audit`."""
    if trainer.loss is None:
        raise UsageError("an audit compares the gradient of a loss over embeddings, and this trainer has loss=None.")
    if trainer.model_init is not None:
        raise UsageError("model_init makes a model when training begins, so an audit has none. Give model instead.")
    if trainer.strategy.has_engine:
        raise UsageError(
            "an audit reads gradients before the optimizer's step, which DeepSpeed's engine makes inside of the last "
            "backward. Audit the run on one process or under multi_gpu_fsdp."
        )
    if reference not in REFERENCES:
        raise UsageError(f'reference="{reference}": choose one of {", ".join(REFERENCES)}.')
    return _Audit(trainer, num_rows, reference).run()


class _Audit:
    def __init__(self, trainer: Any, num_rows: int | None, reference: str):
        self.trainer, self.reference = trainer, reference
        self.repeated = RepeatedUpdate(trainer, num_rows)
        self.datasets = row_checks.names_of_datasets(trainer.train_dataset, trainer.loss)
        self.is_first = collectives.rank() == 0
        self.plain, self.why_no_plain = self._copy()
        self.checks: list[Check] = []

    def run(self) -> AuditReport:
        self.repeated.run(self.updates())
        return AuditReport(self.described(), collectives.told_by_first(self.checks))

    def _copy(self) -> tuple[PlainStep | None, str]:
        """Before the model is wrapped, or put together of its parts. Every rank calls it."""
        trainer, model, strategy = self.trainer, self.trainer.bare_model, self.trainer.strategy
        hook = getattr(trainer.args, "ddp_comm_hook", None)
        if hook is not None and hook not in ("fp16", "bf16"):
            return None, f'ddp_comm_hook="{hook}" sends an approximation'
        if not all(p.is_floating_point() for p in model.parameters()):
            return None, "quantized weights have no copy in float64"
        if not (strategy.comes_with_model or any(map(is_split, model.parameters()))):
            return self._copied(model)
        if not is_of_sentence_transformers(model):
            return None, (
                f"no process has the whole {type(model).__name__}, and only models of sentence-transformers are put "
                "together of their parts; audit the run on one process or under DDP, too"
            )
        return self._put_together(model), ""

    def _copied(self, model: nn.Module) -> tuple[PlainStep | None, str]:
        card, dtype = getattr(model, "model_card_data", None), self.trainer.strategy.casts_to
        made, why = None, ""
        try:
            copied = copy.deepcopy(model, {id(card): card}) if self.is_first else None  # the card knows the trainer
        except (RuntimeError, TypeError) as error:  # of the old torch.nn.utils.weight_norm, of what holds a lock
            copied, why = None, f"the model can not be copied ({error})"
        if copied is not None:
            made = PlainStep(copied if dtype is None else copied.to(getattr(torch, dtype)), self.trainer.loss)
        return made, collectives.told_by_first(why)

    def _put_together(self, model: nn.Module) -> PlainStep | None:
        strategy, names = self.trainer.strategy, trained(model, self.trainer.loss)
        trains = {name for part in strategy.said_by_parts([*names]) for name in part}
        weights = strategy.whole_weights(self.trainer.model, keep=self.is_first)
        if not self.is_first:
            return None
        with strategy.saving_whole(model):
            made = whole_copy(model, weights)
        for name, parameter in named(made.named_parameters()).items():
            parameter.requires_grad_(name in trains)
        return PlainStep(made, self.trainer.loss)

    # ---- (1) ----

    def updates(self) -> Iterator[None]:
        """Called after every update; up to the next `yield` lies what is between two of them."""
        trainer, strategy = self.trainer, self.trainer.strategy
        model = trainer.bare_model
        self.parameters = trained(model, trainer.loss)
        is_right, note = row_checks.rows_of_ranks(self.repeated.batches, strategy.rows)
        self.add(ROWS, is_right, note=note)
        if note := row_checks.other_datasets(self.repeated.batches, self.datasets):
            self.add("other datasets", None, note=note)
        drawn = [*self.repeated.random.drawn_since()]
        self.check_replay(drawn)
        if not math.isfinite(loss := self.whole_loss()):
            self.add("loss", False, note=f"it is {loss}: the update would be skipped")
            return
        if written := self.repeated.written_buffers():
            note = f"the forward writes {few(written)}, once per chunk and pass: a moving average there moves as often"
            self.add("buffers", None, note=note)
        self.check_equal_on_ranks()
        whole = self.gathered()
        self.check_what_trains(whole)
        if self.why_no_plain:
            self.add(PLAIN, None, note=self.why_no_plain)
            return
        parts = [model, *(self.plain.parts if self.plain else [])]
        with without_dropout(parts):
            if collectives.told_by_first(bool(drawn)):
                yield
                whole, drawn = self.gathered(), self.repeated.random.drawn_since()
                self.add("dropout is off from here on", True, note="as the plain step would draw other masks")
            if any(collectives.everyones(bool(drawn))):
                why = f"the forward draws numbers from {', '.join(drawn)} beside dropout, and a second model others"
                self.add(PLAIN, None, note=why)
                return
            self.check_plain(whole)

    def add(self, name: str, is_right: bool | None, *figures: float | None, note: str = "") -> None:
        self.checks.append(Check(name, is_right, *figures, note=note))

    def whole_loss(self) -> float:
        rows = self.trainer.strategy.rows
        return sum(rows.one_of_each(collectives.everyones(self.repeated.loss.item()))) / rows.size

    def gradients(self) -> dict[str, torch.Tensor]:
        """What this process has of them."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def gathered(self, tensors: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Whole gradients (or `tensors`, by the same names) in float64, on rank 0."""
        if tensors is None:
            own = self.gradients()
            tensors = {n: own[n] if n in own else torch.zeros_like(p) for n, p in self.parameters.items()}
        found = self.trainer.strategy.collected(tensors, keep=self.is_first)
        return {name: tensor.double() for name, tensor in found.items()}

    # ---- (2) ----

    def check_replay(self, drawn: Sequence[str]) -> None:
        error = self.repeated.replay_error
        allowed = None if error is None else self.trainer.step.allowed_difference
        note = "every graph is kept: nothing is encoded twice" if error is None else ""
        if self.repeated.refused:
            _, error, allowed, note = self.repeated.refused
            note += ": the second pass gives other embeddings than the first, and the run would end here"
        self.add("both passes give the same embeddings", not self.repeated.refused, error, allowed, note=note)
        words = f"drawn from {', '.join(drawn)}, and drawn again" if drawn else "none are drawn"
        self.add("random numbers", True, note=words)

    def check_equal_on_ranks(self) -> None:
        if collectives.world_size() == 1:
            return
        own = {name: gradient for name, gradient in self.gradients().items() if num_parts(gradient) == 1}
        digests = {name: digest_of(held_here(gradient)) for name, gradient in own.items()}
        everyone = collectives.everyones(digests)
        unequal = sorted({n for said in everyone for n in said if any(o.get(n, said[n]) != said[n] for o in everyone)})
        shards = len(self.parameters) - len(own)
        of_shards = f"{shards} of {len(self.parameters)} tensors are shards" if shards else ""
        note = f"not {few(unequal)}" if unequal else of_shards
        self.add("gradient equal on all ranks", not unequal, note=note)

    def check_what_trains(self, whole: Mapping[str, torch.Tensor]) -> None:
        without = sorted(name for name, grad in whole.items() if not grad.count_nonzero())
        frozen = [p.grad is not None and bool(held_here(p.grad).count_nonzero()) for p in self._frozen()]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in whole.values()))
        note = f"{len(whole)} tensors, gradient norm {norm:.3e}"
        note += f"; zero in {few(without)}" if without else ""
        self.add("what trains", math.isfinite(norm) and norm > 0, note=note)
        self.add("what is frozen has no gradient", not any(frozen), note=f"{len(frozen)} tensors")

    def _frozen(self) -> list[nn.Parameter]:
        return [p for p in self.trainer.bare_model.parameters() if not p.requires_grad]

    # ---- (3) ----

    def check_plain(self, whole: Mapping[str, torch.Tensor]) -> None:
        of_ranks = collectives.everyones([_as_sent(batch) for batch in self.repeated.batches or ()])
        update = [
            [one for one in given if one]
            for given in zip(*self.trainer.strategy.rows.one_of_each(of_ranks), strict=True)
        ]
        if self.plain is None:
            collectives.told_by_first()
            return
        device = self.trainer.args.device
        with torch.enable_grad():
            exact = self.plain.gradients(update, *self._exactly(update))
            rounded = self.plain.gradients(update, device, self.trainer.precision)
            floor = GRADIENT_ROUNDING[self.coarsest()]
            if _apart(rounded, exact) > floor:
                again = self.plain.gradients(update, device, self.trainer.precision)
                if (differs := _apart(again, rounded)) > floor:
                    why = f"the forward is not deterministic: the plain step differs from itself by {differs:.1e}"
                    self.add(PLAIN, None, note=why)
                    collectives.told_by_first()
                    return
        groups: dict[str, list[str]] = {}
        for name in sorted({*whole, *exact}):
            groups.setdefault(group_of(name), []).append(name)
        given = whole, exact, rounded
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
        tensors = [one for one in tree_leaves(update) if isinstance(one, torch.Tensor)]
        tokens = sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.int64)
        work = 6 * tokens * sum(p.numel() for p in self.plain.model.parameters())
        device = self.trainer.args.device
        if self.reference == "float32" or (self.reference == "auto" and device.type != "cpu" and work > LARGE):
            self.add("plain step", True, note=f"in float32 on {device}")
            return device, nullcontext, torch.float32
        self.add("plain step", True, note="in float64 on the CPU")
        return torch.device("cpu"), nullcontext, torch.float64

    def coarsest(self) -> torch.dtype:
        """Of what is computed in, or sent."""
        dtypes = self.trainer.step.dtypes_of(self.trainer.bare_model)
        sent = getattr(self.trainer.args, "ddp_comm_hook", None)
        dtypes |= {{"fp16": torch.float16, "bf16": torch.bfloat16}[sent]} if sent in ("fp16", "bf16") else set()
        known = [dtype for dtype in GRADIENT_ROUNDING if dtype in dtypes]
        return max(known, key=GRADIENT_ROUNDING.__getitem__, default=torch.bfloat16)

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
def without_dropout(models: Sequence[nn.Module]) -> Iterator[None]:
    """Modules and their rates that have "drop" in their names."""
    with ExitStack() as entered:
        for module in {id(one): one for model in models for one in model.modules()}.values():
            rates = [
                name
                for name, value in vars(module).items()
                if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, _DropoutNd)))
            ]
            entered.enter_context(meanwhile(module, **dict.fromkeys(rates, 0.0)))
        yield


def _beside(
    name: str, names: Sequence[str], whole: Mapping, exact: Mapping, rounded: Mapping, floor: float, times: float
) -> Check:
    """Gradients by name: the run's, the plain step's, and the plain step's in the run's precision."""
    size = _norm(exact, {}, names)
    scale = max(size, SMALL * _norm(exact, {}, exact), 1e-30)
    error, of_rounding = _norm(whole, exact, names) / scale, _norm(rounded, exact, names) / scale
    allowed = max(times * of_rounding, floor)
    note = f"norm {size:.2e}; the plain step rounds {of_rounding:.1e}"
    return Check(f"gradient of {name}", error <= allowed, error, allowed, note)


def _apart(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    return _norm(found, expected, expected) / max(_norm(expected, {}, expected), 1e-30)


def _norm(of: Mapping[str, torch.Tensor], less: Mapping[str, torch.Tensor], names: Iterable[str]) -> float:
    zero = torch.zeros(())
    parts = [of.get(n, zero) - less.get(n, zero) for n in names]
    return math.sqrt(sum(part.double().square().sum().item() for part in parts))


def group_of(name: str) -> str:
    """Parameters of one layer belong together: the name up to its last number, or its first parts."""
    parts = name.split(".")[:-1] or [name]
    numbers = [place for place, part in enumerate(parts) if part.isdigit() and place]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:3])


def _as_sent(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    if isinstance(batch, StandIn):
        return None
    return {name: on(value, "cpu") for name, value in batch.items() if name != CUTS}
