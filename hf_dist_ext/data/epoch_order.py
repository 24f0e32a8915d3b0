"""`EpochBatches` says which rows of an epoch a process trains on, in batches: it alone decides a training set's order.

(1) The order of an epoch is drawn from the sampler. The sampler is told the epoch, and what it draws from the global
    generators, or from a generator of its own, follows from seed and epoch. So every process draws the same order, and
    a later run draws it again; `digest` tells whether it did
(2) The order is cut into global batches, in a resumed run behind the rows that were used
(3) Of each global batch a process takes its own slice. The last batch may be short, and one with places that hold no
    row (batch_order.py): with a loss over embeddings its rows are split over the processes, and none is repeated.
    Trainer's own losses count every process alike, so for them a short batch is filled up with rows of the first one,
    as accelerate does

`EpochBatches` stands in the place of accelerate's `BatchSamplerShard`, as one sampler: accelerate's
`skip_first_batches` wraps what it finds once more, and then neither `DataLoaderShard.set_epoch` nor Trainer reaches a
sampler two wrappers deep.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_dist_ext.data.batch_order import GlobalBatches
from hf_dist_ext.data.sampling import NO_ROW, NoDuplicatesSampler
from hf_dist_ext.data.source_order import OneSourceSampler


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
        self._drawn: tuple[int, np.ndarray, str] | None = None  # an epoch, its order and the digest of that
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
                is_ours = isinstance(sampler, NoDuplicatesSampler | OneSourceSampler | GlobalBatches)
                order = sampler.order() if is_ours else np.fromiter(sampler, np.int64)
            self._drawn = self.epoch, order, hashlib.blake2b(order, digest_size=16).hexdigest()
        return self._drawn[1]

    def digest(self) -> str:
        """Of the present epoch's order."""
        self.order()
        return self._drawn[2]

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


def take_over(loader: Any, **options: Any) -> None:
    """Let a loader that accelerate has prepared take its batches from `EpochBatches(sampler, ..., **options)`.

    A batch sampler of the user's stays, and so does a sampler without a length: its order has no end to be drawn to.
    """
    loader = getattr(loader, "base_dataloader", loader)
    batches, size, index = getattr(loader, "batch_sampler", None), 1, 0
    if isinstance(batches, BatchSamplerShard):
        size, index, batches = batches.num_processes, batches.process_index, batches.batch_sampler
    if type(batches) is BatchSampler and hasattr(batches.sampler, "__len__"):
        if size == 1 and options["last"] == "filled":
            options["last"] = "uneven"  # one process has a shorter batch
        options |= {"size": size, "index": index, "drop_last": batches.drop_last}
        batches = EpochBatches(batches.sampler, batches.batch_size, **options)
    elif not isinstance(batches, BatchRebalanceSampler):  # one knows processes and epoch, and needs no wrapper
        return
    object.__setattr__(loader, "batch_sampler", batches)  # DataLoader guards the name of what it was made with


def batches_of(loader: Any) -> Any:
    """The `EpochBatches`, or another batch sampler, of a loader; a stream's has none: None."""
    return getattr(getattr(loader, "base_dataloader", loader), "batch_sampler", None)
