"""Memory that runs out in a step with the gradient cache: smaller sizes, the same gradient.

`Reductions` says how far the sizes of the run file are cut down. What costs least is cut first: the wider chunks of
the pass without a graph, kept graphs, the tiles of a loss that ran out, then the chunks. No gradient depends on it.

One process heals in place: it drops the update's gradients and runs its batches again (training/step.py). With several
processes nothing that the rank could send is certain to be what the others wait for. So the rank stores the smaller
sizes in the run's folder and ends with the cause. The others lose a peer, find the cause there, and end with it too;
where a lost peer is not noticed (NCCL), the launcher ends them. A start with the same fields takes the smallest sizes
that any rank finds stored.

Where forwards are a rank's own (DDP), a step that is larger than all before it is tried out first, without a
collective (`place_out_of_memory`), so that all ranks can choose smaller sizes together.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_dist_ext import policy
from hf_dist_ext.engine import gradient_cache as engine
from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch
from hf_dist_ext.engine.gradient_cache import Phase
from hf_dist_ext.engine.outputs import Output, RowSize, row_size, tensors_of
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies import collectives

logger = logging.getLogger(__name__)

FILE = "smaller_chunks.json"  # in the run's folder
FIELDS = ("chunk_size", "chunk_tokens", "chunk_patches", "keep_graph", "memory_gib")  # gradient_cache_*
ALL_GRAPHS = 2**31
ENCODE, REPLAY, LAST, LOSS = PLACES = (
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
    max_kept_graphs: int = ALL_GRAPHS
    widens: bool = True  # the pass without a graph takes larger chunks
    tile_halvings: int = 0  # of the loss

    @property
    def share(self) -> float:
        return 0.5**self.chunk_halvings

    def smaller(
        self, place: str, has_wider: bool, num_kept: int, has_tiles: bool, can_halve: bool
    ) -> Reductions | None:
        """The next sizes after a lack of memory in a place; None: nothing that would help is left."""
        if place == ENCODE and has_wider:
            return replace(self, widens=False)
        if num_kept > 0:
            return replace(self, max_kept_graphs=num_kept // 2)
        if place == LOSS:
            return replace(self, tile_halvings=self.tile_halvings + 1) if has_tiles else None
        return replace(self, chunk_halvings=self.chunk_halvings + 1) if can_halve else None

    def smallest(self, other: Reductions) -> Reductions:
        return Reductions(
            max(self.chunk_halvings, other.chunk_halvings),
            min(self.max_kept_graphs, other.max_kept_graphs),
            self.widens and other.widens,
            max(self.tile_halvings, other.tile_halvings),
        )

    def __str__(self) -> str:
        words = [f"chunks of {self.share:g} of the size that was given"] if self.chunk_halvings else []
        words += [f"at most {self.max_kept_graphs} kept graphs"] if self.max_kept_graphs < ALL_GRAPHS else []
        words += ["a pass without a graph that is not widened"] if not self.widens else []
        words += [f"tiles of the loss of {0.5**self.tile_halvings:g} of their size"] if self.tile_halvings else []
        return ", ".join(words)


def is_lack_of_memory(error: BaseException) -> bool:
    """torch's own error, or that of somebody else who got no memory from the device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and BESIDE_ALLOCATOR.search(str(error)) is not None
    )


class FittingSizes:
    """The sizes of one run, in this process and in its folder. `place`: where in a step this process is."""

    def __init__(self, args: Any, loss: Any):
        self.path = Path(args.output_dir, FILE)
        self.given = {name: getattr(args, f"gradient_cache_{name}") for name in FIELDS}
        self.loss = loss
        self.now, self.place, self.cause = Reductions(), ENCODE, ""
        self._run = 0  # number of this start, the same on all ranks

    def begin(self) -> None:
        """At the start of training, on every rank."""
        own, smallest = astuple(self._smallest_stored(Reductions())), Reductions()
        everyone = collectives.exchange([*map(int, own), random.SystemRandom().getrandbits(60)])
        self._run = everyone[0][-1]
        for halvings, kept, widens, tiles, _ in everyone:
            smallest = smallest.smallest(Reductions(halvings, kept, bool(widens), tiles))
        if smallest != Reductions():
            logger.warning(
                f"memory ran out with the sizes that are given, says {self.path}. This run has {smallest}; the "
                "gradient is the same. Delete the file to try the given sizes again."
            )
        self._take(smallest)

    def _take(self, sizes: Reductions) -> None:
        self.now = sizes
        if hasattr(self.loss, "tile_halvings"):
            self.loss.tile_halvings = sizes.tile_halvings

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def shrink(self, place: str, step: int, ranks: list[int], **of_step: Any) -> None:
        """After a lack of memory that all ranks know of: `now` is smaller.

        Raises:
            RunError: nothing that would help is left.
        """
        named = ", ".join(map(str, ranks))
        self.cause = f"step {step}: rank {named} ran out of memory in {place}"
        smaller = self.now.smaller(place, has_tiles=self._has_tiles, **of_step)
        if smaller is None:
            raise RunError(f"step {step}: rank {named} ran out of memory in {place}{_nothing_left(place)}")
        self._take(smaller)
        if collectives.rank() == 0:
            logger.warning(f"{self.cause}. The step is run again with {smaller}, which stays so from here on.")
            try:
                self._store(smaller)
            except OSError as error:  # the other ranks go on
                logger.warning(f"{self.path} could not be written ({error}): the next start tries larger sizes again.")

    def end_run(self, step: int, **of_step: Any) -> RunError:
        """After a lack of memory that only this rank knows of: the error to raise, which the others find stored."""
        self.cause = f"step {step}: rank {collectives.rank()} ran out of memory in {self.place}"
        smaller = self.now.smaller(self.place, has_tiles=self._has_tiles, **of_step)
        if smaller is None:
            self.cause += _nothing_left(self.place)
        else:
            self.cause += (
                f". Start the run again with --resume_from_checkpoint auto. It then has {smaller}, as {self.path} "
                "says, and the same gradient."
            )
        try:
            self._store(smaller or self.now)
        except OSError as error:
            self.cause += f" That file could not be written ({error}): give smaller sizes in the run file."
        return RunError(self.cause)

    def error_of_peer(self) -> RunError | None:
        """The error of the rank that ran out of memory in this start, when one did."""
        stored = self._read()
        return RunError(stored["cause"]) if self._run and stored.get("run") == self._run else None

    @property
    def _has_tiles(self) -> bool:
        return hasattr(self.loss, "tile_halvings") and policy.LOSS_TILE_ROWS >> self.now.tile_halvings > 1

    def _smallest_stored(self, sizes: Reductions) -> Reductions:
        """These, or what the same fields have stored, by another rank too."""
        stored = self._read()
        return sizes.smallest(Reductions(**stored["sizes"])) if stored.get("given") == self.given else sizes

    def _store(self, sizes: Reductions) -> None:
        sizes = asdict(self._smallest_stored(sizes))
        content = {"given": self.given, "sizes": sizes, "cause": self.cause, "run": self._run}
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


def place_out_of_memory(
    encode: Callable[[Chunk], Output],
    chunked: ChunkedBatch,
    wide: ChunkedBatch | None,
    num_kept: int,
    loss_bytes: Callable[[RowSize], int],
    has_graph: bool = True,
) -> str | None:
    """Runs what a step holds at most, by itself: None where it fits, else the place. Call it while no parameter has a
    gradient; it leaves zeros in `.grad`.

    Args:
        encode: chunk -> embeddings, without a collective.
        num_kept: graphs that live beside a running chunk.
        loss_bytes: size of a row's embedding -> what the loss will hold.
        has_graph: False where no chunk is encoded with one (a frozen backbone).
    """
    place, costliest = ENCODE, list(costliest_chunks(chunked)) if has_graph else []
    try:
        with torch.no_grad():
            size = max(row_size(encode(chunk)) for chunk in costliest_chunks(wide or chunked))
        place = REPLAY
        graphs = [encode(chunk) for chunk in costliest for _ in range(num_kept)]
        place = LOSS
        torch.empty(loss_bytes(size), dtype=torch.uint8, device=chunked.device)
        place = REPLAY
        graphs += [encode(chunk) for chunk in costliest]
        outputs = [one for output in graphs for one in tensors_of(output)]
        zeros = [(rows * 0.0).sum() for rows in outputs if rows.requires_grad]
        if zeros:
            sum(zeros).backward()
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        return place
    return None


def costliest_chunks(chunked: ChunkedBatch) -> Iterator[Chunk]:
    """Of every table, without and with images, the chunk with most tokens: so many graphs may live at once."""
    kinds: dict[tuple[int, bool], list[Chunk]] = {}
    for chunk in chunked.chunks():
        kinds.setdefault((chunk.table, chunk.has_vision), []).append(chunk)
    for chunks in kinds.values():
        yield max(chunks, key=lambda chunk: chunk.num_tokens)
