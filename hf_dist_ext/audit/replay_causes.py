"""Why a chunk's embeddings differ when it is encoded again, found by trying.

(1) `States`: what a model may carry from one forward to the next, by kind, as it was before an update
(2) `found_causes` encodes one chunk again with everything put back, then with everything but one kind, while another
    chunk runs in between. The kind that makes a difference is the cause
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dist_ext.engine.outputs import Output, tensors_of
from hf_dist_ext.engine.replay import RandomState, are_equal

SIMPLE = (bool, int, float, str, torch.Tensor, np.ndarray)
KINDS = {
    "generators": "the forward draws from {}, which no training loop can put back: use torch's global generator",
    "buffers": "the forward writes {}, and gives something else afterwards",
    "attributes": "the forward sets {}, and gives something else afterwards",
    "modes": "the forward changes the mode (training) of {}",
}
WITH_GRAPH = "the forward gives something else where gradients are recorded than where they are not"
NOTHING_HELD = (
    "the same forward differs though the states of all modules and generators were put back, so it draws random "
    "numbers from elsewhere, or keeps something outside of its modules"
)
BEYOND_NOISE = 10  # so many times what the same forward differs by itself


def found_causes(
    encode: Callable[[int], Output],
    worst: int,
    other: int,
    states: States,
    most: float,
    recording: Callable[[], AbstractContextManager] = nullcontext,
) -> list[str]:
    """In words; [] where encoding this one chunk again shows nothing. Every rank encodes as often, in the same order.

    encode: number of a chunk -> its embeddings. worst: the chunk that differed. other: encoded in between. states:
    before the update. most: what rounding explains. recording: around forwards with a graph.
    """
    drawn = RandomState()
    changed: dict[str, dict[str, None]] = {kind: {} for kind in KINDS}  # names of states, in the model's order

    def encoded(number: int) -> Output:
        drawn.restore()
        output = encode(number)
        for kind, names in states.changed().items():
            changed[kind] |= dict.fromkeys(names)
        return output

    def tried(left: str | None = None) -> torch.Tensor:
        """The worst chunk's embeddings, after a forward of each chunk whose traces of kind `left` stay."""
        for number in (worst, other):
            states.put_back()
            encoded(number)
        states.put_back(left)
        return torch.cat([one.detach().double().flatten() for one in tensors_of(encoded(worst))])

    with torch.no_grad():
        first, again = tried(), tried()
        noise = _difference(again, first)
        with torch.enable_grad(), recording():
            of_graph = _difference(tried(), first)
        by_kind = {kind: _difference(tried(kind), first) for kind in KINDS}
        with _fixed_order():
            in_fixed_order = _difference(tried(), tried())
    states.put_back()
    drawn.restore()
    if noise > most:
        if in_fixed_order <= most:
            return ["kernels have no fixed order: with torch.use_deterministic_algorithms(True) nothing differs"]
        return [NOTHING_HELD]
    # In a pipeline every rank sees the difference, and the one whose stage has the cause its name.
    causes = [kind for kind, difference in by_kind.items() if changed[kind] and difference > BEYOND_NOISE * noise]
    found = [KINDS[kind].format(few(changed[kind])) for kind in causes]
    if of_graph > BEYOND_NOISE * noise and of_graph > most:
        modes = f", and changes the mode (training) of {few(changed['modes'])}" if changed["modes"] else ""
        found += [WITH_GRAPH + modes]
    return found


# ---- (1) ----

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class States:
    """Of a model, as they are now. Without its parameters, which a forward does not write."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._owners = _places(model)
        self._before = {place: _copy(_content(of[key])) for place, (of, key) in self._owners.items()}

    def changed(self) -> dict[str, list[str]]:
        """Kind -> names of those that are not as they were."""
        found: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for kind, name in self._differing():
            found[kind].append(name)
        return found

    def put_back(self, left: str | None = None) -> None:
        """All but those of kind `left`."""
        for (kind, name), (of, key) in self._differing().items():
            if kind == left:
                continue
            if (kind, name) in self._before:
                _write(of, key, _copy(self._before[kind, name]))
            else:
                del of[key]

    def _differing(self) -> dict[tuple[str, str], tuple[dict[str, Any], str]]:
        return {
            place: (of, key)
            for place, (of, key) in {**self._owners, **_places(self.model)}.items()
            if place not in self._before or not are_equal(self._before[place], _content(of.get(key)))
        }


def _places(model: nn.Module) -> dict[tuple[str, str], tuple[dict[str, Any], str]]:
    """(kind, name in the model) of a state -> the mapping that holds it, and its key there."""
    found: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
    for path, module in model.named_modules():
        own = vars(module)
        found["modes", path or type(module).__name__] = own, "training"
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found["buffers", _joined(path, name)] = module._buffers, name
        for name, value in own.items():
            if isinstance(value, _GENERATORS):
                found["generators", _joined(path, name)] = own, name
            elif isinstance(value, SIMPLE) and name != "training":
                found["attributes", _joined(path, name)] = own, name
    return found


def _content(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state() if isinstance(value, _GENERATORS) else value


def _write(of: dict[str, Any], key: str, content: Any) -> None:
    value = of.get(key)
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, _GENERATORS):
        value.set_state(content)
    else:
        of[key] = content


# ---- small parts ----


@contextmanager
def _fixed_order() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warns)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the largest magnitude."""
    size = max(other.abs().max().item(), 1e-30)
    return math.inf if one.shape != other.shape else (one - other).abs().max().item() / size


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def few(names: Iterable[str]) -> str:
    """Three of them at most, and how many more there are."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
