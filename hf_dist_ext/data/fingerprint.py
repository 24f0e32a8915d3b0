"""What the order of a run's rows depends on: the seed, the number of rows and their content.

A checkpoint's manifest holds these facts, so that a resumed run finds out whether it would read the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from hf_dist_ext.data import stream_readers
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # that a fingerprint looks at


def data_fingerprint(dataset: Any) -> str | None:
    """Of a `datasets.Dataset` a digest of columns, length and rows spread over it, by content; of a stream a digest of
    what its order depends on; None for other kinds."""
    if stream_readers.is_stream(dataset):
        return stream_readers.fingerprint(dataset)
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return None
    raw, count = dataset.with_format("arrow"), len(dataset)  # as they are stored: nothing in them is decoded
    found = hashlib.blake2b(f"{sorted(dataset.column_names)} {count}".encode(), digest_size=16)
    for i in sorted({i * (count - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)} if count else ()):
        (row,) = raw[i].to_pylist()
        found.update(repr(sorted(row.items())).encode())
    return found.hexdigest()


def check_same_data(args: Any, dataset: Any, content: Mapping[str, Any], folder: str) -> None:
    """Raises UsageError where the manifest of the checkpoint in `folder` tells of other data.

    `allow_changed_data` makes a warning of the error.
    """
    now = {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "rows": length(dataset),
        "content": data_fingerprint(dataset),
    }
    before = {
        "seed": content["seed"] if content["data_seed"] is None else content["data_seed"],
        "rows": content["data_length"],
        "content": content["data_fingerprint"],
    }
    changed = [name for name in now if before[name] is not None and now[name] != before[name]]
    if not changed:
        return
    words = {
        "seed": f"the seed of the order was {before['seed']}, now it is {now['seed']}",
        "rows": f"the training set had {before['rows']} rows, now it has {now['rows']}",
        "content": "the rows of the training set are others",
    }
    if stream_readers.is_stream(dataset):
        words["content"] = "the stream has other columns or shards, or is shuffled with another seed"
    found = "; ".join(words[name] for name in changed)
    if not args.allow_changed_data:
        raise UsageError(
            f"{folder} can not be continued on these data: {found}, so rows would be repeated and others skipped. "
            "Restore them, or set allow_changed_data=true."
        )
    if args.process_index == 0:
        logger.warning(f"allow_changed_data: {found}; rows are repeated or skipped in the epoch that was begun.")


def length(dataset: Any) -> int | None:
    """The number of rows, None of a stream."""
    return len(dataset) if hasattr(dataset, "__len__") else None
