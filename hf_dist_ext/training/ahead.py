"""Batches are cut where they are made, in the loader's workers, while their tensors are on the CPU.

(1) `CutAhead` cuts every batch when its collator has made it (data/bad_rows.py), within the limits of the last step,
    which are in memory that workers share, and puts the cuts beside the columns
(2) accelerate brings the tensors of the batch to the device; the cuts are numbers of the host and stay as they are
(3) `remember` notes the tensors, once they are where and of the dtype that a step takes
(4) `StepSizes.cut` takes the cuts of a batch that still consists of these. One that somebody has changed since is cut
    anew. Where limits have changed, it packs the sorted rows anew, so that chunks follow from the batch and the limits
    alone, and not from how many batches a loader had ready when these changed

So the training process reads no attention mask back from a device, and does not wait while rows are sorted.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_dist_ext.data.collator import CUTS, RESERVED
from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.engine.budget import widened
from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training import packing

Batch = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class CutRequest:
    """limits: of chunks. factor: how many times larger those of the pass without a graph are."""

    limits: ChunkLimits
    factor: int


@dataclass
class Cuts:
    """A batch in chunks.

    request: what was asked for; padded chunks in the place of packed ones have other limits. wide: larger chunks, None
    where the factor is 1. loaded: column -> its features as the loader gave them (`_identity`), None: not noted.
    """

    request: CutRequest
    chunked: ChunkedBatch
    wide: ChunkedBatch | None
    loaded: Mapping[str, list] | None = None

    def without_tensors(self) -> Cuts:
        return Cuts(self.request, self.chunked.without_tensors(), self.wide and self.wide.without_tensors())

    def of(self, batch: Batch) -> Cuts:
        chunked = self.chunked.of_batch(batch)
        return Cuts(self.request, chunked, self.wide and self.wide.of_batch(chunked.columns))

    def are_of(self, batch: Batch) -> bool:
        """Whether the columns are those that were cut, and hold what the loader gave."""
        if self.loaded is None or list(self.chunked.row_counts()) != list(batch):
            return False
        return all(_are_same(self.loaded.get(name, []), _identity(features)) for name, features in batch.items())


def _identity(value: Any) -> list[tuple[Any, Any, int]]:
    """Every key and value within, tensors with their shape and the number of changes in place (none where torch allows
    none)."""
    if isinstance(value, Mapping):
        return [one for pair in value.items() for part in pair for one in _identity(part)]
    if isinstance(value, list | tuple):
        return [one for part in value for one in _identity(part)]
    if not isinstance(value, torch.Tensor):
        return [(value, None, 0)]
    return [(value, value.shape, 0 if value.is_inference() else value._version)]


def _are_same(before: list, now: list) -> bool:
    """The very same objects: nothing is read from a device."""
    if len(before) != len(now):
        return False
    return all(a is b and more == others for (a, *more), (b, *others) in zip(before, now, strict=True))


def remember(batch: Any) -> None:
    """Tell a batch's cuts that its tensors are those that the loader gave."""
    if isinstance(batch, Mapping) and CUTS in batch:
        batch[CUTS]["all"].loaded = {name: _identity(batch[name]) for name in _columns(batch)}


def _columns(batch: Mapping[str, Any]) -> list[str]:
    return [name for name in batch if name not in RESERVED]


class Cutter:
    """How a run cuts its batches, in whatever process.

    Args:
        options: of `lay_out`.
        packing: the argument `gradient_cache_packing`.
    """

    def __init__(self, options: Mapping[str, Any], packing: bool | str):
        self.options, self.packing = options, packing

    def cut(self, batch: Batch, request: CutRequest) -> Cuts:
        return self._decided(lay_out(batch, request.limits, **self.options), request)

    def cut_again(self, cuts: Cuts, request: CutRequest) -> Cuts:
        """The same sorted rows as now asked for."""
        if cuts.request.limits != request.limits:
            return self._decided(cuts.chunked.within(request.limits), request)
        return cuts if cuts.request == request else self._widened(cuts.chunked, request)

    def _decided(self, chunked: ChunkedBatch, request: CutRequest) -> Cuts:
        return self._widened(packing.decided(chunked, self.packing) if request.limits.packs else chunked, request)

    def _widened(self, chunked: ChunkedBatch, request: CutRequest) -> Cuts:
        return Cuts(request, chunked, widened(chunked, request.factor) if request.factor > 1 else None)


class SharedCutRequest:
    """That of the last step, in memory that loader workers share with the training process."""

    def __init__(self, request: CutRequest):
        self._first = request
        self._numbers = multiprocessing.RawArray("q", 4)
        self.set(request)

    def set(self, request: CutRequest) -> None:
        limits = request.limits
        sizes = (limits.max_rows, limits.max_tokens, limits.max_patches, request.factor)
        self._numbers[:] = [size or 0 for size in sizes]

    def get(self) -> CutRequest:
        rows, tokens, patches, factor = (number or None for number in self._numbers)
        limits = replace(self._first.limits, max_rows=rows, max_tokens=tokens, max_patches=patches)
        return CutRequest(limits, factor or 1)


@dataclass(eq=False)
class CutAhead:
    """A batch with its cuts. num_columns: source of a batch -> how many of its columns the loss reads, None: all; ""
    stands for all other sources."""

    cutter: Cutter
    request: SharedCutRequest
    num_columns: Mapping[str, int | None]

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping) or not all(isinstance(value, Mapping) for value in batch.values()):
            return batch  # which the step refuses, in words
        names = _columns(batch)
        source = (batch.get("ids") or {}).get(SOURCE)
        read = self.num_columns.get(source or "", self.num_columns.get(""))
        try:
            cuts = self.cutter.cut({name: batch[name] for name in names[:read]}, self.request.get())
        except UsageError:
            return batch  # the training process comes to the same error, and tells it
        return {**batch, CUTS: {"all": cuts.without_tensors()}}  # a mapping, as every value of a batch
