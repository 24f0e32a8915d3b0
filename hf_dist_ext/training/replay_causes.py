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
from hf_dist_ext.engine.replay import RandomState

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


class _State:
    """One thing that a forward may leave behind."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]):
        self.name, self.read, self.write = name, read, write
        self.before = _copy(read())

    def changed(self) -> list[str]:
        return [] if _are_equal(self.before, self.read()) else [self.name]

    def put_back(self) -> None:
        if self.changed():
            self.write(_copy(self.before))


class _Attributes(_State):
    """Numbers, texts and tensors of one module, those that it has later too."""

    def __init__(self, path: str, module: nn.Module):
        self.of = vars(module)
        super().__init__(path, self._read, self._write)

    def _read(self) -> dict[str, Any]:
        return {name: value for name, value in self.of.items() if isinstance(value, SIMPLE) and name != "training"}

    def _write(self, before: dict[str, Any]) -> None:
        for name in [name for name in self._read() if name not in before]:
            del self.of[name]
        self.of.update(before)

    def changed(self) -> list[str]:
        now, missing = self._read(), object()
        names = [name for name in {**self.before, **now}
                 if not _are_equal(self.before.get(name, missing), now.get(name, missing))]  # fmt: skip
        return [_joined(self.name, name) for name in names]


class States:
    """Of a model, as they are now. Without its parameters, which a forward does not write."""

    def __init__(self, model: nn.Module):
        self._by_kind = _states(model)

    def changed(self) -> dict[str, list[str]]:
        """Kind -> names of those that are not as they were."""
        return {kind: [name for one in found for name in one.changed()] for kind, found in self._by_kind.items()}

    def put_back(self, left: str | None = None) -> None:
        """All but those of kind `left`."""
        for kind, found in self._by_kind.items():
            for one in found if kind != left else ():
                one.put_back()


def _states(model: nn.Module) -> dict[str, list[_State]]:
    found: dict[str, list[_State]] = {kind: [] for kind in KINDS}
    for path, module in model.named_modules():
        found["modes"].append(_attribute(path or type(module).__name__, vars(module), "training"))
        for name in module._buffers:
            if module._buffers[name] is not None:
                found["buffers"].append(_attribute(_joined(path, name), module._buffers, name))
        for name, value in vars(module).items():
            if isinstance(value, _GENERATORS):
                found["generators"].append(_generator(_joined(path, name), value))
        found["attributes"].append(_Attributes(path, module))
    return found


def _attribute(name: str, of: dict[str, Any], key: str) -> _State:
    return _State(name, lambda: of.get(key), lambda value: of.__setitem__(key, value))


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _generator(name: str, own: Any) -> _State:
    if isinstance(own, torch.Generator):
        return _State(name, own.get_state, own.set_state)
    if isinstance(own, np.random.Generator):
        bits = own.bit_generator
        return _State(name, lambda: bits.state, lambda value: setattr(bits, "state", value))
    if isinstance(own, np.random.RandomState):
        return _State(name, own.get_state, own.set_state)
    return _State(name, own.getstate, own.setstate)


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


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and one == other


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(one) for name, one in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def few(names: Iterable[str]) -> str:
    """Three of them at most, and how many more there are."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
