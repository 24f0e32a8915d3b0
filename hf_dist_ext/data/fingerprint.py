"""What the order of a run's rows depends on: the seed, the number of rows and their content.

A checkpoint's manifest holds these facts, so that a resumed run finds out whether it would read the same rows. Ranks
compare more of the content (`content_digest`) before they train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers.utils import logging

from hf_dist_ext.data import stream_readers
from hf_dist_ext.data.mixture import MixedStream, Mixture
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
        return hashlib.blake2b(repr((prints, dataset.shares)).encode(), digest_size=16).hexdigest()
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return None
    raw, count = dataset.with_format("arrow"), len(dataset)  # as they are stored: nothing in them is decoded
    digest = hashlib.blake2b(f"{sorted(dataset.column_names)} {count}".encode(), digest_size=16)
    for i in sorted({i * (count - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)} if count else ()):
        (row,) = raw[i].to_pylist()
        digest.update(repr(sorted(row.items())).encode())
    return digest.hexdigest()


def content_digest(dataset: Any) -> str | None:
    """Of the rows themselves, wherever they lie: of a `datasets.Dataset` every row, or blocks spread over one that is
    larger than COMPARED_BYTES; of a stream the first rows of its sources; of other kinds the number of rows."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(dataset, Mapping):
        digest.update(repr({name: content_digest(one) for name, one in dataset.items()}).encode())
    elif isinstance(dataset, Mixture) or isinstance(dataset, MixedStream):
        digest.update(repr([content_digest(dataset.sources), dataset.shares]).encode())
    elif stream_readers.is_stream(dataset):
        # Not its seeds: the order of rows is compared by itself, with another remedy.
        digest.update(repr(stream_readers.digests_of_first_rows(dataset)).encode())
    elif not hasattr(dataset, "column_names") or not hasattr(dataset, "with_format"):
        return None if (rows := length(dataset)) is None else f"{rows} rows"
    else:
        table, order = dataset.data, dataset._indices  # the rows as they are stored, and which of them in which order
        digest.update(f"{sorted(dataset.column_names)} {len(dataset)} {len(table)}".encode())
        every = max(1, table.nbytes // COMPARED_BYTES)
        for start in range(0, len(table), BLOCK_ROWS * every):
            block = table.fast_slice(start, BLOCK_ROWS)
            for name in sorted(dataset.column_names):
                _add(digest, block.column(name))
        for chunk in [] if order is None else order.column(0).chunks:
            digest.update(chunk.to_numpy())
    return digest.hexdigest()


def _add(digest: Any, values: Any) -> None:
    """The content of an arrow array, however it is cut into chunks and whatever lies where it is null."""
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.chunks else pa.array([], values.type)
    values, kind = getattr(values, "storage", values), getattr(values.type, "storage_type", values.type)
    if values.null_count:
        digest.update(values.is_null().to_numpy(zero_copy_only=False))
        values = values.drop_null()
    digest.update(f"{kind} {len(values)}".encode())
    if pa.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:
        # A picture or a sound: machines may have its file in other folders.
        contents, paths = (values.field(name).to_pylist() for name in ("bytes", "path"))
        for content, path in zip(contents, paths, strict=True):
            digest.update(content or Path(path or "").name.encode())
    elif pa.types.is_struct(kind):
        for part in values.flatten():
            _add(digest, part)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add(digest, values.value_lengths())
        _add(digest, values.flatten())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        _, offsets, content = values.buffers()
        is_large = pa.types.is_large_string(kind)
        places = np.frombuffer(offsets, np.int64 if is_large else np.int32)[values.offset :][: len(values) + 1]
        digest.update(np.diff(places).astype(np.int64))
        digest.update(memoryview(content or b"")[places[0] : places[-1]] if len(values) else b"")
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        digest.update(values.to_numpy(zero_copy_only=False))
    else:
        digest.update(repr(values.to_pylist()).encode())


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
