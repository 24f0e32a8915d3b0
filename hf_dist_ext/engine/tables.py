"""A table of sorted rows, where it is cut into chunks, and what a chunk of it takes from the collator's tensors. A
table itself holds numbers of the host alone.

Letters: R rows of a table, L its token width.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal

import numpy as np
import torch

from hf_dist_ext.engine.columns import RowLayout
from hf_dist_ext.engine.packing import PackedRows
from hf_dist_ext.engine.rows import ChunkOrder, Places, gathered, positions_of_edges, positions_of_mask
from hf_dist_ext.errors import UsageError

REMEDY = (
    "Give DistTrainer the model's processor (processing_class), of whose blank picture the image part is then run, or "
    "use DDP."
)

Bounds = list[tuple[int, int]]  # per chunk its first sorted row and one past the last, equal where it is idle


@dataclass(frozen=True)
class ChunkLimits:
    """What bounds a chunk: rows, tokens (rows x width, padding included), image patches, or nothing (one chunk).

    `packs`: text rows go through the model end to end, without padding, so that tokens are real ones.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    width_multiple: int = 8
    max_patches: int | None = None
    packs: bool = False

    def width(self, tokens: int) -> int:
        """Of a chunk whose longest row has so many tokens."""
        return -(-max(1, tokens) // self.width_multiple) * self.width_multiple

    @property
    def is_bounded(self) -> bool:
        return not (self.max_rows is None and self.max_tokens is None and self.max_patches is None)

    def scaled(self, factor: float) -> ChunkLimits:
        """So many times the rows, tokens and patches, rounded down, at least one of each."""
        sizes = {name: getattr(self, name) for name in ("max_rows", "max_tokens", "max_patches")}
        scaled: dict[str, Any] = {name: max(1, int(n * factor)) for name, n in sizes.items() if n is not None}
        return replace(self, **scaled)


@dataclass
class Units:
    """An image key of a table, whose rows are laid end to end here, unsorted. Its entries stay where the collator put
    them; chunks gather those of their rows."""

    places: list[tuple[int, int, int]]  # per row: its column's number, first entry, one past the last
    lengths: list[int] | None  # per row: real extent of axis 1
    rounds_length: bool

    def gather(self, values: Sequence[Any], rows: Sequence[int], multiple: int) -> Any:
        """Entries of the rows, or None where they have none. values: one tensor (or list of numbers) per column."""
        runs: list[list[int]] = []
        for column, first, last in (self.places[row] for row in rows):
            if runs and runs[-1][0] == column and runs[-1][2] == first:
                runs[-1][2] = last
            elif first < last:
                runs.append([column, first, last])
        if not runs:
            return None
        if isinstance(values[0], list):
            return [number for column, first, last in runs for number in values[column][first:last]]
        pieces = [values[column][first:last] for column, first, last in runs]
        if self.lengths is not None:
            longest = max(self.lengths[row] for row in rows)
            longest = -(-longest // multiple) * multiple if self.rounds_length else longest
            pieces = [piece[:, :longest] for piece in pieces]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


@dataclass
class Table:
    """All rows that go through one tower: those without images first, and in each half the longest first (what does
    not fit fails first)."""

    kind: int  # of the rows: tables of one kind reach the same parameters
    columns: list[str]
    places: list[int]  # of the columns in the batch
    row_counts: list[int]
    features: dict[str, RowLayout]
    pad_values: Mapping[str, int]  # key -> what stands for a token that a column does not have, 0 if unset
    first_tokens: list[int]  # per column: the table's token at which its own first one stands
    positions: Literal["mask", "edges"] | None  # what position_ids are counted from; None: the model makes its own
    units: dict[str, Units]
    extents: np.ndarray  # (R, 2) int32, per sorted row: first real token, one past the last
    patches: np.ndarray | None  # (R, 2), per sorted row: entries, patches in the longest; None: no images
    num_text_rows: int  # without images
    order: np.ndarray  # (R,) int32: sorted row i is row order[i] of the columns laid end to end
    column: str | None
    width: int
    pads_left: bool
    can_trim: bool
    real_tokens: int
    longest: int  # tokens of a row
    has_lengths: bool  # a row's extent is that of its real tokens, and there are no others within
    packed: PackedRows | None  # None: rows that need their padding

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    def packed_for(self, limits: ChunkLimits) -> PackedRows | None:
        """The rows without padding, where that is how they are encoded."""
        return self.packed if limits.packs else None

    def window(self, start: int, stop: int, limits: ChunkLimits) -> tuple[int, int]:
        """Token columns [left, right) that rows start..stop need, widened as the limits say where the table has
        room."""
        first, last = self.extents[start:stop].T
        return self._widened(int(first.min()), int(last.max()), limits)

    def is_full(self, start: int, stop: int, width: int) -> bool | None:
        """Whether rows start..stop have `width` real tokens each; None: not known."""
        if not self.has_lengths or self.patches is not None or not width:
            return None
        first, last = self.extents[start:stop].T
        return bool((last - first == width).all())

    def _widened(self, first: int, last: int, limits: ChunkLimits) -> tuple[int, int]:
        if not self.can_trim or self.width == 0:
            return 0, self.width
        width = min(limits.width(last - first), self.width)
        return (last - width, last) if self.pads_left else (first, first + width)

    def cost(self, start: int, stop: int, limits: ChunkLimits) -> int:
        """Tokens the chunk computes, padding included (rows when there is no token axis)."""
        if packed := self.packed_for(limits):
            return packed.num_tokens(start, stop)
        left, right = self.window(start, stop, limits)
        return (stop - start) * max(1, right - left)

    def num_patches(self, start: int, stop: int) -> int:
        """Image patches the chunk computes, padding included."""
        if self.patches is None:
            return 0
        entries, longest = self.patches[start:stop].T
        return int(entries.sum() * longest.max())

    def pack(self, limits: ChunkLimits) -> Bounds:
        """Without limits all rows are one chunk. Else rows with and without images never share one: text is not padded
        to the length of images, and ranks can agree on the number of chunks of either kind."""
        starts = [0, self.num_text_rows] if limits.is_bounded and 0 < self.num_text_rows < self.num_rows else [0]
        stops = [*starts[1:], self.num_rows]
        return [bound for half in zip(starts, stops, strict=True) for bound in self._packed(*half, limits)]

    def _packed(self, begin: int, end: int, limits: ChunkLimits) -> Bounds:
        """Cut greedily: a chunk closes when the next row would pass a limit. A row beyond a limit is alone."""
        given = (limits.max_rows, limits.max_tokens, limits.max_patches)
        most_rows, most_tokens, most_patches = (math.inf if size is None else size for size in given)
        bounds, start = [], begin
        if packed := self.packed_for(limits):  # no images, and many rows
            before = packed.starts.tolist()
            while start < end:
                stop = int(min(bisect_right(before, before[start] + most_tokens) - 1, start + most_rows, end))
                bounds.append((start, max(start + 1, stop)))
                start = bounds[-1][1]
            return bounds
        first, last, entries, longest = self.width, 0, 0, 0  # of the open chunk
        patches = repeat((0, 1)) if self.patches is None else self.patches[begin:end].tolist()
        rows_begin_to_end = zip(range(begin, end), self.extents[begin:end].tolist(), patches, strict=False)
        for row, (row_first, row_last), (row_entries, row_longest) in rows_begin_to_end:
            first, last = min(first, row_first), max(last, row_last)
            entries, longest = entries + row_entries, max(longest, row_longest)
            left, right = self._widened(first, last, limits)
            rows = row + 1 - start
            tokens = rows * (right - left)
            fits = rows <= most_rows and tokens <= most_tokens and entries * longest <= most_patches
            if row > start and not fits:
                bounds.append((start, row))
                start, first, last, entries, longest = row, row_first, row_last, row_entries, row_longest
        return [*bounds, (start, end)] if end > start else bounds

    def has_vision(self, bound: tuple[int, int]) -> bool:
        return bound[1] > self.num_text_rows

    def split_to(self, bounds: Bounds, num_chunks: int, limits: ChunkLimits, has_vision: bool | None = None) -> None:
        """Halve the costliest chunk until there are num_chunks; past one row per chunk the rest are idle.

        has_vision: count and split the chunks with (without) images only.
        """
        if has_vision and num_chunks and self.num_text_rows == self.num_rows:
            raise UsageError(
                f"columns {self.columns}: another process has rows with images here and this one has none, so they "
                f"can not run the same forwards, which sharded models need. {REMEDY}"
            )

        def cost(bound: tuple[int, int]) -> int:
            return self.cost(*bound, limits) + self.num_patches(*bound)

        while True:
            own = [b for b in bounds if has_vision is None or self.has_vision(b) == has_vision]
            if len(own) >= num_chunks:
                return
            splittable = [bound for bound in own if bound[1] - bound[0] > 1]
            if splittable:
                start, stop = max(splittable, key=cost)
                middle, at = (start + stop) // 2, bounds.index((start, stop))
                bounds[at : at + 1] = [(start, middle), (middle, stop)]
            elif has_vision is False:
                at = len([bound for bound in bounds if not self.has_vision(bound)])
                bounds.insert(at, (self.num_text_rows, self.num_text_rows))
            else:
                bounds.append((self.num_rows, self.num_rows))

    def runs(self, bounds: Bounds) -> Iterator[tuple[int, int, bool, bool]]:
        """(first row, one past the last, is idle, has images) of every chunk. An idle one repeats the last row of its
        kind, which is the shortest; in a table without text rows, an idle text chunk is a row without its images."""
        for start, stop in bounds:
            has_vision = self.has_vision((start, stop))
            if start < stop:
                yield start, stop, False, has_vision
            else:
                last = stop or self.num_rows
                yield last - 1, last, True, has_vision

    def gather(
        self,
        values: Mapping[str, list],
        order: ChunkOrder,
        places: Sequence[Places],
        window: tuple[int, int],
        multiple: int,
        has_vision: bool,
    ) -> dict[str, Any]:
        """What the model takes for the rows at these places of a chunk order. values: of every key, one per
        column."""
        runs = order.runs(places)
        found: dict[str, Any] = {
            key: gathered(values[key], layout, self.pad_values.get(key, 0), self.first_tokens, runs, window)
            for key, layout in self.features.items()
        }
        if self.positions == "edges":
            found["position_ids"] = positions_of_edges(runs, self.first_tokens, *window, order.device)
        elif self.positions == "mask" and not has_vision:
            # What the model gives to all rows of a batch with images; without images it would count from the edge.
            found["position_ids"] = positions_of_mask(found["attention_mask"])
        if has_vision:
            rows = order.laid[places[0][1] : places[-1][2]].tolist()
            images = {key: units.gather(values[key], rows, multiple) for key, units in self.units.items()}
            found |= {key: value for key, value in images.items() if value is not None}
        return found
