"""What a processor returns for some rows, as tensors: whatever has a number per token is padded, all else stacked.

Processors are called without padding, so that rows can still be cut. Letters: B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

IGNORED = -100  # the label of a token that no loss counts


def is_per_token(value: Any, ids: list[list[int]]) -> bool:
    """Whether a processor's output has one integer for every token of `ids`."""
    return (
        isinstance(value, list)
        and len(value) == len(ids)
        and all(isinstance(row, list) and len(row) == len(of) for row, of in zip(value, ids, strict=True))
        and all(isinstance(one, int) for one in value[0][:1])
    )


def padded(rows: list[list[int]], fill: int, side: str, multiple: int | None = None) -> torch.Tensor:
    """(B, T), where T may be rounded up to a multiple."""
    longest, multiple = max(map(len, rows)), multiple or 1
    width = -(-longest // multiple) * multiple
    values = torch.full((len(rows), width), fill, dtype=torch.long)
    for row, numbers in enumerate(rows):
        start = width - len(numbers) if side == "left" else 0
        values[row, start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.long)
    return values


def as_tensors(encoded: Mapping[str, Any], pad_id: int, side: str, multiple: int | None = None) -> dict[str, Any]:
    """`encoded`: of a processor, with `input_ids` as a list of rows."""
    fill, ids = {"input_ids": pad_id, "labels": IGNORED}, encoded["input_ids"]
    return {
        key: padded(value, fill.get(key, 0), side, multiple) if is_per_token(value, ids) else _tensor(value)
        for key, value in encoded.items()
    }


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return torch.stack(list(value))
    return torch.as_tensor(np.asarray(value))
