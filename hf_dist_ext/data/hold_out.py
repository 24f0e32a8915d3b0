"""Evaluation rows are taken from the training split, and share no picture and no id with the rows that stay there.

The draw is the same in every run. A stream gives its first rows, and training skips what has the same content.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from datasets import Dataset, IterableDataset

from hf_dist_ext.data.collator import as_list, content_id
from hf_dist_ext.data.columns import AnyDataset, arrow_batches, columns_of
from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from hf_dist_ext.run.config import RunConfig

# Not the run's seed: the held-out rows must stay the same when only the training seed changes.
HOLDOUT_SEED = 42


def hold_out(
    train: AnyDataset,
    num_rows: int,
    name: str,
    together: Sequence[str] = (),
    bad: Collection[int] = (),
    label: str | None = None,
) -> tuple[AnyDataset, AnyDataset]:
    """Split off `num_rows`: a fixed random draw, or the first rows of a stream.

    Rows that share a value of the columns `together` (a picture, an id) are not split: up to `num_rows` are held out
    then. `bad` rows stay in training. `label`: a column that rows of any content share.
    """
    if isinstance(train, IterableDataset):
        contents = [column for column in columns_of(train) if column != label]
        return _hold_out_of_stream(train, num_rows, together or contents)
    if num_rows >= len(train):
        raise UsageError(f"eval_holdout={num_rows}, but {name} has {len(train)} rows. Hold out fewer.")
    groups = _groups(train, together) if together else [[row] for row in range(len(train))] if bad else []
    if len(groups) in (0, len(train)) and not bad:
        parts = train.train_test_split(test_size=num_rows, seed=HOLDOUT_SEED)
        return parts["train"], parts["test"]
    chosen: list[int] = []
    for i in np.random.default_rng(HOLDOUT_SEED).permutation(len(groups)):
        if len(chosen) + len(groups[i]) <= num_rows and not any(row in bad for row in groups[i]):
            chosen += groups[i]
    if not chosen:
        raise UsageError(
            f"eval_holdout={num_rows}: rows of {name} that share {' or '.join(together)} stay together, and each such "
            "group has more rows. Hold out more."
        )
    is_held = np.zeros(len(train), dtype=bool)
    is_held[chosen] = True
    return train.select(np.flatnonzero(~is_held)), train.select(np.flatnonzero(is_held))


def kept_together(run: RunConfig, dataset: AnyDataset) -> list[str]:
    """Columns whose equal values must not be in training and in evaluation: pictures and the id."""
    features = dataset.features or {}
    is_conversation = run.task == "image-text-to-text"
    pictures = [name for name, one in features.items() if _holds_pictures(one)]
    named = [(run.columns or {}).get("image", "image")] if is_conversation else []
    ids = [run.id_column] if run.id_column else []
    return [name for name in dict.fromkeys([*pictures, *named, *ids]) if name in features]


def _holds_pictures(feature: Any) -> bool:
    """One per row, several, or one beside a text."""
    of_image = feature.get("image") if isinstance(feature, dict) else getattr(feature, "feature", feature)
    return isinstance(of_image, datasets.Image)


def _groups(dataset: Dataset, columns: Sequence[str]) -> list[list[int]]:
    """Rows that share a value of one of the columns, directly or through other rows."""
    group_of, first_with = list(range(len(dataset))), {}  # row -> an earlier one of its group; value -> its first row

    def root(row: int) -> int:
        while group_of[row] != row:
            group_of[row] = row = group_of[group_of[row]]
        return row

    for column in columns:
        row = 0
        for table in arrow_batches(dataset.select_columns([column])):
            for value in table.column(column).to_pylist():
                for content in _values(value):
                    group_of[root(row)] = root(first_with.setdefault((column, content), row))
                row += 1
    groups: dict[int, list[int]] = {}
    for row in range(len(dataset)):
        groups.setdefault(root(row), []).append(row)
    return list(groups.values())


def _values(value: Any) -> list:
    """What of a row's value another row may share: each of several pictures, none where there is none."""
    if isinstance(value, dict) and "image" in value:  # beside a text
        value = value["image"]
    stored = [one["bytes"] or one["path"] if isinstance(one, dict) else one for one in as_list(value)]
    return [content_id(one) if isinstance(one, bytes) else one for one in stored if one not in (None, "")]


def _hold_out_of_stream(stream: Any, num_rows: int, columns: Sequence[str]) -> tuple[AnyDataset, AnyDataset]:
    """The rest is filtered by content: skip() would count rows over all shards, and leave one reader."""
    stored = stream.decode(False) if stream.features else stream  # no picture is decoded
    held = {key for row in stored.take(num_rows) for key in _keys(row, columns)}
    rest = stored.filter(_shares_nothing, fn_kwargs={"held": held, "columns": list(columns)})
    return (rest.decode(num_threads=0) if rest.features else rest), stream.take(num_rows)


def _keys(row: dict[str, Any], columns: Sequence[str]) -> list:
    return [
        (column, one if isinstance(one, str | int) else repr(one))
        for column in columns
        for one in _values(row[column])
    ]


def _shares_nothing(row: dict[str, Any], held: set, columns: list[str]) -> bool:
    return held.isdisjoint(_keys(row, columns))
