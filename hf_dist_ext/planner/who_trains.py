"""Who trains, by parameter names alone: freezing patterns as in frozen/groups.py, adapters as in tasks/adapters.py."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.architectures import TWO_TOWERS
from hf_dist_ext.planner.tape import Lora

# peft's own targets for the families of planner/architectures.py; q_proj and v_proj in all others (tasks/adapters.py)
LORA_TARGETS = dict.fromkeys(["bert", "roberta", "xlm-roberta"], ("query", "value"))


def who_trains(trainable: Any, frozen: Any, is_lora: bool) -> Callable[[str], bool]:
    @functools.cache
    def trains(name: str) -> bool:
        if ".lora_" in name:
            return True
        chosen = depth(trainable, name) if trainable else 0
        if is_lora and not chosen:
            return False
        if frozen:
            held = depth(frozen, name)
            return chosen > held if trainable else not held
        return bool(chosen) if trainable else not is_lora

    return trains


def depth(patterns: Sequence[str] | str, name: str) -> int:
    """How deep the deepest match of freezing patterns lies above a parameter; 0 for none."""
    parts = name.split(".")
    above = [".".join(parts[: count + 1]) for count in range(len(parts))]
    if isinstance(patterns, str):
        return max((one.count(".") + 1 for one in above if re.fullmatch(patterns, one)), default=0)
    depths = [0]
    for pattern in patterns:
        root = _group_root(pattern, name)
        matches = [root] if root else [one for one in above if one == pattern or one.endswith("." + pattern)]
        depths += [match.count(".") + 1 for match in matches]
    return max(depths)


def check_patterns(field: str, patterns: Sequence[str] | str | None, names: Iterable[str]) -> None:
    """Raises UsageError for a pattern that matches no parameter, as training does."""
    names = list(names)
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        if any(depth(pattern if isinstance(patterns, str) else [pattern], name) for name in names):
            continue
        tails = {part: name for name in names for part in name.split(".")}
        near = [tails[one] for one in difflib.get_close_matches(pattern.rpartition(".")[2], tails, 3, 0.5)]
        shown = ", ".join(f'"{one}"' for one in near) or "nothing is near"
        raise UsageError(
            f"{field}={patterns!r}: {pattern!r} matches no module. Closest: {shown}. Use a dotted suffix or a regex."
        )


# Names of parts as frozen/groups.py finds them in a model; a projector may lie inside the vision part.
GROUPS = {
    "vision": ("model.vision_tower", "model.vision_model", "model.visual", "vision_model", "visual_projection"),
    "image": ("vision_model", "visual_projection"),
    "text": ("text_model", "text_projection"),
    "projector": (
        "model.multi_modal_projector",
        "model.image_newline",
        "model.connector",
        "model.visual.merger",
        "model.visual.deepstack_merger_list",
    ),
    "language": ("model.language_model", "model.text_model", "lm_head", "text_model", "text_projection"),
    "backbone": ("backbone",),
    "pooling": ("pooling",),
    "projection": ("projection",),
}


def _group_root(pattern: str, name: str) -> str | None:
    if pattern == "vision" and _group_root("projector", name):
        return None
    return next((root for root in GROUPS.get(pattern, ()) if f"{name}.".startswith(f"{root}.")), None)


def lora_of(given: Mapping[str, Any], config: Mapping[str, Any]) -> Lora:
    wanted = given.get("lora_target_modules")
    kind = (config.get("text_config") or config)["model_type"]
    is_usual, has_parts = wanted is None, bool(config.get("vision_config")) and config["model_type"] not in TWO_TOWERS
    if is_usual:
        wanted = LORA_TARGETS.get(kind, ("q_proj", "v_proj"))

    @functools.cache
    def targets(name: str) -> bool:
        if is_usual and has_parts and not depth(["language"], name):
            return False  # peft's own choice stays out of the image part (tasks/adapters.py)
        last = name.rpartition(".")[2]
        if wanted == "all-linear":
            return last not in ("lm_head", "patch_embedding") and not name.startswith("projection")
        if isinstance(wanted, str):
            return re.fullmatch(wanted, name) is not None
        return any(name == one or name.endswith("." + one) for one in wanted)

    return Lora(given.get("lora_r") or 8, given.get("lora_dropout") or 0.0, targets, wanted)
