"""What processes do together, whatever the strategy.

(1) processes on a machine without an accelerator become a gloo group, FSDP included
(2) rows travel: a differentiable gather whose gradients return to the rank that made the row
(3) what stays whole on every rank between the chunks of a step is decided by the memory that all have
(4) gradients that no wrapper owns (the loss's own parameters) are averaged by hand
(5) processes leave together

Under tensor parallelism `share_rows` says that so many consecutive ranks hold the same rows; rows then travel among
ranks that hold different ones, and only those count. `exchange` is of all ranks: `one_of_each` leaves one per group.

The loss is the mean over the global batch. Each rank scores its own rows against everyone's columns; the gather's
backward sums what all ranks say about a row, and DDP and FSDP average over ranks, so no world-size factor appears.
Ranks that hold more rows weigh more: `row_weight`. Letters: B own rows, N all ranks' rows, D embedding, W ranks (with
rows of their own).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError

# ---- (1) processes without an accelerator ----


def processes_here() -> int:
    """Processes of this run on this machine, as its launcher says."""
    return launched.processes_here(world_size())


def must_use_cpu() -> bool:
    """Several processes and no accelerator: without `use_cpu` every rank would train alone into one output_dir. Not
    for DeepSpeed, which finds the CPU itself and which accelerate drops, silently, once `use_cpu` is set."""
    is_cpu = launched.uses_cpu() or not has_accelerator()
    return launched.processes() > 1 and is_cpu and not launched.uses_deepspeed()


def has_accelerator() -> bool:
    """A device that processes can share work over; Apple's is visible to one process only."""
    return torch.accelerator.is_available() and torch.accelerator.current_accelerator().type != "mps"


@contextmanager
def sharded_on_cpu(has_mesh: bool = False) -> Iterator[None]:
    """Around the making of an `Accelerator`: let FSDP2 be FSDP2 on gloo, and take a mesh of processes (`has_mesh`).

    accelerate 1.15 (state.py, AcceleratorState.__init__) looks at FSDP only when the distributed type is one of the
    accelerators' and otherwise trains DDP without a word; ParallelismConfig refuses MULTI_CPU. Remove when MULTI_CPU
    reaches the first and passes the second; tests/distributed/test_upstream.py tells.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    wants_fsdp = launched.uses_fsdp()
    state = PartialState._shared_state
    if (wants_fsdp or has_mesh) and state.get("distributed_type") == DistributedType.MULTI_CPU:
        if wants_fsdp and launched.fsdp_setting("version", "2") == "1":
            raise UsageError("FSDP version 1 does not run without an accelerator; set fsdp_version: 2 in the YAML.")
        state["distributed_type"] = DistributedType.MULTI_GPU
    yield


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


# ---- which ranks hold rows of their own ----


@dataclass(frozen=True)
class _RowSharing:
    size: int = 1  # consecutive ranks that hold the same rows
    peers: Any = None  # process group of the ranks with this one's place in their groups; None: all ranks


_sharing = _RowSharing()  # of this process, as its process groups are


def share_rows(size: int, peers: Any = None) -> None:
    """From now on `size` consecutive ranks hold the same rows; `peers` are this rank's of the other groups."""
    global _sharing
    _sharing = _RowSharing(size, peers)


def ranks_per_rows() -> int:
    """How many ranks hold the same rows: 1 but under tensor parallelism."""
    return _sharing.size


def data_parallel_size() -> int:
    """W: ranks, or groups of ranks, with rows of their own."""
    return world_size() // _sharing.size


def data_parallel_rank() -> int:
    return rank() // _sharing.size


def one_of_each(of_ranks: Sequence[Any]) -> list[Any]:
    """What all ranks say -> what those say that hold different rows."""
    return list(of_ranks[:: _sharing.size])


# ---- (2) rows travel ----

# torch 2.13 renamed both and warns about the old names; below that only the old ones exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange(numbers: list[int], device: torch.device) -> list[list[int]]:
    """Every rank's list of integers, in rank order: one small all-gather and one copy to the host."""
    if world_size() == 1:
        return [numbers]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = mine.new_empty(world_size() * len(numbers))
    _all_gather(everyone, mine)
    return everyone.view(world_size(), -1).tolist()


def exchange_later(numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to gather every rank's small tensor (n,); the function it gives waits and returns all of them, (W, n)."""
    if world_size() == 1:
        return lambda: numbers.unsqueeze(0)
    everyone = numbers.new_empty(world_size() * len(numbers))
    work = _all_gather(everyone, numbers, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return everyone.view(world_size(), -1)

    return wait


def texts_of(text: str, ranks: Iterable[int]) -> list[str]:
    """What the given ranks (none: rank 0) say, in words, on every rank. Slow; for reports. Every rank must call it."""
    if world_size() == 1:
        return [text]
    everyone: list = [None] * world_size()
    dist.all_gather_object(everyone, text)
    return [f"rank {rank}: {everyone[rank]}" for rank in list(ranks) or [0]]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.counts = counts
        most = max(counts)
        padded = (
            rows if rows.shape[0] == most else torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])
        )
        everyone = rows.new_empty(len(counts) * most, *rows.shape[1:])
        _all_gather(everyone, padded.contiguous(), group=_sharing.peers)
        if min(counts) == most:
            return everyone  # (W*B, D)
        return torch.cat([part[:count] for part, count in zip(everyone.split(most), counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        counts, most = ctx.counts, max(ctx.counts)
        if min(counts) != most:
            padded = gradient.new_zeros(len(counts), most, *gradient.shape[1:])
            for part, to, count in zip(gradient.split(counts), padded, counts, strict=True):
                to[:count] = part
            gradient = padded.flatten(0, 1)
        mine = gradient.new_empty(most, *gradient.shape[1:])
        _reduce_scatter(mine, gradient.contiguous(), group=_sharing.peers)
        return mine[: counts[data_parallel_rank()]], None


def gather_rows(rows: torch.Tensor, counts: Iterable[int]) -> torch.Tensor:
    """(B, ...) -> (N, ...) in rank order, differentiable: what all ranks say about a row is summed at its owner.

    `counts` holds every rank's number of rows (see `exchange`). One all-gather forward, one reduce-scatter backward.
    """
    return rows if data_parallel_size() == 1 else _GatherRows.apply(rows, tuple(counts))


class GatheredColumns(Mapping):
    """column -> (N, D), gathered when first asked for: a column that the loss never reads is never sent.

    Every rank runs the same loss and so asks for the same columns in the same order.
    """

    def __init__(self, own: Mapping[str, torch.Tensor], counts: Mapping[str, list[int]]):
        self._own, self._counts, self._gathered = own, counts, {}

    def __getitem__(self, column: str) -> torch.Tensor:
        if column not in self._gathered:
            self._gathered[column] = gather_rows(self._own[column], self._counts[column])
        return self._gathered[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def gather_ids(
    ids: Mapping[str, torch.Tensor], counts: Mapping[str, list[int]], anchor: str
) -> dict[str, torch.Tensor]:
    """Text hashes of all ranks, column -> (N,), in one all-gather. Keys that are no column have one id per anchor."""
    per_key = [counts.get(name, counts[anchor]) for name in ids]
    lengths = [sum(of_rank) for of_rank in zip(*per_key, strict=True)]  # per rank, all keys end to end
    with torch.no_grad():
        everyone = gather_rows(torch.cat(list(ids.values())), lengths)
    parts = [part.split([count[r] for count in per_key]) for r, part in enumerate(everyone.split(lengths))]
    return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(ids)}


def row_weight(own_rows: int, counts: Iterable[int]) -> float:
    """W * B / N: what a rank's mean loss is worth, so that the mean over ranks is the mean over all rows."""
    counts = list(counts)
    return len(counts) * own_rows / sum(counts)


# ---- (3) memory ----


def choose_mode(needed: float) -> str:
    """ "speed" when so many bytes are under a quarter of the memory free on every rank, else "memory". Without an
    accelerator: "speed"."""
    if not torch.accelerator.is_available():
        return "speed"
    device = torch.accelerator.current_accelerator()
    free, _ = torch.get_device_module(device).mem_get_info()
    fits = torch.tensor([int(needed < free / 4)], device=device)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return "speed" if fits.item() else "memory"


# ---- (4) gradients that no wrapper owns ----


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Mean over ranks of each `.grad` (a missing one counts as 0), in one all-reduce: what DDP does for its own."""
    parameters = [p for p in parameters if p.requires_grad]
    if data_parallel_size() == 1 or not parameters:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    dist.all_reduce(flat, group=_sharing.peers)
    flat /= data_parallel_size()
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


# ---- (5) the end of a process ----


def leave_together() -> None:
    """At the end of a script, on every rank: gloo aborts a process whose peers have left while its threads still talk
    to them, and the groups of a mesh live until they are collected."""
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
