"""The orders in which ranks of a pipeline work, without a process group."""

import itertools
import math

import pytest

from hf_dist_ext import policy
from hf_dist_ext.strategies.pipeline import schedules
from hf_dist_ext.strategies.pipeline.schedules import SCHEDULES

SHAPES = [
    (name, ranks, per_rank)
    for name in SCHEDULES
    for ranks in (2, 3, 4)
    for per_rank in ([1] if name in policy.ONE_STAGE_PER_RANK else [1, 2, 3])
]
BACKWARDS = (schedules.BACKWARD, schedules.WEIGHT_BACKWARD)
OPPOSITE = {schedules.RECEIVE_FORWARD: schedules.SEND_FORWARD, schedules.RECEIVE_BACKWARD: schedules.SEND_BACKWARD}


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_every_stage_runs_every_chunk_once_each_way(name, ranks, per_rank):
    for needed in (1, 2, 5, 7, 12):
        chunks = policy.dealt_chunks(name, ranks, needed)
        assert needed <= chunks < needed + ranks
        for rank, forward_only in itertools.product(range(ranks), (False, True)):
            found = schedules.actions(name, ranks, per_rank, chunks, rank, forward_only)
            everything = sorted(itertools.product(policy.stages_of_rank(rank, ranks, per_rank), range(chunks)))
            assert sorted(action[1:] for action in found if action.kind == schedules.FORWARD) == everything
            backwards = sorted(action[1:] for action in found if action.kind in BACKWARDS)
            assert backwards == ([] if forward_only else everything)


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_messages_leave_in_the_order_in_which_they_are_expected(name, ranks, per_rank):
    """Without this, two ranks would wait for each other, or one would take another chunk's tensor."""
    chunks = policy.dealt_chunks(name, ranks, 7)
    of_ranks = [schedules.actions(name, ranks, per_rank, chunks, rank) for rank in range(ranks)]
    for one, other in itertools.permutations(range(ranks), 2):
        sent, expected = [], []
        for action in of_ranks[one]:
            to = action.stage + (1 if action.kind == schedules.SEND_FORWARD else -1)
            if action.kind in OPPOSITE.values() and to % ranks == other:
                sent.append((action.kind, to, action.chunk))
        for action in of_ranks[other]:
            source = action.stage + (-1 if action.kind == schedules.RECEIVE_FORWARD else 1)
            if action.kind in OPPOSITE and source % ranks == one:
                expected.append((OPPOSITE[action.kind], action.stage, action.chunk))
        assert sent == expected


@pytest.mark.parametrize(
    ("name", "per_rank", "expected"),
    [
        ("gpipe", 1, [12, 12, 12, 12]),  # all chunks
        ("1f1b", 1, [4, 3, 2, 1]),  # as many as stages follow, and itself
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),  # (V - 1) P + 2 (P - 1 - rank) + 1, of a stage each
        ("zero_bubble", 1, [4, 4, 4, 4]),
    ],
)
def test_so_many_chunks_are_under_way(name, per_rank, expected):
    assert [policy.live_chunks(name, 4, per_rank, 12, rank) for rank in range(4)] == expected


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_what_a_rank_holds_at_most_is_foretold(name, ranks, per_rank):
    for needed, rank in itertools.product((*range(1, ranks + 2), 7, 13), range(ranks)):
        chunks = policy.dealt_chunks(name, ranks, needed)
        now = most = 0
        for kind, _, _ in schedules.actions(name, ranks, per_rank, chunks, rank):
            now += (kind == schedules.FORWARD) - (kind in BACKWARDS)
            most = max(most, now)
        assert policy.live_chunks(name, ranks, per_rank, chunks, rank) == most


def length(name, ranks, per_rank, chunks, forward_only):
    """When the last rank has done its last action, in forwards of a stage."""
    left = [list(schedules.actions(name, ranks, per_rank, chunks, r, forward_only))[::-1] for r in range(ranks)]
    left = [[action for action in of_rank if action.kind in schedules.UNITS] for of_rank in left]
    free, ended, last = [0] * ranks, {}, ranks * per_rank - 1
    while any(left):
        for rank, of_rank in enumerate(left):
            while of_rank:
                kind, stage, chunk = of_rank[-1]
                is_forward, start = kind == schedules.FORWARD, free[rank]
                if kind != schedules.WEIGHT_BACKWARD and stage != (0 if is_forward else last):
                    before = (is_forward, stage + (-1 if is_forward else 1), chunk)
                    if before not in ended:
                        break
                    start = max(start, ended[before])
                free[rank] = start + schedules.UNITS[kind]
                if kind != schedules.WEIGHT_BACKWARD:  # nobody waits for it
                    ended[is_forward, stage, chunk] = free[rank]
                of_rank.pop()
    return max(free)


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_what_ranks_wait_is_what_an_order_makes_them_wait(name, ranks, per_rank):
    for needed in (*range(1, 2 * ranks), 13):
        chunks = policy.dealt_chunks(name, ranks, needed)
        first, training = (length(name, ranks, per_rank, chunks, forward_only) for forward_only in (True, False))
        work = per_rank * chunks
        expected = 1 - 4 * work / (first + training)
        assert policy.idle_share(name, ranks, per_rank, chunks) == pytest.approx(expected)


def length_in_one_stream(name, ranks, per_rank, chunks, forward_only):
    """The same on NCCL: all messages of a rank go through one stream in order, begin when both ranks have come to
    them, and take no time. Work waits for what it reads, and for messages that left long ago."""
    work, stream = [0] * ranks, [0] * ranks  # when each is free
    posted, done, sent = {}, {}, [{False: [], True: []} for _ in range(ranks)]
    left = [list(schedules.actions(name, ranks, per_rank, chunks, r, forward_only))[::-1] for r in range(ranks)]
    queues = [[] for _ in range(ranks)]  # messages in each stream, in order
    while any(left):
        before = sum(map(len, (*left, *queues)))
        for rank, of_rank in enumerate(left):
            while of_rank:
                kind, stage, chunk = of_rank[-1]
                is_back = "BACKWARD" in kind or kind.endswith("_B")
                if kind in schedules.UNITS:
                    needed = [(is_back, stage, chunk)] if kind != schedules.WEIGHT_BACKWARD else []
                    source = stage + (1 if is_back else -1)
                    needed = needed if 0 <= source < ranks * per_rank else []
                    for messages in sent[rank].values():
                        needed += messages[: max(0, len(messages) - policy.MESSAGES_ON_THE_WAY)]
                    if any(message not in done for message in needed):
                        break
                    work[rank] = max(work[rank], *(done[one] for one in needed), 0) + schedules.UNITS[kind]
                else:
                    is_send = kind.startswith("SEND")
                    message = is_back, stage + ((-1 if is_back else 1) if is_send else 0), chunk
                    posted.setdefault(message, {})[rank] = work[rank]
                    queues[rank].append(message)
                    if is_send:
                        sent[rank][is_back].append(message)
                of_rank.pop()
        for message in [queue[0] for queue in queues if queue]:
            both = [rank for rank in range(ranks) if queues[rank] and queues[rank][0] == message]
            if len(both) == 2:
                done[message] = max(*posted[message].values(), *(stream[rank] for rank in both))
                for rank in both:
                    stream[rank] = done[message]
                    queues[rank].pop(0)
        if before == sum(map(len, (*left, *queues))):
            return math.inf  # they wait for each other
    return max(work)


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SHAPES)
def test_messages_in_one_stream_do_not_wait_for_each_other(name, ranks, per_rank):
    for needed, forward_only in itertools.product((1, 5, 16), (False, True)):
        chunks = policy.dealt_chunks(name, ranks, needed)
        least = length(name, ranks, per_rank, chunks, forward_only)
        assert length_in_one_stream(name, ranks, per_rank, chunks, forward_only) == least


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 12), (8, 64)])
def test_so_much_of_the_time_is_waited(ranks, chunks):
    share = {name: policy.idle_share(name, ranks, policy.stages_per_rank(name, None), chunks) for name in SCHEDULES}
    formula = (ranks - 1) / (chunks + ranks - 1)
    assert share["gpipe"] == pytest.approx(formula) and share["1f1b"] == pytest.approx(formula)
    assert 0 < share["zero_bubble"] < share["interleaved_1f1b"] < share["1f1b"]
