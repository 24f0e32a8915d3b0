"""Who trains: decided from names, applied, asserted, reported.

    plan = plan_freezing(model, trainable_modules=["projector"])          # or frozen_modules=["vision", "language"]
    plan.apply(model); plan.check(model, when); print(report(model))

Patterns select parameters (frozen/groups.py); the deepest match decides where patterns of both kinds match. The plan
is a set of parameter names. Applying it sets `requires_grad` and makes half-precision trainable weights float32, which
autocast computes with in half precision again. The plan is checked before the optimizer exists and at every step,
because much code resets `requires_grad`.

Names are those of the bare model, before DDP, FSDP or torch.compile wrap it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError, bytes_in_words
from hf_dist_ext.frozen.groups import Patterns, all_names, match_depths, module_groups
from hf_dist_ext.strategies.tensors import num_elements

_ADAPTER = re.compile(r"(^|\.)(lora_|modules_to_save\.|prompt_encoder\.|vera_|ia3_|oft_|boft_)")
OTHER = "other"


@dataclass(frozen=True)
class FreezePlan:
    """Which parameters train. `carried`: those that earlier stages trained, which a checkpoint must hold as well."""

    trainable: frozenset[str]
    trainable_modules: Patterns = None
    frozen_modules: Patterns = None
    carried: frozenset[str] = field(default=frozenset())

    @property
    def saved(self) -> frozenset[str]:
        return self.trainable | self.carried

    def describe(self) -> dict[str, Any]:
        """JSON-able; names are sorted."""
        return {
            "trainable_modules": self.trainable_modules,
            "frozen_modules": self.frozen_modules,
            "trainable": sorted(self.trainable),
            "carried": sorted(self.carried - self.trainable),
        }

    def apply(self, model: nn.Module, has_autocast: bool = False) -> None:
        """Set `requires_grad` everywhere. has_autocast: trainable half-precision weights become float32 (autocast
        computes in half precision all the same, and the optimizer's small updates are not rounded away)."""
        for name, parameter in model.named_parameters():
            trains = name in self.trainable
            parameter.requires_grad_(trains)
            if not trains:
                parameter.grad = None
            elif has_autocast and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()

    def check(self, model: nn.Module, when: str) -> None:
        """Raises UsageError when anything trains that the plan froze, or the other way round."""
        wrong = [n for n, p in model.named_parameters() if p.requires_grad != (n in self.trainable)]
        if not wrong:
            return
        thawed = [name for name in wrong if name not in self.trainable]
        verb, names = ("trains though it was frozen", thawed) if thawed else ("was frozen meanwhile", wrong)
        raise UsageError(
            f"{when}: {names[0]!r} {verb} ({len(names)} of {len(wrong)} such parameters). Something changed "
            "requires_grad after the plan was made (resize_token_embeddings, an adapter, the model's own code). "
            "Do it before the trainer is built; a new stage needs a new trainer."
        )

    def check_gradients(self, model: nn.Module) -> None:
        """After the first backward: raises UsageError for trainable parameters that received no gradient."""
        missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise UsageError(
                f"{len(missing)} of {len(self.trainable)} trainable parameters received no gradient in the first "
                f"step: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. The model does not use them on "
                "these batches: freeze them (frozen_modules), or set ddp_find_unused_parameters=true if other batches "
                "use them."
            )


def plan_freezing(
    model: nn.Module,
    trainable_modules: Patterns = None,
    frozen_modules: Patterns = None,
    carried: Iterable[str] = (),
) -> FreezePlan | None:
    """The plan for a bare model; None when neither field is given. Nothing is changed yet.

    `trainable_modules` alone: these train, nothing else does. `frozen_modules` alone: these do not, everything else
    does, but for what the model itself or PEFT keeps frozen. Both: where they overlap the deeper match wins; what
    neither matches is frozen. Adapters of PEFT train unless `frozen_modules` matches them.

    Raises:
        UsageError: a pattern that matches nothing, both matching at the same depth, nothing left to train.
    """
    if trainable_modules is None and frozen_modules is None:
        return None
    trained = match_depths(model, trainable_modules, "trainable_modules") if trainable_modules is not None else None
    frozen = match_depths(model, frozen_modules or [], "frozen_modules")
    aliases, kept_frozen, trainable = all_names(model)[1], _kept_frozen_by_itself(model), set()
    for name, parameter in model.named_parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):  # quantized weights have no gradient
            continue
        is_adapter = _ADAPTER.search(name) is not None
        decisions = {}
        for alias in aliases[name]:
            wanted = trained.get(alias, int(is_adapter)) if trained is not None else int(name not in kept_frozen)
            if trained is not None and alias in frozen and frozen[alias] == trained.get(alias):
                raise UsageError(
                    f"trainable_modules={trainable_modules!r} and frozen_modules={frozen_modules!r} both match "
                    f"{alias!r} equally closely. Remove it from one of the two."
                )
            is_frozen = alias in frozen and (trained is None or frozen[alias] > wanted)
            decisions[alias] = "frozen" if is_frozen else "trains" if wanted else "neither"
        if "frozen" in decisions.values() and "trains" in decisions.values():
            one, other = (next(a for a, d in decisions.items() if d == what) for what in ("frozen", "trains"))
            raise UsageError(
                f"{one!r} and {other!r} are one tied parameter: it can not be frozen under one name and train under "
                "the other. Name both in trainable_modules or both in frozen_modules, or untie them."
            )
        if "trains" in decisions.values():
            trainable.add(name)
    if not trainable:
        given = {"trainable_modules": trainable_modules, "frozen_modules": frozen_modules}
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items() if value is not None)
        raise UsageError(f"{shown}: nothing is left to train in {type(model).__name__}.")

    def listed(patterns: Patterns) -> Patterns:
        return patterns if patterns is None or isinstance(patterns, str) else list(patterns)

    return FreezePlan(
        frozenset(trainable), listed(trainable_modules), listed(frozen_modules), frozenset(carried) - trainable
    )


def _kept_frozen_by_itself(model: nn.Module) -> set[str]:
    """Parameters without gradients when the model was first planned: constant tables, and the base below adapters.
    Remembered on the model, since a later plan for the same model finds what the earlier one froze."""
    if "_frozen_by_itself" not in model.__dict__:
        model.__dict__["_frozen_by_itself"] = {n for n, p in model.named_parameters() if not p.requires_grad}
    return model.__dict__["_frozen_by_itself"]


# ---- the report ----


HEADS = ("group", "parameters", "trainable", "share", "dtype", "weights", "gradients", "optimizer")


def report(model: nn.Module, optimizer: str = "adamw_torch") -> str:
    """A table: per group, and for parameters of no group under "other", what trains now and what that costs. Bytes are
    of the whole model, before any sharding. `optimizer`: Trainer's name of it."""
    groups = module_groups(model)
    inside: dict[str, list[nn.Parameter]] = {name: [] for name in [*groups, OTHER]}
    for name, parameter in model.named_parameters():
        depths = {group: one.depth(name) for group, one in groups.items()}
        deepest = max(depths, key=depths.get, default=OTHER)
        inside[deepest if depths.get(deepest) else OTHER].append(parameter)
    rows: list[Sequence[str]] = [HEADS]
    for name, parameters in [*inside.items(), ("total", list(model.parameters()))]:
        if not (parameters or (name in groups and groups[name].roots)):
            continue
        trained = [p for p in parameters if p.requires_grad]
        count, num_trained = (sum(map(num_elements, of)) for of in (parameters, trained))
        weights, gradients = (sum(num_elements(p) * p.element_size() for p in of) for of in (parameters, trained))
        widths = [p.shape[-1] if p.dim() > 1 else 0 for p in trained]
        states = sum(
            policy.optimizer_bytes(optimizer, num_elements(p), p.element_size(), width)
            for p, width in zip(trained, widths, strict=True)
        )
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        rows.append((
            name, f"{count:,}", f"{num_trained:,}", f"{num_trained / max(1, count):.1%}", "+".join(dtypes),
            *map(bytes_in_words, (weights, gradients, states)),
        ))  # fmt: skip
    lengths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_text = [head in ("group", "dtype") for head in HEADS]
    lines = []
    for row in rows:
        cells = zip(row, lengths, is_text, strict=True)
        padded = [cell.ljust(length) if left else cell.rjust(length) for cell, length, left in cells]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
