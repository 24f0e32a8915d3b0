"""Datasets as contrastive training wants them: rows of named columns, all of them checked.

    train, evaluation = load_datasets(run)           # run: config.RunConfig; columns become query, positive, ...
    collator = ContrastiveCollator(tokenizer, column_names(run, train), max_length=run.max_length)  # collator.py

(1) open: the built-in dataset, a hub id, a file, a folder -> splits
(2) choose the training and the evaluation rows
(3) columns: the user's names -> ours, in the order that has meaning (query, positive, negatives); the rest is dropped
(4) check that every row has text where text must be, before anything is built
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed as dist
from datasets import Dataset, IterableDataset
from datasets.features.features import require_decoding

from hf_dist_ext.data.code_search import load_code_search
from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS, ContrastiveCollator, as_list, content_id
from hf_dist_ext.data.storage import with_retries
from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from hf_dist_ext.run.config import RunConfig

logger = logging.getLogger(__name__)

__all__ = ["ContrastiveCollator", "column_names", "load_datasets"]

CODE_SEARCH = "code-search"
BUILT_IN = (CODE_SEARCH, "digits")  # they bring a test split
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
DEFAULT_COLUMNS = ("query", "positive", "negative")
# Not the run's seed: the held-out rows must stay the same when only the training seed changes.
HOLDOUT_SEED = 42
SHUFFLE_BUFFER_ROWS = 10_000

AnyDataset = Dataset | IterableDataset
Source = str | list[str]  # one dataset column, or several that are joined into a list per row


def load_datasets(
    run: RunConfig, opener: Callable | None = None, preparer: Callable | None = None, max_bad_rows: int = 0
) -> tuple[AnyDataset, AnyDataset | None]:
    """The run's training rows and its evaluation rows (None when it names none), in the columns `column_names` gives.

    A streamed training set is shuffled through a buffer, since no sampler can. Raises UsageError for what is not
    there: the dataset, a split, a column, a row, a text; of the training rows `max_bad_rows` may lack something.
    Another task brings its own `open_splits` and `prepare`. All processes call it: the first of each node reads and
    checks, the others take from the caches what it has made.
    """
    opener, preparer = opener or open_splits, preparer or prepare
    if not run.dataset_name:
        raise UsageError('dataset_name is missing. Give "code-search", a hub id, or a json/csv/parquet/arrow file.')
    if run.eval_holdout and run.dataset_name != CODE_SEARCH and (run.eval_split or run.eval_dataset_name):
        raise UsageError(
            "eval_holdout takes evaluation rows from the training split, but eval_split or eval_dataset_name is given "
            "too. Keep one."
        )
    train_name = f"{run.dataset_name} ({run.train_split})"
    train_check, evaluation = RowCheck(train_name, max_bad_rows), None
    with first_of_node() as train_check.is_on:
        # (1), (2)
        splits = opened(opener, run.dataset_name, run)
        train = pick_split(splits, run.train_split, run.dataset_name, "train_split")
        eval_of = None
        if run.eval_dataset_name:
            eval_splits = opened(opener, run.eval_dataset_name, run)
            eval_of = (
                run.eval_dataset_name,
                eval_splits,
                run.eval_split or only_split(eval_splits, run.eval_dataset_name),
            )
        elif run.eval_split or (
            run.dataset_name in BUILT_IN and not (run.eval_holdout and run.dataset_name != CODE_SEARCH)
        ):
            eval_of = run.dataset_name, splits, run.eval_split or "test"
        if eval_of is not None:
            name, eval_splits, eval_split = eval_of
            evaluation = pick_split(eval_splits, eval_split, name, "eval_split")
        # (3), (4)
        train = preparer(train, run, train_check)
        if evaluation is not None:
            evaluation = preparer(evaluation, run, RowCheck(f"{name} ({eval_split})", is_on=train_check.is_on))
    bad = train_check.finish()
    if evaluation is None and run.eval_holdout:
        train, evaluation = hold_out(train, run.eval_holdout, train_name, _kept_together(run, train), bad)
    train = first_rows(train, run.max_train_samples)
    if isinstance(train, IterableDataset):
        train = train.shuffle(seed=HOLDOUT_SEED, buffer_size=SHUFFLE_BUFFER_ROWS)
    return train, first_rows(evaluation, run.max_eval_samples) if evaluation is not None else None


@contextlib.contextmanager
def first_of_node() -> Iterator[bool]:
    """Its first process goes through before the others do; whether this is the first. One process: it is."""
    if not (dist.is_available() and dist.is_initialized()):
        yield True
        return
    from accelerate import PartialState

    state = PartialState()
    with state.local_main_process_first():
        yield state.is_local_main_process


@dataclass
class RowCheck:
    """Looks at all rows before training. More than `may_be_bad` that cannot be used are an error, fewer a warning."""

    name: str
    may_be_bad: int = 0
    is_on: bool = True  # in the first process of a node
    bad: dict[int, str] = field(default_factory=dict)  # row -> what is wrong with it

    def rows(self, values: Iterable, look: Callable[[Any], Any], column: str | None = None) -> None:
        """`look(value)` of every row raises UsageError for one that cannot be used."""
        for row, value in enumerate(values if self.is_on else ()):
            try:
                look(value)
            except UsageError as error:
                self.add(row, str(error), column)

    def add(self, row: int, what: str, column: str | None = None) -> None:
        where = "" if column is None else f', column "{column}"'
        self.bad.setdefault(row, f"{self.name}, row {row} (counted from 0){where}: {what}")
        if len(self.bad) <= self.may_be_bad:
            return
        if self.may_be_bad:
            raise UsageError(
                f"{self.bad[row]} Rows like it: {len(self.bad)}, more than max_bad_rows={self.may_be_bad}."
            )
        raise UsageError(self.bad[row])

    def finish(self) -> set[int]:
        """The rows that cannot be used, in every process."""
        if self.bad:
            first = next(iter(self.bad.values()))
            logger.warning(f"{first} max_bad_rows={self.may_be_bad} lets {len(self.bad)} such row(s) be replaced.")
        everyone = [set(self.bad)]
        if self.may_be_bad and dist.is_available() and dist.is_initialized():
            everyone = [set()] * dist.get_world_size()
            dist.all_gather_object(everyone, set(self.bad))
        return set().union(*everyone)


# (1) ---------------------------------------------------------------------------------------------------------------


def opened(opener: Callable, name: str, run: RunConfig) -> Mapping[str, AnyDataset]:
    """A file system may hang for a while; a hub id that nobody answers is a mistake, or `datasets` has tried again."""
    is_local = with_retries(Path(name).expanduser().exists, f"the path {name}")
    return with_retries(lambda: opener(name, run), f'dataset "{name}"') if is_local else opener(name, run)


def open_splits(name: str, run: RunConfig) -> Mapping[str, AnyDataset]:
    if name == CODE_SEARCH:
        if run.streaming:
            raise UsageError(
                'streaming=true with dataset_name "code-search", which is read in memory. Drop streaming.'
            )
        if run.dataset_config_name is not None:
            raise UsageError('dataset_config_name is given, but "code-search" has no configurations. Remove it.')
        return load_code_search(held_out=run.eval_holdout) if run.eval_holdout else load_code_search()
    path = Path(name).expanduser()
    config_name = run.dataset_config_name if name == run.dataset_name else None
    if config_name is not None and path.is_file():
        raise UsageError(f'dataset_config_name="{config_name}": the file {path} has no configurations. Remove it.')
    with loading_errors(name):
        if path.is_dir() and any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
            if config_name is not None:
                raise UsageError(f'dataset_config_name="{config_name}": {path} was saved without. Remove it.')
            return open_saved_folder(path, run.streaming)
        if path.is_dir():
            return datasets.load_dataset(str(path), config_name, streaming=run.streaming)
        if path.is_file():
            return open_file(path, run.streaming)
        if looks_like_a_path(name):
            raise UsageError(f'Dataset "{name}": there is no such file or folder. Paths start at {Path.cwd()}.')
        hub_id, _, revision = name.partition("@")
        return datasets.load_dataset(hub_id, config_name, revision=revision or None, streaming=run.streaming)


@contextlib.contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """What `datasets` raises for a name, a connection or a file that is not right, as one line with the remedy."""
    try:
        yield
    except UsageError:
        raise
    except (
        datasets.exceptions.DatasetsError,
        pa.ArrowException,
        OSError,
        ValueError,
        RuntimeError,
        StopIteration,  # datasets 5.2 on a JSON file of zero bytes
    ) as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        # of a CSV file, pandas' words; of a JSON file, those of datasets 4.0
        no_rows = ("corresponds to no data", "No columns to parse", "Please pass `features` or at least one example")
        if isinstance(cause, StopIteration) or any(words in reason for words in no_rows):
            raise UsageError(
                f'Dataset "{name}" is empty: there is no row in it. Check the file or the split.'
            ) from error
        raise UsageError(
            f'Dataset "{name}" could not be loaded: {reason.rstrip(".")}. Give "code-search", a hub id that this '
            "machine can reach or has cached (id@revision pins it), or a json/csv/parquet/arrow file or folder."
        ) from error


def open_saved_folder(path: Path, streaming: bool) -> Mapping[str, AnyDataset]:
    saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, dict) else {"train": saved}
    return {name: split.to_iterable_dataset() for name, split in splits.items()} if streaming else splits


def open_file(path: Path, streaming: bool) -> Mapping[str, AnyDataset]:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    file_format = FILE_FORMATS.get(suffixes[-1]) if suffixes else None
    if file_format is None:
        raise UsageError(
            f'Dataset "{path}": can not read this kind of file. Kinds: {", ".join(FILE_FORMATS)}, or .gz.'
        )
    # pandas would turn the texts "NA" and "null" into missing values.
    options = {"keep_default_na": False} if file_format == "csv" else {}
    return datasets.load_dataset(file_format, data_files={"train": str(path)}, streaming=streaming, **options)


def looks_like_a_path(name: str) -> bool:
    is_relative_or_absolute = name.startswith((".", "~", "/")) or name.count("/") > 1
    return is_relative_or_absolute or any(suffix in FILE_FORMATS for suffix in Path(name).suffixes)


# (2) ---------------------------------------------------------------------------------------------------------------


def pick_split(splits: Mapping[str, AnyDataset], split: str, name: str, option: str) -> AnyDataset:
    if split not in splits:
        raise UsageError(f'{option}="{split}" is no split of {name}. Splits: {", ".join(splits)}.')
    return splits[split]


def only_split(splits: Mapping[str, AnyDataset], name: str) -> str:
    if len(splits) > 1:
        raise UsageError(f"eval_dataset_name {name} has several splits: {', '.join(splits)}. Choose with eval_split.")
    return next(iter(splits))


def hold_out(
    train: AnyDataset, num_rows: int, name: str, together: Sequence[str] = (), bad: Collection[int] = ()
) -> tuple[AnyDataset, AnyDataset]:
    """Split off `num_rows`: a fixed random draw, or the first rows of a stream.

    Rows that share a value of the columns `together` (a picture, an id) are not split: up to `num_rows` are held out
    then. `bad` rows stay in training.
    """
    if isinstance(train, IterableDataset):
        return _hold_out_of_stream(train, num_rows, together or columns_of(train))
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


def _kept_together(run: RunConfig, dataset: AnyDataset) -> list[str]:
    """Columns whose equal values must not be in training and in evaluation: pictures and the id."""
    features = dataset.features or {}
    is_conversation = run.task == "image-text-to-text"
    pictures = [name for name, one in features.items() if isinstance(getattr(one, "feature", one), datasets.Image)]
    named = [(run.columns or {}).get("image", "image")] if is_conversation else []
    ids = [run.id_column] if run.id_column else []
    return [name for name in dict.fromkeys([*pictures, *named, *ids]) if name in features]


def _groups(dataset: Dataset, columns: Sequence[str]) -> list[list[int]]:
    """Rows that share a value of one of the columns, directly or through other rows."""
    group_of, first_with = list(range(len(dataset))), {}  # row -> an earlier one of its group; value -> its first row

    def root(row: int) -> int:
        while group_of[row] != row:
            group_of[row] = row = group_of[group_of[row]]
        return row

    for column in columns:
        row = 0
        for table in arrow_batches(stored(dataset.select_columns([column]))):
            for value in table.column(column).to_pylist():
                for one in _values(value):
                    group_of[root(row)] = root(first_with.setdefault((column, one), row))
                row += 1
    groups: dict[int, list[int]] = {}
    for row in range(len(dataset)):
        groups.setdefault(root(row), []).append(row)
    return list(groups.values())


def _values(value: Any) -> list:
    """What of a row's value another row may share: each of several pictures, none where there is none."""
    stored = [one["bytes"] or one["path"] if isinstance(one, dict) else one for one in as_list(value)]
    return [content_id(one) if isinstance(one, bytes) else one for one in stored if one not in (None, "")]


def stored(dataset: AnyDataset) -> AnyDataset:
    """With pictures as they are stored, not decoded."""
    if isinstance(dataset, IterableDataset):
        return dataset.decode(False) if dataset.features else dataset
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            dataset = dataset.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return dataset


def _hold_out_of_stream(stream: Any, num_rows: int, columns: Sequence[str]) -> tuple[AnyDataset, AnyDataset]:
    """The rest is filtered by content: skip() would count rows over all shards, and leave one reader."""
    held = {key for row in stored(stream).take(num_rows) for key in _keys(row, columns)}
    rest = stored(stream).filter(_shares_nothing, fn_kwargs={"held": held, "columns": list(columns)})
    return (rest.decode(num_threads=0) if rest.features else rest), stream.take(num_rows)


def _keys(row: dict[str, Any], columns: Sequence[str]) -> list:
    return [
        (column, one if isinstance(one, str | int) else repr(one))
        for column in columns
        for one in _values(row[column])
    ]


def _shares_nothing(row: dict[str, Any], held: set, columns: list[str]) -> bool:
    return held.isdisjoint(_keys(row, columns))


def first_rows(dataset: AnyDataset, num_rows: int | None) -> AnyDataset:
    if num_rows is None:
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.take(num_rows)
    return dataset.select(range(min(num_rows, len(dataset))))


# (3) ---------------------------------------------------------------------------------------------------------------


def column_names(run: RunConfig, dataset: AnyDataset) -> list[str]:
    """The columns of a dataset from `load_datasets` that are embedded, in order: anchor, positive, negatives."""
    names = list(run.columns) if run.columns else DEFAULT_COLUMNS
    available = columns_of(dataset)
    return [name for name in names if name in available]


def prepare(dataset: AnyDataset, run: RunConfig, check: RowCheck) -> AnyDataset:
    """Check the columns the run needs, rename them, drop the rest."""
    name = check.name
    with loading_errors(name):
        # Reading a row is the only way to know that a stream has one, and where its first error shows.
        is_empty = not len(dataset) if isinstance(dataset, Dataset) else next(iter(dataset), None) is None
    if is_empty:
        raise UsageError(f'Dataset "{name}" is empty: there is no row in it. Check the file or the split.')
    available = columns_of(dataset)
    columns = resolve_columns(run.columns, available, name)
    if run.id_column:
        if run.id_column in columns and columns[run.id_column] != run.id_column:
            raise UsageError(
                f'id_column="{run.id_column}" is also a name in columns. Call that column something else.'
            )
        require_column(run.id_column, available, name, "id_column")
    if run.image_columns:
        from hf_dist_ext.data.image_files import with_images

        dataset = with_images(dataset, columns, run, check)
    if isinstance(dataset, Dataset):  # a stream is checked row by row, in the collator
        for index, (column, source) in enumerate(columns.items()):
            check_texts(dataset, column, source, index < NUM_PAIR_COLUMNS, check)
        if run.id_column:
            check_no_nulls(dataset, run.id_column, check)
    return rename(dataset, {**columns, **({run.id_column: run.id_column} if run.id_column else {})}, available)


def columns_of(dataset: AnyDataset) -> list[str]:
    """A stream may know its columns only once a row is read."""
    return list(dataset.column_names or next(iter(dataset), {}))


def resolve_columns(columns: Mapping[str, Source] | None, available: list[str], name: str) -> dict[str, Source]:
    """Our column name -> the dataset's column or columns, all of which exist."""
    if columns is None:
        columns = {column: column for column in DEFAULT_COLUMNS if column in available}
        if len(columns) < NUM_PAIR_COLUMNS or list(columns)[1] != "positive":
            raise UsageError(
                f"{name} has the columns {', '.join(available)}, not query and positive. "
                'Map them: columns={"query": "...", "positive": "..."}.'
            )
    if len(columns) < NUM_PAIR_COLUMNS:
        raise UsageError(f"columns={dict(columns)} names {len(columns)} column. A query and its positive are needed.")
    for index, (column, source) in enumerate(columns.items()):
        if column == "ids":
            raise UsageError(
                'columns: the name "ids" is reserved for the rows\' ids. Call that column something else.'
            )
        if not isinstance(source, str) and index < NUM_PAIR_COLUMNS:
            raise UsageError(
                f'columns["{column}"] is a list, but a row has one {column}. Only negatives may be several.'
            )
        for dataset_column in [source] if isinstance(source, str) else source:
            require_column(dataset_column, available, name, f'columns["{column}"]')
    return dict(columns)


def require_column(column: str, available: list[str], name: str, option: str) -> None:
    if column not in available:
        nearest = difflib.get_close_matches(column, available, n=1)
        hint = f' Closest: "{nearest[0]}".' if nearest else ""
        raise UsageError(f'{option}: {name} has no column "{column}". Columns: {", ".join(available)}.{hint}')


def rename(dataset: AnyDataset, columns: dict[str, Source], available: list[str]) -> AnyDataset:
    """Exactly `columns`, in that order. Several negative columns become one column of lists."""
    sources = list(columns.values())
    if all(isinstance(source, str) for source in sources) and len(set(sources)) == len(sources):
        dataset = dataset.select_columns(sources)
        # `datasets` refuses to rename a column to its own name.
        changes = {source: column for column, source in columns.items() if source != column}
        return (_renamed(dataset, changes) if changes else dataset).select_columns(list(columns))
    return dataset.map(join_columns, batched=True, remove_columns=available, fn_kwargs={"columns": columns})


def _renamed(dataset: AnyDataset, changes: dict[str, str]) -> AnyDataset:
    """A stream is renamed by a map(), for which `datasets` would decode every picture, and encode it again."""
    if isinstance(dataset, Dataset) or not any(map(require_decoding, (dataset.features or {}).values())):
        return dataset.rename_columns(changes)
    return dataset.decode(False).rename_columns(changes).decode(num_threads=0)


def join_columns(rows: dict[str, list], columns: dict[str, Source]) -> dict[str, list]:
    """A row's texts of several columns as one list. A column without text in a row is one negative less."""
    joined = {}
    for column, source in columns.items():
        if isinstance(source, str):
            joined[column] = rows[source]
        else:
            several = zip(*(rows[dataset_column] for dataset_column in source), strict=True)
            joined[column] = [[text for value in values for text in as_list(value) if text] for values in several]
    return joined


# (4) ---------------------------------------------------------------------------------------------------------------


def check_texts(dataset: Dataset, column: str, source: Source, is_pair: bool, check: RowCheck) -> None:
    """Every row of a query or positive has a text (or an image); of a column of negatives at least one row."""
    sources = [source] if isinstance(source, str) else source
    kinds = [column_kind(dataset.features[dataset_column]) for dataset_column in sources]
    for dataset_column, kind in zip(sources, kinds, strict=True):
        if kind is None or (is_pair and kind == "texts"):
            allowed = "text or images" if is_pair else "text, lists of text or images"
            raise UsageError(
                f'{check.name}, column "{dataset_column}" (row 0 and all others) holds '
                f"{type_name(dataset.features[dataset_column])}; {column} must be {allowed}. Choose another column."
            )
    if not check.is_on:
        return
    row_offset, found, shown = 0, 0, '", "'.join(sources)
    for table in arrow_batches(dataset.select_columns(list(dict.fromkeys(sources)))):
        # (rows,) booleans: this row has something to embed in at least one of the sources
        has_content = np.zeros(len(table), dtype=bool)
        for dataset_column in sources:
            has_content |= content_mask(table.column(dataset_column))
        for row in np.flatnonzero(~has_content) if is_pair else ():
            check.add(
                row_offset + int(row), f"every row needs a {column}, this is empty or null. Remove the row.", shown
            )
        found += int(has_content.sum())
        row_offset += len(table)
    if not found:
        raise UsageError(f'{check.name}, column "{shown}": no row has a {column}. Leave it out of columns.')


def check_no_nulls(dataset: Dataset, column: str, check: RowCheck) -> None:
    row_offset = 0
    for table in arrow_batches(dataset.select_columns([column])) if check.is_on else ():
        for row in np.flatnonzero(table.column(column).is_null().to_numpy()):
            check.add(row_offset + int(row), f'id_column "{column}" is null. Give every row an id.')
        row_offset += len(table)


def column_kind(feature: Any) -> str | None:
    """ "text", "texts" (a list per row), "image", or None for what can not be embedded."""
    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.Value):
        # A column of nothing but nulls is typed "null"; the row check names its first row.
        return "text" if "string" in feature.dtype or feature.dtype == "null" else None
    inner = getattr(feature, "feature", None) if isinstance(feature, (datasets.List, datasets.LargeList)) else None
    return "texts" if inner is not None and column_kind(inner) == "text" else None


def type_name(feature: Any) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__


def arrow_batches(dataset: Dataset, num_rows: int = 10_000) -> Iterator[pa.Table]:
    return dataset.with_format("arrow").iter(batch_size=num_rows)


def content_mask(values: pa.ChunkedArray) -> np.ndarray:
    """(rows,) True where a text is not empty, a list holds a text, an image is there."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values.type, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        mask = np.zeros(len(values), dtype=bool)
        # (texts,) the row of each text, without null rows
        rows = pc.list_parent_indices(values).to_numpy()
        mask[rows[content_mask(pc.list_flatten(values))]] = True
        return mask
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return pc.fill_null(pc.greater(pc.binary_length(values), 0), False).to_numpy(zero_copy_only=False)
    return pc.is_valid(values).to_numpy(zero_copy_only=False)
