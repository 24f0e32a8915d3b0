"""Memory that runs out in a step with the gradient cache: smaller sizes, the same gradient.

`Reductions` says how far the sizes of the run file are cut down: kept graphs go first, then chunks are halved,
and the pass without a graph takes no wider ones. No gradient depends on it.

One process heals in place: it drops the update's gradients and runs its batches again (training/step.py). With several
processes nothing that the rank could send is certain to be what the others wait for. So the rank stores the smaller
sizes in the run's folder and ends with the cause. The others lose a peer, find the cause there, and end with it too;
where a lost peer is not noticed (NCCL), the launcher ends them. A start with the same fields takes the smallest sizes
that any rank finds stored.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from hf_dist_ext.engine import gradient_cache as engine
from hf_dist_ext.engine.gradient_cache import Phase
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies import collectives

logger = logging.getLogger(__name__)

FILE = "smaller_chunks.json"  # in the run's folder
FIELDS = ("chunk_size", "chunk_tokens", "chunk_patches", "keep_graph", "memory_gib")  # gradient_cache_*
ENCODE, REPLAY, LAST, LOSS = (
    "the pass without a graph",
    "a chunk with a graph",
    "the backward that reduces gradients",
    "the loss or its gradient",
)

# What libraries, the driver and NCCL say where they get no memory from the device, past torch's allocator.
BESIDE_ALLOCATOR = re.compile(r"_STATUS_ALLOC_FAILED|CUDA (driver )?error: out of memory|Cuda failure .*out of memory")


@dataclass(frozen=True)
class Reductions:
    """What is left of the sizes that were given."""

    chunk_halvings: int = 0
    keeps_graphs: bool = True

    @property
    def share(self) -> float:
        return 0.5**self.chunk_halvings

    def smaller(self, place: str, num_kept: int, can_halve: bool) -> Reductions | None:
        """The next sizes after a lack of memory in a place; None: nothing that would help is left."""
        if num_kept > 0:
            return replace(self, keeps_graphs=False)
        is_of_chunks = place != LOSS and can_halve
        return replace(self, chunk_halvings=self.chunk_halvings + 1) if is_of_chunks else None

    def smallest(self, other: Reductions) -> Reductions:
        return Reductions(max(self.chunk_halvings, other.chunk_halvings), self.keeps_graphs and other.keeps_graphs)

    def __str__(self) -> str:
        words = [f"chunks of {self.share:g} of the size that was given"] if self.chunk_halvings else []
        return ", ".join(words + ["no kept graphs"] * (not self.keeps_graphs))


def is_lack_of_memory(error: BaseException) -> bool:
    """torch's own error, or that of somebody else who got no memory from the device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and BESIDE_ALLOCATOR.search(str(error)) is not None
    )


class FittingSizes:
    """The sizes of one run, in this process and in its folder. `place`: where in a step this process is."""

    def __init__(self, args: Any):
        self.path = Path(args.output_dir, FILE)
        self.given = {name: getattr(args, f"gradient_cache_{name}") for name in FIELDS}
        self.now, self.place = Reductions(), ENCODE
        self._run = 0  # number of this start, the same on all ranks

    def begin(self) -> None:
        """At the start of training, on every rank."""
        own = self._smallest_stored(Reductions())
        everyone = collectives.exchange(
            [own.chunk_halvings, int(own.keeps_graphs), random.SystemRandom().getrandbits(60)]
        )
        self._run = everyone[0][-1]
        self.now = reduce(Reductions.smallest, (Reductions(halvings, bool(keeps)) for halvings, keeps, _ in everyone))
        if self.now != Reductions():
            logger.warning(
                f"memory ran out with the sizes that are given, says {self.path}. This run has {self.now}; the "
                "gradient is the same. Delete the file to try the given sizes again."
            )

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def shrink(self, step: int, **of_step: Any) -> None:
        """After a lack of memory of a process alone: `now` is smaller.

        Raises:
            RunError: nothing that would help is left.
        """
        cause, smaller = self._cause(step), self.now.smaller(self.place, **of_step)
        if smaller is None:
            raise RunError(cause + _nothing_left(self.place))
        self.now = smaller
        logger.warning(f"{cause}. The step is run again with {smaller}, which stays so from here on.")
        try:
            self._store(smaller, cause)
        except OSError as error:
            logger.warning(f"{self.path} could not be written ({error}): the next start tries larger sizes again.")

    def end_run(self, step: int, **of_step: Any) -> RunError:
        """After a lack of memory of one of several processes: the error to raise, which the others find stored."""
        cause, smaller = self._cause(step), self.now.smaller(self.place, **of_step)
        if smaller is None:
            cause += _nothing_left(self.place)
        else:
            cause += (
                f". Start the run again with --resume_from_checkpoint auto. It then has {smaller}, as {self.path} "
                "says, and the same gradient."
            )
        try:
            self._store(smaller or self.now, cause)
        except OSError as error:
            cause += f" That file could not be written ({error}): give smaller sizes in the run file."
        return RunError(cause)

    def _cause(self, step: int) -> str:
        return f"step {step}: rank {collectives.rank()} ran out of memory in {self.place}"

    def error_of_peer(self) -> RunError | None:
        """The error of the rank that ran out of memory in this start, when one did."""
        stored = self._read()
        return RunError(stored["cause"]) if self._run and stored.get("run") == self._run else None

    def _smallest_stored(self, sizes: Reductions) -> Reductions:
        """These, or what the same fields have stored, by another rank too."""
        stored = self._read()
        if stored.get("given") != self.given or stored["sizes"].keys() != asdict(sizes).keys():  # of an older release
            return sizes
        return sizes.smallest(Reductions(**stored["sizes"]))

    def _store(self, sizes: Reductions, cause: str) -> None:
        sizes = asdict(self._smallest_stored(sizes))
        content = {"given": self.given, "sizes": sizes, "cause": cause, "run": self._run}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{FILE}.{collectives.rank()}")
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(new, self.path)  # a reader finds all of it or what was there before

    def phase(self, phase: Phase) -> AbstractContextManager:
        """Around every part of a step: `place` is where a lack of memory comes from."""
        forwards = ENCODE if phase.kind == engine.ENCODE else REPLAY
        self.place = LOSS if phase.kind == engine.SCORE else LAST if phase.is_last else forwards
        return nullcontext()


def _nothing_left(place: str) -> str:
    if place == LOSS:
        return ", and smaller chunks do not help there. Use a smaller per_device_train_batch_size."
    return (
        ", with the smallest chunks there are: one row each. Use shorter rows (max_length), "
        '"gradient_checkpointing": true, or a preset that shards the model (multi_gpu_fsdp).'
    )


def empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
