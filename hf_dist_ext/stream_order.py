"""A `datasets` stream as one endless order of rows, whatever the batch, the processes and the loader workers.

(1) the order is the one that a single reader gets, epoch after epoch. A batch may hold the end of an epoch and the
    beginning of the next: none is short, and no row is repeated to fill one
(2) every process and loader worker reads all of it and keeps its own: worker k of K takes the global batches k,
    k + K, ..., which is how DataLoader asks for them; accelerate's IterableDatasetShard cuts a rank's rows out of each
(3) with a batch comes the place behind it: epoch, rows of it that were used, `datasets`' state, and a digest of the
    row that follows. The place of the last batch goes into the checkpoint, as JSON
(4) a resumed run begins at that place: by the state, which reads nothing again but a part of one shard, or, where a
    shuffle buffer is in the stream, whose content no state holds, by reading the epoch's rows again up to there.
    Whichever it was, the row that follows must be the checkpoint's
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import fsspec.asyn
import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as this_worker
from transformers.utils import logging

from .errors import UsageError

logger = logging.get_logger(__name__)

FILE = "stream_position.json"
_END = object()


@dataclass(frozen=True)
class Place:
    """Behind `rows` rows of epoch `epoch`. `state`: datasets' own, None where it would not be exact; `following`: the
    digest of the next row, None where nothing was read yet."""

    epoch: int = 0
    rows: int = 0
    state: dict[str, Any] | None = None
    following: str | None = None


class Placed(NamedTuple):
    batch: Any
    place: str  # JSON: what moves batches to a device or pins them leaves a text alone


# ---- what a stream is made of ----


def is_stream(dataset: Any) -> bool:
    return hasattr(dataset, "_ex_iterable") and hasattr(dataset, "load_state_dict")


def _parts(node: Any) -> Iterator[Any]:
    """The iterables that a stream is built of, itself first."""
    yield node
    for inner in [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]:
        if inner is not None:
            yield from _parts(inner)


def has_shuffle_buffer(stream: Any) -> bool:
    return any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in _parts(stream._ex_iterable))


def fingerprint(stream: Any) -> str:
    """Of what the order depends on and is known without reading: columns, shards, seeds of shuffling and mixing."""
    generators = [getattr(part, "generator", None) for part in _parts(stream._ex_iterable)]
    seeds = [one.bit_generator.state for one in generators if isinstance(one, np.random.Generator)]
    facts = [sorted(stream.column_names or ()), stream.num_shards, seeds]
    return hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16).hexdigest()


def digest(row: Any) -> str:
    """Of a row's content."""
    found = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        found.update(type(value).__name__.encode())
        if isinstance(value, dict):
            for name in sorted(value, key=str):
                add(name)
                add(value[name])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif isinstance(value, torch.Tensor):
            add(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, bytes):
            found.update(value)
        elif hasattr(value, "tobytes"):  # numpy, PIL
            found.update(value.tobytes())
        elif isinstance(value, str | int | float | bool | None):
            found.update(repr(value).encode())

    add(row)
    return found.hexdigest()


# ---- (1), (2) ----


class OneOrder(IterableDataset):
    """(1) from `start` on, in global batches of `window` rows. `place` is the one behind the last batch it gave."""

    def __init__(
        self, stream: Any, window: int, start: Place, allow_changed: bool = False, is_first_rank: bool = True
    ):
        self.stream, self.window, self.start = stream, window, start
        self.allow_changed, self.is_first_rank = allow_changed, is_first_rank
        self.place, self.keeps_state = start, not has_shuffle_buffer(stream)
        self._reader: Any = None
        self._epoch = self._rows_read = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        own, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            fsspec.asyn.reset_lock()  # as `datasets` does: files over the network would hang in a forked process
        rows = self._checked_rows()
        row = next(rows)
        for number in itertools.count():
            is_own, batch, place = number % num_workers == own, [], self.start
            for i in range(self.window):
                if is_own:
                    batch.append(row)
                    if i == self.window - 1:
                        place = self._here()  # before the row that follows is read
                row = next(rows)
            if is_own:
                self.place = replace(place, following=digest(row))
                yield from batch

    def _here(self) -> Place:
        state = json.loads(json.dumps(self._reader.state_dict())) if self.keeps_state else None
        return Place(self._epoch, self._rows_read, state)

    def _checked_rows(self) -> Iterator[Any]:
        """(4)"""
        start, rows = self.start, self._rows_from(self.start)
        first = next(rows)
        if start.state is not None and digest(first) != start.following:
            self._say(
                f"the stream's own state leads to another row than the checkpoint's: the first {start.rows} rows of "
                f"epoch {start.epoch} are read again."
            )
            rows = self._rows_from(replace(start, state=None))
            first = next(rows)
        if start.following is not None and digest(first) != start.following:
            found = f"the row behind the first {start.rows} of epoch {start.epoch} is not the one of the checkpoint"
            if not self.allow_changed:
                raise UsageError(
                    f"the stream can not go on: {found}, so rows would be repeated and others skipped. Restore the "
                    "data, or set allow_changed_data=true."
                )
            self._say(f"allow_changed_data: {found}.")
        return itertools.chain([first], rows)

    def _say(self, text: str) -> None:
        if self.is_first_rank and getattr(get_worker_info(), "id", 0) == 0:
            logger.warning(text)

    def _rows_from(self, place: Place) -> Iterator[Any]:
        for epoch in itertools.count(place.epoch):
            begun = place.rows if epoch == place.epoch else 0
            self._reader = _reader(self.stream, epoch)
            number = 0
            if begun and place.state is not None:
                self._reader.load_state_dict(place.state)
                number = begun
            rows = iter(self._reader)
            while (row := _next_of_whole_stream(rows)) is not _END:
                number += 1
                if number > begun:
                    self._epoch, self._rows_read = epoch, number
                    yield row
            if number == 0:
                raise UsageError("the training stream has no rows. Look at the dataset and its filters.")


def _reader(stream: Any, epoch: int) -> Any:
    """The stream, in an epoch of its own: `datasets` shares the number between loader workers, which may be apart."""
    reader = object.__new__(type(stream))
    reader.__dict__.update(stream.__dict__)
    reader._epoch, reader._starting_state_dict = epoch, None
    return reader


def _next_of_whole_stream(rows: Iterator[Any]) -> Any:
    """`datasets`, and generators of users, give a loader worker a share of the shards; unknown, it reads them all."""
    info, this_worker._worker_info = this_worker._worker_info, None
    try:
        return next(rows, _END)
    finally:
        this_worker._worker_info = info


# ---- (3) ----


class WithPlace:
    """A collator whose batches bring their place; it runs where `rows` is read, behind a batch's last row."""

    def __init__(self, collate: Callable, rows: OneOrder):
        self.collate, self.rows = collate, rows

    def __call__(self, batch: list) -> Placed:
        return Placed(self.collate(batch), json.dumps(asdict(self.rows.place)))


def read(place: str) -> Place:
    return Place(**json.loads(place))


def save(place: Place, folder: str) -> None:
    Path(folder, FILE).write_text(json.dumps(asdict(place), indent=1), encoding="utf-8")


def load(folder: str) -> Place | None:
    path = Path(folder, FILE)
    return read(path.read_text(encoding="utf-8")) if path.is_file() else None
