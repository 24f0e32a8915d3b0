"""A chunk is encoded twice: its random numbers are drawn again, and its embeddings are compared.

A gradient cache is right only where pass 3 gives what pass 1 gave.

(1) `RandomState`: all generators that a forward may draw from, noted before a chunk's first forward and put back
    before its second one
(2) `Comparison`: the embeddings of both passes, compared where they are; one number per chunk stays on the device
(3) `allowed_difference`: by how much they may differ; `end_for_replay_error`: what a run is told whose model differs
    by more
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from hf_dist_ext.engine.chunks import Chunk
from hf_dist_ext.engine.outputs import Output
from hf_dist_ext.errors import RunError

# The largest difference that rounding explains, relative to the largest magnitude: in chunks of the same shapes, whose
# kernels may still add up in another order, and in a pass 1 of larger chunks. Halves: 4 and 32 times their epsilon.
ROUNDING = {
    torch.float64: (1e-12, 1e-6),  # Gemma computes its norms in float32
    torch.float32: (1e-6, 1e-4),
    torch.float16: (4e-3, 3e-2),
    torch.bfloat16: (3e-2, 2.5e-1),
}

# ---- (1) ----


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Name -> how the state of a generator is read and set."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "numpy": (np.random.get_state, np.random.set_state),
        "random": (random.getstate, random.setstate),
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return found
    module = torch.get_device_module(accelerator)
    if not (getattr(module, "is_initialized", None) or module.is_available)():
        return found
    for number in range(module.device_count()):
        device = torch.device(accelerator.type, number)
        found[str(device)] = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    return found


class RandomState:
    """The generators a forward may draw from, as they are now: torch's of the CPU and of every device of an
    accelerator in use, numpy's global one and that of `random`. No synchronisation: they all live on the host.

    only: names of generators; None: all.
    """

    def __init__(self, only: Iterable[str] | None = None):
        generators = _generators()
        names = generators if only is None else [name for name in only if name in generators]
        self._states = {name: (generators[name][0](), generators[name][1]) for name in names}

    def drawn_since(self) -> list[str]:
        """The generators that something was drawn from since."""
        now = RandomState(self._states)._states
        return [name for name, (state, _) in self._states.items() if not are_equal(state, now[name][0])]

    def is_now(self) -> bool:
        return not self.drawn_since()

    def restore(self, only: Iterable[str] | None = None) -> None:
        for name in self._states if only is None else only:
            if name in self._states:
                state, set_state = self._states[name]
                set_state(state)


def are_equal(one: Any, other: Any) -> bool:
    """Two states, by their contents."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)  # numpy's holds an array, and may be a mapping


@contextmanager
def replayed(state: RandomState, drawn: Sequence[str]) -> Iterator[None]:
    """While inside, random numbers are those that were drawn from `state` on, of the generators `drawn`: those that
    pass 1 drew from."""
    after = RandomState(drawn)
    state.restore(drawn)
    try:
        yield
    finally:
        after.restore()


# ---- (2) ----


@dataclass(frozen=True)
class ReplayError:
    """How far embeddings of pass 3 lie from those of pass 1, relative to the largest magnitude of their chunk.

    of_chunks: (n,) on the device, one for every chunk and output that was compared. places: which chunk each is of,
    and whose rows that has, in words.
    """

    of_chunks: torch.Tensor
    places: list[str]

    @property
    def largest(self) -> torch.Tensor:
        """(), on the device. What is not a number was none in pass 1 either, or came of a gradient that is none."""
        return self.of_chunks.nan_to_num(nan=0.0, posinf=math.inf).amax()

    def worst(self) -> tuple[float, str]:
        """The largest one and its place; waits for the device."""
        ratios = self.of_chunks.nan_to_num(nan=0.0, posinf=math.inf).tolist()
        return max(zip(ratios, self.places, strict=True), key=lambda found: found[0])


class Comparison:
    """Of the embeddings of pass 1, per chunk, with those of pass 3 as they come. Nothing is copied to the host."""

    def __init__(self, chunks: Sequence[Chunk], before: Sequence[Output]):
        self.chunks, self.before = chunks, before
        self._differences: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []  # embeddings of pass 1 that were compared
        self._numbers: list[int] = []

    @torch.no_grad()
    def add(self, number: int, output: Output, gradients: Output) -> None:
        """What pass 3 gives for a chunk. An idle one's rows are nobody's. `gradients`: those of the cache. Of several
        vectors per row those without one are not compared: padding among them is whatever the width of its chunk
        makes of it."""
        if self.chunks[number].is_idle:
            return
        names = sorted(gradients) if isinstance(gradients, Mapping) else []
        three = [_tensors(one, names) for one in (output, self.before[number], gradients)]
        for now, first, gradient in zip(*three, strict=True):
            if now.dim() > 2 or (names and now.dim() > 1):  # what one has beyond the others is padding
                width = min(one.shape[1] for one in (now, first, gradient))
                now, first, gradient = (one[:, :width] for one in (now, first, gradient))
                now = torch.where(gradient == 0, first, now)
            self._differences.append(torch.dist(now, first, math.inf))
            self._first.append(first)
            self._numbers.append(number)

    @torch.no_grad()
    def result(self) -> ReplayError | None:
        """None: every graph was kept, and nothing was encoded twice."""
        if not self._numbers:
            return None
        sizes = torch.stack([*self._differences, *torch._foreach_norm(self._first, math.inf)]).float()
        differences, magnitudes = sizes.view(2, -1).unbind()
        columns = [" and ".join(self.chunks[number].columns) for number in self._numbers]
        places = [f"{c}, chunk {n + 1} of {len(self.chunks)}" for c, n in zip(columns, self._numbers, strict=True)]
        return ReplayError(differences / magnitudes, places)


def _tensors(output: Output, names: Sequence[str]) -> list[torch.Tensor]:
    return [output[name] for name in names] if isinstance(output, Mapping) else [output]


# ---- (3) ----


def allowed_difference(dtypes: Iterable[torch.dtype], has_other_shapes: bool) -> float:
    """The largest ratio that rounding explains.

    dtypes: in which embeddings are computed: the coarsest counts. has_other_shapes: pass 1 had larger chunks, or
    kernels of its own.
    """
    return max(ROUNDING.get(dtype, ROUNDING[torch.bfloat16])[has_other_shapes] for dtype in dtypes)


def end_for_replay_error(step: int, ratio: float, most: float, place: str) -> NoReturn:
    raise RunError(
        f"step {step}: the gradient cache encodes every chunk twice, and the second embeddings differ from the "
        f"first by {ratio:.2g} of their largest magnitude ({place}), where rounding explains {most:.2g}. The "
        f"gradient would be wrong, so the update is not made. The usual causes, in this order: (1) the "
        "forward draws random numbers that come neither from torch nor from numpy.random or random: draw them "
        "there; (2) the forward writes a state that it reads (spectral_norm, observers of quantization, moving "
        "averages): switch that off, or do it once per step outside of the model; (3) tables follow the longest "
        'row (rotary embeddings of type "dynamic"): use another type; (4) a part changes its mode between '
        "forwards: set it once; (5) kernels have no fixed order: torch.use_deterministic_algorithms(True). "
        "Without a gradient cache rows are encoded once. A model that can not be deterministic may say "
        f"replay_tolerance={2 * ratio:.0e}: its gradient is off by that."
    )
