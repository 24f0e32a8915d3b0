"""The tokens of some texts, end to end and without padding.

Letters: R texts, N tokens of all, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# What a tokenizer gives per token, and with which type it is kept. The attention mask follows from lengths.
KEPT = {"input_ids": np.int32, "token_type_ids": np.uint8}
MASK = "attention_mask"


@dataclass
class Tokens:
    """`values`: key -> (N,). `lengths`: (R,)."""

    values: dict[str, np.ndarray]
    lengths: np.ndarray

    def padded(self, fill: Mapping[str, int], side: str) -> dict[str, torch.Tensor]:
        """key -> (R, T) int64, the attention mask included."""
        width = int(self.lengths.max(initial=0))
        place, lengths = np.arange(width), self.lengths[:, None]
        is_real = place >= width - lengths if side == "left" else place < lengths  # (R, T)
        features = {}
        for key, values in self.values.items():
            table = np.full(is_real.shape, fill[key], dtype=np.int64)
            table[is_real] = values
            features[key] = torch.from_numpy(table)
        return features | {MASK: torch.from_numpy(is_real.astype(np.int64))}

    def flat(self, fill: Mapping[str, int], side: str) -> dict[str, Any]:
        """The same as features that take the memory of the real tokens; engine/flat.py tells what they are."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        known = {"lengths": self.lengths, "width": int(self.lengths.max(initial=0)), "pads_left": side == "left"}
        values = {key: torch.from_numpy(values) for key, values in self.values.items()}
        return values | {"offsets": torch.from_numpy(offsets), "flat": known | {"fill": dict(fill)}}


def without_rows(features: Mapping[str, Any]) -> dict[str, Any]:
    """Features of the same kind, of no row."""
    if (known := features.get("flat")) is None:
        return {name: value[:0] for name, value in features.items()}
    known, offsets = known | {"lengths": known["lengths"][:0]}, features["offsets"][:1]
    return {name: features[name][:0] for name in KEPT if name in features} | {"offsets": offsets, "flat": known}
