"""The real tokens of rows end to end, without padding, for models that are told where each row begins.

A packed chunk is one sequence of all its rows' tokens. Beside the features the model takes two more:

    position_ids    (1, t): the place every token has in its own row, as the collator laid that row, unless the batch
                    has positions of its own
    packed_rows     where every row begins (`RowBounds`)

Four numbers per row say where its tokens are. From them every chunk makes the numbers of its own tokens, on the
device: kept for the whole batch, these would take as much memory as the batch.

Letters: R rows of a table, of a column with C in front, T their real tokens, b rows of a chunk, t their real tokens, L
a column's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from hf_dist_ext.engine.columns import RowLayout
from hf_dist_ext.engine.flat import MASK, FlatRows
from hf_dist_ext.engine.rows import moved

# What a packed row can consist of. A mask of real tokens alone says nothing, and is left out.
PACKED_KEYS = frozenset("input_ids inputs_embeds attention_mask token_type_ids position_ids".split())


class RowBounds:
    """Where the rows of a packed chunk are. It goes through every layer as it is: FSDP2 and DDP walk through lists,
    mappings and dataclasses at every forward of a part, and this is none.

    lengths: tokens per row, on the host. longest: the largest of them. offsets: (b + 1,) int32 on the device, the
    token at which every row begins, and at last t. has_positions: position_ids are the batch's own.
    """

    __slots__ = ("lengths", "longest", "offsets", "has_positions")

    def __init__(self, lengths: list[int], offsets: torch.Tensor, has_positions: bool = False):
        self.lengths, self.longest, self.offsets = lengths, max(lengths), offsets
        self.has_positions = has_positions

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class PackedRows:
    """Where the tokens of sorted rows are: numbers of the host.

    spans: (R, 2), per sorted row its first real token and one past the last, counted in its own column. order: sorted
    row i is row order[i] of the columns laid end to end. given: how every column stands in memory, by its width L or,
    end to end already, by the tokens of its rows.
    """

    spans: np.ndarray
    order: np.ndarray
    row_counts: list[int]
    given: list[int | np.ndarray]

    def num_tokens(self, start: int, stop: int) -> int:
        """Of sorted rows start..stop."""
        return int(self.starts[stop] - self.starts[start])

    def width(self, start: int, stop: int) -> int:
        """Tokens of the longest of them."""
        return int(np.diff(self.starts[start : stop + 1]).max())

    @cached_property
    def starts(self) -> np.ndarray:
        """(R + 1,) int32, the token at which every row begins, and at last T."""
        return _before(self.spans[:, 1] - self.spans[:, 0])

    @cached_property
    def columns(self) -> list[np.ndarray]:
        """Per column (4, CR + 1) int32, for its rows in their sorted order: real tokens of the column before the row,
        and the number of its first token among the column's as they were given, among the T, and in its row. At last
        all tokens of the column, and T."""
        begins = _before(self.row_counts)[:-1].tolist()
        return [self._of_column(*column) for column in zip(self.given, begins, self.row_counts, strict=True)]

    def _of_column(self, given: int | np.ndarray, begin: int, count: int) -> np.ndarray:
        rows = np.flatnonzero((self.order >= begin) & (self.order < begin + count))
        own, (first, end) = self.order[rows] - begin, self.spans[rows].T
        numbers = np.zeros((4, count + 1), dtype=np.int32)
        numbers[0] = _before(end - first)
        numbers[1, :-1] = own * given + first if isinstance(given, int) else _before(given)[own]
        numbers[2] = self.starts[np.append(rows, -1)]
        numbers[3, :-1] = first
        return numbers


@dataclass
class PackedTokens:
    """The tokens of a table's rows in their sorted order. values: of every key of the table, one per column."""

    values: Mapping[str, list]
    rows: PackedRows
    device: torch.device

    def gather(self, start: int, stop: int) -> dict[str, torch.Tensor | RowBounds]:
        """What the model takes for sorted rows start..stop."""
        starts = self.rows.starts[start : stop + 1]
        tokens: dict[str, torch.Tensor] = {}
        for column in range(len(self.rows.columns)):
            self._gather_column(column, int(starts[0]), int(starts[-1]), tokens)
        gathered: dict[str, torch.Tensor | RowBounds] = {key: value.unsqueeze(0) for key, value in tokens.items()}
        offsets = self._starts[start : stop + 1] - int(starts[0])
        gathered["packed_rows"] = RowBounds(np.diff(starts).tolist(), offsets, "position_ids" in self.values)
        return gathered

    def _gather_column(self, column: int, left: int, right: int, tokens: dict[str, torch.Tensor]) -> None:
        """Put the column's own of the table's tokens left..right into `tokens`, key -> (t, ...)."""
        before, _, places, _ = self.rows.columns[column]
        first, last = np.searchsorted(places[:-1], (left, right)).tolist()
        if first == last:
            return
        lengths, shifts = self._numbers[column]
        begin, end = int(before[first]), int(before[last])
        row = torch.repeat_interleave(lengths[first:last], output_size=end - begin)
        token = torch.arange(begin, end, dtype=torch.int32, device=self.device)
        given, placed, in_row = shifts[:, first:last].index_select(1, row) + token
        placed = placed.long() - left  # index_copy_ takes no int32
        found = {key: values[column].index_select(0, given) for key, values in self._flat.items()}
        for key, value in ({"position_ids": in_row} | found).items():
            value = value.to(self.values[key][column].dtype if key in self.values else torch.int64)
            whole = tokens.setdefault(key, value.new_empty(right - left, *value.shape[1:]))
            tokens[key] = whole.index_copy_(0, placed, value)

    @cached_property
    def _flat(self) -> dict[str, list[torch.Tensor]]:
        """key -> per column its tokens as they were given, without rows; views where a column's memory allows it."""
        return {
            key: [
                cast(torch.Tensor, value.values) if isinstance(value, FlatRows) else value.flatten(0, 1)
                for value in of_columns
            ]
            for key, of_columns in self.values.items()
            if key != MASK
        }

    @cached_property
    def _starts(self) -> torch.Tensor:
        return moved(self.rows.starts, self.device)

    @cached_property
    def _numbers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per column the tokens of its rows (CR,), and what makes a token's number in the column one among the given,
        among the T, and in its row (3, CR)."""
        columns = [moved(numbers, self.device) for numbers in self.rows.columns]
        return [(numbers[0].diff(), (numbers[1:] - numbers[0])[:, :-1]) for numbers in columns]


def can_be_packed(features: Mapping[str, RowLayout]) -> bool:
    """Whether every feature has one entry per token."""
    is_text = "input_ids" in features or "inputs_embeds" in features
    return is_text and features.keys() <= PACKED_KEYS and {*features.values()} == {RowLayout(0, 1)}


def _before(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int32: how many come before each, and at last all."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
