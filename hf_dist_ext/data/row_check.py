"""Every row is looked at before training: a `RowCheck` notes those that cannot be used, and too many are an error.

One process of each machine does the looking (`first_of_node`), and the others take from the caches what it has made.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed as dist
from datasets import Dataset

from hf_dist_ext.data.columns import PARTS, Source, arrow_batches, type_name
from hf_dist_ext.data.mixture import Mixture
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.run.losses import names_in

logger = logging.getLogger(__name__)

SHOWN = 20  # numbers of rows in a message
LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


@contextlib.contextmanager
def first_of_node() -> Iterator[bool]:
    """Lets the first process of each machine through before the others; gives whether this process is the first."""
    if not (dist.is_available() and dist.is_initialized()):
        yield True
        return
    from accelerate import PartialState

    state = PartialState()
    with state.local_main_process_first():
        yield state.is_local_main_process


@dataclass
class RowCheck:
    """Notes rows that cannot be used: more than `may_be_bad` of them are an error, fewer a warning. None: of rows that
    none may stand for."""

    name: str
    may_be_bad: int | None = None
    is_on: bool = True  # in the first process of a node
    bad: set[int] = field(default_factory=set)
    first: str = ""  # what is wrong with the first of them

    def rows(self, values: Iterable, look: Callable[[Any], Any], column: str | None = None) -> None:
        """`look(value)` of every row raises UsageError for one that cannot be used."""
        for row, value in enumerate(values if self.is_on else ()):
            try:
                look(value)
            except UsageError as error:
                self.add(row, str(error), column)

    def add(self, row: int, what: str, column: str | None = None) -> None:
        where = "" if column is None else f', column "{column}"'
        self.first = self.first or f"{self.name}, row {row} (counted from 0){where}: {what}"
        self.bad.add(row)

    def refuse_too_many(self) -> None:
        """Once all rows were looked at."""
        count = len(self.bad)
        if count <= (self.may_be_bad or 0):
            return
        rows = ", ".join(map(str, sorted(self.bad)[:SHOWN])) + (", ..." if count > SHOWN else "")
        more = f", more than max_bad_rows={self.may_be_bad}." if self.may_be_bad else "."
        raise UsageError(f"{self.first} Rows that cannot be used: {count} ({rows}){more}")

    def finish(self) -> set[int]:
        """The rows that cannot be used, in every process."""
        self.refuse_too_many()
        if self.bad:
            logger.warning(
                f"{self.first} max_bad_rows={self.may_be_bad} lets {len(self.bad)} such row(s) be replaced."
            )
        everyone = [self.bad]
        if self.may_be_bad and dist.is_available() and dist.is_initialized():
            everyone = [set()] * dist.get_world_size()
            dist.all_gather_object(everyone, self.bad)
        return set().union(*everyone)


def check_texts(dataset: Dataset, column: str, source: Source, is_pair: bool, check: RowCheck) -> None:
    """Every row of a query or positive has a text (or an image); of a column of negatives at least one row."""
    sources = names_in(source)
    parts = list(source) if isinstance(source, Mapping) else [None] * len(sources)
    for dataset_column, part in zip(sources, parts, strict=True):
        kind = column_kind(dataset.features[dataset_column])
        if kind is None or (is_pair and kind == "texts") or part not in (None, kind):
            allowed = "text or images" if is_pair else "text, lists of text or images"
            if type_name(dataset.features[dataset_column]) == "Json":  # what `datasets` calls values of several types
                row, value = next((i, v) for i, v in enumerate(dataset[dataset_column]) if not isinstance(v, str))
                raise UsageError(
                    f'{check.name}, row {row} (counted from 0), column "{dataset_column}": {value!r} is no text, and '
                    f"rows of this column differ in type; {column} must be {allowed}. Mend the row, or remove it."
                )
            raise UsageError(
                f'{check.name}, column "{dataset_column}" (row 0 and all others) holds '
                f"{type_name(dataset.features[dataset_column])}; {column} must be {allowed}. Choose another column."
            )
    if not check.is_on:
        return
    row_offset, num_rows, shown = 0, 0, '", "'.join(sources)
    for table in arrow_batches(dataset.select_columns(list(dict.fromkeys(sources)))):
        # (rows,) booleans: this row has something to embed in at least one of the sources
        has_content = np.zeros(len(table), dtype=bool)
        for dataset_column in sources:
            _refuse_not_utf8(table.column(dataset_column), check, row_offset, f', column "{dataset_column}": the text')
            has_content |= content_mask(table.column(dataset_column))
        for row in np.flatnonzero(~has_content) if is_pair else ():
            check.add(
                row_offset + int(row), f"every row needs a {column}, this is empty or null. Remove the row.", shown
            )
        num_rows += int(has_content.sum())
        row_offset += len(table)
    if not num_rows:
        check.refuse_too_many()
        raise UsageError(f'{check.name}, column "{shown}": no row has a {column}. Leave it out of columns.')


def _refuse_not_utf8(values: pa.ChunkedArray, check: RowCheck, first: int, what: str) -> None:
    """Of a text that cannot be decoded; Arrow's JSON reader takes any bytes. No such row can be replaced: what reads
    the whole column fails at it. `first`: the number of the first row."""

    def is_valid(part: pa.ChunkedArray) -> bool:
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            return False
        return True

    if not is_valid(values):
        row = next(row for row in range(len(values)) if not is_valid(values.slice(row, 1)))
        raise UsageError(
            f"{check.name}, row {first + row} (counted from 0){what} is not UTF-8. Save the file as UTF-8."
        )


def check_same_number(dataset: Dataset, column: str, source: Source, check: RowCheck) -> None:
    """Every row has as many negatives as the first one."""
    sources = names_in(source)
    row_offset, most = 0, None
    for table in arrow_batches(dataset.select_columns(list(dict.fromkeys(sources)))) if check.is_on else ():
        counts = sum(content_counts(table.column(name)) for name in sources)
        most = counts[0] if most is None else most
        for row in np.flatnonzero(counts != most):
            check.add(
                row_offset + int(row),
                f"{counts[row]} negative(s), and row 0 has {most}; the loss takes as many of every row.",
                '", "'.join(sources),
            )
        row_offset += len(table)


def check_no_nulls(dataset: Dataset, option: str, column: str, check: RowCheck) -> None:
    """`option`: the field of the run file that names the column. Ids may not be empty texts either, as a CSV file has
    them where there is none: rows with the same id are never negatives of each other."""
    row_offset, is_id = 0, option == "id_column"
    what = "an id" if is_id else "a label"
    for table in arrow_batches(dataset.select_columns([column])) if check.is_on else ():
        values = table.column(column)
        _refuse_not_utf8(values, check, row_offset, f': {option} "{column}"')
        for row in np.flatnonzero(~content_mask(values) if is_id else values.is_null().to_numpy()):
            how = "empty" if values[row].is_valid else "null"
            check.add(row_offset + int(row), f'{option} "{column}" is {how}. Give every row {what}.')
        row_offset += len(table)


def check_labels(dataset: Dataset, column: str, check: RowCheck) -> None:
    """Numbers, or lists of them, of which every row has as many as the first one."""
    feature, depth = dataset.features[column], 0
    while hasattr(feature, "feature"):
        feature, depth = feature.feature, depth + 1
    kind = type_name(feature)
    if depth > 2 or not (kind == "ClassLabel" or kind.startswith(("int", "uint", "float", "double", "bool"))):
        raise UsageError(
            f'{check.name}, column "{column}" holds {type_name(dataset.features[column])}; a label must be a number '
            "or a list of numbers. Choose another label_column."
        )
    row_offset, most = 0, None
    for table in arrow_batches(dataset.select_columns([column])) if check.is_on and depth else ():
        lengths = pc.list_value_length(table.column(column)).to_numpy()
        most = lengths[0] if most is None else most
        for row in np.flatnonzero(lengths != most):
            check.add(row_offset + int(row), f"a label of {lengths[row]} numbers, and of {most} in row 0.", column)
        row_offset += len(table)


def name_of(dataset: Any) -> str:
    info = getattr(dataset, "info", None)
    return getattr(info, "dataset_name", None) or f"the training set ({type(dataset).__name__})"


def bad_row_in_words(dataset: Any, one: Any, name: str, error: Exception) -> tuple[str, str]:
    """(which row of a training set cannot be used, why). `one`: its number in `dataset`, or the row of a stream."""
    number, row = getattr(one, "number", one), getattr(one, "row", one)
    if isinstance(dataset, Mixture):
        source, number = dataset.locate(number)
        name, dataset = f'source "{source.name}" of datasets', source.dataset
    columns = getattr(dataset, "column_names", None) or (list(row) if isinstance(row, Mapping) else [])
    quoted = [column for column in columns if re.search(rf"['\"]{re.escape(column)}['\"]", str(error))]
    bad = quoted or [column for column in columns if _lacks(column, row, number, dataset)]
    where = f', column "{bad[0]}"' if bad else ""
    if (indices := getattr(dataset, "_indices", None)) is not None:  # rows of the file were chosen or shuffled
        number = indices.column(0)[number].as_py()
    place = f"the row {row!r:.100}" if dataset is None else f"row {number} (counted from 0)"
    kind = "" if isinstance(error, UsageError | RunError) else f"{type(error).__name__}: "
    return f"{name}, {place}{where}", f"{kind}{error}"


def _lacks(column: str, row: Any, number: int, dataset: Any) -> bool:
    """Whether the value of a row cannot be read, or there is none."""
    try:
        row = row if isinstance(row, Mapping) else dataset.with_format(None).select_columns([column])[number]
        return row[column] is None
    except Exception:
        return True


def column_kind(feature: Any) -> str | None:
    """ "text", "texts" (a list per row), "image", "both" (text and image), or None for what can not be embedded."""
    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, dict):
        is_both = feature and all(column_kind(of_part) == part for part, of_part in feature.items())
        return "both" if is_both else None
    if isinstance(feature, datasets.Value):
        # A column of nothing but nulls is typed "null"; the row check names its first row.
        return "text" if "string" in feature.dtype or feature.dtype == "null" else None
    inner = getattr(feature, "feature", None) if isinstance(feature, (datasets.List, datasets.LargeList)) else None
    return "texts" if inner is not None and column_kind(inner) == "text" else None


def content_mask(values: pa.ChunkedArray) -> np.ndarray:
    """(rows,) True where a text is more than white space, a list holds such a text, an image is there."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values.type, LISTS):
        return content_counts(values) > 0
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        is_text = pc.and_not(pc.greater(pc.binary_length(values), 0), pc.utf8_is_space(values))
        return pc.fill_null(is_text, False).to_numpy(zero_copy_only=False)
    if pa.types.is_struct(values.type) and {field.name for field in values.type} <= {*PARTS}:
        parts = [content_mask(pc.struct_field(values, field.name)) for field in values.type]
        return np.logical_or.reduce(parts)
    return pc.is_valid(values).to_numpy(zero_copy_only=False)


def content_counts(values: pa.ChunkedArray) -> np.ndarray:
    """(rows,) how many texts of a list are more than white space; of what is no list 0 or 1."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not isinstance(values.type, LISTS):
        return content_mask(values).astype(np.int64)
    rows = pc.list_parent_indices(values).to_numpy()  # (texts,) the row of each text, without null rows
    return np.bincount(rows[content_mask(pc.list_flatten(values))], minlength=len(values))
