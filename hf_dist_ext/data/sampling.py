"""`NoDuplicatesSampler` gives a permutation of the rows in which every global batch holds each id once.

    ids = shared_ids(dataset, ["query", "positive"])
    sampler = NoDuplicatesSampler(ids, window=batch_size * num_processes, seed=42)

A window is a global batch: data/order.py cuts the order into them. An epoch's order is made in three steps:
(1) Permute the rows, by seed and epoch
(2) Fill a window with rows that wait from earlier windows, then with rows of the permutation; a row with an id that
    the window has already joins the queue of that id
(3) When nothing that fits is left, fill up with rows that do not; `num_deferred` counts them

Only rows that share an id with another row of the window, or of those that would fill it, are looked at one by one. A
row joins each id's queue once at most, and of a queue at most one row fits a window: an epoch costs about O(rows).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

from hf_dist_ext.data.fingerprint import seed_of_order
from hf_dist_ext.data.row_ids import shared_ids
from hf_dist_ext.errors import UsageError

logger = logging.getLogger(__name__)

NO_ROW = -1  # in an order: a place without a row
NO_DUPLICATES = ("no_duplicates", "no_duplicates_hashed")  # of `batch_sampler`


class EpochOrder(Sampler[int]):
    """A sampler that knows the order of a whole epoch, which every process draws alike."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def order(self) -> np.ndarray:
        """(rows,) of the present epoch; NO_ROW where a place holds none."""
        raise NotImplementedError


class NoDuplicatesSampler(EpochOrder):
    """A seeded permutation in which each window of `window` rows shares no id, as far as that is possible.

    `ids`: (rows, columns) int32 as `row_ids.shared_ids` and `row_ids.numbered` give them, 0 for what no other row
    holds. Two rows conflict when any id of one is any id of the other (the query of one may be the positive of the
    other). The order depends on which ids are equal, the seed and the epoch only, so every rank computes the same.
    `leaves_out`: a row that would stand beside one it conflicts with is left out, and its place holds NO_ROW.
    """

    def __init__(self, ids: np.ndarray, window: int, seed: int = 0, leaves_out: bool = False):
        assert ids.ndim == 2 and ids.dtype == np.int32 and window > 0, (ids.shape, ids.dtype, window)
        self.ids = np.asarray(ids)  # not as a map of a file, whose slices are slow
        self.window = window
        self.seed = seed
        self.leaves_out = leaves_out
        self.num_deferred = 0  # rows of the last epoch that stand beside a row they conflict with

    def __len__(self) -> int:
        return len(self.ids)

    def order(self) -> np.ndarray:
        """(rows,) of the epoch; `num_deferred` says how many stand beside a row they conflict with."""
        permutation = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ids))  # (1)
        order, self.num_deferred = without_duplicates(self.ids, permutation, self.window)
        return self._with_places_left(order) if self.leaves_out and self.num_deferred else order

    def _with_places_left(self, order: np.ndarray) -> np.ndarray:
        for first in range(0, len(order), self.window):
            rows = order[first : first + self.window]
            seen: set[int] = set()
            for place, of_row in enumerate(self.ids[rows].tolist()):
                own = {number for number in of_row if number}
                if seen & own:
                    rows[place] = NO_ROW
                else:
                    seen |= own
        logger.warning(
            "%d of %d rows are left out of this epoch, since every batch that is left holds a text of theirs already: "
            "too many rows have the same text for batches of %d.",
            np.count_nonzero(order == NO_ROW),
            len(order),
            self.window,
        )
        return order


def without_duplicates(ids: np.ndarray, rows: np.ndarray, window: int) -> tuple[np.ndarray, int]:
    """(rows,) numbers of rows, put in order by (2) and (3), in place; and how many stand beside a row they conflict
    with."""
    dealing = _Dealing(ids, window, rows)
    num_deferred = dealing.run()
    if num_deferred:
        logger.log(
            logging.WARNING if num_deferred > len(rows) / 100 else logging.INFO,
            "%d of %d rows share a global batch with a duplicate: too many rows have the same text or id. A "
            "smaller batch keeps them apart, or more rows do.",
            num_deferred,
            len(rows),
        )
    return dealing.order, num_deferred


class _Dealing:
    """One epoch. `order` begins as the permutation: `taken` rows of it were read, of which `placed` were written back
    to its beginning and the others wait."""

    def __init__(self, ids: np.ndarray, window: int, order: np.ndarray):
        self.ids, self.window, self.order = ids, window, order
        self.placed = self.taken = 0
        self.waiting: dict[int, deque[int]] = {}  # id -> rows that met this id in a window that was being filled
        most = int(ids.max(initial=0)) + 1
        self.held = bytearray(most)  # whether the window that is being filled has an id
        self.is_held = np.frombuffer(self.held, dtype=bool)  # the same memory
        self.row_with = np.empty(most, dtype=np.int32)

    def run(self) -> int:
        num_rows, num_deferred = len(self.order), 0
        while self.placed < num_rows:
            end = min(self.placed + self.window, num_rows)
            self.is_held[self.ids[self.order[max(0, self.placed - self.window) : self.placed]]] = False
            self._fill_from_queues(end)  # (2)
            while self.placed < end and self.taken < num_rows:
                self._fill_from_permutation(end)
            # (3) the permutation is at its end, and every row that waits conflicts with this window
            while self.placed < end:
                for row_id in list(islice(self.waiting, end - self.placed)):
                    self._write(self._next_waiting(row_id))
                    num_deferred += 1
        return num_deferred

    def _fill_from_permutation(self, end: int) -> None:
        """With the next rows, as many as are missing; those that conflict wait."""
        rows = self.order[self.taken : self.taken + end - self.placed].copy()
        self.taken += len(rows)
        ids, place = self.ids[rows], np.arange(len(rows), dtype=np.int32)[:, None]  # (rows, columns), (rows, 1)
        self.row_with[ids] = place
        self.row_with[ids[self.row_with[ids] != place]] = -1  # several of these rows have it
        self.row_with[0] = 0
        fits = ((self.row_with[ids] >= 0) & ~self.is_held[ids]).all(axis=1)
        self.is_held[ids[fits]] = True  # whatever becomes of the others
        self.is_held[0] = False
        others = np.flatnonzero(~fits)
        fits[others] = list(map(self._takes, rows[others].tolist(), ids[others].tolist()))
        rows = rows[fits]
        self.order[self.placed : self.placed + len(rows)] = rows
        self.placed += len(rows)

    # ---- the queues ----

    def _takes(self, row: int, row_ids: list[int]) -> bool:
        """Whether the window takes the row; otherwise the row waits for the first id that forbids it."""
        for row_id in row_ids:
            if self.held[row_id]:
                self.waiting.setdefault(row_id, deque()).append(row)
                return False
        for row_id in row_ids:
            self.held[row_id] = row_id > 0
        return True

    def _fill_from_queues(self, end: int) -> None:
        """With a row of each queue, the oldest queue first, that was there when the window began."""
        last, asked = next(reversed(self.waiting), None), set()
        while self.waiting and self.placed < end:
            # Only the first ones, as a rule: there may be many more queues than a window has rows.
            queues = [row_id for row_id in islice(self.waiting, 4 * self.window + len(asked)) if row_id not in asked]
            for row_id in queues:
                if self.placed == end:
                    return
                asked.add(row_id)
                if not self.held[row_id]:
                    row = self._next_waiting(row_id)
                    if self._takes(row, self.ids[row].tolist()):
                        self._write(row)
                if row_id == last:
                    return

    def _next_waiting(self, row_id: int) -> int:
        row = self.waiting[row_id].popleft()
        if not self.waiting[row_id]:
            del self.waiting[row_id]
        return row

    def _write(self, row: int) -> None:
        self.order[self.placed] = row
        self.placed += 1


def sampler_without_duplicates(args: Any, dataset: Any, collator: Any, window: int) -> NoDuplicatesSampler | None:
    """A sampler that lets no batch of `window` rows hold a query, a positive or a group twice.

    Negatives are left out: two rows with a common hard negative do not disturb each other. With a `batch_sampler` of
    that name they count, and rows that disturb each other all the same are left out of the epoch. None where
    no_duplicates_in_batch, or "auto" for this dataset and collator, leaves the order to Trainer: a transform makes the
    rows while they are read, so that nobody knows before which of them are equal.

    Raises:
        UsageError: it was asked for and can not be.
    """
    wanted, columns = args.no_duplicates_in_batch, getattr(collator, "columns", None)
    named = getattr(args, "batch_sampler", None)
    if named is not None and named not in NO_DUPLICATES:
        return None
    wanted = True if named is not None else wanted
    is_random = args.train_sampling_strategy == "random"
    if wanted and not is_random:
        raise UsageError(
            f"no_duplicates_in_batch=true is an order of its own, and train_sampling_strategy="
            f"{str(args.train_sampling_strategy)!r} another. Keep one."
        )
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    is_possible = columns is not None and hasattr(dataset, "column_names") and hasattr(dataset, "__len__")
    is_possible &= not is_transformed
    if wanted is False or not is_random or not (wanted or is_possible):
        return None
    if columns is None:
        raise UsageError(
            "no_duplicates_in_batch=true needs a data_collator that names its columns: ContrastiveCollator."
        )
    refuse_stream(dataset)
    if is_transformed:
        raise UsageError(
            "no_duplicates_in_batch=true compares rows before training, and the dataset has a transform, which makes "
            "them while they are read. Make them with map(), or remove no_duplicates_in_batch."
        )
    id_column = getattr(collator, "id_column", None)
    names = columns if named is not None else [*columns[:2], *([id_column] if id_column else [])]
    return NoDuplicatesSampler(shared_ids(dataset, names), window, seed_of_order(args), leaves_out=named is not None)


def refuse_stream(dataset: object) -> None:
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            "no_duplicates_in_batch=true with streaming=true: a stream can not be reordered. Drop one of the two; "
            "mask_false_negatives still keeps equal texts from being negatives of each other."
        )
