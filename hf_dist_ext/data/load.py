"""This file opens a dataset and gives training what it wants: rows of named columns, all of them checked.

    train, evaluation = load_datasets(run)           # run: config.RunConfig; columns become query, positive, ...
    collator = ContrastiveCollator(tokenizer, column_names(run, train), max_length=run.max_length)  # collator.py

(1) open the built-in dataset, a hub id, a file or a folder, which gives splits
(2) choose the training and the evaluation rows; hold_out.py takes the latter from the former where a run asks for that
(3) check that every row has text where text must be, before anything is built (row_check.py), and give the user's
    columns our names (columns.py); all other columns are dropped
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset
from datasets.data_files import DataFilesList
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as KINDS_OF_FILES  # no public name gives them
from datasets.table import CastError

from hf_dist_ext.data import digits, glyphs
from hf_dist_ext.data.code_search import load_code_search
from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS
from hf_dist_ext.data.columns import (
    AnyDataset,
    columns_of,
    refuse_late_columns,
    refuse_late_type,
    rename,
    require_column,
    resolve_columns,
)
from hf_dist_ext.data.hold_out import HOLDOUT_SEED, hold_out, kept_together, pair_of
from hf_dist_ext.data.image_files import with_images
from hf_dist_ext.data.row_check import (
    RowCheck,
    check_labels,
    check_no_nulls,
    check_same_number,
    check_texts,
    first_of_node,
)
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.files import looks_like_a_path
from hf_dist_ext.run.losses import LABEL_COLUMNS, embedded_columns
from hf_dist_ext.run.parts import label_column_of, takes_negatives_as_columns
from hf_dist_ext.run.sources import CODE_SEARCH, columns_of_evaluation

if TYPE_CHECKING:
    from hf_dist_ext.run.config import RunConfig

logger = logging.getLogger(__name__)

BUILT_IN_PAIRS = {CODE_SEARCH: load_code_search, glyphs.NAME: glyphs.load_glyphs}  # in memory, with a test split
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
SAVED = ("dataset_dict.json", "state.json")  # a folder that `save_to_disk` wrote has one of them
SHUFFLE_BUFFER_ROWS = 10_000


def load_datasets(
    run: RunConfig,
    opener: Callable | None = None,
    preparer: Callable | None = None,
    max_bad_rows: int = 0,
    seed: int | None = HOLDOUT_SEED,
) -> tuple[AnyDataset, AnyDataset | None]:
    """The run's training rows and its evaluation rows (None when it names none), in the columns `column_names` gives.

    A streamed training set is shuffled through a buffer, by the `seed`, since no sampler can; None leaves its order.
    Raises UsageError for what is not there: the dataset, a split, a column, a row, a text; of the training rows
    `max_bad_rows` may lack something.
    Another task brings its own `open_splits` and `prepare`. All processes call it: the first of each node reads and
    checks, the others take from the caches what it has made.
    """
    opener, preparer = opener or open_splits, preparer or prepare
    if not run.dataset_name:
        raise UsageError('dataset_name is missing. Give "code-search", a hub id, or a json/csv/parquet/arrow file.')
    if run.eval_holdout and run.dataset_name not in BUILT_IN_PAIRS and (run.eval_split or run.eval_dataset_name):
        raise UsageError(
            "eval_holdout takes evaluation rows from the training split, but eval_split or eval_dataset_name is given "
            "too. Keep one."
        )
    train_name = f"{run.dataset_name} ({run.train_split})"
    train_check, evaluation = RowCheck(train_name, max_bad_rows), None
    with first_of_node() as train_check.is_on:
        # (1), (2)
        splits = opener(run.dataset_name, run)
        if train_check.is_on:
            say_what_is_not_read(run.dataset_name)
        train = pick_split(splits, run.train_split, run.dataset_name, "train_split")
        eval_name, eval_split = run.eval_dataset_name or run.dataset_name, run.eval_split
        if run.eval_dataset_name:
            splits = opener(eval_name, run)
            if train_check.is_on:
                say_what_is_not_read(eval_name)
            eval_split = eval_split or only_split(splits, eval_name)
        elif run.dataset_name in BUILT_IN_PAIRS or (run.dataset_name == digits.NAME and not run.eval_holdout):
            eval_split = eval_split or "test"  # they bring one
        if eval_split:
            evaluation = pick_split(splits, eval_split, eval_name, "eval_split")
        # (3)
        train = preparer(train, run, train_check)
        train_check.refuse_too_many()
        if evaluation is not None:
            has_one = run.eval_dataset_name and not run.eval_split  # a file's only one is called "train"
            check = RowCheck(eval_name if has_one else f"{eval_name} ({eval_split})", is_on=train_check.is_on)
            columns = (
                columns_of_evaluation(run.columns, columns_of(evaluation)) if run.eval_dataset_name else run.columns
            )
            evaluation = preparer(evaluation, dataclasses.replace(run, columns=columns), check)
            check.refuse_too_many()
    bad = train_check.finish()
    if evaluation is None and run.eval_holdout:
        together, label = kept_together(run, train), label_column_of(run, columns_of(train))
        pair = pair_of(run, train, together)
        train, evaluation = hold_out(
            train, run.eval_holdout, train_name, together, bad, label, pair, train_check.is_on
        )
    train = first_rows(train, run.max_train_samples)
    if isinstance(train, IterableDataset) and seed is not None:
        train = train.shuffle(seed=seed, buffer_size=run.shuffle_buffer_rows or SHUFFLE_BUFFER_ROWS)
    if path_of(run.dataset_name).exists():
        train.info.dataset_name = path_of(run.dataset_name).name  # for errors; `datasets` has the kind of file there
    return train, first_rows(evaluation, run.max_eval_samples) if evaluation is not None else None


# (1) ---------------------------------------------------------------------------------------------------------------


def path_of(name: str) -> Path:
    """Absolute. "~nobody/a" is a path as it stands."""
    return Path(os.path.expanduser(name)).absolute()


def place_of(name: str) -> str:
    """What `datasets` opens for a user's name: the absolute path of what is here, else an id on the hub.

    `datasets` takes "json" for a kind of file and then reads every such file here, the path of a folder for a pattern,
    and "::" for a file in an archive. Raises UsageError where it would open something else.
    """
    path, hub_id = path_of(name), name.partition("@")[0]
    if path.exists():
        sign = "::" if "::" in str(path) else next((sign for sign in "*?[" if sign in str(path)), "")
        if sign == "::" or (sign and path.is_dir() and not is_saved(path)):
            raise UsageError(
                f'Dataset "{name}": `datasets` reads {path} as a pattern, since "{sign}" stands in it. Rename it.'
            )
        return str(path)
    if looks_like_a_path(name):
        raise UsageError(f'Dataset "{name}": there is no such file or folder. Paths start at {Path.cwd()}.')
    if path_of(hub_id).exists():
        raise UsageError(f'Dataset "{name}": {path_of(hub_id)} is here and has no revisions. Leave "@" and more out.')
    if hub_id in KINDS_OF_FILES:
        raise UsageError(
            f'Dataset "{name}": there is no file or folder "{name}" here, and `datasets` takes the name for a kind of '
            "file. Give a path, or an id with its owner."
        )
    return name


def is_saved(path: Path) -> bool:
    return any((path / one).is_file() for one in SAVED)


def open_splits(name: str, run: RunConfig) -> Mapping[str, AnyDataset]:
    if name in BUILT_IN_PAIRS:
        if run.streaming:
            raise UsageError(f'streaming=true with dataset_name "{name}", which is read in memory. Drop streaming.')
        if run.dataset_config_name is not None:
            raise UsageError(f'dataset_config_name is given, but "{name}" has no configurations. Remove it.')
        load = BUILT_IN_PAIRS[name]
        return load(held_out=run.eval_holdout) if run.eval_holdout else load()
    place = place_of(name)
    path = Path(place)
    config_name = run.dataset_config_name if name == run.dataset_name else None
    if config_name is not None and path.is_file():
        raise UsageError(f'dataset_config_name="{config_name}": the file {path} has no configurations. Remove it.')
    with loading_errors(name):
        if is_saved(path):
            if config_name is not None:
                raise UsageError(f'dataset_config_name="{config_name}": {path} was saved without. Remove it.')
            return open_saved_folder(path, run.streaming)
        if path.is_dir() or path.is_file():
            return open_here(path, run.streaming, config_name, _numbers(run))
        hub_id, _, revision = place.partition("@")
        return datasets.load_dataset(hub_id, config_name, revision=revision or None, streaming=run.streaming)


@contextlib.contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """What `datasets` raises for a name, a connection or a file that is not right, as one line with the remedy."""
    theirs = logging.getLogger("datasets.packaged_modules")  # its lines of a broken file say what the error says
    level = theirs.level
    theirs.setLevel(logging.CRITICAL)
    try:
        yield
    except UsageError:
        raise
    # StopIteration: there is no row, as `datasets` 5.2 says of a JSON file of zero bytes too
    except (
        datasets.exceptions.DatasetsError,
        pa.ArrowException,
        OSError,
        ValueError,
        RuntimeError,
        StopIteration,
        EOFError,
    ) as error:
        cause = error.__cause__ or error
        if isinstance(cause, CastError):
            refuse_late_columns(f'Dataset "{name}"', cause)
        path = path_of(name)
        if isinstance(cause, TypeError):
            refuse_late_type(f'Dataset "{name}"', cause, first_features(path) if path.exists() else None)
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        # of a CSV file, pandas' words; of a JSON file, those of datasets 4.0
        no_rows = ("corresponds to no data", "No columns to parse", "Please pass `features` or at least one example")
        if isinstance(cause, StopIteration) or any(words in reason for words in no_rows):
            raise UsageError(
                f'Dataset "{name}" is empty: there is no row in it. Check the file or the split.'
            ) from error
        missing = "" if path.exists() else "it is no file or folder here, and "
        raise UsageError(
            f'Dataset "{name}" could not be loaded: {missing}{reason.rstrip(".")}. Give "code-search", a hub id that '
            "this machine can reach or has cached (id@revision pins it), or a json/csv/parquet/arrow file or folder."
        ) from error
    finally:
        theirs.setLevel(level)


def first_features(path: Path) -> datasets.Features | None:
    """The columns of a file or folder as its first rows have them."""
    return next(iter(open_here(path, True).values())).features


def open_saved_folder(path: Path, streaming: bool) -> Mapping[str, AnyDataset]:
    saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, dict) else {"train": saved}
    return {name: split.to_iterable_dataset() for name, split in splits.items()} if streaming else splits


def as_named(files: Sequence[str]) -> DataFilesList:
    """For `datasets`, which takes other paths for patterns. Its cache tells files apart by these facts too."""
    return DataFilesList([*files], [*map(facts_of, files)])


def facts_of(file: str | Path) -> tuple[str, ...]:
    """By which a cache tells whether a file is as it was: size, times. st_mtime can be set back, st_ctime not."""
    stat = os.stat(file)
    return str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ctime_ns)


def open_here(
    path: Path, streaming: bool, config_name: str | None = None, numbers: Collection[str] = LABEL_COLUMNS
) -> Mapping[str, AnyDataset]:
    """A file or a folder. In CSV only the columns `numbers` hold numbers: of others 007 and NA are texts."""
    place, options, files = str(path.absolute()), {}, {"train": [str(path.absolute())]}
    if path.is_dir():
        config = datasets.load_dataset_builder(place, config_name).config
        files, is_csv = config.data_files or {}, hasattr(config, "keep_default_na")
    else:
        suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
        place = FILE_FORMATS.get(suffixes[-1]) if suffixes else None
        is_csv = place == "csv"
        if place is None:
            raise UsageError(
                f'Dataset "{path}": can not read this kind of file. Kinds: {", ".join(FILE_FORMATS)}, or .gz.'
            )
    if files and all(os.path.isfile(file) for of_split in files.values() for file in of_split):
        options["data_files"] = {split: as_named(of_split) for split, of_split in files.items()}
    if is_csv:
        options["keep_default_na"] = False
        heads = datasets.load_dataset(place, config_name, streaming=True, **options).values()
        texts = {column for head in heads for column in columns_of(head)} - {*numbers}
        options["converters"] = dict.fromkeys(sorted(texts), str)
    return datasets.load_dataset(place, config_name, streaming=streaming, **options)


def _numbers(run: RunConfig) -> set[str]:
    """Columns of a CSV file that may hold labels."""
    return {*([run.label_column] if run.label_column else LABEL_COLUMNS)} - embedded_columns(run) - {run.id_column}


def say_what_is_not_read(name: str) -> None:
    """`datasets` reads the files of a folder that are of its commonest kind, and where the names of some have that of
    a split ("train-0.jsonl"), only those; it says nothing of the others."""
    folder = path_of(name)
    # README.md may say of every file where it belongs
    if not folder.is_dir() or is_saved(folder) or (folder / "README.md").is_file():
        return
    splits = datasets.load_dataset_builder(str(folder)).config.data_files or {}
    read = {os.path.realpath(file) for files in splits.values() for file in files}
    suffixes = {Path(file.removesuffix(".gz")).suffix for file in read}
    if not suffixes <= FILE_FORMATS.keys():  # pictures, say
        return
    kinds = suffixes | FILE_FORMATS.keys() - {".json"}
    paths = (path for path in folder.rglob("*") if kinds.intersection(path.suffixes) and path.is_file())
    hidden = (".", "__")
    names = [path.relative_to(folder) for path in paths if os.path.realpath(path) not in read]
    if lost := sorted(str(name) for name in names if not any(part.startswith(hidden) for part in name.parts)):
        logger.warning(
            f'Dataset "{name}": {len(lost)} of its data files belong(s) to no split and will not be read, such as '
            f"{lost[0]}. `datasets` takes files of one kind, and where names of files have the name of a split in "
            "them, only those. Give files of one kind, and a split's name to all or none of them."
        )


# (2) ---------------------------------------------------------------------------------------------------------------


def pick_split(splits: Mapping[str, AnyDataset], split: str, name: str, option: str) -> AnyDataset:
    if split not in splits:
        is_training_alone = option == "eval_split" and len(splits) == 1
        remedy = " eval_holdout=N keeps N of its rows for evaluation; eval_dataset_name names other data."
        raise UsageError(
            f'{option}="{split}" is no split of {name}. Splits: {", ".join(splits)}.{remedy * is_training_alone}'
        )
    return splits[split]


def only_split(splits: Mapping[str, AnyDataset], name: str) -> str:
    if len(splits) > 1:
        raise UsageError(f"eval_dataset_name {name} has several splits: {', '.join(splits)}. Choose with eval_split.")
    return next(iter(splits))


def first_rows(dataset: AnyDataset, num_rows: int | None) -> AnyDataset:
    if num_rows is None:
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.take(num_rows)
    return dataset.select(range(min(num_rows, len(dataset))))


# (3) ---------------------------------------------------------------------------------------------------------------


def prepare(dataset: AnyDataset, run: RunConfig, check: RowCheck) -> AnyDataset:
    """Check the columns the run needs, rename them, drop the rest."""
    refuse_empty(dataset, check.name)
    available = columns_of(dataset)
    columns = resolve_columns(run.columns, available, check.name)
    if run.id_column:
        if run.id_column in columns and columns[run.id_column] != run.id_column:
            raise UsageError(
                f'id_column="{run.id_column}" is also a name in columns. Call that column something else.'
            )
        require_column(run.id_column, available, check.name, "id_column")
    label = label_column_of(run, available)
    if label is not None:
        require_column(label, available, check.name, "label_column")
        if label in columns:
            raise UsageError(f'label_column="{label}" is also a name in columns. Call that column something else.')
    kept = {name: name for name in (run.id_column, label) if name is not None}
    dataset = with_images(dataset, columns, run, check)
    if isinstance(dataset, Dataset):  # a stream is checked row by row, in the collator
        for index, (column, source) in enumerate(columns.items()):
            check_texts(dataset, column, source, index < NUM_PAIR_COLUMNS, check)
            if index >= NUM_PAIR_COLUMNS and takes_negatives_as_columns(run):
                check_same_number(dataset, column, source, check)
        for option, name in (("id_column", run.id_column), ("label_column", label)):
            if name is not None:
                check_no_nulls(dataset, option, name, check)
        if label is not None:
            check_labels(dataset, label, check)
    return rename(dataset, columns | kept, columns_of(dataset))


def refuse_empty(dataset: AnyDataset, name: str) -> None:
    with loading_errors(name):
        # Reading a row is the only way to know that a stream has one, and where its first error shows.
        next(iter(range(len(dataset)) if isinstance(dataset, Dataset) else dataset))
