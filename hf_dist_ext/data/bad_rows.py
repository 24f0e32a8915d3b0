"""Training rows that cannot be read or made into features are named, and up to `max_bad_rows` of them are replaced.

(1) When a batch fails, every row is tried beside one that most others go with: losses take as many negatives of each
(2) A bad row is an error with dataset, row and column. When no row is good, the error of the batch is raised as it is
(3) With `max_bad_rows` a good row of the batch takes the place of a bad one. Both have the same ids, so losses mask
    the copy, and the batch follows from its rows alone, so that a relaunch resumes exactly
(4) Loader workers count in memory that they share, and the ranks add up after every step (training/health.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info
from transformers.utils import logging

from hf_dist_ext.data.row_check import bad_row_in_words
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

COMPARED = 3  # rows that can be used alone, one of which most others go with


@dataclass(eq=False)
class BatchMaker:
    """What a training loader calls for a batch.

    Args:
        dataset: of whose rows a batch is the numbers; None: of a stream it is the rows.
        counts: (workers,) rows that were replaced.
        then: each is called with the batch that the one before gives.
    """

    collate: Callable
    dataset: Any
    name: str
    can_replace: bool
    counts: torch.Tensor
    then: Sequence[Callable[[Any], Any]] = ()

    def __call__(self, batch: list) -> Any:
        try:
            return self._made(batch)
        except Exception:
            errors = self._errors(batch)
            good = [one for one, error in zip(batch, errors, strict=True) if error is None]
            if (not good and len(batch) > 1) or (len(good) == len(batch) and not self.can_replace):
                raise  # of the batch, and of no row
        for place, error in enumerate(errors):
            if error is not None:
                where, what = bad_row_in_words(self.dataset, batch[place], self.name, error)
                if not (good and self.can_replace):
                    raise UsageError(f"{where}, cannot be used: {what}") from error
                logger.warning(f"{where}, cannot be used: {what} Another row of its batch takes its place.")
                self.counts[getattr(get_worker_info(), "id", 0)] += 1
                batch[place] = good[place % len(good)]
        return self._made(batch)

    def _made(self, batch: list) -> Any:
        made = self._collated(batch)
        if isinstance(batch[0], int) and isinstance(made, Mapping) and isinstance(made.get("ids"), dict):
            made["ids"]["row"] = torch.tensor(batch)  # for reports; no loss reads it
        for change in self.then:
            made = change(made)
        return made

    def _collated(self, batch: list) -> Any:
        if self.dataset is None:
            return self.collate(batch)
        read_all = getattr(self.dataset, "__getitems__", None)
        return self.collate(read_all(batch) if read_all else [self.dataset[one] for one in batch])

    def _errors(self, batch: list) -> list[Exception | None]:
        """Per row why it cannot be used."""
        usable = (one for one in batch if self._error_of([one]) is None)
        usual = [*itertools.islice(usable, COMPARED)] or batch[:1]
        tried = [[self._error_of([row, one]) for one in batch] for row in usual]
        return max(tried, key=lambda errors: errors.count(None))

    def _error_of(self, batch: list) -> Exception | None:
        try:
            self._collated(batch)
        except Exception as error:
            return error
        return None
