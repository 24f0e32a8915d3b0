"""What a reader wants to know of training rows: how many there are, how long they are, and a few of them, cut short.

Lengths are those of at most 1,000 rows, spread evenly over the data. A stream is not read for it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np

from hf_dist_ext.data.row_check import column_kind

SAMPLED_ROWS = 1000
SAMPLED_PICTURES = 50  # which have to be opened
EXAMPLES = 3
CHARACTERS = 150  # of a value in an example
PICTURES = "pictures"  # how the words for a column of them begin


@dataclass(frozen=True)
class Described:
    """One dataset.

    Attributes:
        name: of the source, "" where there is one only.
        rows: None for a stream.
        columns: name -> what it holds, in words.
        examples: column -> value, cut short, of a few rows.
    """

    name: str
    rows: int | None
    columns: dict[str, str]
    examples: list[dict[str, str]] = field(default_factory=list)


def describe(dataset: Any, tokenizer: Any) -> list[Described]:
    """Of a dataset or of each source of a mixture; what is no dataset of `datasets` is left out.

    `tokenizer`: gives the lengths of texts in tokens, before they are cut; None: in characters.
    """
    sources = getattr(dataset, "sources", None) or {"": dataset}
    kinds = (datasets.Dataset, datasets.IterableDataset)
    return [_of_one(name, one, tokenizer) for name, one in sources.items() if isinstance(one, kinds)]


def _of_one(name: str, rows: Any, tokenizer: Any) -> Described:
    if isinstance(rows, datasets.IterableDataset):
        return Described(name, None, dict.fromkeys(rows.column_names or (), "read as a stream"))
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):  # a picture may be one of the rows that cannot be read
            rows = rows.cast_column(column, datasets.Image(decode=False))
        elif "Image(" in repr(feature):
            rows = rows.remove_columns(column)
    sampled = _spread(rows, SAMPLED_ROWS)
    columns = {column: _in_words(sampled, column, tokenizer) for column in rows.column_names}
    examples = [{column: short(row[column]) for column in columns} for row in _spread(rows, EXAMPLES)]
    return Described(name, len(rows), columns, examples)


def _spread(rows: datasets.Dataset, most: int) -> datasets.Dataset:
    return rows.select(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))


def _in_words(rows: datasets.Dataset, column: str, tokenizer: Any) -> str:
    feature = rows.features[column]
    kind = column_kind(feature)
    if kind == "image":
        sizes = [size for size in map(_size, _spread(rows, SAMPLED_PICTURES)[column]) if size is not None]
        return f"{PICTURES}, {_span([width for width, _ in sizes])} x {_span([height for _, height in sizes])} pixels"
    values = [value for value in rows[column] if value is not None]
    if kind == "text":
        return f"texts of {_lengths(values, tokenizer)}"
    if kind == "texts":
        texts = [text for of_row in values for text in of_row if text]
        return f"lists of {_span([len(of_row) for of_row in values])} texts of {_lengths(texts, tokenizer)}"
    if isinstance(feature, datasets.ClassLabel):
        return f"one of {feature.num_classes} classes"
    if values and all(isinstance(value, (int, float)) for value in values):
        return f"numbers, {_span(values)}"
    return "lists" if values and isinstance(values[0], list) else "objects"


def _lengths(texts: Sequence[str], tokenizer: Any) -> str:
    if not texts:
        return "no length"
    if tokenizer is None:
        return f"{_span([len(text) for text in texts])} characters"
    return f"{_span([len(ids) for ids in tokenizer(list(texts), verbose=False)['input_ids']])} tokens"


def _span(numbers: Sequence[float]) -> str:
    if not numbers:
        return "0"
    low, high = min(numbers), max(numbers)
    return _show(low) if low == high else f"{_show(low)} to {_show(high)} (mean {_show(float(np.mean(numbers)))})"


def _show(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{round(number, 1 if abs(number) >= 10 else 4):g}"


def _size(picture: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Width and height of an encoded picture; None where it cannot be read."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(picture["bytes"]) if picture["bytes"] else picture["path"]).size
    except (OSError, TypeError):
        return None


def short(value: Any) -> str:
    """A text of one line. `value`: what a column without decoded pictures holds."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        size = _size(value)
        return "a picture" if size is None else f"a picture of {size[0]} x {size[1]} pixels"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=short)
    text = " ".join(text.split())
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}..."
