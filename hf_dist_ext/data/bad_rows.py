"""Training rows that cannot be read or made into features are named, and up to `max_bad_rows` of them are replaced.

(1) A `BatchMaker` reads and collates the rows of a batch as ever. Only when that fails, it tries them one by one, then
    each beside a row that is as others are, since losses take as many negatives of every row
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from hf_dist_ext.data.mixture import SOURCE, Mixture, RowsAround
from hf_dist_ext.data.storage import with_retries
from hf_dist_ext.data.stream_order import Dealt, DealtRows
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

    def rows(self, since: list[int] | None = None, until: list[int] | None = None) -> list[int]:
        """The numbers of bad rows, as far as they are kept; `since`: only of those after such counts; `until`: only of
        those up to such counts, as workers go on counting."""
        bad, lines = set(), self.table.tolist()
        counts = [count for count, *_ in lines] if until is None else until
        for (_, *rows), first, count in zip(lines, since or [0] * len(lines), counts, strict=True):
            bad |= {rows[i % self.listed] for i in range(max(first, count - self.listed), count)}
        return sorted(bad)


class RowNumbers(RowsAround):
    """A map-style dataset to a loader, which hands the numbers of a batch's rows to its `BatchMaker`."""

    def __getitem__(self, index: Any) -> Any:
        return index


@dataclass(eq=False)
class BatchMaker:
    """What a training loader calls for a batch: reads the rows, collates them, and does (1) to (3).

    Args:
        dataset: of whose rows a batch is the numbers; None: of a stream it is the rows.
        then: each is called with the batch that the one before gives: what takes place where batches are made.
        may_repeat: a good row of the batch may take the place of a bad one, since no loss contrasts them.
    """

    collate: Callable
    dataset: Any
    name: str
    tally: Tally
    can_replace: bool  # (3) holds, else (2)
    rank: int = 0  # for errors
    then: Sequence[Callable[[Any], Any]] = ()
    may_repeat: bool = False
    num_seen: int = 0
    last_good: dict[str | None, Any] = field(default_factory=dict)  # by source, None: there is one only

    def __post_init__(self):
        # a stream's row, which is its own number here, can not be asked for
        self.has_numbers = self.dataset is not None and not isinstance(self.dataset, DealtRows)

    def __call__(self, batch: list) -> Any:
        if self.dataset is None:
            batch = [Dealt(number, row) for number, row in enumerate(batch, self.num_seen)]
            self.num_seen += len(batch)
        try:
            return self._made(batch)
        except StorageError:
            raise
        except Exception:
            standard, reasons = self._judged(batch)
            if not any(reasons) and not self.can_replace:
                raise  # of the batch, not of a row
        # Without a reason it is the batch's, and comes again, or of a row that failed once, as a random crop may.
        return self._made(self._replaced(batch, standard, reasons))

    def _made(self, batch: list) -> Any:
        made = self._collated(batch)
        self.last_good[_source(batch[-1])] = batch[-1]
        if self.has_numbers and hasattr(made, "get") and isinstance(made.get("ids"), dict):
            made["ids"]["row"] = torch.tensor(batch)  # for reports; no loss reads it
        for change in self.then:
            made = change(made)
        return made

    def _collated(self, batch: list) -> Any:
        rows = self._rows(batch)
        return with_retries(lambda: self.collate(rows), f"a batch of {self.name}")  # (5): opens pictures

    def _rows(self, batch: list) -> list:
        if hasattr(self.dataset, "__getitems__"):
            with contextlib.suppress(Exception):  # of one of them; which, is found out below
                return self.dataset.__getitems__(batch)
        return [self._row(one) for one in batch]

    def _row(self, one: Any) -> Any:
        if self.dataset is None:
            return one.row
        return with_retries(lambda: self.dataset[one], f"row {_number(one)}")  # (5)

    def _error_of(self, batch: list) -> Exception | None:
        try:
            self._collated(batch)
        except StorageError:
            raise
        except Exception as error:
            return error
        return None

    def _judged(self, batch: list) -> tuple[list, list[Exception | None]]:
        """A row that every row must go with, if there is one, and per row of the batch why it cannot be used."""
        reasons = [self._error_of([one]) for one in batch]
        good = [one for one, reason in zip(batch, reasons, strict=True) if reason is None]
        standard = self._standard(batch[0], good) if good else []
        beside = (reason or self._odd(standard, one) for one, reason in zip(batch, reasons, strict=True))
        return standard, list(beside)

    def _standard(self, first: Any, good: list) -> list:
        """The first row of the dataset; of a stream the last good one. Else that of the batch which most go with."""
        known = self._others(first)[0] if self.has_numbers else self.last_good.get(_source(good[0]))
        if known is None or self._error_of([known]) is not None:
            known = max(good[:COMPARED], key=lambda one: sum(self._odd([one], other) is None for other in good))
        return [known] if self._error_of([known, known]) is None else []  # else no two rows can be collated

    def _odd(self, standard: list, one: Any) -> UsageError | None:
        error = self._error_of([*standard, one]) if standard else None
        return error if isinstance(error, UsageError) else None  # others may be of the batch

    def _replaced(self, batch: list, standard: list, reasons: list[Exception | None]) -> list:
        good = [one for one, reason in zip(batch, reasons, strict=True) if reason is None]
        for position, reason in enumerate(reasons):
            if reason is None:
                continue
            if not self.can_replace:
                raise UsageError(self._in_words(batch[position], reason, len(batch) - len(good))) from reason
            self.tally.add(_number(batch[position]))
            batch[position] = self._replacement(batch[position], good, standard)
            good.append(batch[position])
        return batch

    def _replacement(self, bad: Any, good: list, standard: list) -> Any:
        if not self.has_numbers:
            last = self.last_good.get(_source(bad))
            if last is None and not good:
                raise UsageError(f"{self.name}: no row of the first batch can be used. Look at the dataset.")
            return last or good[0]
        if self.may_repeat and good:
            return good[0]
        first, count = self._others(bad)
        tried = [first + (bad - first + step) % count for step in range(1, min(TRIES, count))]
        free = [other for other in tried if other not in good]
        for other in free:
            if self._error_of([other]) is None and self._odd(standard, other) is None:
                return other
        raise UsageError(
            f"{self.name}: row {bad} cannot be used. Of the {len(tried)} rows after it {len(tried) - len(free)} "
            f"are in the batch already and {len(free)} cannot be used either. Mend the rows, or lower the batch size."
        )

    def _others(self, number: int) -> tuple[int, int]:
        """The first of the rows that may stand for another, and how many there are: those of its source."""
        if not isinstance(self.dataset, Mixture):
            return 0, len(self.dataset)
        source, row = self.dataset.locate(number)
        return number - row, len(source)

    def _in_words(self, one: Any, reason: Exception, count: int) -> str:
        rank, remedy, name = self.rank, "Mend or remove the row, or let max_bad_rows replace some.", self.name
        remedy += f" Like it are {count} rows of this batch." * (count > 1)
        if isinstance(self.dataset, Mixture):
            source, _ = self.dataset.locate(one)
            name = f'source "{source.name}" of datasets'
        row_number, is_ours = original_row(self.dataset, _number(one)), isinstance(reason, UsageError | RunError)
        if is_ours and re.search(rf"\brow {row_number}\b", str(reason)):  # it names the row, and better
            return f"{reason} (Found on rank {rank}. {remedy})"
        what = str(reason) if is_ours else f"{type(reason).__name__}: {reason}"
        where = f"{name}, row {row_number} (counted from 0)"
        if self.dataset is None:
            where += f" of those that loader worker {getattr(get_worker_info(), 'id', 0)} read"
        elif not self.has_numbers:
            where += " of the epoch's order"
        column = self._bad_column(one, reason)
        where += "" if column is None else f', column "{column}"'
        return f"{where}, on rank {rank} cannot be used: {what} {remedy}"

    def _bad_column(self, one: Any, reason: Exception) -> str | None:
        try:
            row = self._row(one)
            names = list(row) if isinstance(row, dict) else []
        except Exception:
            row, names = None, list(getattr(self.dataset, "column_names", None) or ())
            for name in names if hasattr(self.dataset, "select_columns") else ():
                try:
                    self.dataset.select_columns([name])[one]
                except Exception:
                    return name
        said = [name for name in names if re.search(rf"['\"]{re.escape(name)}['\"]", str(reason))]
        empty = [name for name in names if isinstance(row, dict) and row[name] is None]
        return next(iter([*said, *empty]), None)


def _number(one: Any) -> int:
    return getattr(one, "number", one)


def _source(one: Any) -> str | None:
    """That of a stream's row; None of a number, or where there is one source."""
    row = getattr(one, "row", None)
    return row.get(SOURCE) if isinstance(row, dict) else None


def make_batches(
    loader: DataLoader, name: str, max_bad_rows: int | None, rank: int, then: Sequence[Callable[[Any], Any]] = ()
) -> Tally:
    """Let a loader's batches be made by a `BatchMaker`. Its sampling, sharding and workers stay what they are."""
    can_replace = bool(max_bad_rows)
    loader = getattr(loader, "base_dataloader", loader)  # inside of accelerate's, which asks it for everything
    tally, dataset = Tally(loader.num_workers, max(LISTED, 1 + (max_bad_rows or 0))), None
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        dataset = loader.dataset
        object.__setattr__(loader, "dataset", RowNumbers(dataset))  # DataLoader guards the name, but for its batches
    loader.collate_fn = BatchMaker(loader.collate_fn, dataset, name, tally, can_replace, rank, then)
    return tally


def read_apart(
    dataset: Any, collate: Callable, max_bad_rows: int | None, num_workers: int, rank: int
) -> tuple[Any, Callable]:
    """(rows, collate) of a training set that is read once before training: bad rows are named or replaced as there
    (also by a row of the batch, as rows come in order), and not counted, since training meets them again."""
    if not hasattr(dataset, "__len__"):
        return dataset, collate
    given = name_of(dataset), Tally(num_workers), bool(max_bad_rows), rank
    return RowNumbers(dataset), BatchMaker(collate, dataset, *given, may_repeat=True)


def name_of(dataset: Any) -> str:
    info = getattr(dataset, "info", None)
    return getattr(info, "dataset_name", None) or f"the training set ({type(dataset).__name__})"


def original_row(rows: Any, number: int) -> int:
    """The row's number before rows were selected or shuffled (`datasets` keeps an index then); in a mixture, that in
    its source."""
    if isinstance(rows, Mixture):
        source, number = rows.locate(number)
        rows = source.dataset
    indices = getattr(rows, "_indices", None)
    return number if indices is None else indices.column(0)[number].as_py()


def listing(tally: Tally, rows: Any) -> str:
    listed = [str(original_row(rows, number)) for number in tally.rows()[:SHOWN]]
    return ", ".join(listed) + (", ..." if tally.count() > SHOWN else "")
