"""The columns of a dataset: which there are, the names that training gives them, and their values as they are stored.

The order of the columns of a run has a meaning: the first is the query, the second its positive, others are negatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset
from datasets.features.features import require_decoding
from datasets.table import CastError

from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS, RESERVED, as_list, is_empty
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.losses import names_in
from hf_dist_ext.run.sources import query_column, refuse_no_pair, require_column

if TYPE_CHECKING:
    from hf_dist_ext.run.config import RunConfig

DEFAULT_COLUMNS = ("query", "positive", "negative")
PARTS = ("text", "image")  # of a row that has both

AnyDataset = Dataset | IterableDataset
# One dataset column, several that are joined into a list per row, or {"text": column, "image": column}.
Source = str | list[str] | dict[str, str]


def column_names(run: RunConfig, dataset: AnyDataset) -> list[str]:
    """The columns of a dataset from `load_datasets` that are embedded, in order: anchor, positive, negatives."""
    names = list(run.columns) if run.columns else DEFAULT_COLUMNS
    available = columns_of(dataset)
    return [name for name in names if name in available]


def columns_of(dataset: AnyDataset) -> list[str]:
    """A stream may know its columns only once a row is read."""
    return list(dataset.column_names or next(iter(dataset), {}))


def refuse_late_columns(what: str, error: CastError) -> NoReturn:
    """A file's later rows have other columns than its first ones, from which `datasets` takes them."""
    found, expected = set(error.table_column_names), set(error.requested_column_names)
    differ = ", ".join(f'"{name}"' for name in sorted(found ^ expected))
    raise UsageError(
        f"{what}: its first rows have the columns {', '.join(sorted(expected))}, later ones "
        f"{', '.join(sorted(found))}. Write {differ} in every row, null where there is none, but not in the first row."
    ) from error


def refuse_late_type(what: str, error: Exception, features: datasets.Features | None) -> None:
    """Raises UsageError where the first rows, from which `datasets` takes the type of a column, have nothing in it.
    `features`: of the columns, as these rows have them."""
    if not (found := re.search(r"Couldn't cast array of type (.+) to null", str(error))):
        return
    names = ", ".join(f'"{name}"' for name, one in (features or {}).items() if "null" in repr(one))
    raise UsageError(
        f"{what}: a column is null or [] in all of the first rows (10 MB of a JSON file) and holds {found[1]} later. "
        f"Move a row with a value to the top of the (first) file. Columns without one there: {names or 'unknown'}."
    ) from error


def resolve_columns(columns: Mapping[str, Source] | None, available: list[str], name: str) -> dict[str, Source]:
    """Our column name -> the dataset's column or columns, all of which exist."""
    if columns is None:
        columns = _default_columns(available, name)
        if len(columns) < NUM_PAIR_COLUMNS or list(columns)[1] != "positive":
            if len(available) == 1 and (sign := next((one for one in ";\t" if one in available[0]), None)):
                raise UsageError(f"{name}: its columns seem to be divided by {sign!r}. Save it with commas.")
            refuse_no_pair(available, name)
    if len(columns) < NUM_PAIR_COLUMNS:
        raise UsageError(f"columns={dict(columns)} names {len(columns)} column. A query and its positive are needed.")
    for index, (column, source) in enumerate(columns.items()):
        if column in RESERVED:
            raise UsageError(
                f'columns: the name "{column}" is reserved for the rows\' {column}. Call that column something else.'
            )
        if isinstance(source, Mapping):
            check_parts(column, source, available, name)
            continue
        if not isinstance(source, str) and index < NUM_PAIR_COLUMNS:
            raise UsageError(
                f'columns["{column}"] is a list, but a row has one {column}. Only negatives may be several.'
            )
        for dataset_column in [source] if isinstance(source, str) else source:
            require_column(dataset_column, available, name, f'columns["{column}"]')
    return dict(columns)


def _default_columns(available: list[str], name: str) -> dict[str, Source]:
    """Ours, or those of sentence-transformers: anchor for query, and negative_1, negative_2, ... in their order."""
    columns: dict[str, Source] = {column: column for column in DEFAULT_COLUMNS if column in available}
    if (query := query_column(available)) in available:
        columns = {"query": query} | columns
    numbered = [column for column in available if re.fullmatch(r"negative_\d+", column)]
    numbered.sort(key=lambda column: int(column.rpartition("_")[2]))
    if numbered and "negative" in columns:
        raise UsageError(
            f"{name} has the column negative, and {', '.join(numbered)} too. Say which are meant: columns="
            f'{{"query": "{columns.get("query", "...")}", "positive": "positive", "negative": ["negative", ...]}}.'
        )
    if numbered:
        columns["negative"] = list(numbered)
    return columns


def check_parts(column: str, source: Mapping[str, str], available: list[str], name: str) -> None:
    if not source or set(source) - {*PARTS}:
        raise UsageError(
            f'columns["{column}"] is {dict(source)}. It takes {{"text": "a column", "image": "a column"}}, or one.'
        )
    for part, dataset_column in source.items():
        require_column(dataset_column, available, name, f'columns["{column}"]["{part}"]')


def rename(dataset: AnyDataset, columns: dict[str, Source], available: list[str]) -> AnyDataset:
    """Exactly `columns`, in that order. Several negative columns become one column of lists, one of texts and one of
    pictures a column of both, in the order in which they are named."""
    sources, features = list(columns.values()), (dataset.features or {}).values()
    if all(isinstance(source, str) for source in sources) and len(set(sources)) == len(sources):
        changes = {source: column for column, source in columns.items() if source != column}
        # `datasets` refuses to rename a column to its own name, and one of a stream to the name of another.
        if isinstance(dataset, Dataset) or changes.keys().isdisjoint(changes.values()):
            dataset = dataset.select_columns(sources)
            return (_renamed(dataset, changes) if changes else dataset).select_columns(list(columns))
    options = {"remove_columns": available, "fn_kwargs": {"columns": columns}}
    has_pictures = any(isinstance(source, Mapping) for source in sources) or any(map(require_decoding, features))
    if not isinstance(dataset, Dataset) and not has_pictures:
        return dataset.map(join_columns, batched=True, **options)
    dataset = with_features(dataset)
    # `datasets` would take the types from the first rows, which may have no negative
    return map_stored(dataset, join_columns, _features_of_joined(dataset.features, columns), **options)


def with_features(dataset: AnyDataset) -> AnyDataset:
    """A stream may know its types only once a row is read."""
    return dataset if dataset.features else dataset._resolve_features()


def map_stored(dataset: AnyDataset, function: Callable, features: datasets.Features, **options: Any) -> AnyDataset:
    """A map() over batches as they are stored: no picture is decoded, and encoded again. `features`: of its rows."""
    if not isinstance(dataset, Dataset):  # whose map() with features would give pictures as they are stored
        return dataset.decode(False).map(function, batched=True, **options).cast(features)
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset.map(function, batched=True, features=features, **options)


def _features_of_joined(features: datasets.Features, columns: dict[str, Source]) -> datasets.Features:
    of_one = {}
    for column, source in columns.items():
        if isinstance(source, str):
            of_one[column] = features[source]
            continue
        if isinstance(source, Mapping):
            of_one[column] = {part: features[name] for part, name in source.items()}
            continue
        inner = [getattr(features[name], "feature", features[name]) for name in source]
        known = [one for one in inner if type_name(one) != "null"]
        of_one[column] = datasets.List((known or inner)[0])
    return datasets.Features(of_one)


def _renamed(dataset: AnyDataset, changes: dict[str, str]) -> AnyDataset:
    """A stream is renamed by a map(), for which `datasets` would decode every picture, and encode it again."""
    if isinstance(dataset, Dataset) or not any(map(require_decoding, (dataset.features or {}).values())):
        return dataset.rename_columns(changes)
    return dataset.decode(False).rename_columns(changes).decode(num_threads=0)


def join_columns(rows: dict[str, list], columns: dict[str, Source]) -> dict[str, list]:
    """A row's texts of several columns as one list, in which no text is one negative less; its text and picture as one
    object."""
    joined = {}
    for column, source in columns.items():
        if isinstance(source, str):
            joined[column] = rows[source]
            continue
        several = zip(*(rows[name] for name in names_in(source)), strict=True)
        if isinstance(source, Mapping):
            joined[column] = [dict(zip(source, of_row, strict=True)) for of_row in several]
        else:
            of_rows = ([text for value in values for text in as_list(value)] for values in several)
            joined[column] = [[text for text in of_row if not is_empty(text)] for of_row in of_rows]
    return joined


def type_name(feature: Any) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__


def arrow_batches(dataset: Dataset) -> Iterator[pa.Table]:
    """The rows as they are stored: no picture is decoded."""
    return dataset.with_format("arrow").iter(batch_size=10_000)
