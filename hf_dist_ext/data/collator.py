"""What all collators share: the names that a batch holds beside its columns, ids that tell equal content from
different content, labels, and what is refused in rows.

Letters: B rows of one rank, K numbers of a label.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.sources import NUM_PAIR_COLUMNS

logger = logging.getLogger(__name__)

CUTS = "chunk_cuts"  # how the batch is cut into chunks (training/ahead.py)
CONSTANTS = "constants"  # column -> what its features are besides tensors over rows (models/embedder.py)
RESERVED = ("ids", "targets", CONSTANTS, CUTS)  # of a batch, and no columns


def check_columns(
    columns: Sequence[str], prompts: Any, max_length: int | Mapping[str, int] | None, label_column: str | None
) -> None:
    """Raises UsageError for options of a column that there is not. Warns of negatives that differ by their prompt."""
    assert len(columns) >= NUM_PAIR_COLUMNS and not {*RESERVED} & {*columns}, columns
    by_column = prompts if isinstance(prompts, Mapping) else {}
    for option, value in (("prompts", by_column), ("max_length", max_length)):
        for column in value if isinstance(value, Mapping) else ():
            if column not in columns:
                raise UsageError(f'{option} has "{column}", which is no column of this run: {", ".join(columns)}.')
    if label_column is not None and "label" in columns:
        raise UsageError('columns: the name "label" is that of the labels. Call that column something else.')
    without = [column for column in columns[NUM_PAIR_COLUMNS:] if column not in by_column]
    if without and by_column.get(columns[1]):
        logger.warning(
            'prompts has one for "%s" and none for "%s": hard negatives can then be told by what they lack. '
            "Give it the same, or an empty one if that is meant.",
            columns[1],
            without[0],
        )


def groups_of(column: str, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """(B,) ids of the rows' groups."""
    groups = [row[column] for row in rows]
    if any(map(is_empty, groups)):  # as a stream may have them: all of these rows would be of one group
        raise UsageError(f'id_column "{column}" is null or empty in a row. Give every row an id.')
    return content_ids(groups)


def labels_of(
    column: str, values: list, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = torch.float32
) -> torch.Tensor:
    """(B,), (B, K) or (B, K, D), in float32 whatever the numbers: processes send each other their labels. `shape`:
    that of a row's. `dtype`: None is int64 of integers, and of others float32."""
    try:
        labels = torch.stack(values) if isinstance(values[0], torch.Tensor) else torch.tensor(values)
        labels = labels if dtype is None else labels.to(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f'Column "{column}": a label must be a number, or a list of as many numbers in every row: {error}. '
            f"The first row of the batch holds {values[0]!r}. Correct the rows, or name another column."
        ) from error
    if shape is not None and labels.shape[1:] != shape:
        raise UsageError(
            f'label_column "{column}": the first row of the data has a label of the shape {list(shape)}, and a later '
            f"one of {list(labels.shape[1:])}. Every row needs as many numbers. It holds {values[0]!r}."
        )
    return labels


def label_shape_of(stream: Any, column: str | None) -> tuple[int, ...] | None:
    """Of the first row's label, where rows are read while training; None: there is none, or all rows are known."""
    if column is None or hasattr(stream, "__len__"):
        return None
    label = next(iter(stream)).get(column)
    return tuple(labels_of(column, [label]).shape[1:])


def check_same_number(column: str, numbers: list[int]) -> None:
    if len(set(numbers)) > 1:
        raise UsageError(
            f'Column "{column}": one row has {max(numbers)} negatives and another one {min(numbers)}, and the loss '
            "takes the first, second, ... negatives of all rows as a column each. Give every row as many."
        )


def content_ids(values: Sequence) -> torch.Tensor:
    return torch.tensor([content_id(value) for value in values], dtype=torch.long)


def content_id(value: Any) -> int:
    """63 bits that are equal for equal content in every process and run, which Python's own hash is not."""
    value = value.numpy() if isinstance(value, torch.Tensor) else value
    if isinstance(value, bytes):
        content = value
    elif hasattr(value, "tobytes"):  # a picture, an array
        content = f"{getattr(value, 'mode', '')}{value.size}".encode() + value.tobytes()
    elif isinstance(value, Mapping):  # a text with images
        content = repr([(kind, [content_id(one) for one in as_list(some)]) for kind, some in value.items()]).encode()
    elif isinstance(value, list | tuple):  # messages, a pair: str() names a picture by its place in memory
        content = repr([content_id(one) for one in value]).encode()
    else:
        content = str(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def is_empty(value: Any) -> bool:
    """Whether there is nothing to embed. A text of nothing but white space is empty."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or value == [] or (isinstance(value, str) and (not value or value.isspace()))


def as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]
