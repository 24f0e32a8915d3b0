"""Training rows that cannot be read or made into features are named, and up to `max_bad_rows` of them are replaced.

(1) A loader fetches and collates a batch as ever. Only when that fails, it tries the rows of the batch one by one,
    then each beside a row that is as others are, since losses take as many negatives of every row
(2) Without `max_bad_rows` a bad row is an error that names the dataset, the row, the column and the rank
(3) With it a bad row is replaced, so that no batch is shorter: by the next row of the dataset that is good and not in
    the batch. A stream has no next row to ask for, so the last good row that this worker has seen takes the place
(4) Loader workers are other processes, so they count bad rows in shared memory, and the trainer adds up all ranks once
    per step. A checkpoint holds the count of its epoch with the rows' numbers: a loader reads ahead, so that a resumed
    run meets some of these rows again
(5) A row whose storage does not answer is not a bad row. It is read again, and a storage that stays silent ends the
    run with an error of its own (data/storage.py)

A stream that fails while it is iterated, before its row reaches the collator, cannot go on: that is always an error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from hf_dist_ext.data.mixture import SOURCE, Mixture, RowsAround
from hf_dist_ext.data.storage import with_retries
from hf_dist_ext.data.stream_order import DealtRows
from hf_dist_ext.errors import RunError, StorageError, UsageError

LISTED = 64  # row numbers kept per loader worker, at least
SHOWN = 20  # of them in messages
TRIES = 100  # following rows that are asked for one replacement
COMPARED = 8  # rows of a stream's first batch that are compared with all of it


class Tally:
    """Counts this rank's bad rows in shared memory, a line per loader worker: [how many, numbers of the last]."""

    def __init__(self, num_workers: int, listed: int = LISTED):
        self.listed = listed
        self.table = torch.zeros(max(1, num_workers), 1 + listed, dtype=torch.long).share_memory_()

    def add(self, row: int) -> None:
        worker = get_worker_info()
        line = self.table[0 if worker is None else worker.id]
        line[1 + line[0] % self.listed] = row
        line[0] += 1

    def counts(self) -> list[int]:
        """How many bad rows each worker has met."""
        return self.table[:, 0].tolist()

    def count(self) -> int:
        return sum(self.counts())

    def rows(self, since: list[int] | None = None) -> list[int]:
        """The numbers of bad rows, as far as they are kept; `since`: only of those after such counts."""
        bad = set()
        for (count, *rows), first in zip(self.table.tolist(), since or [0] * len(self.table), strict=True):
            bad |= {rows[i % self.listed] for i in range(max(first, count - self.listed), count)}
        return sorted(bad)


class GuardedRows(RowsAround):
    """A map-style dataset whose rows come as (number, row or the error that reading it raised)."""

    def __getitem__(self, index: Any) -> tuple[int, Any]:
        number = getattr(index, "number", index)  # of a row of a stream, which is its own index
        try:
            return number, with_retries(lambda: self.dataset[index], f"row {number}")  # (5)
        except StorageError:
            raise
        except Exception as error:
            return number, _Unreadable(error)

    def __getitems__(self, indices: list) -> list[tuple[int, Any]]:
        if hasattr(self.dataset, "__getitems__"):
            with contextlib.suppress(Exception):  # of one of them; which, is found out below
                return list(zip(indices, self.dataset.__getitems__(indices), strict=True))
        return [self[index] for index in indices]


class _Unreadable(Exception):
    pass


@dataclass(eq=False)
class GuardedCollator:
    """Does (1) to (3) around the collator `collate`."""

    collate: Callable
    rows: GuardedRows | None  # None for a stream
    name: str
    tally: Tally
    can_replace: bool  # (3) holds, else (2)
    is_numbered: bool = True  # rows come as from `GuardedRows`, not plainly
    rank: int = 0  # for errors
    num_seen: int = 0
    last_good: dict[str | None, tuple[int, Any]] = field(default_factory=dict)  # by source, None: there is one only

    def __call__(self, batch: list) -> Any:
        if not self.is_numbered:
            batch = list(enumerate(batch, self.num_seen))
            self.num_seen += len(batch)
        try:
            return self._collated(batch)
        except StorageError:
            raise
        except Exception:
            standard, reasons = self._judged(batch)
            if not any(reasons):
                raise  # of the batch, not of a row
        return self._collated(self._replaced(batch, standard, reasons))

    def _collated(self, batch: list[tuple[int, Any]]) -> Any:
        rows = [row for _, row in batch]
        collated = with_retries(lambda: self._made_of(rows), f"a batch of {self.name}")  # (5): opens pictures
        self.last_good[self._source(rows[-1])] = batch[-1]
        if self.rows is not None and hasattr(collated, "get") and isinstance(collated.get("ids"), dict):
            collated["ids"]["row"] = torch.tensor([number for number, _ in batch])  # for reports; no loss reads it
        return collated

    def _made_of(self, rows: list) -> Any:
        for row in rows:
            if isinstance(row, _Unreadable):
                raise row.args[0]
        return self.collate(rows)

    def _error_of(self, rows: list) -> Exception | None:
        try:
            self._made_of(rows)
        except StorageError:
            raise
        except Exception as error:
            return error
        return None

    def _judged(self, batch: list[tuple[int, Any]]) -> tuple[list, list[Exception | None]]:
        """A row that every row must go with, if there is one, and per row of the batch why it cannot be used."""
        reasons = [self._error_of([row]) for _, row in batch]
        good = [row for (_, row), reason in zip(batch, reasons, strict=True) if reason is None]
        standard = self._standard(batch[0][0], good) if good else []
        beside = (reason or self._odd(standard, row) for (_, row), reason in zip(batch, reasons, strict=True))
        return standard, list(beside)

    def _standard(self, number: int, good: list) -> list:
        """The first row of the dataset; of a stream the last good one. Else that of the batch which most go with."""
        if self.rows is None:
            known = self.last_good.get(self._source(good[0]))
        else:
            known = self.rows[self._others(number)[0]]
        row = None if known is None else known[1]
        if row is None or self._error_of([row]) is not None:
            row = max(good[:COMPARED], key=lambda one: sum(self._odd([one], row) is None for row in good))
        return [row] if self._error_of([row, row]) is None else []  # else no two rows can be collated

    def _odd(self, standard: list, row: Any) -> UsageError | None:
        error = self._error_of([*standard, row]) if standard else None
        return error if isinstance(error, UsageError) else None  # others may be of the batch

    def _replaced(
        self, batch: list[tuple[int, Any]], standard: list, reasons: list[Exception | None]
    ) -> list[tuple[int, Any]]:
        good = [numbered for numbered, reason in zip(batch, reasons, strict=True) if reason is None]
        for position, reason in enumerate(reasons):
            if reason is None:
                continue
            number, row = batch[position]
            if not self.can_replace:
                raise UsageError(self._in_words(number, row, reason, len(batch) - len(good))) from reason
            self.tally.add(number)
            batch[position] = self._replacement(batch[position], {number for number, _ in good}, good, standard)
            good.append(batch[position])
        return batch

    def _replacement(self, bad: tuple[int, Any], taken: set[int], good: list, standard: list) -> tuple[int, Any]:
        number, row = bad
        if self.rows is None:
            last = self.last_good.get(self._source(row))
            if last is None and not good:
                raise UsageError(f"{self.name}: no row of the first batch can be used. Look at the dataset.")
            return last or good[0]
        first, count = self._others(number)
        tried = [first + (number - first + step) % count for step in range(1, min(TRIES, count))]
        free = [other for other in tried if other not in taken]
        for other in free:
            found = self.rows[other]
            if self._error_of([found[1]]) is None and self._odd(standard, found[1]) is None:
                return found
        raise UsageError(
            f"{self.name}: row {number} cannot be used. Of the {len(tried)} rows after it {len(tried) - len(free)} "
            f"are in the batch already and {len(free)} cannot be used either. Mend the rows, or lower the batch size."
        )

    def _source(self, row: Any) -> str | None:
        return row.get(SOURCE) if isinstance(row, dict) else None

    def _others(self, number: int) -> tuple[int, int]:
        """The first of the rows that may stand for another, and how many there are: those of its source."""
        if not isinstance(self.rows.dataset, Mixture):
            return 0, len(self.rows)
        source, row = self.rows.dataset.locate(number)
        return number - row, len(source)

    def _in_words(self, number: int, row: Any, reason: Exception, count: int) -> str:
        rank, remedy, name = self.rank, "Mend or remove the row, or let max_bad_rows replace some.", self.name
        remedy += f" Like it are {count} rows of this batch." * (count > 1)
        if isinstance(getattr(self.rows, "dataset", None), Mixture):
            source, _ = self.rows.dataset.locate(number)
            name = f'source "{source.name}" of datasets'
        row_number, is_ours = original_row(self.rows, number), isinstance(reason, UsageError | RunError)
        if is_ours and re.search(rf"\brow {row_number}\b", str(reason)):  # it names the row, and better
            return f"{reason} (Found on rank {rank}. {remedy})"
        what = str(reason) if is_ours else f"{type(reason).__name__}: {reason}"
        where = f"{name}, row {row_number} (counted from 0)"
        if self.rows is None and self.is_numbered:
            where += " of the epoch's order"
        elif self.rows is None:
            where += f" of those that loader worker {getattr(get_worker_info(), 'id', 0)} read"
        column = self._bad_column(number, row, reason)
        where += "" if column is None else f', column "{column}"'
        return f"{where}, on rank {rank} cannot be used: {what} {remedy}"

    def _bad_column(self, number: int, row: Any, reason: Exception) -> str | None:
        names = list(row) if isinstance(row, dict) else list(getattr(self.rows, "column_names", None) or ())
        if isinstance(row, _Unreadable) and hasattr(self.rows, "select_columns"):
            for name in names:
                try:
                    self.rows.select_columns([name])[number]
                except Exception:
                    return name
        said = [name for name in names if re.search(rf"['\"]{re.escape(name)}['\"]", str(reason))]
        empty = [name for name in names if isinstance(row, dict) and row[name] is None]
        return next(iter([*said, *empty]), None)


def guard_rows(loader: DataLoader, name: str, max_bad_rows: int | None, rank: int) -> Tally:
    """Let a loader do (1) to (4). Its sampling, sharding and workers stay what they are."""
    can_replace = bool(max_bad_rows)
    loader = getattr(loader, "base_dataloader", loader)  # inside of accelerate's, which asks it for everything
    tally, rows = Tally(loader.num_workers, max(LISTED, 1 + (max_bad_rows or 0))), None
    is_numbered = not isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if is_numbered:
        rows = GuardedRows(loader.dataset)
        object.__setattr__(loader, "dataset", rows)  # DataLoader guards the name, but for its batches, which stay
        rows = None if isinstance(rows.dataset, DealtRows) else rows
    loader.collate_fn = GuardedCollator(loader.collate_fn, rows, name, tally, can_replace, is_numbered, rank)
    return tally


def name_of(dataset: Any) -> str:
    info = getattr(dataset, "info", None)
    return getattr(info, "dataset_name", None) or f"the training set ({type(dataset).__name__})"


def original_row(rows: Any, number: int) -> int:
    """The row's number before rows were selected or shuffled (`datasets` keeps an index then); in a mixture, that in
    its source."""
    if isinstance(getattr(rows, "dataset", None), Mixture):
        source, number = rows.dataset.locate(number)
        rows = source.dataset
    indices = getattr(rows, "_indices", None)
    return number if indices is None else indices.column(0)[number].as_py()


def in_short(error: UsageError | RunError) -> UsageError | RunError:
    """An error of a loader worker without the worker's traceback around it."""
    kind = type(error)
    if not str(error).startswith(f"Caught {kind.__name__}"):
        return error
    *_, last = re.split(rf"^[\w.]*{kind.__name__}: ", str(error), flags=re.MULTILINE)
    return kind(last.strip())


def listing(tally: Tally, rows: Any) -> str:
    listed = [str(original_row(rows, number)) for number in tally.rows()[:SHOWN]]
    return ", ".join(listed) + (", ..." if tally.count() > SHOWN else "")
