"""`gradient_cache_chunk_size="auto"`: tokens per chunk from what the first steps really used, not from a formula.

(1) the first two steps run chunks of 8 and of 16 rows. Of every chunk with a graph the peak is measured, beyond what
    was allocated when the step began
(2) a straight line through the two sizes: its intercept is what a step holds whatever the chunk (gradients, weights
    that were gathered or cast, the embeddings of the batch), its slope the bytes per token
(3) the chunk at which the line meets the memory that is free (from the second update on, when the optimizer's state
    exists), less a margin of 5 % and what the allocator wastes between tensors, is approached by doubling, and every
    step on the way is measured: the line is never extended to more than twice what was seen. Of the ranks' sizes the
    smallest counts
(4) with graphs to keep, a chunk gets a quarter of what the intercept and the loss leave, and kept graphs the rest.
    Where the loss takes most of it, none is kept: a chunk alone is gone before the loss, and may have all
(5) longer rows than any measured get fewer tokens, as if bytes per token grew with the width (as attention's do), and
    are measured in their turn

The gradient is the full batch's for every chunk size, so a step that measures trains like any other. On a CPU torch
counts no memory: chunks have a fixed size there (training/sizes.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace

import torch

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import KEEP, SCORE, Phase
from hf_dist_ext.engine.tables import ChunkLimits

logger = logging.getLogger(__name__)

MEASURING_ROWS = (8, 16)  # of the first two steps
PROBED_CHUNKS = 64  # a first step of more chunks than that is not the one that measures
SHARE_OF_FIRST_STEP = 0.5  # of free memory: probes hold neither the batch's embeddings nor the loss
GROWTH = 2
MARGIN = 0.05
CHUNK_SHARE_WITH_KEPT_GRAPHS = 0.25
LEAST_BESIDE_LOSS = 0.25  # of what the intercept leaves, for graphs to be kept
CAN_DIFFER = 0.75  # two sizes: the smaller has at most this share of the larger one's tokens
ALIKE = 0.9  # of the width
LASTING = 1 / 64  # of a peak: a chunk that leaves more than that behind has made gradients, and its own peak is hidden


def free_bytes(device: torch.device) -> int:
    """What torch may still allocate: free on the device, and reserved by torch but not in use."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


class Peak:
    """Bytes that are allocated on an accelerator since a beginning: `peak()` the most since the last `restart()`,
    `now()` at this moment."""

    def __init__(self, device: torch.device):
        self._module, self._device = torch.get_device_module(device), device
        self._module.empty_cache()  # of other parts of a run, whose pieces are none of this one's
        self._module.reset_peak_memory_stats(device)
        self._start = self._highest = self._module.memory_allocated(device)

    def __call__(self) -> int:
        return self._module.max_memory_allocated(self._device) - self._start

    def now(self) -> int:
        return self._module.memory_allocated(self._device) - self._start

    def restart(self) -> int:
        """Gives `now()`."""
        self._highest = max(self._highest, self._module.max_memory_allocated(self._device))
        self._module.reset_peak_memory_stats(self._device)
        return self.now()

    def wasted(self) -> int:
        """Bytes that the allocator has reserved since the beginning beyond the most that was held at once: pieces
        between tensors, into which no other one fitted."""
        most = max(self._highest, self._module.max_memory_allocated(self._device))
        return max(0, self._module.memory_reserved(self._device) - most)


@dataclass
class Measured:
    """What is known of this model on this device. Stored in the checkpoint."""

    bytes_per_token: float = 0.0  # of a chunk's forward and backward, padding included
    intercept: float = 0.0  # bytes that a step holds beside, whatever the chunk
    loss_bytes: int = 0  # held while the loss is computed
    graphs_at_once: int = 1  # without kept ones: models with several towers end a step with a chunk of each
    width: int = 0  # the longest row measured
    available: int = 0  # bytes that a step may take
    tokens: int = 0  # per chunk; 0 until it is settled
    device: str = ""
    given: dict = field(default_factory=dict, compare=False)  # what was asked for: with another it is measured again


@dataclass
class _Point:
    tokens: int
    width: int
    peak: int
    lasting: int  # bytes that stayed


def _by_size(point: _Point) -> tuple[int, int]:
    return point.tokens, point.peak


@dataclass
class _AliveGraphs:
    """Of chunks whose backward is still to come."""

    held_before: int  # bytes
    tokens: int = 0
    number: int = 0
    width: int = 0


class ChunkBudget:
    """Finds the tokens per chunk, and how many graphs may be kept, during the first steps.

    Args:
        device: an accelerator, where the model runs.
        budget_bytes: memory that a step may take; None: what is free.
        finds_size: False where the chunk limits are given and only the number of kept graphs is looked for.
        keeps_graphs: decide how many graphs are kept.
        has_graphs: False where no chunk has one (a frozen backbone), so that forwards are measured.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int | None,
        finds_size: bool = True,
        keeps_graphs: bool = False,
        has_graphs: bool = True,
    ):
        self.device, self.budget_bytes = device, budget_bytes
        self.finds_size, self.keeps_graphs, self.has_graphs = finds_size, keeps_graphs, has_graphs
        self.measured = Measured()
        self.num_measured_steps = 0
        self.proposed = 0
        self._points: list[list[_Point]] = []  # of the last two steps
        self._peak: Peak  # of the step that is measured
        self._alive: _AliveGraphs | None = None
        self._new_points: list[_Point] = []
        self._wasted = 0  # bytes of the last step: Peak.wasted
        self._largest = self._largest_now = 0  # tokens of a chunk: of the last step, of the one that is measured
        self._agreed = self._limit = self._longest = 0  # tokens per chunk, as its limit, of a batch's longest row
        self._has_line = self._has_warned = self._may_settle = False

    @property
    def is_measuring(self) -> bool:
        return not self.measured.tokens

    # ---- sizes ----

    def propose(self, may_settle: bool) -> None:
        """Sets `proposed`, this rank's tokens per chunk; 0 while rows are counted. To be called before the first
        micro-batch of an update, when there are no gradients. `may_settle`: the optimizer's state exists."""
        self._may_settle = may_settle
        if self.is_measuring and self.num_measured_steps >= len(MEASURING_ROWS):
            self._settle()
        else:
            self.proposed = self.measured.tokens

    def probes(self, rows: int) -> bool:
        """Whether chunks are tried out by themselves before the step that begins, the first one. rows: of a rank's
        batch, which as many chunks as that of the first sizes would take long."""
        return self.finds_size and not self.num_measured_steps and rows > PROBED_CHUNKS * MEASURING_ROWS[0]

    def _settle(self) -> None:
        known = self.measured
        known.available = self.budget_bytes or int(free_bytes(self.device) * (1 - MARGIN))
        known.available -= GROWTH * self._wasted
        if not self._may_settle:
            known.available = int(known.available * SHARE_OF_FIRST_STEP)
        known.device = _name(self.device)
        of_chunk = known.available - known.intercept
        beside_loss = of_chunk - known.loss_bytes
        if self.keeps_graphs and beside_loss >= LEAST_BESIDE_LOSS * of_chunk:
            of_chunk = beside_loss * CHUNK_SHARE_WITH_KEPT_GRAPHS
        tokens = max(1, int(of_chunk / (known.bytes_per_token * known.graphs_at_once)))
        is_whole_batch = self._limit and self._largest <= self._limit / GROWTH
        self.proposed = min(tokens, GROWTH * self._largest)
        if self._may_settle and (not self.finds_size or is_whole_batch or self.proposed == tokens):
            known.tokens = self.proposed = tokens

    def limits(self, longest_row: int, tokens: int, given: ChunkLimits, share: float = 1.0) -> ChunkLimits:
        """Limits for a batch whose longest row (of any rank) has so many tokens.

        Args:
            tokens: the least that any rank proposes.
            given: what the user bounds; without a size to find, all of it.
            share: of the size found, after a lack of memory.
        """
        known = self.measured
        if self._may_settle and 0 < tokens < self.proposed and tokens <= self._agreed:
            known.tokens = self.proposed  # another rank has less room: this one need not look further
        self._agreed = tokens
        self._longest = longest_row
        if self.num_measured_steps >= len(MEASURING_ROWS) and longest_row > known.width:
            known.tokens, self._points = 0, []  # (5)
            tokens = int(tokens * known.width / longest_row)
        if not self.finds_size:
            return given if self.num_measured_steps else given.scaled(0.5)
        if not tokens:
            rows = MEASURING_ROWS[min(self.num_measured_steps, len(MEASURING_ROWS) - 1)]
            return replace(given, max_rows=max(1, int(rows * share)), max_tokens=None)
        self._limit = max(int(tokens * share), longest_row)
        if known.tokens and int(tokens * share) < longest_row and not self._has_warned:
            self._has_warned = True
            needed = known.intercept + known.bytes_per_token * known.graphs_at_once * longest_row
            logger.warning(
                f"gradient cache: a row of {longest_row} tokens takes about {needed / 2**30:.2g} GiB in a step, more "
                f"than the {known.available / 2**30:.2g} GiB there are for it. A chunk is one row, and memory will be "
                "exceeded. Lower max_length, or raise gradient_cache_memory_gib where it is given."
            )
        return replace(given, max_rows=None, max_tokens=self._limit)

    def reserve(self, loss_bytes: int) -> None:
        """The loss takes so much at least."""
        self.measured.loss_bytes = max(self.measured.loss_bytes, loss_bytes)

    def keep_graph(self, costliest_chunk: int) -> int:
        """Graphs that fit beside one running chunk and the loss, each counted as the costliest (in tokens)."""
        if self.is_measuring or not self.keeps_graphs:
            return 0
        known = self.measured
        of_a_chunk = known.bytes_per_token * costliest_chunk
        left = known.available - known.intercept - known.loss_bytes - of_a_chunk
        return max(0, int(left / of_a_chunk))

    # ---- measuring ----

    @contextmanager
    def measured_step(self) -> Iterator[None]:
        """Around a step that is run with `phase`."""
        self._new_points, self._alive, self._largest_now = [], None, 0
        self._peak = Peak(self.device)
        yield
        self._wasted = self._peak.wasted()
        self._points, self._largest = [*self._points[-1:], self._new_points], self._largest_now
        self.num_measured_steps += 1
        self.measured.width = max(self.measured.width, self._longest)
        self._fit()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Around every part of a step that is measured: the peak from a graph's forward to its backward (of a forward
        where no chunk has a graph), and that of the loss."""
        if phase.kind == SCORE:
            self._peak.restart()
            yield
            self.reserve(self._peak())
            return
        if phase.has_graph != self.has_graphs:
            yield
            return
        alive = self._alive = self._alive or _AliveGraphs(self._peak.restart())
        if phase.chunk is not None:
            width, tokens = phase.chunk.width or 1, phase.chunk.num_tokens
            alive.tokens, alive.number, alive.width = alive.tokens + tokens, alive.number + 1, max(alive.width, width)
            self._largest_now = max(self._largest_now, tokens)
        yield
        if phase.kind != KEEP:
            self._add_point(alive)

    def _add_point(self, graphs: _AliveGraphs) -> None:
        self._alive = None
        if not graphs.tokens:  # a backward of graphs that were counted with an earlier one
            return
        peak, lasting = self._peak(), self._peak.now() - graphs.held_before
        self._new_points.append(_Point(graphs.tokens, graphs.width, peak, lasting))
        self.measured.graphs_at_once = max(self.measured.graphs_at_once, graphs.number)

    def _fit(self) -> None:
        """(2), through the costliest chunk and a clearly smaller one of like width."""
        known, points = self.measured, [point for of_step in self._points for point in of_step]
        # In the replay that makes the gradients, the peak holds only some of them.
        points = [point for point in points if point.lasting <= LASTING * point.peak] or points
        if not points:
            return
        most = max(points, key=_by_size)
        smaller = [point for point in points if point.tokens <= CAN_DIFFER * most.tokens]
        alike = [point for point in smaller if point.width >= ALIKE * most.width]
        if other := max(alike or ([] if self._has_line else smaller), key=_by_size, default=None):
            self._has_line = True
            known.bytes_per_token = max(1.0, (most.peak - other.peak) / (most.tokens - other.tokens))
            known.intercept = most.peak - known.bytes_per_token * most.tokens
        else:
            known.bytes_per_token = (most.peak - known.intercept) / most.tokens
        if known.intercept < 0 or known.bytes_per_token < 1:
            known.intercept, known.bytes_per_token = 0.0, max(1.0, most.peak / most.tokens)

    def state(self) -> dict:
        return asdict(self.measured)

    def resume(self, state: dict) -> bool:
        """Take a checkpoint's measurement, unless it was made on another kind of device, or for other fields."""
        names = {one.name for one in fields(Measured)}
        if set(state) != names or (state["device"], state["given"]) != (_name(self.device), self.measured.given):
            return False
        self.measured, self.num_measured_steps, self._has_line = Measured(**state), len(MEASURING_ROWS), True
        return True


def longest_row(batch: ChunkedBatch) -> int:
    """Real tokens of the longest row."""
    return max(table.longest for table in batch.tables if table.num_rows)


def widened(batch: ChunkedBatch, factor: int) -> ChunkedBatch:
    """The same rows in chunks of `factor` times the rows and tokens."""
    return batch.within(batch.limits.scaled(factor))


def _name(device: torch.device) -> str:
    return torch.get_device_module(device).get_device_name(device)
