"""What the order of a run's rows depends on: the seed, the number of rows and their content.

A checkpoint's manifest holds these facts, so that a resumed run finds out whether it would read the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from hf_dist_ext.data import stream_readers
from hf_dist_ext.data.mixture import Mixture
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # that a fingerprint looks at


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
