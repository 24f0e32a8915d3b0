"""What the order of a run's rows depends on: the seed, the number of rows and their content.

A checkpoint's manifest holds these facts, so that a resumed run finds out whether it would read the same rows. Ranks
compare more of the content (`content_digest`) before they train.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pandas.util import hash_array
from transformers.utils import logging

from hf_dist_ext.data import stream_readers
from hf_dist_ext.data.mixture import MixedStream, Mixture
from hf_dist_ext.data.row_ids import is_picture
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # that a fingerprint looks at
BLOCK_ROWS, COMPARED_BYTES = 256, 2**28  # that ranks compare


def data_fingerprint(dataset: Any) -> str | None:
    """Of a `datasets.Dataset` a digest of columns, length and rows spread over it, by content; of a stream a digest of
    what its order depends on; of a mixture those of its sources; None for other kinds."""
    if stream_readers.is_stream(dataset):
        return stream_readers.fingerprint(dataset)
    if isinstance(dataset, Mixture):
        prints = [(name, data_fingerprint(source)) for name, source in dataset.sources.items()]
        return _digest((prints, dataset.shares))
    if not _is_table(dataset) or not hasattr(dataset, "__len__"):
        return None
    count = len(dataset)
    rows = sorted({i * (count - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)} if count else ())
    return _digest((sorted(dataset.column_names), count), [dataset.with_format("arrow")[rows]])


def content_digest(dataset: Any) -> str | None:
    """Of the rows themselves, wherever they lie: of a `datasets.Dataset` every row, or blocks spread over one that is
    larger than COMPARED_BYTES; of a stream the first rows of its sources; of other kinds the number of rows."""
    if isinstance(dataset, Mapping):
        return _digest({name: content_digest(one) for name, one in dataset.items()})
    if isinstance(dataset, Mixture | MixedStream):
        return _digest([content_digest(dataset.sources), dataset.shares])
    if stream_readers.is_stream(dataset):
        # Not its seeds: the order of rows is compared by itself, with another remedy.
        return _digest(stream_readers.digests_of_first_rows(dataset))
    if not _is_table(dataset):
        return None if (rows := length(dataset)) is None else f"{rows} rows"
    table, order = dataset.data, dataset._indices  # the rows as they are stored, and which of them in which order
    every = max(1, table.nbytes // COMPARED_BYTES)
    blocks = (table.fast_slice(start, BLOCK_ROWS) for start in range(0, len(table), BLOCK_ROWS * every))
    facts = sorted(dataset.column_names), len(dataset), len(table)
    return _digest(facts, itertools.chain(blocks, [] if order is None else [order]))


def _is_table(dataset: Any) -> bool:
    return hasattr(dataset, "column_names") and hasattr(dataset, "with_format")


def _digest(facts: Any, tables: Iterable[Any] = ()) -> str:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for table in tables:
        for name in sorted(table.column_names):
            _add(digest, table.column(name))
    return digest.hexdigest()


def _add(digest: Any, values: Any) -> None:
    """The content of an arrow array, however it is cut into chunks and whatever lies where it is null."""
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.chunks else pa.array([], values.type)
    values = getattr(values, "storage", values)
    digest.update(f"{values.type} {len(values)}".encode() + values.is_null().to_numpy(zero_copy_only=False).tobytes())
    values = values.drop_null()
    if is_picture(values.type):  # machines may have its file in other folders
        contents, paths = (values.field(name).to_pylist() for name in ("bytes", "path"))
        parts = [content or Path(path or "").name.encode() for content, path in zip(contents, paths, strict=True)]
        values = pa.array(parts, pa.large_binary())
    if pa.types.is_struct(values.type):
        for part in values.flatten():
            _add(digest, part)
    elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        _add(digest, values.value_lengths())
        _add(digest, values.flatten())
    else:
        digest.update(hash_array(values.to_numpy(zero_copy_only=False), categorize=False))


def check_same_data(args: Any, dataset: Any, content: Mapping[str, Any], folder: str) -> None:
    """Raises UsageError where the manifest of the checkpoint in `folder` tells of other data.

    `allow_changed_data` makes a warning of the error.
    """
    other_rows = "the rows of the training set are others"
    if isinstance(dataset, Mixture):
        other_rows = "the sources in datasets have other rows, names or weights"
    if stream_readers.is_stream(dataset):
        other_rows = "the stream has other columns or shards, or is shuffled with another seed"
    seed = content["seed"] if content["data_seed"] is None else content["data_seed"]
    compared = (
        (seed, seed_of_order(args), "the seed of the order was {}, now it is {}"),
        (content["data_length"], length(dataset), "the training set had {} rows, now it has {}"),
        (content["data_fingerprint"], data_fingerprint(dataset), other_rows),
    )
    changes = [words.format(before, now) for before, now, words in compared if before is not None and now != before]
    if changes and not args.allow_changed_data:
        raise UsageError(
            f"{folder} can not be continued on these data: {'; '.join(changes)}, so rows would be repeated and others "
            "skipped. Restore them, or set allow_changed_data=true."
        )
    if changes and args.process_index == 0:
        logger.warning(
            f"allow_changed_data: {'; '.join(changes)}; rows are repeated or skipped in the epoch that was begun."
        )


def seed_of_order(args: Any) -> int:
    return args.seed if args.data_seed is None else args.data_seed


def seed_of_stream(args: Any) -> int | None:
    """What a run file's stream is shuffled with; None leaves the rows in the order of the files."""
    return None if args.train_sampling_strategy == "sequential" else seed_of_order(args)


def length(dataset: Any) -> int | None:
    """The number of rows, None of a stream."""
    return len(dataset) if hasattr(dataset, "__len__") else None
