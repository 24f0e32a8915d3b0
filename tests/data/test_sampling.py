"""The order of rows: a permutation, the same everywhere, without duplicates in a global batch."""

import datasets
import numpy as np
import pytest

from hf_dist_ext.data.row_ids import numbered
from hf_dist_ext.data.sampling import NoDuplicatesSampler, refuse_stream, sampler_without_duplicates
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments


def num_conflicting_rows(ids, order, window):
    """Naive: rows that share an id with an earlier row of their window."""
    conflicts = 0
    for start in range(0, len(order), window):
        seen = set()
        for row in order[start : start + window]:
            row_ids = set(np.asarray(ids[row]).tolist())
            conflicts += bool(row_ids & seen)
            seen |= row_ids
    return conflicts


def random_ids(num_rows, num_ids, seed=0):
    return np.random.default_rng(seed).integers(0, num_ids, size=(num_rows, 2))


@pytest.mark.parametrize("num_rows, num_ids, window", [(1000, 700, 32), (1000, 5000, 64), (97, 300, 10), (5, 100, 64)])
def test_no_window_holds_an_id_twice_and_no_row_is_lost(num_rows, num_ids, window):
    ids = random_ids(num_rows, num_ids)
    sampler = NoDuplicatesSampler(numbered(ids), window, seed=3)
    order = list(sampler)
    plain = np.random.default_rng((3, 0)).permutation(num_rows)
    assert num_rows < 50 or num_conflicting_rows(ids, plain, window) > 0  # the plain order does conflict
    assert sorted(order) == list(range(num_rows)) and len(sampler) == num_rows
    assert num_conflicting_rows(ids, order[: -2 * window], window) == 0
    assert num_conflicting_rows(ids, order, window) <= sampler.num_deferred <= 2


def test_what_can_not_be_spread_is_counted_and_still_visited(caplog):
    ids = np.zeros((100, 1), dtype=np.int64)  # one text only: every window of 10 has 9 rows too many
    sampler = NoDuplicatesSampler(numbered(ids), window=10)
    assert sorted(sampler) == list(range(100)) and sampler.num_deferred == 90
    assert "90 of 100 rows share a global batch" in caplog.text, "a warning: without logs of a run it is seen too"
    mixed = np.concatenate([np.arange(1, 901), np.zeros(100, dtype=np.int64)])[:, None]
    sampler = NoDuplicatesSampler(numbered(mixed), window=100)
    order = list(sampler)
    assert sorted(order) == list(range(1000)) and 0 < sampler.num_deferred <= 100
    assert num_conflicting_rows(mixed, order[:900], 100) == 0  # leftovers go last


def test_epochs_differ_and_repeat():
    ids = random_ids(200, 300)
    sampler, other = NoDuplicatesSampler(numbered(ids), 20, seed=1), NoDuplicatesSampler(numbered(ids), 20, seed=1)
    first = list(sampler)
    assert first == list(other) == list(sampler)
    other.set_epoch(1)
    second = list(other)
    assert second != first and sorted(second) == sorted(first)
    sampler.set_epoch(1)
    assert list(sampler) == second
    assert list(NoDuplicatesSampler(numbered(ids), 20, seed=2)) != first


def test_the_work_is_linear_even_when_nearly_everything_repeats():
    # Nine in ten rows share one of 50 ids. Checking every waiting row for every window would take minutes.
    ids = np.random.default_rng(0).integers(0, 50, size=(60_000, 1))
    ids[::10] = np.arange(100, 6100)[:, None]
    sampler = NoDuplicatesSampler(numbered(ids), window=64)
    assert sorted(sampler) == list(range(60_000)) and sampler.num_deferred > 0


def reference_order(ids, window, draw):
    """Row by row: the order, and how many rows stand beside one they conflict with."""
    order, waiting, num_deferred = [], {}, 0
    permutation = iter(draw.permutation(len(ids)).tolist())
    while len(order) < len(ids):
        end, held = min(len(order) + window, len(ids)), set()

        def take(row, held=held):
            forbidden = [one for one in ids[row].tolist() if one in held]
            if forbidden:
                waiting.setdefault(forbidden[0], []).append(row)
            else:
                held.update(ids[row].tolist())
                order.append(row)

        def next_of(one):
            row = waiting[one].pop(0)
            if not waiting[one]:
                del waiting[one]
            return row

        for one in list(waiting):
            if len(order) < end and one not in held:
                take(next_of(one))
        while len(order) < end and (row := next(permutation, None)) is not None:
            take(row)
        while len(order) < end:
            for one in list(waiting)[: end - len(order)]:
                order.append(next_of(one))
                num_deferred += 1
    return order, num_deferred


def test_the_order_is_that_of_looking_at_each_row_in_turn():
    draw = np.random.default_rng(7)
    for seed in range(180):
        num_rows, num_columns = draw.integers(1, 500), draw.integers(1, 4)
        ids = draw.integers(0, draw.choice([2, 20, 300, 4000]), size=(num_rows, num_columns))
        ids = np.where(draw.random((num_rows, 1)) < draw.choice([0.2, 1.0]), ids, draw.integers(10**9, size=ids.shape))
        sampler = NoDuplicatesSampler(numbered(ids), int(draw.choice([1, 2, 16, 64, 700])), seed)
        expected = reference_order(ids, sampler.window, np.random.default_rng((seed, 0)))
        assert (sampler.order().tolist(), sampler.num_deferred) == expected


def test_a_stream_is_refused():
    with pytest.raises(UsageError, match="stream can not be reordered"):
        refuse_stream(iter([]))


def test_rows_that_a_transform_makes_are_left_to_trainers_order(tmp_path):
    collator, stored = ContrastiveCollator(None, ["query", "positive"]), datasets.Dataset.from_dict({"query": ["a"]})
    rows = stored.with_transform(lambda rows: {name: ["a"] for name in ("query", "positive")})
    args = DistTrainingArguments(output_dir=str(tmp_path), report_to=[])
    assert sampler_without_duplicates(args, rows, collator, window=1) is None
    args.no_duplicates_in_batch = True
    with pytest.raises(UsageError, match="the dataset has a transform"):
        sampler_without_duplicates(args, rows, collator, window=1)
