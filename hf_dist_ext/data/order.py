"""Which rows of an epoch a process trains on, in batches: `EpochBatches` alone decides a training set's order.

(1) The order of an epoch is drawn from the sampler. The sampler is told the epoch, and what it draws from the global
    generators, or from a generator of its own, follows from seed and epoch. So every process draws the same order, and
    a later run draws it again; `digest` tells whether it did
(2) The order is cut into global batches, in a resumed run behind the rows that were used
(3) Of each global batch a process takes its own slice. The last batch may be short, and one with places that hold no
    row: with a loss over embeddings its rows are split over the processes, and none is repeated. Trainer's own losses
    count every process alike, so for them a short batch is filled up with rows of the first one, as accelerate does

`EpochBatches` stands in the place of accelerate's `BatchSamplerShard`, as one sampler: accelerate's
`skip_first_batches` wraps what it finds once more, and then neither `DataLoaderShard.set_epoch` nor Trainer reaches a
sampler two wrappers deep.

`sampler_of` gives the order of a training set with a loss over embeddings. One dataset has an order without
duplicates in a batch (sampling.py), or that of Trainer's sampler. A `Mixture` has batches of one source (4):

(a) The rows of a source are one endless order: pass after pass over it, each a permutation of its own. An epoch goes
    on where the one before it stopped, so that after each epoch the uses of a source's rows differ by one at most
(b) An epoch has as many rows as all sources together. It is cut into global batches, and each batch's source is drawn
    (mixture.py) by seed, epoch and the row at which the cut begins. All processes draw the same
(c) A batch takes the next rows of its source. Where batches must not hold an id twice, the rows that an epoch takes of
    a source are put in order for that
(d) A run that goes on with another batch cuts the rest of its epoch anew, and no row is repeated or skipped. So a
    checkpoint holds how the epoch began in every source, and the cuts: from which row on batches had which size

Where a batch sampler of sentence-transformers, or of the user, makes the batches (5), it is made for global batches.
`GlobalBatches` writes an epoch's batches one behind the other. A short one is filled up with places that hold no row,
so that a batch begins at every multiple of its size. So `multi_dataset_batch_sampler` and `batch_sampler` mean what
they mean there. Only batches without duplicates are found by our own way, which is that of a large dataset.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_dist_ext.data.fingerprint import seed_of_order
from hf_dist_ext.data.mixture import Mixture, drawn
from hf_dist_ext.data.sampling import (
    NO_DUPLICATES,
    NO_ROW,
    EpochOrder,
    sampler_without_duplicates,
    without_duplicates,
)
from hf_dist_ext.data.sentence_collator import LABELS
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.sources import refuse_order

PLAIN, GROUPED = "batch_sampler", "group_by_label"  # of `batch_sampler`
BATCH_SAMPLERS = (PLAIN, *NO_DUPLICATES, GROUPED)
PROPORTIONAL, ROUND_ROBIN = MULTI_DATASET_BATCH_SAMPLERS = ("proportional", "round_robin")


@dataclass(frozen=True)
class RowsUsed:
    """`rows` of epoch `epoch` were used; its order was made for global batches of `window` rows. `samples`: rows of
    the whole run. `is_regular`: every step so far had the present run's batch, so that Trainer can find the place."""

    epoch: int = 0
    rows: int = 0
    window: int = 0
    samples: int = 0
    is_regular: bool = True


class StandIn(dict):
    """A batch of one row, on a process that has no row of its own in a short global batch: models and collectives run
    with it, and it counts for nothing."""


class EpochBatches(Sampler[list[int]]):
    """This process's batches. `size` processes hold rows of their own, this is number `index` of them."""

    def __init__(
        self,
        sampler: Sampler[int],
        batch_size: int,
        *,
        seed: int,
        size: int = 1,
        index: int = 0,
        drop_last: bool = False,
        last: Literal["split", "filled", "uneven"] = "split",
        begun: RowsUsed | None = None,
    ):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.num_processes, self.process_index = size, index  # accelerate's names: its loaders count rows by them
        self.seed, self.last, self.begun = seed, last, begun
        self.epoch = 0
        self._drawn: tuple[int, np.ndarray] | None = None  # an epoch and its order
        generator = getattr(sampler, "generator", None)
        has_own_seed = isinstance(generator, torch.Generator) and not isinstance(sampler, SeedableRandomSampler)
        self._generator_seed = generator.initial_seed() if has_own_seed else None

    @property
    def window(self) -> int:
        """Rows of a global batch."""
        return self.batch_size * self.num_processes

    @property
    def num_rows(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        """How many batches a whole epoch has."""
        full, rest = divmod(self.num_rows, self.window)
        if self.drop_last or not rest:
            return full
        return full + (self.last != "uneven" or rest > self.process_index * self.batch_size)

    # ---- (1) ----

    def made_for(self, epoch: int) -> int:
        """The batch that an epoch's order was made for, where orders depend on that; else the global batch."""
        if self.begun is not None and epoch == self.begun.epoch:
            return self.begun.window
        return getattr(self.sampler, made_for_name(self.sampler) or "", self.window)

    def order(self) -> np.ndarray:
        """The rows of the present epoch, (rows,)."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = None  # not two orders at once: each takes 8 bytes per row
            sampler, name = self.sampler, made_for_name(self.sampler)
            if name is not None and self.made_for(self.epoch) != getattr(sampler, name):
                sampler = copy.copy(sampler)
                setattr(sampler, name, self.made_for(self.epoch))
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            if self._generator_seed is not None:
                sampler.generator.manual_seed(self._generator_seed + self.epoch)
            with seeded(self.seed + self.epoch):
                is_ours = isinstance(sampler, EpochOrder)
                self._drawn = self.epoch, sampler.order() if is_ours else np.fromiter(sampler, np.int64)
        return self._drawn[1]

    def digest(self) -> str:
        """Of the present epoch's order."""
        return hashlib.blake2b(self.order(), digest_size=16).hexdigest()

    # ---- (2), (3) ----

    def begin(self) -> int:
        """Rows of the present epoch that were used before this run."""
        return self.begun.rows if self.begun is not None and self.epoch == self.begun.epoch else 0

    def is_stand_in(self, first: int) -> bool:
        """Whether this process has no row of its own in the global batch that begins at row `first` of the order."""
        own = self._share(len(self._rows(first)))
        return self.last == "split" and own.start == own.stop

    def __iter__(self) -> Iterator[list[int]]:
        order, begin = self.order(), self.begin()
        for first in range(begin, len(order), self.window):
            if first + self.window > len(order) and self.drop_last:
                return
            rows = self._rows(first)
            if len(rows) < self.window:
                if self.last == "filled":
                    rows = np.concatenate([rows, np.resize(order[begin : begin + self.window], self.window)])
                    rows = rows[: self.window]
            own = rows[self._share(len(rows))]
            if len(own):
                yield own.tolist()
            elif self.last == "split":
                yield rows[:1].tolist()

    def _rows(self, first: int) -> np.ndarray:
        """Those of the global batch that begins at this place of the order, which may have places without a row."""
        rows = self.order()[first : first + self.window]
        return rows[rows != NO_ROW]

    def _share(self, num_rows: int) -> slice:
        """This process's part of a global batch of so many rows."""
        if num_rows == self.window or self.last != "split":
            return slice(self.process_index * self.batch_size, (self.process_index + 1) * self.batch_size)
        parts = [num_rows * index // self.num_processes for index in (self.process_index, self.process_index + 1)]
        return slice(*parts)


def made_for_name(sampler: Any) -> str | None:
    """The attribute of a sampler that holds the batch its order is made for: NoDuplicatesSampler's, or that of
    transformers' LengthGroupedSampler."""
    return next((name for name in ("window", "batch_size") if isinstance(getattr(sampler, name, None), int)), None)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators of the CPU begin at `seed`, and afterwards go on where they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed accelerators too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def take_over(loader: Any, **options: Any) -> Any:
    """Let a loader that accelerate has prepared take its batches from `EpochBatches(sampler, ..., **options)`; gives
    where it takes them from.

    A batch sampler of the user's stays, and so does a sampler without a length: its order has no end to be drawn to.
    """
    batches, size, index = batches_of(loader), 1, 0
    if isinstance(batches, BatchSamplerShard):
        size, index, batches = batches.num_processes, batches.process_index, batches.batch_sampler
    if type(batches) is BatchSampler and hasattr(batches.sampler, "__len__"):
        if size == 1 and options["last"] == "filled":
            options["last"] = "uneven"  # one process has a shorter batch
        options |= {"size": size, "index": index, "drop_last": batches.drop_last}
        batches = EpochBatches(batches.sampler, batches.batch_size, **options)
    elif not isinstance(batches, BatchRebalanceSampler):  # one knows processes and epoch, and needs no wrapper
        return batches_of(loader)
    return replace_batches(loader, batches)


def replace_batches(loader: Any, batches: Any) -> Any:
    # DataLoader guards the name of what it was made with
    object.__setattr__(getattr(loader, "base_dataloader", loader), "batch_sampler", batches)
    return batches


def batches_of(loader: Any) -> Any:
    """The `EpochBatches`, or another batch sampler, of a loader; a stream's has none: None."""
    return getattr(getattr(loader, "base_dataloader", loader), "batch_sampler", None)


# ---- (4) ----


@dataclass(frozen=True)
class Begun:
    """How an epoch of a mixture begins.

    `used`: of each source's endless order. `left`: rows of each source that come before the next of its endless order,
    since an epoch had put them in order and then was cut anew. `cuts`: (first row of the epoch, rows of a batch).
    """

    sources: list[str]
    epoch: int
    used: list[int]
    left: list[list[int]]
    cuts: list[list[int]]


class OneSourceSampler(EpochOrder):
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
        names, count = list(mixture.sources), len(self.sizes)
        self.begun = self._known = Begun(names, 0, [0] * count, [[]] * count, [[0, rows_per_batch]])
        for name, size in zip(names, self.sizes, strict=True):
            if size < rows_per_batch:
                raise UsageError(
                    f'datasets: "{name}" has {size} rows, fewer than one global batch of {rows_per_batch}, and a '
                    "batch is of one source. Lower per_device_train_batch_size, or leave the source out."
                )

    def __len__(self) -> int:
        return sum(self.sizes)

    def order(self) -> np.ndarray:
        """(rows,) of the present epoch."""
        return self._dealt(self.at(self.epoch))[0]

    # ---- epochs, (b) and (d) ----

    def at(self, epoch: int) -> Begun:
        """How an epoch begins, from the one that this sampler knows on."""
        begun = self._known if self._known.epoch <= epoch else self.begun
        if epoch < begun.epoch:
            raise ValueError(f"epoch {epoch} lies before epoch {begun.epoch}, which a checkpoint has begun.")
        while begun.epoch < epoch:
            _, used, left = self._dealt(begun)
            begun = Begun(begun.sources, begun.epoch + 1, used, left, [[0, self.rows_per_batch]])
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
        begun = Begun(**stored)
        if begun.sources != self.begun.sources:  # allow_changed_data
            return
        if epoch == begun.epoch and begun.cuts[-1][1] != self.rows_per_batch:
            kept = [cut for cut in begun.cuts if cut[0] < rows]
            begun = replace(begun, cuts=[*kept, [rows, self.rows_per_batch]])
        self.begun = self._known = begun

    def facts(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        return asdict(self.at(self.epoch))

    # ---- the rows of a source, (a) and (c) ----

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


# ---- (5) ----


class GlobalBatches(EpochOrder):
    """Does (5). `batches`: of at most `rows_per_batch` rows each, as many as their length says. `generator`: of their
    random numbers, begins an epoch at seed + epoch."""

    def __init__(self, batches: Any, rows_per_batch: int, generator: torch.Generator, seed: int):
        self.batches, self.rows_per_batch, self.numbers, self.seed = batches, rows_per_batch, generator, seed

    def __len__(self) -> int:
        return len(self.batches) * self.rows_per_batch

    def order(self) -> np.ndarray:
        """(batches x rows_per_batch,) of the epoch."""
        self.numbers.manual_seed(self.seed + self.epoch)
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(self.epoch)
        expected, made, name = len(self.batches), 0, type(self.batches).__name__
        order = np.full((expected, self.rows_per_batch), NO_ROW, dtype=np.int64)
        for made, rows in enumerate(islice(self.batches, expected), 1):  # noqa: B007
            if not 0 < len(rows) <= self.rows_per_batch:
                raise UsageError(
                    f"{name} gives a batch of {len(rows)} rows, and was asked for batches of {self.rows_per_batch}, "
                    "which are those of all processes together. Let it take its batch_size for the size of a batch."
                )
            order[made - 1, : len(rows)] = rows
        if made < expected:
            raise UsageError(
                f"{name} has a length of {expected} batches and gives {made} in epoch {self.epoch}, so the run would "
                "end before its schedule. Let __len__ be the number of batches of every epoch."
            )
        return order.reshape(-1)


# ---- which of them a training set has ----


def sampler_of(args: Any, dataset: Any, collator: Any, rows_per_batch: int) -> Sampler[int] | None:
    """The order of a training set with a loss over embeddings; None: Trainer's. `rows_per_batch`: of all processes."""
    if (sampler := sampler_of_batches(args, dataset, collator, rows_per_batch)) is not None:
        return sampler
    of_kind = sampler_of_sources if isinstance(dataset, Mixture) else sampler_without_duplicates
    return of_kind(args, dataset, collator, rows_per_batch)


def sampler_of_batches(args: Any, dataset: Any, collator: Any, rows_per_batch: int) -> Sampler[int] | None:
    """The order that `batch_sampler` and `multi_dataset_batch_sampler` ask for; None: they leave it to others.

    Raises:
        UsageError: another order is asked for as well, the dataset is a stream, or the labels do not serve.
    """
    of_one, of_several = getattr(args, "batch_sampler", None), getattr(args, "multi_dataset_batch_sampler", None)
    is_mixture = isinstance(dataset, Mixture) and of_several is not None
    if of_one in (None, PLAIN) and not is_mixture:
        return None
    shown = f"batch_sampler={of_one!r}" if of_one is not None else f"multi_dataset_batch_sampler={of_several!r}"
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"{shown} with a stream, whose rows come as they are read. Remove it, or give a Dataset.")
    if args.train_sampling_strategy != "random":
        raise UsageError(
            f"{shown} is an order of its own, and train_sampling_strategy={str(args.train_sampling_strategy)!r} "
            "another. Keep one."
        )
    if of_one in NO_DUPLICATES and not is_mixture:
        return None  # sampler_without_duplicates
    seed, generator = seed_of_order(args), torch.Generator()
    options = {
        "batch_size": rows_per_batch,
        "drop_last": args.dataloader_drop_last,
        "valid_label_columns": list(LABELS),
    }
    options |= {"generator": generator, "seed": seed}
    if not is_mixture:
        return GlobalBatches(_batches(of_one, dataset, options), rows_per_batch, generator, seed)
    of_sources = []
    for name, source in dataset.sources.items():
        apart = sampler_without_duplicates(args, source, collator.of_source(name), rows_per_batch)
        if apart is None:
            of_sources.append(_batches(of_one or PLAIN, source, options))
        else:
            apart.leaves_out = True
            of_sources.append(EpochBatches(apart, rows_per_batch, seed=seed, drop_last=args.dataloader_drop_last))
    make = of_several if callable(of_several) else _their_sampler(str(of_several))
    batches = make(dataset, batch_samplers=of_sources, generator=generator, seed=seed)
    return GlobalBatches(batches, rows_per_batch, generator, seed)


def _batches(kind: Any, dataset: Any, options: dict[str, Any]) -> Any:
    if kind == PLAIN:
        from sentence_transformers.base.sampler import DefaultBatchSampler

        return DefaultBatchSampler(RandomSampler(dataset, generator=options["generator"]), **options)
    make = kind if callable(kind) else _their_sampler(kind)
    try:
        made = make(dataset, **options)
    except ValueError as error:
        raise UsageError(f"batch_sampler={kind!r}: {error} A batch is that of all processes together.") from error
    if not (hasattr(made, "__len__") and hasattr(made, "__iter__")):
        raise UsageError(
            f"batch_sampler={kind!r} gives a {type(made).__name__}, whose batches can not be counted: an epoch has no "
            "length then, and a resumed run no place. Give a DefaultBatchSampler with __iter__ and __len__."
        )
    return made


def _their_sampler(name: str) -> Callable[..., Any]:
    from sentence_transformers.base import sampler

    return {
        GROUPED: sampler.GroupByLabelBatchSampler,
        PROPORTIONAL: sampler.ProportionalBatchSampler,
        ROUND_ROBIN: sampler.RoundRobinBatchSampler,
    }[name]


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
