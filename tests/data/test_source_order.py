"""Which source and which rows each batch of several datasets has."""

import json
import math
from collections import Counter
from dataclasses import asdict
from itertools import islice, pairwise

import datasets
import numpy as np
import pytest
import torch

from hf_dist_ext.data import stream_order
from hf_dist_ext.data.bad_rows import BatchMaker
from hf_dist_ext.data.mixture import SOURCE, MixedStream, Mixture, drawn, shares
from hf_dist_ext.data.order import OneSourceSampler
from hf_dist_ext.data.row_ids import numbered
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.data.stream_order import MixedDealer, Ranks, StreamState
from hf_dist_ext.errors import UsageError
from tests.tiny_models import tiny_tokenizer

SIZES = {"large": 53, "small": 17, "middle": 24}
SHARES = [0.5, 0.3, 0.2]
WINDOW = 8


def mixture(sizes: dict[str, int] = SIZES, of_each=SHARES) -> Mixture:
    tables = {name: [{"text": f"{name} {i}"} for i in range(size)] for name, size in sizes.items()}
    return Mixture({name: datasets.Dataset.from_list(rows) for name, rows in tables.items()}, of_each)


def sampler(ids=(None, None, None), window: int = WINDOW, seed: int = 3, drop_last=False) -> OneSourceSampler:
    return OneSourceSampler(mixture(), window, seed, ids, drop_last)


def epochs(of: OneSourceSampler, count: int, first: int = 0) -> list[np.ndarray]:
    found = []
    for epoch in range(first, first + count):
        of.set_epoch(epoch)
        found.append(of.order())
    return found


def batches(order: np.ndarray, window: int = WINDOW) -> list[list[int]]:
    return [order[first : first + window].tolist() for first in range(0, len(order), window)]


def source(row: int) -> str:
    return next(name for name, last in zip(SIZES, np.cumsum(list(SIZES.values())), strict=True) if row < last)


# ---- which source ----


def test_draws_match_the_weights_within_three_sigma_at_every_place():
    """And a source's batches of one drawing are its share of them, rounded up or down."""
    runs = 4000
    found = np.stack([drawn(SHARES, 40, (seed, 0)) for seed in range(runs)])  # (runs, batches)
    for number, share in enumerate(SHARES):
        at_each_place, sigma = (found == number).mean(axis=0), math.sqrt(share * (1 - share) / runs)
        assert (abs(at_each_place - share) < 3 * sigma).mean() > 0.95
        assert abs((found == number).mean() - share) < 3 * sigma / math.sqrt(40)
        counts = (found == number).sum(axis=1)
        assert set(counts) <= {math.floor(40 * share + 1e-9), math.ceil(40 * share - 1e-9)}
    neighbours = Counter(map(tuple, found[:, :2].tolist()))
    assert all(abs(neighbours[a, b] / runs - SHARES[a] * SHARES[b]) < 0.03 for a in range(3) for b in range(3))


def test_an_epoch_draws_by_the_weights_and_each_epoch_anew():
    found = [[source(batch[0]) for batch in batches(order)] for order in epochs(sampler(), 60)]
    assert found[0] != found[1]
    counts = Counter(name for epoch in found for name in epoch)
    total = sum(counts.values())
    for name, share in zip(SIZES, SHARES, strict=True):
        assert abs(counts[name] - total * share) < 3 * math.sqrt(total * share * (1 - share))


def test_shares_follow_from_weights_or_from_sizes_to_a_temperature():
    assert shares([1, 3], [None, None]) == [0.25, 0.75]
    assert shares([None, None], [90, 10]) == pytest.approx([0.9, 0.1])
    assert shares([None, None], [90, 10], 2.0) == pytest.approx([0.75, 0.25])
    assert shares([None, None], [10**6, 1], 1e9) == pytest.approx([0.5, 0.5], abs=1e-6)
    assert shares([None, None], [10**9, 10**3], 0.01) == pytest.approx([1.0, 0.0])


# ---- which rows ----


@pytest.mark.parametrize("has_ids", [False, True])
def test_a_batch_is_of_one_source_and_a_sources_rows_are_used_evenly(has_ids):
    """Rows are used once more than others at most, also over epochs and where a source is used up in one."""
    ids = [np.zeros((size, 2), np.int32) for size in SIZES.values()] if has_ids else (None,) * 3
    used = Counter()
    for order in epochs(sampler(ids), 5):
        assert len(order) == sum(SIZES.values())
        for batch in batches(order):
            assert len({source(row) for row in batch}) == 1
            assert not has_ids or len(set(batch)) == len(batch), "a row that comes twice in an epoch"
        used.update(order.tolist())
        for name in SIZES:
            counts = [used[row] for row in range(sum(SIZES.values())) if source(row) == name]
            assert max(counts) - min(counts) <= 1
    assert min(used.values()) >= 2 and max(used.values()) > 6


@pytest.mark.parametrize("has_ids", [False, True])
def test_rows_of_a_batch_that_is_dropped_are_not_used(has_ids):
    """Also in a run that goes on with another batch in the second epoch, and again in the fourth."""
    ids = [numbered(np.arange(size, dtype=np.int32)[:, None] // 2) for size in SIZES.values()]
    of, used = sampler(ids if has_ids else (None,) * 3, drop_last=True), Counter()
    windows = {0: [(0, 8)], 1: [(0, 8), (32, 12)], 2: [(0, 12)], 3: [(0, 12), (24, 8)], 4: [(0, 8)]}
    for epoch, cuts in windows.items():
        for first, window in cuts:
            if first:
                (order,), facts = epochs(of, 1, epoch), of.facts()
                used.update(order[:first].tolist())
                of = sampler(of.ids, window, drop_last=True)
                of.go_on(json.loads(json.dumps(facts)), epoch, first)
        (order,) = epochs(of, 1, epoch)
        assert len(order) == sum(SIZES.values()) and (len(order) - first) % window
        used.update(order[first : len(order) - (len(order) - first) % window].tolist())
        for name in SIZES:
            counts = [used[row] for row in range(sum(SIZES.values())) if source(row) == name]
            assert max(counts) - min(counts) <= 1, (epoch, name)


def test_no_batch_holds_an_id_twice():
    """A third of the rows share their query with another row of their source."""
    draw, ids = np.random.default_rng(0), []
    for size in SIZES.values():
        query = np.where(np.arange(size) < size // 3, np.arange(size) // 2, 100 + np.arange(size))
        ids.append(numbered(np.column_stack([draw.permutation(query), 1000 + np.arange(size)])))
    assert all((one[:, 0] > 0).sum() > 3 for one in ids)
    of_row = np.concatenate([one[:, 0] + 1000 * number for number, one in enumerate(ids)])
    found = [batch for order in epochs(sampler(ids), 3) for batch in batches(order)]
    shared = lambda batch: [one for one in of_row[batch] if one % 1000]  # noqa: E731
    repeated = [batch for batch in found if len(set(shared(batch))) < len(shared(batch))]
    in_any_order = [batch for order in epochs(sampler(), 3) for batch in batches(order)]
    would = [batch for batch in in_any_order if len(set(shared(batch))) < len(shared(batch))]
    # the last rows of "small", which an epoch uses more than once, may have none to stand with
    assert not [batch for batch in repeated if source(batch[0]) != "small"] and len(repeated) < 3 < len(would)


def test_every_process_and_run_draws_the_same_order():
    one, again = epochs(sampler(), 3), epochs(sampler(), 3)
    assert all(map(np.array_equal, one, again))
    assert not np.array_equal(one[0], epochs(sampler(seed=4), 1)[0])


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("windows", [(8, 16), (8, 4), (16, 8, 4)])
def test_a_run_goes_on_with_another_batch_where_every_source_stopped(windows, has_ids):
    """Changed in the middle of the second epoch, and once more if there is a third size."""
    ids = [np.arange(2 * size, dtype=np.int32).reshape(size, 2) // 3 for size in SIZES.values()]
    ids = [numbered(one) for one in ids] if has_ids else (None,) * 3
    of, rows = sampler(ids, windows[0]), 0
    order = epochs(of, 2)
    for window in windows[1:]:
        rows += 32
        stored, of = json.loads(json.dumps(of.facts())), sampler(ids, window)
        of.go_on(stored, 1, rows)
        epoch = epochs(of, 1, first=1)[0]
        assert epoch[:rows].tolist() == order[1][:rows].tolist(), "what was used stays"
        assert epoch[rows:].tolist() != order[1][rows:].tolist()
        assert all(len({source(row) for row in batch}) == 1 for batch in batches(epoch[rows:], window))
        order[1] = epoch
    again = sampler(ids, windows[-1])
    again.go_on(json.loads(json.dumps(of.facts())), 1, rows + 16)
    assert epochs(again, 1, first=1)[0].tolist() == order[1].tolist(), "resumed without a change"
    later = epochs(of, 3, first=2)
    assert [one.tolist() for one in later] == [one.tolist() for one in epochs(again, 3, first=2)]
    if has_ids:
        left = of.at(2).left
        assert sum(map(len, left)) < 3 * max(windows) + 32
    used = Counter()
    for number, one in enumerate([*order, *later]):
        used.update(one.tolist())
        for name in SIZES if number > 1 else ():
            counts = [used[row] for row in range(94) if source(row) == name]
            assert max(counts) - min(counts) <= 1


def test_an_unchanged_run_goes_on_from_what_a_checkpoint_holds():
    of = sampler()
    whole = epochs(of, 4)
    stored = asdict(of.at(2))
    again = sampler()
    again.go_on(stored, 2, 40)
    assert all(map(np.array_equal, whole[2:], epochs(again, 2, first=2)))
    with pytest.raises(ValueError, match="lies before"):
        again.at(1)


def test_streams_are_dealt_one_source_a_batch_and_go_on_behind_any(tmp_path):
    """Over a block of draws too; of every source all rows once before any row twice."""
    streams = {name: one.to_iterable_dataset(num_shards=2) for name, one in mixture().sources.items()}
    count = stream_order.BLOCK + 3

    def dealt(start: StreamState, batches: int) -> list[tuple[StreamState, list[tuple[str, str]]]]:
        dealer = MixedDealer(MixedStream(streams, SHARES), 2, Ranks(0, 1, 1), start, seed=3)
        rows = islice(dealer, batches)
        return [(dealer.states.popleft(), [(one.row[SOURCE], one.row["text"]) for one in batch]) for batch in rows]

    whole = dealt(StreamState(), count)
    names = [name for _, rows in whole for name in {name for name, _ in rows}]
    assert len(names) == count and whole[-1][0].rows == 2 * count
    assert all(abs(names.count(name) - count * share) < 3 for name, share in zip(SIZES, SHARES, strict=True))
    for name, size in SIZES.items():
        texts = [text for _, rows in whole for of, text in rows if of == name]
        assert {text.split()[0] for text in texts} == {name} and len(set(texts[:size])) == size
    for used in (1, 13, stream_order.BLOCK - 1, stream_order.BLOCK):
        stream_order.save(whole[used - 1][0], tmp_path)
        found = dealt(stream_order.load(tmp_path), 3)
        assert [rows for _, rows in found] == [rows for _, rows in whole[used : used + 3]]
        assert [state for state, _ in found] == [state for state, _ in whole[used : used + 3]]


def test_a_source_smaller_than_a_batch_is_refused():
    with pytest.raises(UsageError, match='"small" has 17 rows, fewer than one global batch of 18'):
        sampler(window=18)


# ---- rows and batches ----


def test_rows_know_their_source():
    rows = mixture()
    ends = [0, *rows.cumulative_sizes]
    for first, last in pairwise(ends):
        name = rows[first][SOURCE]
        assert rows.__getitems__([first, last - 1]) == [rows[first], rows[last - 1]]
        assert rows[first]["text"] == f"{name} 0" and rows[last - 1]["text"] == f"{name} {last - first - 1}"


def collator(name: str) -> ContrastiveCollator:
    return ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], {"query": f"{name} "})


def test_a_batch_of_several_sources_is_refused():
    of_all = collator("parse").with_sources({"a": collator("parse"), "b": collator("read")})
    row = {"query": "a date", "positive": "text"}
    batch = of_all([row | {SOURCE: "b"}] * 2)
    assert batch["ids"][SOURCE] == "b"
    assert batch["query"]["input_ids"].equal(collator("read")([row] * 2)["query"]["input_ids"])
    with pytest.raises(UsageError, match="rows of the sources a and b"):
        of_all([row | {SOURCE: "a"}, row | {SOURCE: "b"}])


@pytest.mark.parametrize("can_replace", [True, False])
def test_a_bad_row_is_replaced_by_one_of_its_source_or_named_in_it(can_replace):
    tables = {name: [{"query": f"{name} {i}", "positive": "text"} for i in range(4)] for name in "ab"}
    tables["a"][3] |= {"positive": None}
    rows = Mixture({name: datasets.Dataset.from_list(table) for name, table in tables.items()}, [0.5, 0.5])
    of_all, seen = collator("parse"), []

    def collate(batch):
        seen[:] = batch
        return of_all(batch)

    maker = BatchMaker(collate, rows, "the training set", can_replace, torch.zeros(1))
    if can_replace:
        maker([2, 3])
        assert [row["query"] for row in seen] == ["a 2", "a 2"]
    else:
        with pytest.raises(UsageError, match='source "a" of datasets, row 3'):
            maker([2, 3])
