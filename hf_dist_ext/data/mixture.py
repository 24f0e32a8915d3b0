"""Several training sets of one run, its sources: every batch is of one of them, so that its negatives are too.

    mixture = Mixture({"nli": nli, "code": code}, shares([None, None], [len(nli), len(code)], temperature=2.0))
    collator = of_all.with_sources({"nli": ContrastiveCollator(...), "code": ContrastiveCollator(...)})

A row carries the name of its source under `SOURCE`, so that the collator of its source makes the batch and the log
tells the sources apart. order.py draws the source of each batch, and stream_order.py does it for streams.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from hf_dist_ext.errors import UsageError

SOURCE = "dataset_name"  # in a row, and in a batch's ids; sentence-transformers calls it so, too


def shares(
    weights: Sequence[float | None], sizes: Sequence[int | None], temperature: float | None = None
) -> list[float]:
    """Of each source, the share of batches that are drawn from it: by the weights, or size^(1/temperature).

    `temperature`: None is 1, sources by size; with a larger one small sources are drawn more often
    (https://huggingface.co/papers/1907.05019, section 3.3). A stream has no size: None.
    """
    if None in weights:
        assert None not in sizes, sizes
        # in logarithms, since 1/temperature of a low temperature would overflow
        powers = [math.log(max(size, 1)) / (temperature or 1.0) for size in sizes]
        weights = [math.exp(power - max(powers)) for power in powers]
    return [weight / sum(weights) for weight in weights]


def drawn(shares: Sequence[float], batches: int, seed: Sequence[int]) -> np.ndarray:
    """(batches,) the number of each batch's source.

    Each source has its share of the batches, rounded up or down; in which order they come is drawn.
    """
    draw = np.random.default_rng(seed)
    places = (draw.random() + np.arange(batches)) / batches  # evenly spread over 0 to 1, from a drawn beginning on
    numbers = np.searchsorted(np.cumsum(shares), places, side="right")
    return draw.permutation(np.minimum(numbers, len(shares) - 1))


class RowsAround(Dataset):
    """The rows of a dataset in another form. Whatever else is asked of it is the dataset's."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class RowNumbers(RowsAround):
    """A map-style dataset to a loader, which hands the numbers of a batch's rows to a `BatchMaker` (bad_rows.py)."""

    def __getitem__(self, index: Any) -> Any:
        return index


class Tagged(RowsAround):
    """A dataset whose rows carry the name of their source."""

    def __init__(self, name: str, dataset: Any):
        super().__init__(dataset)
        self.name = name

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[row] | {SOURCE: self.name}

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [row | {SOURCE: self.name} for row in self.dataset.__getitems__(rows)]


def tagged_stream(name: str, stream: Any) -> Any:
    """A `datasets` stream whose rows carry the name of their source."""
    return stream.map(_tag, fn_kwargs={"name": name})


def _tag(row: dict[str, Any], name: str) -> dict[str, Any]:
    return row | {SOURCE: name}


class Mixture(ConcatDataset):
    """The rows of all sources, one source after another. `shares`: of the batches, by source."""

    def __init__(self, sources: Mapping[str, Any], shares: Sequence[float]):
        super().__init__([Tagged(name, dataset) for name, dataset in sources.items()])
        self.sources, self.shares = dict(sources), list(shares)

    def locate(self, row: int) -> tuple[Tagged, int]:
        """The source of a row, and its number there."""
        number = bisect.bisect_right(self.cumulative_sizes, row)
        source = self.datasets[number]
        return source, row - self.cumulative_sizes[number] + len(source)

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Of one source, as a batch is."""
        source, first = self.locate(rows[0])
        return source.__getitems__([first + row - rows[0] for row in rows])


class MixedStream(IterableDataset):
    """Streams of `datasets`, each read in an order of its own; stream_order.py deals their batches."""

    def __init__(self, sources: Mapping[str, Any], shares: Sequence[float]):
        self.sources, self.shares = dict(sources), list(shares)

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "the rows of a MixedStream have no one order: DistTrainer draws the source of each batch. Leave "
            "dispatch_batches and split_batches out of accelerator_config."
        )


def one_source(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of the source that all rows are of, None where they name none."""
    name, *others = sorted({row[SOURCE] for row in rows}) if SOURCE in rows[0] else [None]
    if others:
        raise UsageError(
            f"a batch holds rows of the sources {name} and {others[0]}. A batch of a Mixture is of one: let "
            "DistTrainer with a loss make the sampler."
        )
    return name
