"""The order of the rows when no global batch may hold a text twice: a duplicate would be a negative of itself.

    sampler = NoDuplicatesSampler(row_ids(dataset, ["query", "positive"]), window=batch_size * num_processes, seed=42)
    DataLoader(dataset, sampler=sampler, batch_size=batch_size)

Windows of `window` rows are the global batches, since accelerate deals consecutive batches to the ranks. Per epoch:
(1) permute the rows, by seed and epoch
(2) fill a window with rows that wait from earlier windows, then with rows of the permutation; a row with an id that
    the window has already joins the queue of that id
(3) when nothing that fits is left, fill up with rows that do not; `num_deferred` counts them

A row joins each id's queue once at most, and of a queue at most one row fits a window: an epoch costs about O(rows).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from hf_dist_ext.errors import UsageError

logger = logging.getLogger(__name__)


class NoDuplicatesSampler(Sampler[int]):
    """A seeded permutation in which each window of `window` rows shares no id, as far as that is possible.

    `ids_per_row`: (rows, columns) int64, such as `data.row_ids` gives. Two rows conflict when any id of one is any id
    of the other (the query of one may be the positive of the other); equal ids within a row are no conflict. The order
    depends on the ids, the seed and the epoch only, so every rank computes the same.
    """

    def __init__(self, ids_per_row: np.ndarray | torch.Tensor | Sequence[Sequence[int]], window: int, seed: int = 0):
        ids = np.asarray(ids_per_row)
        assert ids.ndim == 2 and window > 0, (ids.shape, window)
        _, dense = np.unique(ids, return_inverse=True)
        self.ids = dense.reshape(ids.shape)  # (rows, columns), 0 .. number of different ids - 1
        self.window = window
        self.seed = seed
        self.epoch = 0
        self.num_deferred = 0  # rows of the last epoch that stand beside a row they conflict with
        # Most rows of most datasets conflict with no other; they skip the bookkeeping.
        self.is_repeated = self._has_repeated_id()  # (rows,)

    def _has_repeated_id(self) -> np.ndarray:
        num_rows, num_columns = self.ids.shape
        first_in_row = np.ones(self.ids.shape, dtype=bool)  # False where an earlier column of the row has the same id
        for column in range(1, num_columns):
            first_in_row[:, column] = (self.ids[:, :column] != self.ids[:, column : column + 1]).all(axis=1)
        rows_per_id = np.bincount(self.ids[first_in_row], minlength=1)
        return (rows_per_id[self.ids] > 1).any(axis=1) if num_rows else np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        return len(self.ids)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def order(self) -> np.ndarray:
        """(rows,) of the epoch; `num_deferred` says how many stand beside a row they conflict with."""
        permutation = iter(np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ids)).tolist())  # (1)
        is_repeated = self.is_repeated.tolist()
        window_of_id = np.full(self.ids.max(initial=-1) + 1, -1).tolist()  # the last window that holds the id
        waiting: dict[int, deque[int]] = {}  # id -> rows that met this id in a window that was being filled
        order: list[int] = []
        num_deferred = 0

        def place(row: int, window: int) -> None:
            """Put the row in this window, or in the queue of the id that forbids it."""
            if is_repeated[row]:
                row_ids = self.ids[row].tolist()
                for row_id in row_ids:
                    if window_of_id[row_id] == window:
                        waiting.setdefault(row_id, deque()).append(row)
                        return
                for row_id in row_ids:
                    window_of_id[row_id] = window
            order.append(row)

        while len(order) < len(self.ids):
            window = len(order) // self.window
            end = min((window + 1) * self.window, len(self.ids))
            for row_id in list(waiting):  # (2)
                if len(order) == end:
                    break
                if window_of_id[row_id] != window:
                    place(pop_left(waiting, row_id), window)
            while len(order) < end and (row := next(permutation, None)) is not None:
                place(row, window)
            # (3) the permutation is at its end, and every row that waits conflicts with this window
            while len(order) < end:
                for row_id in list(waiting)[: end - len(order)]:
                    order.append(pop_left(waiting, row_id))
                    num_deferred += 1
        self.num_deferred = num_deferred
        if num_deferred:
            logger.info(
                "%d of %d rows share a global batch with a duplicate: too many rows have the same text or id.",
                num_deferred,
                len(order),
            )
        return np.array(order)


def pop_left(waiting: dict[int, deque[int]], row_id: int) -> int:
    row = waiting[row_id].popleft()
    if not waiting[row_id]:
        del waiting[row_id]
    return row


def no_duplicates_sampler(
    dataset: object, columns: Sequence[str], window: int, seed: int, id_column: str | None = None
) -> NoDuplicatesSampler:
    """The sampler for a dataset of `data.load_datasets`; hashing its texts takes about a second per 100,000 rows."""
    from hf_dist_ext.data import row_ids

    refuse_stream(dataset)
    return NoDuplicatesSampler(row_ids(dataset, columns, id_column), window=window, seed=seed)


def refuse_stream(dataset: object) -> None:
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            "no_duplicates_in_batch=true with streaming=true: a stream can not be reordered. Drop one of the two; "
            "mask_false_negatives still keeps equal texts from being negatives of each other."
        )
