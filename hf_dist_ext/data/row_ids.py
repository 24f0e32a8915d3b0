"""Rows that hold the same text may not share a batch: each text gets a small number here, for `NoDuplicatesSampler`.

(1) The texts of a column are hashed as Arrow holds them, block by block, to 64 bits
(2) Hashes that stand in several rows are numbered 1, 2, ... All others become 0, and int32 is enough
(3) For a large dataset this is done once per machine: the first process to come writes a file, the others wait for it
    (kept_files.py) and map it into memory, and so does every later run on the same dataset

Two texts with one hash (for 1e7 rows about once in 100,000 datasets) are kept apart without need; that is all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from pandas.util import hash_array
from transformers.utils import logging

from hf_dist_ext.data.kept_files import kept_file
from hf_dist_ext.data.row_check import content_mask

logger = logging.get_logger(__name__)

STORED_ROWS = 100_000  # below, hashing takes less than a second, and no file is written
VERSION = 2  # of the file
ROWS, PICTURES = 1 << 16, 1 << 9  # hashed at a time
PARTS = 16  # of the hashes are sorted one after another, which bounds memory


def shared_ids(dataset: Dataset, columns: Sequence[str]) -> np.ndarray:
    """(rows, columns) int32: equal where two rows hold the same in any of the columns, 0 where no other row does,
    or where a row has nothing (a negative may be null, [] or an empty text).

    A dataset of STORED_ROWS rows or more is numbered once per machine (3); the array is then a map of the file.
    """
    if len(dataset) < STORED_ROWS:
        return numbered(content_hashes(dataset, columns, False))
    # `datasets` changes a dataset's fingerprint with every change of a row
    facts = f"{VERSION} {dataset._fingerprint} {len(dataset)} {list(columns)}"
    name = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def read(path: Path) -> np.ndarray:
        return np.lib.format.open_memmap(path, mode="r").reshape(len(dataset), len(columns))

    def make(path: Path) -> None:
        with path.open("wb") as file:  # np.save would end its name with ".npy"
            np.save(file, numbered(content_hashes(dataset, columns, False)))

    try:
        return kept_file(f"row_ids_{name}.npy", read, make)
    except OSError as error:
        logger.warning(
            f"the ids of the rows can not be kept in {datasets.config.HF_DATASETS_CACHE} ({error}): every process "
            "hashes the texts itself, at every start. Set HF_DATASETS_CACHE to a folder with room."
        )
        return numbered(content_hashes(dataset, columns, False))


# ---- (1) ----


def content_hashes(dataset: Dataset, columns: Sequence[str], joins_nothing: bool = True) -> np.ndarray:
    """(rows, columns) uint64. `joins_nothing`: rows without a value hold the same one, else each one of its own."""
    hashes = np.empty((len(dataset), len(columns)), dtype=np.uint64)
    for place, name in enumerate(columns):
        first = 0
        for values in _blocks(dataset, name):
            hashes[first : first + len(values), place] = _hashes(values)
            if not joins_nothing:
                nothing = first + np.flatnonzero(~content_mask(values))
                hashes[nothing, place] = hash_array(nothing.astype(np.uint64) + np.uint64(1 << 63))
            first += len(values)
    return hashes


def _blocks(dataset: Dataset, column: str) -> Iterator[pa.Array]:
    stored = dataset.select_columns([column]).with_format("arrow")
    has_pictures = is_picture(stored.features.arrow_schema.field(column).type)
    for table in stored.iter(batch_size=PICTURES if has_pictures else ROWS):
        yield table.column(column).combine_chunks()


def is_picture(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}


def _hashes(values: pa.Array) -> np.ndarray:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if is_picture(values.type):  # its file's bytes, not the decoded pixels
        values = pc.coalesce(pc.struct_field(values, "bytes"), pc.cast(pc.struct_field(values, "path"), pa.binary()))
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_nested(values.type):  # messages, tokens
        values = pa.array(map(repr, values.to_pylist()), pa.large_string())
    return hash_array(values.to_numpy(zero_copy_only=False), categorize=False)


# ---- (2) ----


def numbered(ids: np.ndarray) -> np.ndarray:
    """Any integers (rows, columns) as int32: 1, 2, ... where several rows hold the integer, else 0."""
    out = np.zeros(ids.shape, dtype=np.int32)
    ids = ids if ids.itemsize == 8 else ids.astype(np.int64)
    flat, numbers = ids.reshape(-1).view(np.uint64), out.reshape(-1)  # flat index: row * columns + column
    again = _repeated_within_rows(ids)
    parts = np.empty(len(flat), dtype=np.uint8)
    for first in range(0, len(flat), ROWS):
        block = flat[first : first + ROWS]
        parts[first : first + ROWS] = (block ^ (block >> 32) ^ (block >> 17)) % PARTS  # small integers spread too
    if again is not None:
        parts[again] = PARTS  # left out
    known = 0
    for part in range(PARTS):
        places = np.flatnonzero(parts == part).astype(np.int32 if len(flat) < 2**31 else np.int64)
        values = flat[places]
        order = np.argsort(values)
        values, places = values[order], places[order]
        is_same = np.zeros(len(values) + 1, dtype=bool)  # as the one before
        is_same[1:-1] = values[1:] == values[:-1]
        repeats = is_same[:-1] | is_same[1:]
        group = np.cumsum(repeats & ~is_same[:-1])
        numbers[places[repeats]] = known + group[repeats]
        known += int(group[-1]) if len(group) else 0
    return out


def _repeated_within_rows(ids: np.ndarray) -> np.ndarray | None:
    """Flat places of values that an earlier column of the same row holds too: a row has no conflict with itself."""
    num_columns, places = ids.shape[1], []
    for column in range(1, num_columns):
        for first in range(0, len(ids), ROWS):
            block = ids[first : first + ROWS]
            is_again = (block[:, :column] == block[:, column : column + 1]).any(axis=1)
            places.append((first + np.flatnonzero(is_again)) * num_columns + column)
    return np.concatenate(places) if places else None
