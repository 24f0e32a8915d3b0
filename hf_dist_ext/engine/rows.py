"""A chunk's features, gathered from the collator's own tensors when the chunk runs and freed with it.

`ChunkOrder` puts the rows of every chunk into the order of their columns and moves all row numbers to the device at
once, so that a chunk is one slice of them per column and costs no copy from the host. `gathered` takes those rows,
narrowed to the tokens that the chunk needs, padded where a column is narrower than its table, and laid end to end.

A sorted copy of the whole batch would take more memory than a small chunk's activations. Letters: R rows of a table,
L its token width, b rows of a chunk, w its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import pad

from hf_dist_ext.engine.columns import RowLayout
from hf_dist_ext.engine.flat import FlatRows

Places = tuple[int, int, int]  # column's number, the first place of its rows in a `ChunkOrder`, one past the last
Run = tuple[int, torch.Tensor | slice]  # column's number, its rows


@dataclass
class ChunkOrder:
    """The rows of a table in the order in which chunks hold them: numbers of the host, until a chunk asks for them.

    laid: (R,) int32, at every place of that order its row of the columns laid end to end. own: the same row's number
    in its own column. begins: rows of all columns before each, and at last R.
    """

    laid: np.ndarray
    own: np.ndarray
    begins: list[int]
    is_as_laid: bool
    device: torch.device

    def places(self, start: int, stop: int) -> list[Places]:
        """Places start..stop, column by column."""
        columns = np.searchsorted(self.begins, self.laid[start:stop], side="right") - 1
        edges = [start, *(np.flatnonzero(np.diff(columns)) + start + 1).tolist(), stop]
        return [(int(columns[first - start]), first, last) for first, last in pairwise(edges) if first < last]

    def runs(self, places: Sequence[Places]) -> list[Run]:
        """The rows at these places: a slice where the batch's own order is kept (nothing is copied then), else row
        numbers on the device."""
        return [(column, self._rows(column, first, last)) for column, first, last in places]

    def _rows(self, column: int, first: int, last: int) -> torch.Tensor | slice:
        begin = self.begins[column]
        return slice(first - begin, last - begin) if self.is_as_laid else self._own[first:last]

    @cached_property
    def order(self) -> torch.Tensor:
        """(R,) int32: `laid`."""
        return moved(self.laid, self.device)

    @cached_property
    def _own(self) -> torch.Tensor:
        return moved(self.own, self.device)


def order_of_chunks(
    order: np.ndarray,
    row_counts: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    device: torch.device,
) -> ChunkOrder:
    """
    Args:
        order: (R,), sorted row i is row order[i] of the columns laid end to end.
        row_counts: rows per column.
        bounds: first sorted row of every chunk and one past the last.
    """
    begins = np.concatenate([[0], np.cumsum(row_counts)])
    if len(row_counts) > 1:
        chunks = np.repeat(np.arange(len(bounds)), [stop - start for start, stop in bounds])
        order = order[np.lexsort((np.searchsorted(begins, order, side="right"), chunks))]
    own = order
    if len(row_counts) > 1:
        own = order - begins[np.searchsorted(begins, order, side="right") - 1].astype(np.int32)
    is_as_laid = np.array_equal(order, np.arange(len(order)))
    return ChunkOrder(order, own, begins.tolist(), is_as_laid, device)


def moved(numbers: np.ndarray | list[float], device: torch.device) -> torch.Tensor:
    """On the device, without waiting: a copy that waits costs as much as the one to the host. CUDA waits where the
    memory is not pinned, whatever is asked."""
    there = torch.tensor(numbers)  # which pins no array of numpy itself
    if device.type == "cuda" and torch.cuda.is_available():
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def gathered(
    values: Sequence[torch.Tensor | FlatRows],
    layout: RowLayout,
    fill: int,
    first_tokens: Sequence[int],
    runs: Sequence[Run],
    window: tuple[int, int],
) -> torch.Tensor:
    """(b, w): rows of the runs, tokens of the window of their table.

    Args:
        values: of one key, the collator's tensor of every column.
        fill: of tokens that a column does not have.
        first_tokens: per column the table's token at which its own first one stands.
    """
    pieces = []
    for column, rows in runs:
        first, last = (token - first_tokens[column] for token in window)
        pieces.append(_piece(values[column], layout, fill, rows, first, last))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.row_axis)


def _piece(
    value: torch.Tensor | FlatRows, layout: RowLayout, fill: int, rows: torch.Tensor | slice, first: int, last: int
) -> torch.Tensor:
    """Rows of a column, its tokens first..last, some of which it may not have."""
    axis, before, after = layout.token_axis, 0, 0
    if axis is not None:
        before, after = max(0, -first), max(0, last - value.shape[axis])
    if isinstance(value, FlatRows):
        found = value.piece(rows, first + before, last - after)
    else:
        found = value if axis is None else value.narrow(axis, first + before, last - after - first - before)
        if isinstance(rows, slice):
            found = found.narrow(layout.row_axis, rows.start, rows.stop - rows.start)
        else:
            found = found.index_select(layout.row_axis, rows)
    if axis is None or not (before or after):
        return found
    return pad(found, (0, 0) * (found.dim() - 1 - axis) + (before, after), value=fill)


def positions_of_edges(
    runs: Sequence[Run], first_tokens: Sequence[int], left: int, right: int, device: torch.device
) -> torch.Tensor:
    """(b, w): the position every token had in its own column, counted from the column's left edge; 0 before it.

    Rotary tables are rounded, so that equal distances between tokens are not enough for equal numbers.
    """
    token = torch.arange(left, right, device=device)
    counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in runs]
    pieces = [
        (token - first_tokens[column]).clamp(min=0).expand(count, -1)
        for (column, _), count in zip(runs, counts, strict=True)
    ]
    return torch.cat(pieces)


def positions_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """(b, w): real tokens counted, from a mask (b, w) that leaves out padding only."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
