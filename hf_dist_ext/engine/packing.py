"""The real tokens of rows end to end, without padding, for models that are told where each row begins.

A packed chunk is one sequence of all its rows' tokens. Beside the features the model takes three more:

    position_ids      (1, t): the place every token has in its own row, as the collator laid that row
    packed_lengths    tokens per row, on the host
    packed_offsets    (b + 1,) int32: the token at which every row begins, and at last t

Letters: R rows of a table, T their real tokens, b rows of a chunk, t their real tokens, L a column's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from hf_dist_ext.engine.columns import RowLayout
from hf_dist_ext.engine.flat import FlatRows
from hf_dist_ext.engine.rows import RowFeature

# What a packed row can consist of. A mask of real tokens alone says nothing, and is left out.
PACKED_KEYS = frozenset("input_ids inputs_embeds attention_mask token_type_ids position_ids".split())


class PackedTokens:
    """The tokens of a table's rows in their sorted order, copied once per batch when the first chunk asks for them.

    Args:
        features: every key of the table; values (R of a column, L, ...).
        spans: per sorted row its first real token and one past the last, counted in its own column.
        places: per sorted row its column's number and its number in that column.
    """

    def __init__(
        self,
        features: Mapping[str, RowFeature],
        spans: Sequence[tuple[int, int]],
        places: Sequence[tuple[int, int]],
        device: torch.device,
    ):
        self.features = {key: feature for key, feature in features.items() if key != "attention_mask"}
        self.spans, self.places, self.device = spans, places, device
        self.lengths = [last - first for first, last in spans]
        self.starts = [0, *accumulate(self.lengths)]

    def num_tokens(self, start: int, stop: int) -> int:
        """Of sorted rows start..stop."""
        return self.starts[stop] - self.starts[start]

    def gather(self, start: int, stop: int) -> dict[str, torch.Tensor | list[int]]:
        """What the model takes for sorted rows start..stop."""
        left, right = self.starts[start], self.starts[stop]
        gathered: dict[str, torch.Tensor | list[int]] = {
            key: tokens[left:right].unsqueeze(0) for key, tokens in self._tokens.items()
        }
        gathered["packed_lengths"] = self.lengths[start:stop]
        gathered["packed_offsets"] = self._offsets[start : stop + 1] - left
        return gathered

    @cached_property
    def _offsets(self) -> torch.Tensor:
        return torch.tensor(self.starts, dtype=torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def _tokens(self) -> dict[str, torch.Tensor]:
        """key -> (T, ...)."""
        lengths, starts = np.array(self.lengths), np.array(self.starts[:-1])
        first = np.array([first for first, _ in self.spans])
        column, row = np.array(self.places).T
        tokens = {} if "position_ids" in self.features else {"position_ids": self._moved(_ranges(first, lengths))}
        for number, value in enumerate(next(iter(self.features.values())).values):
            own = column == number  # (R,) sorted rows of this column
            if isinstance(value, FlatRows):
                begins = (value.places.lengths.cumsum() - value.places.lengths)[row[own]]
            else:
                begins = row[own] * value.shape[1] + first[own]
            sources = self._moved(_ranges(begins, lengths[own]))
            places = self._moved(_ranges(starts[own], lengths[own]))
            for key, feature in self.features.items():
                value = feature.values[number]
                flat = value.values if isinstance(value, FlatRows) else value.flatten(0, 1)  # (R * L, ...)
                assert flat is not None, "only a mask has no values, and it is left out"
                shape = (self.starts[-1], *flat.shape[1:])
                packed = tokens.setdefault(key, flat.new_empty(shape, dtype=value.dtype))
                packed.index_copy_(0, places, flat.index_select(0, sources).to(value.dtype))
        return tokens

    def _moved(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.tensor(numbers).to(self.device, non_blocking=True)


def can_be_packed(features: Mapping[str, RowFeature]) -> bool:
    """Whether every feature has one entry per token."""
    is_text = "input_ids" in features or "inputs_embeds" in features
    return is_text and features.keys() <= PACKED_KEYS and all(f.layout == RowLayout(0, 1) for f in features.values())


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[i], starts[i] + 1, ... of lengths[i] numbers, for one i after the other."""
    before = lengths.cumsum() - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
