"""The images of a chunk's rows, cut from the collator's tensors, in which a row owns one run of entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Units:
    """An image key of a table, whose rows are laid end to end here, unsorted. Its entries stay where the collator put
    them; chunks gather those of their rows."""

    values: list[Any]  # one tensor (or list of numbers) per column
    places: list[tuple[int, int, int]]  # per row: its column's number, first entry, one past the last
    lengths: list[int] | None  # per row: real extent of axis 1
    rounds_length: bool

    def gather(self, rows: Sequence[int], multiple: int) -> Any:
        """Entries of the rows, or None where they have none."""
        runs: list[list[int]] = []
        for column, first, last in (self.places[row] for row in rows):
            if runs and runs[-1][0] == column and runs[-1][2] == first:
                runs[-1][2] = last
            elif first < last:
                runs.append([column, first, last])
        if not runs:
            return None
        if isinstance(self.values[0], list):
            return [number for column, first, last in runs for number in self.values[column][first:last]]
        pieces = [self.values[column][first:last] for column, first, last in runs]
        if self.lengths is not None:
            longest = max(self.lengths[row] for row in rows)
            longest = -(-longest // multiple) * multiple if self.rounds_length else longest
            pieces = [piece[:, :longest] for piece in pieces]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)
