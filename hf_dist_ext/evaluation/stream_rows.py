"""Which rows of a batch count in an evaluation of a stream.

A stream has no length, so accelerate knows neither that a batch is short, nor which of its rows are repeated ones that
fill it up where several processes need as many. What Trainer gathers of such a batch would count too much of it.

(1) the worker that reads a row numbers it
(2) the collator counts the rows of its batch that are no repetition
(3) what is gathered of a batch is cut to those of all processes, which come first
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset

from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import meanwhile

COUNT = "number_of_rows"  # in a batch


class _Numbered(IterableDataset):  # (1)
    def __init__(self, stream: Any):
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self.stream)


def _collate(collator: Callable, first: int, everyones: int, numbered: list[tuple[int, Any]]) -> dict:  # (2)
    """A batch of all processes has `everyones` rows, of which this one has those from `first` on. A repeated row has a
    lower number than a row in its place would have."""
    numbers, rows = zip(*numbered, strict=True)
    begins = numbers[0] % everyones == first
    count = sum(number == numbers[0] + i for i, number in enumerate(numbers)) if begins else 0
    return {**collator(list(rows)), COUNT: count}


def loader(run: Any, make: Callable, dataset: Any, *, is_training: bool = False, **options: Any) -> Any:
    """Of a `DistTrainer`, by Trainer's own `make`: batches of an evaluated stream say how many of their rows count.
    `dataloader_drop_last` is of training: figures are of all rows. Without a loss they are Trainer's."""
    if is_training or run.loss is None:
        return make(dataset=dataset, is_training=is_training, **options)
    if hasattr(dataset, "__len__"):
        with meanwhile(run.args, dataloader_drop_last=False):
            return make(dataset=dataset, **options)
    size, rows = run.args.eval_batch_size, run.strategy.rows
    collate = partial(_collate, run.data_collator, rows.index * size, rows.size * size)
    with meanwhile(run, data_collator=collate):
        return make(dataset=_Numbered(dataset), **options)


def gathered_of(run: Any, batch: dict[str, Any]) -> Callable:  # (3)
    """What gathers tensors over the rows of this batch; takes its number of rows out of it."""
    gather = partial(run.accelerator.gather_for_metrics, use_gather_object=run.args.eval_use_gather_object)
    if COUNT not in batch:
        return gather
    of_ranks = collectives.exchange([batch.pop(COUNT)])
    total = sum(count for (count,) in run.strategy.rows.one_of_each(of_ranks))

    def gathered(data: Any) -> Any:
        data = gather(data)
        return data[:total] if isinstance(data, list) else recursively_apply(lambda rows: rows[:total], data)

    return gathered
