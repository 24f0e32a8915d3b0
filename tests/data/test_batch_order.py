"""Orders that a batch sampler makes: the global batches are its batches, on any number of processes."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from sentence_transformers.base import sampler as theirs
from torch.utils.data import ConcatDataset, RandomSampler

from hf_dist_ext.data.mixture import Mixture, shares
from hf_dist_ext.data.order import EpochBatches, GlobalBatches, RowsUsed, sampler_of
from hf_dist_ext.data.sampling import NO_ROW, NoDuplicatesSampler
from hf_dist_ext.errors import UsageError

SIZES, WINDOW = {"small": 5, "large": 29, "middle": 12}, 12


def arguments(**options) -> SimpleNamespace:
    return SimpleNamespace(**{
        "batch_sampler": None, "multi_dataset_batch_sampler": None, "no_duplicates_in_batch": None, "seed": 3,
        "data_seed": None, "train_sampling_strategy": "random", "dataloader_drop_last": False, **options,
    })  # fmt: skip


def dataset(size: int, kinds: int | None = None) -> Dataset:
    """Texts of `kinds` kinds; None: all different. Labels of 4."""
    given = [{"anchor": f"a{i % (kinds or size)}", "positive": f"p{i}", "label": i % 4} for i in range(size)]
    return Dataset.from_list(given)


COLLATOR = SimpleNamespace(columns=["anchor", "positive"], of_source=lambda name: COLLATOR)


def mixture(kinds: int | None = None) -> Mixture:
    return Mixture({name: dataset(size, kinds) for name, size in SIZES.items()}, shares([None] * 3, [*SIZES.values()]))


def global_batches(
    sampler, epoch: int, processes: int, window: int = WINDOW, begun: RowsUsed | None = None
) -> list[list[int]]:
    """The rows of every global batch, those of all processes one behind the other, without stand-ins."""
    of_ranks = []
    for index in range(processes):
        own = EpochBatches(
            sampler, window // processes, seed=3, size=processes, index=index, last="split", begun=begun
        )
        own.set_epoch(epoch)
        first, batches = own.begin(), []
        for number, rows in enumerate(own):
            is_stand_in = own.is_stand_in(first + number * window)
            assert len(rows) == 1 if is_stand_in else rows
            batches.append([] if is_stand_in else rows)
        if begun is None:
            assert len(batches) == len(own)
        of_ranks.append(batches)
    assert len({len(batches) for batches in of_ranks}) == 1, "as many steps on every process"
    return [[row for rows in of_batch for row in rows] for of_batch in zip(*of_ranks, strict=True)]


def by_theirs(kind: str, drop_last: bool, epoch: int) -> list[list[int]]:
    """What their trainer's samplers give for batches of WINDOW rows."""
    generator = torch.Generator().manual_seed(3 + epoch)
    sets = [dataset(size) for size in SIZES.values()]
    options = {"batch_size": WINDOW, "drop_last": drop_last, "generator": generator, "seed": 3}
    parts = [theirs.DefaultBatchSampler(RandomSampler(one, generator=generator), **options) for one in sets]
    make = {"proportional": theirs.ProportionalBatchSampler, "round_robin": theirs.RoundRobinBatchSampler}[kind]
    batches = make(ConcatDataset(sets), batch_samplers=parts, generator=generator, seed=3)
    batches.set_epoch(epoch)
    return list(batches)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["proportional", "round_robin"])
def test_global_batches_of_several_datasets_are_those_of_their_samplers(kind, drop_last, processes):
    args = arguments(multi_dataset_batch_sampler=kind, batch_sampler="batch_sampler", dataloader_drop_last=drop_last)
    sampler = sampler_of(args, mixture(), COLLATOR, WINDOW)
    for epoch in (0, 1, 0):
        assert global_batches(sampler, epoch, processes) == by_theirs(kind, drop_last, epoch)


@pytest.mark.parametrize("kind", ["proportional", None])
@pytest.mark.parametrize("processes", [1, 3])
def test_no_global_batch_holds_a_text_twice_where_that_is_asked_for(kind, processes, caplog):
    """Each text stands in several rows, more than batches could hold apart: those rows are left out."""
    rows = mixture(kinds=7) if kind else dataset(40, kinds=7)
    args = arguments(multi_dataset_batch_sampler=kind, batch_sampler="no_duplicates")
    sampler = sampler_of(args, rows, COLLATOR, WINDOW)
    seen = Counter()
    for epoch in range(20):
        for batch in global_batches(sampler, epoch, processes):
            texts = [rows[row]["anchor"] for row in batch]
            assert len(set(texts)) == len(texts) > 0
            seen.update(batch)
    assert max(seen.values()) <= 20 and len(seen) == len(rows), "another epoch leaves out others"
    assert "rows are left out of this epoch" in caplog.text


def test_texts_of_other_columns_are_compared_too():
    given = [{"anchor": f"a{i}", "positive": f"p{i}", "negative": f"a{(i + 1) % 8}"} for i in range(8)]
    collator = SimpleNamespace(columns=["anchor", "positive", "negative"])
    sampler = sampler_of(arguments(batch_sampler="no_duplicates_hashed"), Dataset.from_list(given), collator, 4)
    for batch in global_batches(sampler, 0, 1, window=4):
        texts = [text for row in batch for text in given[row].values()]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_by_labels_holds_two_rows_of_each(processes):
    rows = dataset(50)
    sampler = sampler_of(arguments(batch_sampler="group_by_label"), rows, COLLATOR, WINDOW)
    for epoch in range(2):
        batches = global_batches(sampler, epoch, processes)
        assert len(batches) == len(sampler) // WINDOW
        for batch in batches:
            counts = Counter(rows[row]["label"] for row in batch)
            assert len(counts) > 1 and min(counts.values()) >= 2
    assert batches != global_batches(sampler, 0, processes)


class Sorted(theirs.DefaultBatchSampler):
    """A user's: rows by their number, rotated by the epoch, in batches of two thirds of what was asked for."""

    def __init__(self, dataset, batch_size, drop_last, **more):
        super().__init__(dataset, batch_size, drop_last, **more)
        self.rows, self.size = len(dataset), batch_size * 2 // 3

    def __iter__(self):
        rows = [(row + self.epoch) % self.rows for row in range(self.rows)]
        return (rows[first : first + self.size] for first in range(0, self.rows, self.size))

    def __len__(self):
        return -(-self.rows // self.size)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_sampler_of_the_user_makes_the_global_batches_and_is_resumed(processes):
    sampler = sampler_of(arguments(batch_sampler=Sorted), dataset(30), COLLATOR, WINDOW)
    expected = [[(first + i + 1) % 30 for i in range(min(8, 30 - first))] for first in range(0, 30, 8)]
    assert global_batches(sampler, 1, processes) == expected
    begun = RowsUsed(epoch=1, rows=2 * WINDOW, window=WINDOW)
    assert global_batches(sampler, 1, processes, begun=begun) == expected[2:]


class Drawn(Sorted):
    def __iter__(self):
        return iter(torch.randperm(self.rows, generator=self.generator).split(self.size))


def test_a_sampler_that_draws_from_its_generator_draws_an_epoch_again():
    sampler = sampler_of(arguments(batch_sampler=Drawn), dataset(30), COLLATOR, WINDOW)
    first, second, again = (global_batches(sampler, epoch, 1) for epoch in (0, 1, 0))
    assert first == again != second


class TooLarge(Sorted):
    def __init__(self, dataset, batch_size, drop_last, **more):
        super().__init__(dataset, 3 * batch_size, drop_last, **more)


class TooFew(Sorted):
    def __len__(self):
        return 9


@pytest.mark.parametrize("options, words", [
    ({"batch_sampler": TooLarge}, "TooLarge gives a batch of 24 rows, and was asked for batches of 12"),
    ({"batch_sampler": TooFew}, "TooFew has a length of 9 batches and gives 4"),
    ({"batch_sampler": lambda rows, **more: iter([[0]])}, "batches can not be counted"),
    ({"batch_sampler": "group_by_label", "data": dataset(30).remove_columns("label")}, "None of the valid_label"),
    ({"batch_sampler": "group_by_label", "data": dataset(30).to_iterable_dataset()}, "with a stream"),
    ({"batch_sampler": "no_duplicates", "train_sampling_strategy": "sequential"}, "is an order of its own"),
])  # fmt: skip
def test_what_can_not_be_an_order_is_refused(options, words):
    rows = options.pop("data", dataset(30))
    with pytest.raises(UsageError, match=words):
        sampler_of(arguments(**options), rows, COLLATOR, WINDOW).order()


def test_without_their_fields_the_order_is_ours():
    assert isinstance(sampler_of(arguments(), dataset(30), COLLATOR, WINDOW), NoDuplicatesSampler)
    assert sampler_of(arguments(batch_sampler="batch_sampler"), dataset(30), COLLATOR, WINDOW) is None
    order = GlobalBatches([[4, 2], [1]], 3, torch.Generator(), 0).order()
    assert order.tolist() == [4, 2, NO_ROW, 1, NO_ROW, NO_ROW]
