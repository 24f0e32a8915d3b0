"""What an evaluation embeds: texts or pictures by their numbers, and the split that they are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_dist_ext.errors import UsageError


class Items:
    """Texts or pictures by their numbers.

    Attributes:
        lengths: (n,) of the texts in characters; zeros for pictures.
    """

    def __init__(self, values: pa.ChunkedArray | datasets.Dataset):
        self._values = values
        is_text = isinstance(values, pa.ChunkedArray)
        self.lengths = pc.utf8_length(values).to_numpy() if is_text else np.zeros(len(values), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._values)

    def take(self, numbers: Sequence[int]) -> list:
        if isinstance(self._values, pa.ChunkedArray):
            return self._values.take(pa.array(numbers)).to_pylist()
        return self._values[list(numbers)][self._values.column_names[0]]


def choose_split(splits: Mapping[str, Any], asked: str | None, what: str) -> str:
    """The name of the one that is asked for; None: the only one, else "test". Raises UsageError."""
    if asked is None:
        asked = next(iter(splits)) if len(splits) == 1 else "test"
    if asked not in splits:
        raise UsageError(f'{what}: there is no split "{asked}", but {", ".join(splits)}. Choose one with split.')
    return asked
