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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from hf_dist_ext.strategies import collectives
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

    def gather(self, own: torch.Tensor, counts: Iterable[int]) -> torch.Tensor:
        """(B, ...) -> (N, ...) in rank order, differentiable: what all ranks say about a row is summed at its owner.

        `counts` holds every rank's number of rows. One all-gather forward, one reduce-scatter backward.
        """
        return own if self.size == 1 else _GatherRows.apply(own, tuple(counts), self)

    def gather_outputs(self, own: Mapping[str, torch.Tensor], counts: Sequence[int]) -> dict[str, torch.Tensor]:
        """The same of several outputs per row. Token vectors and their mask are padded at the end with zeros, to the
        width of the rank with the longest row."""
        widths = [tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in own.values()]
        widest = map(max, zip(*collectives.exchange(widths), strict=True))
        return {
            key: self.gather(pad(one, (0, 0) * (one.dim() - 2) + (0, width - one.shape[1])) if width else one, counts)
            for (key, one), width in zip(own.items(), widest, strict=True)
        }

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


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: torch.Tensor, counts: tuple[int, ...], rows: Rows) -> torch.Tensor:
        ctx.counts, ctx.rows, most = counts, rows, max(counts)
        padded = own if len(own) == most else torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        everyone = own.new_empty(len(counts) * most, *own.shape[1:])
        collectives.all_gather(everyone, padded.contiguous(), group=rows.peers)
        if min(counts) == most:
            return everyone  # (W*B, ...)
        return torch.cat([part[:count] for part, count in zip(everyone.split(most), counts, strict=True)])

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
        return own[: counts[ctx.rows.index]], None, None


class GatheredColumns(Mapping):
    """column -> (N, D), or of several outputs per row key -> (N, ...), gathered when first asked for: a column that
    the loss never reads is never sent.

    Every rank runs the same loss and so asks for the same columns in the same order.
    """

    def __init__(self, rows: Rows, own: Mapping[str, Any], counts: Mapping[str, list[int]]):
        self._rows, self._own, self._counts = rows, own, counts
        self._gathered: dict[str, Any] = {}

    @property
    def starts(self) -> dict[str, int]:
        """Column -> where this rank's rows begin among those of all."""
        return {name: sum(of_ranks[: self._rows.index]) for name, of_ranks in self._counts.items()}

    def __getitem__(self, column: str) -> torch.Tensor | dict[str, torch.Tensor]:
        if column not in self._gathered:
            own = self._own[column]
            gather = self._rows.gather if isinstance(own, torch.Tensor) else self._rows.gather_outputs
            self._gathered[column] = gather(own, self._counts[column])
        return self._gathered[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def row_weight(own_rows: int, counts: Iterable[int]) -> float:
    """W * B / N: what a rank's mean loss is worth, so that the mean over ranks is the mean over all rows."""
    counts = list(counts)
    return len(counts) * own_rows / sum(counts)
