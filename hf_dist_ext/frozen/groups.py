"""The parts of a model by name, and which parameters a pattern selects.

(1) groups are read off the model's own structure: a vision-language model has `vision` (its image encoder), `language`
    (its decoder and output head) and `projector` (all the rest, and the merger inside an image encoder); a
    SentenceTransformer has `backbone`, `pooling`, `projection` (its Dense modules), or a group for each part of a dual
    encoder (`text`, `image`) and each route of a Router (`query`, `document`)
(2) a pattern selects parameters: a list holds group names, exact module or parameter names, or dotted suffixes of
    them; a string is one regular expression over full names
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import embedder_of, is_of_sentence_transformers
from hf_dist_ext.strategies.tensors import num_elements, own_class

Patterns = Sequence[str] | str | None

# A child of an image encoder that maps its patches to the language model's space (Qwen-VL, GLM-4V, Llama 4).
_NESTED_PROJECTOR = re.compile(r"(^|_)(merger|projector|connector|aligner|vision_adapter)")


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


# What the towers of a dual encoder are called in a vision-language model.
TOWERS = {"vision": "image", "language": "text"}


def module_groups(model: nn.Module) -> dict[str, Group]:
    """Group name -> group, the innermost part last; empty for a model whose structure says nothing."""
    inner = below_adapters(model)
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    groups: dict[str, Group] = {}
    if is_of_sentence_transformers(inner):
        parts = dict(embedder_of(inner).parts)
        if not parts:
            first, *rest = inner.children()
            parts["backbone"] = [first]
            for name, kind in (("pooling", "Pooling"), ("projection", "Dense")):
                if found := [one for one in rest if own_class(one).__name__ == kind]:
                    parts[name] = found
        groups = {name: Group(name, tuple(names[id(one)] for one in modules)) for name, modules in parts.items()}
        if groups.keys() == {*TOWERS.values()}:  # a dual encoder, whose projections are of its parts
            return groups
    return groups | _vision_language_groups(model, backbone_of(model), names)


def backbone_of(model: nn.Module) -> nn.Module:
    """The model of transformers inside a model that embeds, or the model itself; of a module of one's own the part
    that reads pictures."""
    inner = below_adapters(model)
    if is_of_sentence_transformers(inner):
        return getattr(inner, "transformers_model", None) or inner
    return next((module for module in inner.modules() if hasattr(module, "get_image_features")), inner)


def below_adapters(model: nn.Module) -> nn.Module:
    """Of a model that PEFT has wrapped the one inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def image_arguments(model: nn.Module) -> set[str]:
    """The names of what `get_image_features` takes; the outer model's may hand keywords on to the inner one's."""
    methods = [getattr(holder, "get_image_features", None) for holder in (model, getattr(model, "model", None))]
    return {name for method in methods if method is not None for name in inspect.signature(method).parameters}


def _vision_language_groups(model: nn.Module, inner: nn.Module, names: Mapping[int, str]) -> dict[str, Group]:
    vision = _proper_part(inner, names, "get_encoder", modality="image")
    language = _proper_part(inner, names, "get_decoder")
    if vision is None or language is None or vision in language.modules() or language in vision.modules():
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


def all_names(model: nn.Module) -> tuple[list[str], dict[str, list[str]]]:
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
    modules, parameters = all_names(model)
    if isinstance(patterns, str):
        selectors = [(patterns, _by_regex(patterns, modules, parameters, field_name))]
    else:
        groups = module_groups(model)
        groups = {other: groups[tower] for other, tower in TOWERS.items() if tower in groups} | groups
        selectors = [(name, groups.get(name) or _by_name(name, modules, parameters)) for name in patterns or ()]
    depths: dict[str, int] = {}
    for pattern, group in selectors:
        matches = {alias: group.depth(alias) for names in parameters.values() for alias in names}
        matches = {name: depth for name, depth in matches.items() if depth}
        if not matches:
            raise UsageError(_no_match(model, pattern, group, modules, parameters, field_name, patterns))
        for name, depth in matches.items():
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
    if isinstance(patterns, str) and (pattern in groups or (roots := _by_name(pattern, modules, parameters).roots)):
        meant = "a group of modules" if pattern in groups else f'"{roots[0]}"'
        return (
            f"{shown} matches no module. A string is one regular expression over full names; as a name in a list it "
            f"is {meant}. Give {json.dumps([pattern])}, on the command line --{field_name} '{json.dumps([pattern])}'."
        )
    if pattern in groups:
        return f"{shown}: {pattern!r} of {type(model).__name__} has no parameters. Groups: {_sizes(model, groups)}."
    if group.roots:
        return f"{shown}: {pattern!r} matches {group.roots[0]!r}, which has no parameters."
    tails = {name.rpartition(".")[2]: name for name in [*parameters, *modules]}
    word = re.sub(r"\W+", ".", pattern).strip(".")  # of a regular expression its plain letters
    near = difflib.get_close_matches(word, [*groups, *modules], 3, 0.5)
    near += [tails[tail] for tail in difflib.get_close_matches(word, tails, 3, 0.5)]
    near += [name for name in modules if word.lower() in name.rpartition(".")[2].lower()][:3]
    closest = ", ".join(f'"{name}"' for name in dict.fromkeys(near)) or "nothing is near"
    if isinstance(patterns, str):
        return (
            f"{shown} matches no module. A string is one regular expression over full names; give plain names as a "
            f"list. Closest: {closest}."
        )
    has_groups = f" Groups: {', '.join(groups)}." if groups else ""
    return f"{shown}: {pattern!r} matches no module. Closest: {closest}.{has_groups} Use a dotted suffix or a regex."


def _sizes(model: nn.Module, groups: Mapping[str, Group]) -> str:
    sizes = {n: sum(num_elements(p) for k, p in model.named_parameters() if g.depth(k)) for n, g in groups.items()}
    return ", ".join(f"{name} ({size:,})" for name, size in sizes.items())
