"""Who trains: decided from names, applied, asserted, reported.

    plan = plan_freezing(model, trainable_modules=["projector"])          # or frozen_modules=["vision", "language"]
    plan.apply(model); plan.check(model); print(format_report(report(model, plan)))

(1) groups are read off the model's own structure: a vision-language model has `vision` (its image encoder), `language`
    (its decoder and output head) and `projector` (all the rest, and the merger inside an image encoder); an
    `EmbeddingModel` has `backbone`, `pooling`, `projection`; a `TowerModel` one group per tower
(2) a pattern selects parameters: a list holds group names, exact module or parameter names, or dotted suffixes of
    them; a string is one regular expression over full names. The deepest match decides where both kinds match
(3) the plan is a set of parameter names; applying it sets `requires_grad` and makes half-precision trainable weights
    float32, which autocast computes with in half precision again
(4) it is checked before the optimizer exists and at every step, because much code resets `requires_grad`

Names are those of the bare model, before DDP, FSDP or torch.compile wrap it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.tensors import num_elements

Patterns = Sequence[str] | str | None

# A child of an image encoder that maps its patches to the language model's space (Qwen-VL, GLM-4V, Llama 4).
_NESTED_PROJECTOR = re.compile(r"(^|_)(merger|projector|connector|aligner|vision_adapter)")
_ADAPTER = re.compile(r"(^|\.)(lora_|modules_to_save\.|prompt_encoder\.|vera_|ia3_|oft_|boft_)")
OTHER = "other"


# ---- (1) ----


@dataclass(frozen=True)
class Group:
    """A named part of a model: subtrees by the name of their root module (or a bare parameter), less nested ones."""

    name: str
    roots: tuple[str, ...]
    without: tuple[str, ...] = ()

    def depth(self, parameter: str) -> int:
        """Number of name parts of the root that holds the parameter; 0 when none does, "" (everything) counts 1."""
        if any(_is_below(parameter, root) for root in self.without):
            return 0
        return max((_depth(root) for root in self.roots if _is_below(parameter, root)), default=0)


# What the towers of a dual encoder are called in a vision-language model (freeze_vision, freeze_language).
TOWERS = {"vision": "image", "language": "text"}


def module_groups(model: nn.Module) -> dict[str, Group]:
    """Group name -> group, the innermost part last; empty for a model whose structure says nothing."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    groups: dict[str, Group] = {}
    if isinstance(getattr(inner, "towers", None), nn.ModuleDict):
        groups = {tower: Group(tower, (names[id(module)],)) for tower, module in inner.towers.items()}
    elif isinstance(getattr(inner, "backbone", None), nn.Module) and hasattr(inner, "pooling"):
        for name in ("backbone", "pooling", "projection"):
            part = getattr(inner, name, None)
            groups[name] = Group(name, (names[id(part)],) if isinstance(part, nn.Module) else ())
        inner = inner.backbone
    return groups | _vision_language_groups(model, inner, names)


def _vision_language_groups(model: nn.Module, inner: nn.Module, names: Mapping[int, str]) -> dict[str, Group]:
    vision = _proper_part(inner, names, "get_encoder", modality="image")
    language = _proper_part(inner, names, "get_decoder")
    if vision is None or language is None or _contains(vision, language) or _contains(language, vision):
        return {}
    root = names.get(id(inner), "")
    encoder, decoder = names[id(vision)], names[id(language)]
    nested = [names[id(child)] for name, child in vision.named_children() if _NESTED_PROJECTOR.search(name)]
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    heads = [names[id(head)]] if isinstance(head, nn.Module) and id(head) in names else []
    outside = [
        name
        for name, _ in model.named_parameters()
        if _is_below(name, root) and not any(_is_below(name, part) for part in (encoder, decoder, *heads))
    ]
    # The projector's roots are the modules beside encoder and decoder, and bare parameters such as image_newline.
    # remove_duplicate: a head tied to the embeddings is the decoder's parameter.
    beside = {_outermost_apart_from(name, [encoder, decoder, *heads]) for name in outside}
    return {
        "vision": Group("vision", (encoder,), tuple(nested)),
        "projector": Group("projector", (*nested, *sorted(beside))),
        "language": Group("language", (decoder, *heads)),
    }


def _proper_part(inner: nn.Module, names: Mapping[int, str], method: str, **options: Any) -> nn.Module | None:
    if not hasattr(inner, method):
        return None
    try:
        part = getattr(inner, method)(**options)
    except (TypeError, ValueError, AttributeError, NotImplementedError):  # not a model with that part
        return None
    base = getattr(inner, getattr(inner, "base_model_prefix", "") or "-", None)
    is_whole = part is inner or part is base
    return part if isinstance(part, nn.Module) and id(part) in names and not is_whole else None


def _contains(outer: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in outer.modules())


def _outermost_apart_from(parameter: str, others: Sequence[str]) -> str:
    """The shortest module (or parameter) name around the parameter that holds none of the others."""
    parts = parameter.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if not any(_is_below(other, name) for other in others):
            return name
    return parameter


def _is_below(name: str, root: str) -> bool:
    return root == "" or name == root or name.startswith(root + ".")


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 1


# ---- (2) ----


def _all_names(model: nn.Module) -> tuple[list[str], dict[str, list[str]]]:
    """(module names, parameter name -> all names of that parameter); tied parameters have several."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    return modules, {name: aliases[id(parameter)] for name, parameter in model.named_parameters()}


def match_depths(model: nn.Module, patterns: Patterns, field_name: str) -> dict[str, int]:
    """Parameter name -> how deep the deepest match lies, for the parameters that the patterns select; a tied parameter
    under each of its names.

    Raises:
        UsageError: a pattern that matches nothing (with the nearest names), a string that is no regular expression,
            a group that this model has without parameters.
    """
    modules, parameters = _all_names(model)
    if isinstance(patterns, str):
        selectors = [(patterns, _by_regex(patterns, modules, parameters, field_name))]
    else:
        groups = module_groups(model)
        groups = {other: groups[tower] for other, tower in TOWERS.items() if tower in groups} | groups
        selectors = [(name, groups.get(name) or _by_name(name, modules, parameters)) for name in patterns or ()]
    depths: dict[str, int] = {}
    for pattern, group in selectors:
        found = {alias: group.depth(alias) for names in parameters.values() for alias in names}
        found = {name: depth for name, depth in found.items() if depth}
        if not found:
            raise UsageError(_no_match(model, pattern, group, modules, parameters, field_name, patterns))
        for name, depth in found.items():
            depths[name] = max(depth, depths.get(name, 0))
    return depths


def _by_name(wanted: str, modules: Sequence[str], parameters: Mapping[str, Any]) -> Group:
    names = [*modules, *parameters]
    exact = [name for name in names if name == wanted]
    return Group(wanted, tuple(exact or [name for name in names if name.endswith("." + wanted)]))


def _by_regex(pattern: str, modules: Sequence[str], parameters: Mapping[str, Any], field_name: str) -> Group:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{field_name}={pattern!r} is no regular expression: {error}. A string is a regex over full names; give "
            "plain names as a list."
        ) from error
    return Group(pattern, tuple(name for name in [*modules, *parameters] if expression.fullmatch(name)))


def _no_match(model, pattern: str, group: Group, modules, parameters, field_name: str, patterns: Patterns) -> str:
    groups = module_groups(model)
    shown = f"{field_name}={patterns!r}" if isinstance(patterns, str) else f"{field_name}={list(patterns)!r}"
    if isinstance(patterns, str):
        return (
            f"{shown} matches no module. A string is one regular expression over full names, such as "
            f'".*{modules[0].rpartition(".")[2] if modules else "layer"}"; give plain names as a list.'
        )
    if pattern in groups:
        return f"{shown}: {pattern!r} of {type(model).__name__} has no parameters. Groups: {_sizes(model, groups)}."
    if group.roots:
        return f"{shown}: {pattern!r} matches {group.roots[0]!r}, which has no parameters."
    tails = {name.rpartition(".")[2]: name for name in [*parameters, *modules]}
    near = difflib.get_close_matches(pattern, [*groups, *modules], 3, 0.5)
    near += [tails[tail] for tail in difflib.get_close_matches(pattern, tails, 3, 0.5)]
    near += [name for name in modules if pattern.lower() in name.rpartition(".")[2].lower()][:3]
    closest = ", ".join(f'"{name}"' for name in dict.fromkeys(near)) or "nothing is near"
    has_groups = f" Groups: {', '.join(groups)}." if groups else ""
    return f"{shown}: {pattern!r} matches no module. Closest: {closest}.{has_groups} Use a dotted suffix or a regex."


def _sizes(model: nn.Module, groups: Mapping[str, Group]) -> str:
    sizes = {n: sum(num_elements(p) for k, p in model.named_parameters() if g.depth(k)) for n, g in groups.items()}
    return ", ".join(f"{name} ({size:,})" for name, size in sizes.items())


# ---- (3), (4) ----


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
    aliases, kept_frozen, trainable = _all_names(model)[1], _kept_frozen_by_itself(model), set()
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


@dataclass(frozen=True)
class GroupReport:
    """One line of the report; bytes are of the whole model, before any sharding."""

    group: str
    num_parameters: int
    num_trainable: int
    dtypes: tuple[str, ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def report(model: nn.Module, optimizer_bytes_per_parameter: float = 8) -> list[GroupReport]:
    """Per group, and for parameters of no group under "other", what trains now and what that costs. The last line,
    "total", adds up. AdamW keeps two float32 numbers per trainable parameter: 8 bytes."""
    groups = module_groups(model)
    inside: dict[str, list[nn.Parameter]] = {name: [] for name in [*groups, OTHER]}
    for name, parameter in model.named_parameters():
        depths = {group: one.depth(name) for group, one in groups.items()}
        deepest = max(depths, key=depths.get, default=OTHER)
        inside[deepest if depths.get(deepest) else OTHER].append(parameter)
    lines = [
        _line(name, parameters, optimizer_bytes_per_parameter)
        for name, parameters in inside.items()
        if parameters or (name in groups and groups[name].roots)
    ]
    everything = _line("total", list(model.parameters()), optimizer_bytes_per_parameter)
    return [*lines, everything]


def _line(name: str, parameters: Sequence[nn.Parameter], optimizer_bytes: float) -> GroupReport:
    trainable = [p for p in parameters if p.requires_grad]
    count = sum(num_elements(p) for p in trainable)
    return GroupReport(
        group=name,
        num_parameters=sum(num_elements(p) for p in parameters),
        num_trainable=count,
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        weight_bytes=sum(num_elements(p) * p.element_size() for p in parameters),
        gradient_bytes=sum(num_elements(p) * p.element_size() for p in trainable),
        optimizer_bytes=int(count * optimizer_bytes),
    )


def format_report(lines: Sequence[GroupReport]) -> str:
    """A table in plain text."""
    heads = ("group", "parameters", "trainable", "share", "dtype", "weights", "gradients", "optimizer")
    rows = [
        (
            line.group, f"{line.num_parameters:,}", f"{line.num_trainable:,}",
            f"{line.num_trainable / max(1, line.num_parameters):.1%}", "+".join(line.dtypes),
            *(_size(number) for number in (line.weight_bytes, line.gradient_bytes, line.optimizer_bytes)),
        )
        for line in lines
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    is_text = [head in ("group", "dtype") for head in heads]

    def padded(row: Sequence[str]) -> str:
        cells = zip(row, widths, is_text, strict=True)
        return "  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in cells).rstrip()

    return "\n".join(map(padded, [heads, *rows]))


def _size(number: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"
