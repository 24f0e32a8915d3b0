"""A chunk's features, gathered from the collator's own tensors when the chunk runs and freed with it.

`ChunkOrder` puts the rows of every chunk into the order of their columns and moves all row numbers to the device at
once, so that a chunk is one slice of them per column and costs no copy from the host. `RowFeature` takes those rows,
narrowed to the tokens that the chunk needs, padded where a column is narrower than its table, and laid end to end.

A sorted copy of the whole batch would take more memory than a small chunk's activations. Letters: R rows of a table,
L its token width, b rows of a chunk, w its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_dist_ext.engine.columns import RowLayout
from hf_dist_ext.engine.flat import FlatRows

Run = tuple[int, torch.Tensor | slice]  # column's number, its rows


class ChunkOrder:
    """The rows of a table in the order in which chunks hold them.

    Args:
        order: sorted row i is row order[i] of the columns laid end to end.
        row_counts: rows per column.
        bounds: first sorted row of every chunk and one past the last; empty ones are passed over.
        by_column: False leaves a chunk's rows in their sorted order, for those that are packed.
    """

    def __init__(
        self,
        order: Sequence[int],
        row_counts: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        device: torch.device,
        by_column: bool = True,
    ):
        places = [(column, own) for column, count in enumerate(row_counts) for own in range(count)]
        self.sorted_rows: list[int] = []  # sorted row at every place
        for start, stop in bounds:
            rows = range(start, stop)
            self.sorted_rows += sorted(rows, key=lambda row: places[order[row]][0]) if by_column else rows
        laid = [order[row] for row in self.sorted_rows]
        self._places = [places[row] for row in laid]
        self._is_as_laid = laid == list(range(len(laid)))
        numbers = torch.tensor([laid, [own for _, own in self._places]], dtype=torch.long)  # also of no row
        # Without waiting: a copy that waits costs as much as the one to the host.
        self.order, self._own = numbers.to(device, non_blocking=True)  # (R,) each

    def runs(self, start: int, stop: int, num_repeated: int = 0) -> list[Run]:
        """The rows at places start..stop, column by column: a slice where the batch's own order is kept (nothing is
        copied then), else row numbers on the device. At last the last row as often as `num_repeated` says."""
        runs: list[Run] = []
        if num_repeated:
            repeated = (self._places[stop - 1][0], self._own[stop - 1 : stop].expand(num_repeated))
            return [*self.runs(start, stop), repeated]
        while start < stop:
            column, own = self._places[start]
            end = start
            while end < stop and self._places[end][0] == column:
                end += 1
            rows = slice(own, own + end - start) if self._is_as_laid else self._own[start:end]
            runs.append((column, rows))
            start = end
        return runs


@dataclass
class RowFeature:
    """One key of a table: the collator's tensor of every column, and where they stand in the table's width."""

    values: list[torch.Tensor | FlatRows]
    layout: RowLayout
    first_tokens: list[int]  # per column: the table's token at which its own first one stands
    fill: int = 0  # of tokens that a column does not have

    def gather(self, runs: Sequence[Run], left: int, right: int) -> torch.Tensor:
        """(b, w): rows of the runs, tokens left..right of the table."""
        if self.layout.row_axis is None:
            return self.values[0]  # type: ignore[return-value]
        pieces = [self._piece(column, rows, left, right) for column, rows in runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.layout.row_axis)

    def _piece(self, column: int, rows: torch.Tensor | slice, left: int, right: int) -> torch.Tensor:
        value, token_axis = self.values[column], self.layout.token_axis
        before = after = first = last = 0
        if token_axis is not None:
            first, last = left - self.first_tokens[column], right - self.first_tokens[column]
            before, after = max(0, -first), max(0, last - value.shape[token_axis])
        if isinstance(value, FlatRows):
            value = value.piece(rows, first + before, last - after)
        else:
            value = self._cut(value, rows, first + before, last - after)
        if token_axis is not None and (before or after):
            left_pad, right_pad = (self._padding(value, token_axis, tokens) for tokens in (before, after))
            value = torch.cat([left_pad, value, right_pad], token_axis)
        return value

    def _cut(self, value: torch.Tensor, rows: torch.Tensor | slice, first: int, last: int) -> torch.Tensor:
        row_axis, token_axis = self.layout.row_axis, self.layout.token_axis
        assert row_axis is not None, "gather returns what is not cut"
        if token_axis is not None:
            value = value.narrow(token_axis, first, last - first)
        if isinstance(rows, slice):
            return value.narrow(row_axis, rows.start, rows.stop - rows.start)
        return value.index_select(row_axis, rows)

    def _padding(self, value: torch.Tensor, token_axis: int, tokens: int) -> torch.Tensor:
        shape = list(value.shape)
        shape[token_axis] = tokens
        return value.new_full(shape, self.fill)


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
