"""The real tokens of rows end to end, without padding, for models that are told where each row begins.

A packed chunk is one sequence of all its rows' tokens. Beside the features the model takes two more:

    position_ids    (1, t): the place every token has in its own row, as the collator laid that row, unless the batch
                    has positions of its own
    packed_rows     where every row begins (`RowBounds`)

Four numbers per row say where its tokens are. From them every chunk makes the numbers of its own tokens, on the
device: kept for the whole batch, these would take as much memory as the batch.

Letters: R rows of a table, T their real tokens, b rows of a chunk, t their real tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from hf_dist_ext.engine.columns import RowLayout
from hf_dist_ext.engine.flat import MASK, FlatRows
from hf_dist_ext.engine.rows import ChunkOrder, Places, moved

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
    """Where the real tokens of a table's rows are: numbers of the host.

    spans: (R, 2), of every row of the columns laid end to end its first real token and one past the last, counted in
    its own column. order: sorted row i is row order[i] of these.
    """

    spans: np.ndarray
    order: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        """(R,) tokens of every row of the columns laid end to end."""
        return self.spans[:, 1] - self.spans[:, 0]

    @cached_property
    def starts(self) -> np.ndarray:
        """(R + 1,) real tokens before every sorted row, and at last T."""
        return np.concatenate([[0], np.cumsum(self.lengths[self.order])])

    def num_tokens(self, start: int, stop: int) -> int:
        """Of sorted rows start..stop."""
        return int(self.starts[stop] - self.starts[start])

    def width(self, start: int, stop: int) -> int:
        """Tokens of the longest of them."""
        return int(np.diff(self.starts[start : stop + 1]).max())


@dataclass
class PackedTokens:
    """The tokens of a table's rows. values: of every key of the table, one per column."""

    values: Mapping[str, list]
    rows: PackedRows
    order: ChunkOrder

    def gather(self, places: Sequence[Places]) -> dict[str, torch.Tensor | RowBounds]:
        """What the model takes for the rows at these places of the chunks' order."""
        pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
        starts, (offsets, lengths, *_), shifts = self._numbers[0], self._on_device, self._on_device[2:]
        for column, first, last in places:
            row = torch.repeat_interleave(lengths[first:last], output_size=int(starts[last] - starts[first]))
            token = torch.arange(starts[first], starts[last], dtype=torch.int32, device=self.order.device)
            given, in_row = shifts[:, first:last].index_select(1, row) + token
            found = {key: values[column].index_select(0, given) for key, values in self._flat.items()}
            for key, value in ({"position_ids": in_row} | found).items():
                pieces[key].append(value.to(self.values[key][column].dtype if key in self.values else torch.int64))
        gathered: dict[str, torch.Tensor | RowBounds] = {
            key: (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0) for key, parts in pieces.items()
        }
        start, stop = places[0][1], places[-1][2] + 1
        offsets = offsets[start:stop] - int(starts[start])
        bounds = RowBounds(np.diff(starts[start:stop]).tolist(), offsets, "position_ids" in self.values)
        return gathered | {"packed_rows": bounds}

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
    def _numbers(self) -> np.ndarray:
        """(4, R + 1) int32, in the chunks' order: real tokens before every row, and at last T; its own; and what makes
        a token's number among the T one among the column's as they were given, and in its row."""
        firsts, begins = self.rows.spans[:, 0], []
        for value in next(iter(self.values.values())):
            if isinstance(value, FlatRows):
                begins.append(np.cumsum(value.places.lengths) - value.places.lengths)
            else:
                first = sum(map(len, begins))
                begins.append(np.arange(len(value)) * value.shape[1] + firsts[first : first + len(value)])
        laid = self.order.laid
        numbers = np.zeros((4, len(laid) + 1), dtype=np.int32)
        numbers[1:, :-1] = np.stack([self.rows.lengths, np.concatenate(begins), firsts])[:, laid]
        numbers[0, 1:] = np.cumsum(numbers[1, :-1])
        numbers[2:] -= numbers[0]
        return numbers

    @cached_property
    def _on_device(self) -> torch.Tensor:
        return moved(self._numbers, self.order.device)


def can_be_packed(features: Mapping[str, RowLayout]) -> bool:
    """Whether every feature has one entry per token."""
    is_text = "input_ids" in features or "inputs_embeds" in features
    return is_text and features.keys() <= PACKED_KEYS and {*features.values()} == {RowLayout(0, 1)}
