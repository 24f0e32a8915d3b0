"""The orders in which ranks of a pipeline work, without a process group."""

import itertools

import pytest

from hf_dist_ext.strategies import schedules
from hf_dist_ext.strategies.schedules import SCHEDULES, Action

SHAPES = [
    (name, ranks, per_rank)
    for name, schedule in SCHEDULES.items()
    for ranks in (2, 3, 4)
    for per_rank in ([schedule.stages_per_rank] if schedule.stages_per_rank else [1, 2, 3])
]
BACKWARDS = (schedules.BACKWARD, schedules.WEIGHT_BACKWARD)
OPPOSITE = {schedules.RECEIVE_FORWARD: schedules.SEND_FORWARD, schedules.RECEIVE_BACKWARD: schedules.SEND_BACKWARD}


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_every_stage_runs_every_chunk_once_each_way(name, ranks, per_rank):
    places = schedules.rank_of_stage(name, ranks, per_rank)
    for needed in (1, 2, 5, 7, 12):
        chunks = schedules.num_chunks(name, ranks, needed)
        assert needed <= chunks < needed + ranks
        for rank, forward_only in itertools.product(range(ranks), (False, True)):
            found = schedules.actions(name, ranks, per_rank, chunks, rank, forward_only)
            own = [stage for stage, place in enumerate(places) if place == rank]
            everything = sorted(itertools.product(own, range(chunks)))
            assert sorted(action[1:] for action in found if action.kind == schedules.FORWARD) == everything
            backwards = sorted(action[1:] for action in found if action.kind in BACKWARDS)
            assert backwards == ([] if forward_only else everything)


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_messages_leave_in_the_order_in_which_they_are_expected(name, ranks, per_rank):
    """Without this, two ranks would wait for each other, or one would take another chunk's tensor."""
    places = schedules.rank_of_stage(name, ranks, per_rank)
    chunks = schedules.num_chunks(name, ranks, 7)
    of_ranks = [schedules.actions(name, ranks, per_rank, chunks, rank) for rank in range(ranks)]
    for one, other in itertools.permutations(range(ranks), 2):
        sent, expected = [], []
        for action in of_ranks[one]:
            to = action.stage + (1 if action.kind == schedules.SEND_FORWARD else -1)
            if action.kind in OPPOSITE.values() and places[to] == other:
                sent.append((action.kind, to, action.chunk))
        for action in of_ranks[other]:
            source = action.stage + (-1 if action.kind == schedules.RECEIVE_FORWARD else 1)
            if action.kind in OPPOSITE and places[source] == one:
                expected.append((OPPOSITE[action.kind], action.stage, action.chunk))
        assert sent == expected


@pytest.mark.parametrize(
    ("name", "per_rank", "expected"),
    [
        ("gpipe", 1, [12, 12, 12, 12]),  # all chunks
        ("1f1b", 1, [4, 3, 2, 1]),  # as many as stages follow, and itself
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),  # (V - 1) P + 2 (P - 1 - rank) + 1, of a stage each
        ("zero_bubble", 1, [4, 4, 4, 4]),
        ("zero_bubble_v", 2, [8, 8, 8, 8]),  # 2 P, of a stage each
    ],
)
def test_so_many_chunks_are_under_way(name, per_rank, expected):
    assert [schedules.live_chunks(name, 4, per_rank, 12, rank) for rank in range(4)] == expected


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 12), (8, 64)])
def test_so_much_of_the_time_is_waited(ranks, chunks):
    share = {name: schedules.idle_share(name, ranks, s.stages_per_rank or 2, chunks) for name, s in SCHEDULES.items()}
    formula = (ranks - 1) / (chunks + ranks - 1)
    assert share["gpipe"] == pytest.approx(formula) and share["1f1b"] == pytest.approx(formula)
    assert share["looped_bfs"] == pytest.approx((ranks - 1) / (2 * chunks + ranks - 1))
    assert 0 < share["zero_bubble"] < share["interleaved_1f1b"] < share["1f1b"]
    assert 0 < share["zero_bubble_v"] < share["1f1b"]


def test_a_v_ends_where_it_begins():
    assert schedules.rank_of_stage("zero_bubble_v", 3, 2) == [0, 1, 2, 2, 1, 0]
    assert schedules.rank_of_stage("interleaved_1f1b", 3, 2) == [0, 1, 2, 0, 1, 2]
    turning = schedules.actions("zero_bubble_v", 3, 2, 6, rank=2)
    assert Action(schedules.SEND_FORWARD, 2, 0) not in turning  # the next stage is its own
