"""A dataset's column of texts and one of pictures become one column, whose rows hold both.

    "columns": {"query": {"text": "question", "image": "photo"}, "positive": "answer"}

A row may lack one of the two. The order in which the parts are named is the one in which a model reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import datasets
import pyarrow as pa
from datasets import Dataset

from hf_dist_ext.data.columns import AnyDataset, Source


def join_parts(
    dataset: AnyDataset, sources: Mapping[str, Source], kept: list[str]
) -> tuple[AnyDataset, dict[str, Source]]:
    """The dataset with a column for every mapping of `sources`, and the sources with its name. Pictures were opened by
    `with_images`. Columns that neither they nor `kept` name are dropped, so that no picture is stored twice."""
    joined = {column: dict(source) for column, source in sources.items() if isinstance(source, Mapping)}
    if not joined:
        return dataset, dict(sources)
    named = {f"{column} of {' and '.join(parts)}": parts for column, parts in joined.items()}
    plain = [name for source in sources.values() if not isinstance(source, Mapping) for name in _as_names(source)]
    kept = list(dict.fromkeys([*plain, *kept]))
    of_parts = [name for parts in named.values() for name in parts.values()]
    if not isinstance(dataset, Dataset) and not dataset.features:
        dataset = dataset._resolve_features()
    dataset = dataset.select_columns(list(dict.fromkeys([*kept, *of_parts])))
    features = datasets.Features(
        {name: dataset.features[name] for name in kept}
        | {name: {part: dataset.features[one] for part, one in parts.items()} for name, parts in named.items()}
    )
    # Through Arrow: no picture is decoded and encoded again.
    dataset = dataset.with_format("arrow").map(
        _join_table, batched=True, features=features, fn_kwargs={"kept": kept, "named": named}
    )
    dataset = dataset.with_format(None)
    if not isinstance(dataset, Dataset):
        dataset = dataset.decode(num_threads=0)
    names = iter(named)
    return dataset, {
        column: next(names) if isinstance(source, Mapping) else source for column, source in sources.items()
    }


def _as_names(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _join_table(table: pa.Table, kept: list[str], named: dict[str, dict[str, str]]) -> pa.Table:
    columns = {name: table.column(name) for name in kept}
    for name, parts in named.items():
        values = [_whole(table.column(column)) for column in parts.values()]
        columns[name] = pa.StructArray.from_arrays(values, names=list(parts))
    return pa.table(columns)


def _whole(values: pa.ChunkedArray) -> pa.Array:
    values = values.combine_chunks()
    values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    return values.storage if isinstance(values, pa.ExtensionArray) else values
