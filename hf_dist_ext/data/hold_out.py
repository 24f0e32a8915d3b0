"""Evaluation rows are taken from the training split. None stays there too under another number, and they share no
picture and no id with the rows that stay there.

The draw is the same in every run. A stream gives its first rows, and training skips their like.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from datasets import Dataset, IterableDataset

from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS, as_list, content_id
from hf_dist_ext.data.columns import AnyDataset, arrow_batches, column_names, columns_of
from hf_dist_ext.data.row_ids import content_hashes
from hf_dist_ext.data.stream_readers import digest
from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from hf_dist_ext.run.config import RunConfig

logger = logging.getLogger(__name__)

# Not the run's seed: the held-out rows must stay the same when only the training seed changes.
HOLDOUT_SEED = 42
LOOKED_AT = 1000  # rows of a stream behind those that are held out, for a warning


def hold_out(
    train: AnyDataset,
    num_rows: int,
    name: str,
    together: Sequence[str] = (),
    bad: Collection[int] = (),
    label: str | None = None,
    pair: Sequence[str] = (),
    is_on: bool = True,
) -> tuple[AnyDataset, AnyDataset]:
    """Split off `num_rows`: a fixed random draw, or the first rows of a stream; `is_on`: with a warning of how many of
    its next rows are left out.

    Rows that share a value of the columns `together` (a picture, an id), or that hold the same in all columns of
    `pair`, are not split: up to `num_rows` are held out then. `bad` rows stay in training. `label`: a column that rows
    of any content share.
    """
    if isinstance(train, IterableDataset):
        alike = pair or ([] if together else [column for column in columns_of(train) if column != label])
        return _hold_out_of_stream(train, num_rows, together, alike, name if is_on else "")
    if num_rows >= len(train):
        raise UsageError(f"eval_holdout={num_rows}, but {name} has {len(train)} rows. Hold out fewer.")
    groups = _groups(train, together, pair)  # (rows,)
    sizes = np.bincount(groups)
    if len(sizes) == len(train) and not bad:
        parts = train.train_test_split(test_size=num_rows, seed=HOLDOUT_SEED)
        return parts["train"], parts["test"]
    sizes[groups[list(bad)]] = len(train)  # more than may be held out
    chosen, count = [], 0
    for group in np.random.default_rng(HOLDOUT_SEED).permutation(len(sizes)).tolist():
        if count + sizes[group] <= num_rows:
            chosen.append(group)
            count += sizes[group]
        if count == num_rows:
            break
    if not chosen:
        raise UsageError(
            f"eval_holdout={num_rows}: rows of {name} that share {' or '.join(together or pair)} stay together, and "
            "each such group has more rows. Hold out more."
        )
    is_held = np.isin(groups, chosen)
    return train.select(np.flatnonzero(~is_held)), train.select(np.flatnonzero(is_held))


def kept_together(run: RunConfig, dataset: AnyDataset) -> list[str]:
    """Columns whose equal values must not be in training and in evaluation: pictures and the id."""
    features = dataset.features or {}
    known = features or columns_of(dataset)  # a stream of CSV knows no types
    is_conversation = run.task == "image-text-to-text"
    pictures = [name for name, one in features.items() if _holds_pictures(one)]
    named = [(run.columns or {}).get("image", "image")] if is_conversation else []
    ids = [run.id_column] if run.id_column else []
    return [name for name in dict.fromkeys([*pictures, *named, *ids]) if name in known]


def _holds_pictures(feature: Any) -> bool:
    """One per row, several, or one beside a text."""
    of_image = feature.get("image") if isinstance(feature, dict) else getattr(feature, "feature", feature)
    return isinstance(of_image, datasets.Image)


def pair_of(run: RunConfig, dataset: AnyDataset, together: Sequence[str]) -> list[str]:
    """The columns of a query and its positive, where rows are such pairs. None where one of them is in `together`, so
    that rows with the same pair are already."""
    names = column_names(run, dataset)[:NUM_PAIR_COLUMNS] if run.task == "embedding" else []
    return names if {*names}.isdisjoint(together) else []


def _groups(dataset: Dataset, together: Sequence[str], pair: Sequence[str]) -> np.ndarray:
    """(rows,) numbers 0, 1, ... that are equal for rows that share a value of one column of `together`, or the values
    of all columns of `pair`, directly or through other rows."""
    from scipy.sparse import coo_array  # takes a moment
    from scipy.sparse.csgraph import connected_components

    rows = np.arange(len(dataset))
    links = [np.stack([rows, rows])]  # (2, links) rows of which the second is the first with the same value
    if pair:
        first_column, *others = content_hashes(dataset, pair).T
        hashes = sum(others, start=first_column * np.uint64(31))  # the same two texts in the other order are no repeat
        _, first, same = np.unique(hashes, return_index=True, return_inverse=True)
        links.append(np.stack([rows, first[same]]))
    for column in together:
        first_with: dict = {}  # value -> its first row
        stored = (table.column(column).to_pylist() for table in arrow_batches(dataset.select_columns([column])))
        found = enumerate(_values(value) for values in stored for value in values)
        pairs = [(row, first_with.setdefault(content, row)) for row, contents in found for content in contents]
        links.append(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
    row, other = np.concatenate(links, axis=1)
    graph = coo_array((np.ones(len(row), dtype=bool), (row, other)), shape=(len(rows), len(rows)))
    return connected_components(graph, directed=False)[1]


def _values(value: Any) -> list:
    """What of a row's value another row may share: each of several pictures, none where there is none."""
    if isinstance(value, dict) and "image" in value:  # beside a text
        value = value["image"]
    stored = [one["bytes"] or one["path"] if isinstance(one, dict) else one for one in as_list(value)]
    return [content_id(one) if isinstance(one, bytes) else one for one in stored if one not in (None, "")]


def _hold_out_of_stream(
    stream: Any, num_rows: int, together: Sequence[str], alike: Sequence[str], says: str
) -> tuple[AnyDataset, AnyDataset]:
    """The rest is filtered by content: skip() would count rows over all shards, and leave one reader."""
    stored = stream.decode(False) if stream.features else stream  # no picture is decoded
    first = [_keys(row, together, alike) for row in stored.take(num_rows + (LOOKED_AT if says else 0))]
    held = {key for keys in first[:num_rows] for key in keys}
    lost = sum(not held.isdisjoint(keys) for keys in first[num_rows:])
    if lost:
        what = " or ".join([*together, *([" and ".join(alike)] if alike else [])])
        logger.warning(
            f"eval_holdout={num_rows}: {lost} of the next {len(first) - num_rows} rows of {says} are left out of "
            f"training, since they hold the same {what} as a held-out row. So are such rows later on."
        )
    rest = stored.filter(_shares_nothing, fn_kwargs={"held": held, "together": [*together], "alike": [*alike]})
    return (rest.decode(num_threads=0) if rest.features else rest), stream.take(num_rows)


def _keys(row: dict[str, Any], together: Sequence[str], alike: Sequence[str]) -> list:
    """What no row of another group holds."""
    shared = [
        (name, one if isinstance(one, str | int) else repr(one)) for name in together for one in _values(row[name])
    ]
    names = alike or ([] if shared else sorted(row))  # a row without a picture is told by all that it holds
    return [*shared, digest([row[name] for name in names])] if names else shared


def _shares_nothing(row: dict[str, Any], held: set, together: list[str], alike: list[str]) -> bool:
    return held.isdisjoint(_keys(row, together, alike))
