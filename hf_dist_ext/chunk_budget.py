"""`gradient_cache_chunk_size="auto"`: tokens per chunk from what the first steps really used, not from a formula.

(1) the first step runs small chunks; around every replay the peak of what autograd holds is measured
(2) from the second step on (the optimizer's state exists by then) memory that is free, less a margin of 5 %, divided
    by the bytes per token measured, gives the tokens per chunk; the least of all ranks counts
(3) with graphs to keep, a chunk gets a quarter of the budget and kept graphs the rest
(4) a batch with longer rows than any measured is measured again: attention may cost more per token there
(5) a rank that runs out of memory all the same in the first steps of a size says so to the others at the next of two
    agreements, before embeddings are gathered and before gradients are reduced; all halve the chunk and run the step
    again

The gradient is the full batch's for every chunk size, so the measuring step is a training step like any other. On a
CPU the budget is a number of bytes that the user gives, and the peak is that of tensors saved for backward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
import torch.utils.checkpoint

from .chunking import Chunk, ChunkedBatch, ChunkLimits
from .gradient_cache import CachedStep, Phase

logger = logging.getLogger(__name__)

MEASURING_ROWS = 8
MARGIN = 0.05
GUARDED_STEPS = 3  # steps in which a new chunk size must show that it fits
CHUNK_SHARE_WITH_KEPT_GRAPHS = 0.25


class _OutOfMemoryElsewhere(Exception):
    pass


@dataclass
class Measured:
    """What is known of this model on this device; zero before the first measurement. Stored in the checkpoint."""

    bytes_per_token: float = 0.0  # peak of a chunk's forward and backward / its tokens, padding included
    width: int = 0  # the widest chunk measured
    available: int = 0  # bytes for activations; 0 while measuring
    device: str = ""


class ChunkBudget:
    """Finds the tokens per chunk, and how many graphs may be kept, during the first steps.

    Args:
        device: where the model runs.
        budget_bytes: memory for activations; None asks an accelerator what is free. A CPU needs a number.
        agree: a number of this rank -> the least of all ranks.
        weights: tensors that a forward saves but does not make.
        fixed: the chunk limits are given and only the number of kept graphs is looked for; None: both, or the first.
        keeps_graphs: decide how many graphs are kept.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int | None,
        agree: Callable[[int], int],
        weights: Iterable[torch.Tensor] = (),
        fixed: ChunkLimits | None = None,
        keeps_graphs: bool = False,
    ):
        assert budget_bytes is not None or device.type != "cpu"
        self.device, self.budget_bytes, self.agree, self.weights = device, budget_bytes, agree, list(weights)
        self.fixed, self.keeps_graphs = fixed, keeps_graphs
        self.measured = Measured()
        # Set where no chunk has a graph (a frozen backbone): bytes per token of a forward, for a CPU, whose memory is
        # known by what graphs save; an accelerator is measured.
        self.forward_bytes: float | None = None
        self._tokens_inside = self._width_inside = 0
        self._found: list[tuple[int, int]] = []  # tokens and peak bytes of every chunk measured
        self._widest = 0
        self._measuring_rows = MEASURING_ROWS
        self._steps_to_guard, self._asks_left, self.is_guarding = GUARDED_STEPS, 0, False

    @property
    def is_measuring(self) -> bool:
        return not self.measured.available

    def limits(self, longest_row: int, given: ChunkLimits, may_settle: bool = True) -> ChunkLimits:
        """Limits for a batch whose longest row (of any rank) has the given tokens; a few rows while measuring.

        `given` says what the user bounds beside tokens: the width multiple and the image patches. `may_settle` is
        False as long as the optimizer has not allocated its state.
        """
        if longest_row > self.measured.width:
            self.measured.available, self._steps_to_guard, self._found = 0, GUARDED_STEPS, []
        elif self.is_measuring and may_settle:
            self._settle()
        if self.fixed is not None:
            return self.fixed
        if self.is_measuring:
            return replace(given, max_rows=self._measuring_rows, max_tokens=None)
        return replace(given, max_rows=None, max_tokens=max(self.tokens, longest_row))

    @property
    def tokens(self) -> int:
        """Tokens per chunk."""
        share = CHUNK_SHARE_WITH_KEPT_GRAPHS if self.keeps_graphs else 1
        return max(1, int(self.measured.available * share / self.measured.bytes_per_token))

    def keep_graph(self, costliest_chunk: int) -> int:
        """Graphs that fit beside one running chunk, each counted as the costliest (in tokens)."""
        if self.is_measuring or not self.keeps_graphs:
            return 0
        of_a_chunk = self.measured.bytes_per_token * costliest_chunk
        return max(0, int(self.measured.available / of_a_chunk) - 1)

    def _settle(self) -> None:
        available = self.budget_bytes
        if available is None:
            gradients = sum(weight.numel() * weight.element_size() for weight in self.weights if weight.requires_grad)
            available = int((free_bytes(self.device) - gradients) * (1 - MARGIN))
        self.measured.available = max(1, self.agree(available))
        self.measured.device = _name(self.device)

    # ---- out of memory ----

    def run(self, attempt: Callable[[], CachedStep], reset: Callable[[], None], can_retry: bool) -> CachedStep:
        """`attempt()`, again with half the chunk as long as memory runs out on any rank; `reset` undoes an attempt.

        `attempt` has to use the functions of `guarded`. The error is raised where a rank can not tell the others:
        without `can_retry` (FSDP, whose forwards are collectives; a later micro-batch, whose gradients are already
        mixed), after the guarded steps, and in the chunk that reduces.
        """
        self.is_guarding = can_retry and self._steps_to_guard > 0
        while True:
            self._asks_left = 2
            try:
                step = attempt()
                break
            except torch.OutOfMemoryError:
                if not (self.is_guarding and self._asks_left and self._can_halve):
                    raise
                self.agree(-1)  # the others hear it at their next agreement
            except _OutOfMemoryElsewhere:
                assert self._can_halve
            self._halve()
            reset()
        self._steps_to_guard -= 1
        self.is_guarding = False
        return step

    def guarded(self, score: Callable, sync: Callable) -> dict[str, Callable]:
        """The same functions for `cached_step` with `replays_last`. Before the score gathers embeddings, and before
        the forward that arms the reduction, all ranks agree that none has run out of memory."""

        def asking_score(embeddings: object) -> object:
            self._agree_to_go_on()
            return score(embeddings)

        def asking_sync(phase: Phase) -> object:
            if phase.is_last:
                self._agree_to_go_on()
            return sync(phase)

        return {"score": asking_score, "sync": asking_sync}

    def _agree_to_go_on(self) -> None:
        if self.agree(0) < 0:
            raise _OutOfMemoryElsewhere
        self._asks_left -= 1

    @property
    def _can_halve(self) -> bool:
        return self._measuring_rows > 1 if self.is_measuring else self.fixed is None or self.keeps_graphs

    def _halve(self) -> None:
        if self.is_measuring:
            self._measuring_rows //= 2
        else:
            self.measured.available = max(1, self.measured.available // 2)
        found = f"{self._measuring_rows} rows" if self.is_measuring else f"{self.measured.available / 2**30:.2f} GiB"
        logger.warning(f"gradient cache: out of memory on some rank; all try again with {found} for a chunk.")
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    # ---- measuring ----

    def encode(self, encode: Callable[[Chunk], torch.Tensor]) -> Callable[[Chunk], torch.Tensor]:
        """The same function, noting the tokens of what is encoded with a graph (or at all, where none has one)."""

        def noting(chunk: Chunk, **more: object) -> torch.Tensor:
            if torch.is_grad_enabled() or self.forward_bytes is not None:
                width = chunk.width or 1
                self._tokens_inside += chunk.num_rows * width
                self._width_inside = max(self._width_inside, width)
            return encode(chunk, **more)

        return noting

    def sync(self, sync: Callable[[Phase], object]) -> Callable[[Phase], object]:
        """The same context, measuring the peak of every phase that has a graph."""

        @contextmanager
        def measuring(phase: Phase) -> Iterator[None]:
            if not phase.with_graph and self.forward_bytes is None:
                with sync(phase):
                    yield
                return
            self._tokens_inside = self._width_inside = 0
            with sync(phase), peak_bytes(self.device, self.weights) as peak:
                yield
            if self._tokens_inside:
                is_estimated = self.forward_bytes is not None and self.device.type == "cpu"
                held = int(self._tokens_inside * self.forward_bytes) if is_estimated else peak()
                self._found.append((self._tokens_inside, held))
                self._widest = max(self._widest, self._width_inside)

        return measuring

    def step_ended(self) -> None:
        """Take over what the step measured; all ranks agree on the costliest, and so on when to settle."""
        most_tokens = max((tokens for tokens, _ in self._found), default=1)
        # What a chunk holds per row rather than per token weighs too much in small ones.
        worst = max((peak / tokens for tokens, peak in self._found if 2 * tokens >= most_tokens), default=0)
        scale = 1024  # thousandths of a byte survive the agreement on integers
        self.measured.bytes_per_token = max(1, -self.agree(-int(worst * scale))) / scale
        self.measured.width = -self.agree(-self._widest)

    def state(self) -> dict:
        return asdict(self.measured)

    def resume(self, state: dict) -> bool:
        """Take a checkpoint's measurement, unless it was made on another kind of device."""
        if state.get("device") != _name(self.device):
            return False
        self.measured = Measured(**state)
        return True


def longest_row(batch: ChunkedBatch) -> int:
    """Real tokens of the longest row."""
    return max(last - first for table in batch.tables for first, last in table.extents)


def costliest_chunk(batch: ChunkedBatch) -> int:
    """Tokens, padding included, of the chunk that has most."""
    return max(
        table.cost(*bounds, batch.limits) for table in batch.tables for bounds in table.bounds if len(set(bounds)) > 1
    )


def widened(batch: ChunkedBatch, factor: int) -> ChunkedBatch:
    """The same rows in chunks of `factor` times the rows and tokens."""
    limits = batch.limits
    wider = replace(
        limits,
        max_rows=None if limits.max_rows is None else limits.max_rows * factor,
        max_tokens=None if limits.max_tokens is None else limits.max_tokens * factor,
        max_patches=None if limits.max_patches is None else limits.max_patches * factor,
    )
    return ChunkedBatch([replace(table, bounds=[]) for table in batch.tables], wider)


def free_bytes(device: torch.device) -> int:
    """What torch may still allocate: free on the device, and reserved by torch but not in use."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


@contextmanager
def peak_bytes(device: torch.device, known: Iterable[torch.Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Gives a function that says how many bytes were held at most since entering: allocated on an accelerator; on a
    CPU saved for backward, recomputed activations of checkpointing included, `known` not."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        yield lambda: module.max_memory_allocated(device) - before
        return
    of_known = {_storage(tensor) for tensor in known}
    held: dict[int, int] = {}  # storage -> how often it is saved
    now = most = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor):
            nonlocal now, most
            self.tensor, self.key = tensor, _storage(tensor)
            held[self.key] = held.get(self.key, 0) + 1
            if held[self.key] == 1:
                now += tensor.untyped_storage().nbytes()
                most = max(most, now)

        def __del__(self):
            nonlocal now
            held[self.key] -= 1
            if not held[self.key]:
                now -= self.tensor.untyped_storage().nbytes()

    def pack(tensor: torch.Tensor):
        return tensor if _storage(tensor) in of_known else Saved(tensor)

    hook = torch.utils.checkpoint._recomputation_hook

    class Counting(hook):
        """Non-reentrant checkpointing runs a layer again under hooks of its own, so ours see nothing of it (torch
        2.13). Remove when torch calls hooks inside hooks."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            inner, counted = self.pack_hook, []

            def pack_again(tensor: torch.Tensor):
                counted.append(pack(tensor.detach()))  # with its graph, it would keep itself alive
                return inner(tensor)

            self.pack_hook = pack_again

    torch.utils.checkpoint._recomputation_hook = Counting
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: getattr(saved, "tensor", saved)):
            yield lambda: most
    finally:
        torch.utils.checkpoint._recomputation_hook = hook


def _storage(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage().data_ptr()


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
