"""Rows of tokens that travel end to end, and are read as if their column were padded to its longest row.

The collator gives such a column the features

    input_ids, token_type_ids   (N,): the tokens of all rows; whichever of the two the model takes
    offsets                     (R + 1,): the token at which every row begins, and at last N
    flat                        what the host must know, so that nothing is read back from an accelerator: `lengths`
                                (R,) numpy, `width` L, `pads_left`, and `fill`, key -> the number of padding

which take the memory of the real tokens, however long the longest row is. `unfolded` names them as a padded column's,
with an attention mask; a chunk then gathers its own rows, padded to the longest of them (engine/rows.py).

Letters: R rows of a column, N its tokens, L tokens of its longest row, b rows of a chunk, w its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

MASK = "attention_mask"


@dataclass
class FlatPlaces:
    """Where the tokens of a column's rows stand, in the flat tensor and in the column's width."""

    offsets: torch.Tensor
    lengths: np.ndarray
    width: int
    pads_left: bool

    @cached_property
    def first(self) -> torch.Tensor:
        """(R,) the place in the width of every row's first token."""
        lengths = self.offsets.diff()
        return self.width - lengths if self.pads_left else torch.zeros_like(lengths)

    def extents(self) -> np.ndarray:
        """(R, 3) int32: per row its first place, one past the last, and whether it has tokens, from the host's
        numbers. One without has a place all the same."""
        has_tokens = self.lengths > 0
        if self.pads_left:
            ends, firsts = np.where(has_tokens, self.width, 1), np.where(has_tokens, self.width - self.lengths, 0)
        else:
            ends, firsts = np.maximum(self.lengths, 1), np.zeros_like(self.lengths)
        return np.column_stack([firsts, ends, has_tokens]).astype(np.int32)


@dataclass
class FlatRows:
    """One key of a column, in the place of a tensor (R, L) of int64. `values`: (N,); None: the attention mask."""

    values: torch.Tensor | None
    places: FlatPlaces
    fill: int = 0
    dtype = torch.int64

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.places.lengths), self.places.width])

    @property
    def device(self) -> torch.device:
        return self.places.offsets.device

    def dim(self) -> int:
        return 2

    def piece(self, rows: torch.Tensor | slice, left: int, right: int) -> torch.Tensor:
        """(b, w): rows, places left..right of the width."""
        places = self.places
        begins, ends = places.offsets[:-1][rows, None], places.offsets[1:][rows, None]  # (b, 1)
        token = torch.arange(left, right, device=self.device) + (begins - places.first[rows, None])  # (b, w)
        is_real = (token >= begins) & (token < ends)
        if self.values is None:
            return is_real.long()
        if not self.values.numel():
            return torch.full_like(token, self.fill)
        found = self.values[token.clamp(0, len(self.values) - 1)]
        return torch.where(is_real, found, self.fill).long()


def is_flat(features: Mapping[str, Any]) -> bool:
    return "flat" in features


def unfolded(features: Mapping[str, Any]) -> Mapping[str, Any]:
    """Features that travelled flat under the keys of padded ones; others as they are."""
    if not is_flat(features):
        return features
    known = features["flat"]
    places = FlatPlaces(features["offsets"], known["lengths"], known["width"], known["pads_left"])
    rows = {key: FlatRows(features[key], places, fill) for key, fill in known["fill"].items() if key in features}
    return {**rows, MASK: FlatRows(None, places)}


def first_rows(features: Mapping[str, Any], count: int) -> list[list[int]]:
    """The ids of the first rows; of padded ones with their padding."""
    if not is_flat(features):
        return features["input_ids"][:count].tolist()
    lengths = features["flat"]["lengths"][:count].tolist()
    return [ids.tolist() for ids in features["input_ids"][: sum(lengths)].split(lengths)]


def num_rows(features: Mapping[str, Any]) -> int:
    return len(features["flat"]["lengths"]) if is_flat(features) else len(features["input_ids"])
