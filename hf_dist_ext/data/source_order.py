"""The order of a `Mixture`: which source each batch is of, and which of its rows.

(1) The rows of a source are one endless order: pass after pass over it, each a permutation of its own. An epoch goes
    on where the one before it stopped, so that after each epoch the uses of a source's rows differ by one at most
(2) An epoch has as many rows as all sources together. It is cut into global batches, and each batch's source is drawn
    (mixture.py) by seed, epoch and the row at which the cut begins. All processes draw the same
(3) A batch takes the next rows of its source. Where batches must not hold an id twice (sampling.py), the rows that an
    epoch takes of a source are put in order for that

A run that goes on with another batch cuts the rest of its epoch anew, and no row is repeated or skipped. So a
checkpoint holds how the epoch began in every source, and the cuts: from which row on batches had which size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from hf_dist_ext.data.fingerprint import seed_of_order
from hf_dist_ext.data.mixture import Mixture, drawn
from hf_dist_ext.data.sampling import sampler_without_duplicates, without_duplicates
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.sources import refuse_order


@dataclass(frozen=True)
class Begun:
    """How an epoch begins.

    `used`: of each source's endless order. `left`: rows of each source that come before the next of its endless order,
    since an epoch had put them in order and then was cut anew. `cuts`: (first row of the epoch, rows of a batch).
    """

    sources: tuple[str, ...]
    epoch: int
    used: tuple[int, ...]
    left: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, int], ...]


class OneSourceSampler(Sampler[int]):
    """An epoch's rows by their numbers in `mixture`, batches of one source after another.

    `rows_per_batch`: of all processes. `ids`: of each source as NoDuplicatesSampler takes them, None: any rows meet.
    `drop_last`: a last batch with fewer rows is not trained on, so that its rows come first in the next epoch.
    """

    def __init__(
        self,
        mixture: Mixture,
        rows_per_batch: int,
        seed: int,
        ids: Sequence[np.ndarray | None],
        drop_last: bool = False,
    ):
        self.sizes, self.shares = [len(source) for source in mixture.datasets], mixture.shares
        self.firsts = [end - size for end, size in zip(mixture.cumulative_sizes, self.sizes, strict=True)]
        self.rows_per_batch, self.seed, self.ids, self.drop_last = rows_per_batch, seed, ids, drop_last
        self.epoch = 0
        names, count = tuple(mixture.sources), len(self.sizes)
        self.begun = self._known = Begun(names, 0, (0,) * count, ((),) * count, ((0, rows_per_batch),))
        for name, size in zip(names, self.sizes, strict=True):
            if size < rows_per_batch:
                raise UsageError(
                    f'datasets: "{name}" has {size} rows, fewer than one global batch of {rows_per_batch}, and a '
                    "batch is of one source. Lower per_device_train_batch_size, or leave the source out."
                )

    def __len__(self) -> int:
        return sum(self.sizes)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def order(self) -> np.ndarray:
        """(rows,) of the present epoch."""
        return self._dealt(self.at(self.epoch))[0]

    # ---- epochs, (2) ----

    def at(self, epoch: int) -> Begun:
        """How an epoch begins, from the one that this sampler knows on."""
        begun = self._known if self._known.epoch <= epoch else self.begun
        if epoch < begun.epoch:
            raise ValueError(f"epoch {epoch} lies before epoch {begun.epoch}, which a checkpoint has begun.")
        while begun.epoch < epoch:
            if len(begun.cuts) > 1 or (self.drop_last and any(ids is not None for ids in self.ids)):
                _, used, left = self._dealt(begun)
            else:  # all of `left` is used, or its beginning, so that the order need not be known
                ((_, last, _, sources),) = self._drawn(begun)
                counts = np.bincount(sources[:last], minlength=len(self.sizes)).tolist()
                states = list(zip(begun.used, begun.left, counts, strict=True))
                used = [before + max(0, count - len(rows)) for before, rows, count in states]
                left = [rows[count:] for _, rows, count in states]
            cuts = ((0, self.rows_per_batch),)
            begun = Begun(begun.sources, begun.epoch + 1, tuple(used), tuple(map(tuple, left)), cuts)
        self._known = begun
        return begun

    def _drawn(self, begun: Begun) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """For each cut of an epoch: its first row, the first row behind those that it uses, rows of a batch, and
        (rows,) the sources that it draws from its first row to the end of the epoch."""
        first, window = begun.cuts[-1]
        dropped = (len(self) - first) % window if self.drop_last else 0
        lasts = [first for first, _ in begun.cuts[1:]] + [len(self) - dropped]
        for (first, window), last in zip(begun.cuts, lasts, strict=True):
            rows = len(self) - first
            of_batches = drawn(self.shares, -(-rows // window), (self.seed, begun.epoch, first))
            yield first, last, window, np.repeat(of_batches, window)[:rows]

    def _dealt(self, begun: Begun) -> tuple[np.ndarray, list[int], list[list[int]]]:
        """The order of an epoch, and what is used and left of each source behind it."""
        order = np.empty(len(self), dtype=np.int64)
        used, left = list(begun.used), [np.array(rows, dtype=np.int64) for rows in begun.left]
        for first, last, window, sources in self._drawn(begun):
            for source, number_of_first in enumerate(self.firsts):
                here = np.flatnonzero(sources == source)
                more = max(0, len(here) - len(left[source]))
                rows = np.concatenate([left[source], self._endless(source, used[source], more)])
                rows[: len(here)] = self._without_duplicates(source, rows[: len(here)], window)
                # to the end of the epoch, as it was before a later cut, which writes over what was not used
                order[first:][here] = rows[: len(here)] + number_of_first
                used[source] += more
                left[source] = rows[np.searchsorted(here, last - first) :]
        return order, used, [rows.tolist() for rows in left]

    def go_on(self, stored: dict[str, Any], epoch: int, rows: int) -> None:
        """From a checkpoint that holds `facts`, in an epoch of which so many rows are used."""
        begun = Begun(**{name: _tuples(value) for name, value in stored.items()})
        if begun.sources != self.begun.sources:  # allow_changed_data
            return
        if epoch == begun.epoch and begun.cuts[-1][1] != self.rows_per_batch:
            kept = tuple(cut for cut in begun.cuts if cut[0] < rows)
            begun = replace(begun, cuts=(*kept, (rows, self.rows_per_batch)))
        self.begun = self._known = begun

    def facts(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        return asdict(self.at(self.epoch))

    # ---- the rows of a source, (1) and (3) ----

    def _endless(self, source: int, first: int, count: int) -> np.ndarray:
        """(count,) rows of the source's endless order, from place `first` on."""
        size, last = self.sizes[source], first + count
        passes = [
            np.random.default_rng((self.seed, source, number)).permutation(size)[
                max(0, first - number * size) : last - number * size
            ]
            for number in range(first // size, -(-last // size))
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *passes])

    def _without_duplicates(self, source: int, rows: np.ndarray, window: int) -> np.ndarray:
        ids = self.ids[source]
        if ids is None or not len(rows):
            return rows
        if np.bincount(rows).max() > 1:  # a row that comes twice shares a number with itself
            own = int(ids.max(initial=0)) + 1 + np.arange(len(ids), dtype=np.int32)
            ids = np.column_stack([ids, own])
        return without_duplicates(ids, rows.copy(), window)[0]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def sampler_of_sources(args: Any, mixture: Mixture, collator: Any, rows_per_batch: int) -> OneSourceSampler:
    """The sampler of a trainer's mixture. Each source keeps duplicates apart where it would as the only one.

    Raises:
        UsageError: another order is asked for, or a source is too small.
    """
    refuse_order(args.train_sampling_strategy)
    samplers = [
        sampler_without_duplicates(args, dataset, collator.of_source(name), rows_per_batch)
        for name, dataset in mixture.sources.items()
    ]
    ids = [None if sampler is None else sampler.ids for sampler in samplers]
    return OneSourceSampler(mixture, rows_per_batch, seed_of_order(args), ids, args.dataloader_drop_last)
