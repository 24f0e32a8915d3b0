"""The order of rows where a batch sampler makes the batches: one of sentence-transformers', or of the user.

(1) The sampler is made for global batches, of all processes together. Every process makes the same, by seed and epoch
(2) `GlobalBatches` writes an epoch's batches one behind the other. A short one is filled up with places that hold no
    row, so that a batch begins at every multiple of its size, and the order is cut there and nowhere else
(3) A process takes its own slice of every batch (epoch_order.py); the rows of a short one are split

So `multi_dataset_batch_sampler` and `batch_sampler` mean what they mean there: which dataset a batch is of, which rows
are in it, and when the epoch ends. Only batches without duplicates are found by our own way, which is that of a large
dataset (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from hf_dist_ext.data.fingerprint import seed_of_order
from hf_dist_ext.data.mixture import Mixture
from hf_dist_ext.data.sampling import NO_DUPLICATES, NO_ROW, NoDuplicatesSampler, sampler_without_duplicates
from hf_dist_ext.data.sentence_collator import LABELS
from hf_dist_ext.data.source_order import sampler_of_sources
from hf_dist_ext.errors import UsageError

PLAIN, GROUPED = "batch_sampler", "group_by_label"  # of `batch_sampler`
BATCH_SAMPLERS = (PLAIN, *NO_DUPLICATES, GROUPED)
PROPORTIONAL, ROUND_ROBIN = MULTI_DATASET_BATCH_SAMPLERS = ("proportional", "round_robin")


class GlobalBatches(Sampler[int]):
    """Does (2). `batches`: of at most `rows_per_batch` rows each, as many as their length says. `generator`: of their
    random numbers, begins an epoch at seed + epoch."""

    def __init__(self, batches: Any, rows_per_batch: int, generator: torch.Generator, seed: int):
        self.batches, self.rows_per_batch, self.numbers, self.seed = batches, rows_per_batch, generator, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batches) * self.rows_per_batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

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


class DistinctBatches(BatchSampler):
    """Batches in which no two rows share a number of `sampler`."""

    def __init__(self, sampler: NoDuplicatesSampler, drop_last: bool):
        super().__init__(sampler, sampler.window, drop_last)
        self.rows = sampler

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order, size = self.rows.order(), self.batch_size
        for first in range(0, len(self) * size, size):
            rows = order[first : first + size]
            yield rows[rows != NO_ROW].tolist()


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
            of_sources.append(DistinctBatches(apart, args.dataloader_drop_last))
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
