"""Which ranks hold rows of their own, and how rows travel between them.

Every strategy has a `Rows`. Under tensor parallelism a group of consecutive ranks holds the same rows; rows then
travel among ranks that hold different ones, and only those count.

The loss is the mean over the global batch. Each rank scores its own rows against everyone's columns; the gather's
backward sums what all ranks say about a row, and DDP and FSDP average over ranks, so no world-size factor appears.
Ranks that hold more rows weigh more: `row_weight`. Letters: B own rows, N all ranks' rows, D embedding, W ranks (with
rows of their own).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_dist_ext.engine.ring import Ring
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.ragged import GatheredOutputs
from hf_dist_ext.strategies.ring import visits
from hf_dist_ext.strategies.tensors import held_here


@dataclass(frozen=True)
class Rows:
    """
    Attributes:
        shared_by: so many consecutive ranks hold the same rows.
        peers: process group of the ranks with this one's place among those; None: all ranks.
    """

    shared_by: int = 1
    peers: Any = None

    @property
    def size(self) -> int:
        """W: ranks, or groups of ranks, with rows of their own."""
        return collectives.world_size() // self.shared_by

    @property
    def index(self) -> int:
        """Of this rank among those."""
        return collectives.rank() // self.shared_by

    def one_of_each(self, of_ranks: Sequence[Any]) -> list[Any]:
        """What all ranks say -> what those say that hold different rows."""
        return list(of_ranks[:: self.shared_by])

    def hold_the_same(self, batch: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether all ranks of every group have the same rows. Every rank calls it."""
        tensors = [t for features in batch.values() for t in features.values() if isinstance(t, torch.Tensor)]
        content = b"".join(tensor.detach().float().cpu().numpy().tobytes() for tensor in tensors)
        return self.say_the_same(content)

    def say_the_same(self, content: bytes) -> bool:
        """Whether `content` is equal on all ranks of every group. Every rank calls it."""
        number = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
        everyone = [said for (said,) in collectives.exchange([number])]
        groups = zip(*[iter(everyone)] * self.shared_by, strict=True)
        return all(len(set(group)) == 1 for group in groups)

    def gather(self, own: torch.Tensor, counts: Iterable[int], begun: Gathering | None = None) -> torch.Tensor:
        """(B, ...) -> (N, ...) in rank order, differentiable: what all ranks say about a row is summed at its owner.

        `counts` holds every rank's number of rows. One all-gather forward, one reduce-scatter backward. `begun`: the
        all-gather of these rows that runs already.
        """
        return own if self.size == 1 else _GatherRows.apply(own, tuple(counts), self, begun)

    def ring(self, counts: Mapping[str, list[int]]) -> Ring:
        """counts: column -> every rank's number of rows."""
        return Ring(
            rank=self.index,
            counts=counts,
            visits=lambda own, heights: visits(own, heights, self.index, self.peers),
            gather=torch.no_grad()(self.gather),
        )

    def gather_output(
        self,
        own: torch.Tensor | Mapping[str, torch.Tensor],
        counts: Sequence[int],
        begun: Gathering | None = None,
        lengths: np.ndarray | None = None,
    ) -> torch.Tensor | GatheredOutputs:
        """The same of what a row encodes to, one tensor or several. `lengths`: of own rows (strategies/ragged.py)."""
        if isinstance(own, torch.Tensor):
            return self.gather(own, counts, begun)
        exchange = lambda numbers: self.one_of_each(collectives.exchange(numbers))  # noqa: E731
        return GatheredOutputs(self.gather, own, counts, exchange, lengths)

    def gather_ids(
        self, ids: Mapping[str, torch.Tensor], counts: Mapping[str, list[int]], anchor: str
    ) -> dict[str, torch.Tensor]:
        """Text hashes of all ranks, column -> (N,), in one all-gather. Keys that are no column have one id per
        anchor."""
        per_key = [counts.get(name, counts[anchor]) for name in ids]
        lengths = [sum(of_rank) for of_rank in zip(*per_key, strict=True)]  # per rank, all keys end to end
        with torch.no_grad():
            everyone = self.gather(torch.cat(list(ids.values())), lengths)
        parts = [part.split([count[r] for count in per_key]) for r, part in enumerate(everyone.split(lengths))]
        return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(ids)}

    @torch.no_grad()
    def gather_targets(
        self, targets: Mapping[str, torch.Tensor], counts: Mapping[str, list[int]], anchor: str
    ) -> dict[str, torch.Tensor]:
        """What the loss compares with, of all ranks: key -> (N, ...). Keys that are no column have one entry per
        anchor."""
        everyone = {}
        for name, own in targets.items():
            of_ranks = counts.get(name, counts[anchor])
            everyone[name] = self.gather(own[: of_ranks[self.index]], of_ranks)
        return everyone

    def gather_for_metrics(self, accelerator: Any, data: Any, use_gather_object: bool = False) -> Any:
        """`Accelerator.gather_for_metrics` with one rank per group: accelerate 1.15 gathers all, and so counts rows
        once per rank of a group."""
        from accelerate.utils import gather, gather_object, recursively_apply

        if use_gather_object:
            return self.one_of_each(gather_object([data]))
        state, ranks = accelerator.gradient_state, collectives.world_size()

        def each_once(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.unflatten(0, (ranks, -1))[:: self.shared_by].flatten(0, 1)
            return tensor[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else tensor

        return recursively_apply(each_once, gather(data))

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Mean over ranks of each `.grad` (a missing one counts as 0), in one all-reduce, as DDP's own."""
        parameters = [p for p in parameters if p.requires_grad]
        if self.size == 1 or not parameters:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        parts = [held_here(gradient) for gradient in gradients]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=self.peers)
        flat /= self.size
        for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(mean.view_as(part))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


class Gathering:
    """An all-gather that runs beside other work until it is waited for. It keeps what it sends alive as long."""

    def __init__(self, own: torch.Tensor, counts: Sequence[int], peers: Any):
        most = max(counts)
        padded = own if len(own) == most else torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        self._counts, self._own = counts, padded.contiguous()
        self._everyone = own.new_empty(len(counts) * most, *own.shape[1:])
        self._work = collectives.all_gather(self._everyone, self._own, group=peers, async_op=True)

    def wait(self) -> torch.Tensor:
        """(N, ...), once."""
        self._work.wait()
        counts, everyone = self._counts, self._everyone
        del self._own, self._everyone
        if min(counts) == max(counts):
            return everyone  # (W*B, ...)
        return torch.cat([part[:count] for part, count in zip(everyone.split(max(counts)), counts, strict=True)])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: torch.Tensor, counts: tuple[int, ...], rows: Rows, begun: Gathering | None) -> torch.Tensor:
        ctx.counts, ctx.rows = counts, rows
        return (begun or Gathering(own, counts, rows.peers)).wait()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        counts, most = ctx.counts, max(ctx.counts)
        if min(counts) != most:
            padded = gradient.new_zeros(len(counts), most, *gradient.shape[1:])
            for part, to, count in zip(gradient.split(counts), padded, counts, strict=True):
                to[:count] = part
            gradient = padded.flatten(0, 1)
        own = gradient.new_empty(most, *gradient.shape[1:])
        collectives.reduce_scatter(own, gradient.contiguous(), group=ctx.rows.peers)
        return own[: counts[ctx.rows.index]], None, None, None


class EarlyGather:
    """Columns of a step that are gathered while others are encoded.

    Args:
        order: the columns, as all ranks send them: a column waits for its turn. Those that the loss has read before
            (`GatheredColumns.asked`).
        counts: column -> every rank's number of rows.
    """

    def __init__(self, rows: Rows, order: Sequence[str], counts: Mapping[str, list[int]]):
        self._rows, self._left, self._counts = rows, list(order), counts
        self._ready: dict[str, torch.Tensor] = {}
        self.begun: dict[str, Gathering] = {}

    def add(self, column: str, rows: torch.Tensor) -> None:
        """A column (R, D) that is whole. The loss has it in float32, at least."""
        if column in self._left:
            own = rows[: self._counts[column][self._rows.index]]
            self._ready[column] = own.float() if own.dtype.itemsize < 4 else own
        while self._left and self._left[0] in self._ready:
            name = self._left.pop(0)
            self.begun[name] = Gathering(self._ready.pop(name), self._counts[name], self._rows.peers)


class GatheredColumns(Mapping):
    """column -> (N, D), or of several outputs per row key -> (N, ...), gathered when first asked for: a column that
    the loss never reads is never sent, and none where the loss takes the `ring`.

    Every rank runs the same loss and so asks for the same columns in the same order. `begun`: those whose all-gather
    runs already; `asked`: those that were asked for; `lengths`: column -> of own rows (strategies/ragged.py).
    """

    def __init__(
        self,
        rows: Rows,
        own: Mapping[str, Any],
        counts: Mapping[str, list[int]],
        begun: Mapping[str, Gathering] | None = None,
        lengths: Callable[[str], np.ndarray | None] = lambda column: None,
    ):
        self._rows, self._own, self._counts, self._begun = rows, own, counts, dict(begun or {})
        self._lengths = lengths
        self._gathered: dict[str, Any] = {}

    @property
    def asked(self) -> frozenset[str]:
        return frozenset(self._gathered)

    @property
    def ring(self) -> Ring:
        """For a loss that lets candidates go round: no column is gathered then."""
        return self._rows.ring(self._counts)

    def __getitem__(self, column: str) -> torch.Tensor | GatheredOutputs:
        if column not in self._gathered:
            own, begun = self._own[column], self._begun.pop(column, None)
            self._gathered[column] = self._rows.gather_output(own, self._counts[column], begun, self._lengths(column))
        return self._gathered[column]

    def finish(self) -> None:
        """Wait for what was begun and nobody has asked for."""
        while self._begun:
            self._begun.popitem()[1].wait()

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def row_weight(own_rows: int, counts: Iterable[int]) -> float:
    """W * B / N: what a rank's mean loss is worth, so that the mean over ranks is the mean over all rows."""
    counts = list(counts)
    return len(counts) * own_rows / sum(counts)
