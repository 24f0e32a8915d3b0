"""How many rows of an epoch could not be used, on all ranks and over every resume within the epoch.

Each loader worker counts its own rows in shared memory (data/bad_rows.py). The ranks tell each other their new ones
with every update, and a checkpoint holds the epoch's count with the rows' numbers: a loader reads ahead, so a resumed
run meets some of these rows again and must not count them twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from transformers.utils import logging

from hf_dist_ext.data.bad_rows import Tally, guard_rows, listing, name_of
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.rows import Rows

logger = logging.get_logger(__name__)


class BadRowCount:
    """`count`: of all ranks in this epoch. `limit`: rows of an epoch that may be replaced; None or 0: none."""

    def __init__(self, limit: int | None, ranks: Callable[[], Rows]):
        self.limit, self.ranks, self.count = limit, ranks, 0
        self._tally: Tally | None = None  # of this rank's loader
        self._loader: DataLoader | None = None
        self._name, self._has_numbers = "", True
        self._numbers: set[int] = set()
        self._before: list[int] = []  # counts of this rank's loader workers before this epoch
        self._resumed: tuple[int, set[int]] = (0, set())  # of this epoch before this run: how many, their numbers

    def watch(self, loader: DataLoader, dataset: Any) -> None:
        """Let the training loader replace rows, or name the one that it fails at."""
        self._loader, self._name = loader, name_of(dataset)
        # In a stream a row has no number that another run would know it by.
        self._has_numbers = not isinstance(dataset, IterableDataset)
        self._tally = guard_rows(loader, self._name, self.limit, collectives.rank())

    def begin_epoch(self, begun: dict[str, Any] | None) -> None:
        """`begun`: what `of_epoch` gave to the checkpoint from which this epoch goes on."""
        begun = begun or {"count": 0, "rows": ()}
        self._before = [] if self._tally is None else self._tally.counts()
        self.count, self._numbers = self._resumed = begun["count"], set(begun["rows"])

    def new_ones(self) -> int:
        """Of this rank in this epoch, without those that a resumed run has read again."""
        if not self.limit or self._tally is None:
            return 0
        count = self._tally.count() - sum(self._before)
        if not count or not self._resumed[1]:
            return count
        return count - len(self._resumed[1].intersection(self._tally.rows(self._before)))

    def add_up(self, new_ones: int, step: int) -> None:
        """`new_ones`: those of all ranks. Every rank calls it with the same number.

        Raises:
            RunError: more than the limit.
        """
        count = self._resumed[0] + new_ones
        if count != self.count:  # on every rank, and rarely
            own = "" if self._tally is None else " ".join(map(str, self._tally.rows(self._before)))
            everyone = collectives.texts_of(own, range(collectives.world_size()))
            numbers = {int(number) for text in everyone for number in text.rpartition(":")[2].split()}
            self._numbers = numbers | self._resumed[1]
        self.count = count
        if count > (self.limit or 0):
            raise RunError(
                f"step {step}: {count} rows of this epoch could not be used, more than max_bad_rows="
                f"{self.limit}. {'; '.join(self._listed())}. Mend the dataset or raise the limit."
            )

    def of_epoch(self) -> dict[str, Any] | None:
        """For the manifest of a checkpoint."""
        numbers = sorted(self._numbers) if self._has_numbers else []
        return {"count": self.count, "rows": numbers} if self.count else None

    def say(self) -> None:
        """At the end of a run: one warning that lists the rows. Every rank must call it."""
        if not self.limit or self._tally is None:
            return
        if listed := [text for text in self._listed() if text]:
            logger.warning(f"rows of {self._name} that could not be used: {'; '.join(listed)}")

    def _listed(self) -> list[str]:
        rows = getattr(self._loader, "dataset", None)
        text = f"{self._tally.count()} rows replaced, {listing(self._tally, rows)}" if self._tally.count() else ""
        ranks = range(0, collectives.world_size(), self.ranks().shared_by)
        return [text for text in collectives.texts_of(text, ranks) if not text.endswith(": ")]
