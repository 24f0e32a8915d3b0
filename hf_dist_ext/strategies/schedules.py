"""In which order the ranks of a pipeline work: torch's schedules as lists of actions.

A model is cut into stages; every chunk goes through the forwards of all stages (F) and back through their backwards
(B). A backward may be cut in two: the gradient of the stage's input (I), which the stage before waits for, and those
of its weights (W), which nobody waits for. A schedule says in which order each rank does this for its stages and all
chunks, and where a tensor is sent to the next rank or received.

`actions` asks torch for the order and adds the messages; nothing here needs a process group, so tests and plans can
count what a run will hold. Letters: P ranks of a pipeline, V stages per rank, M chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType

# What a rank may do next, as torch names it.
FORWARD, BACKWARD = "FORWARD", "FULL_BACKWARD"
INPUT_BACKWARD, WEIGHT_BACKWARD = "BACKWARD_INPUT", "BACKWARD_WEIGHT"
SEND_FORWARD, RECEIVE_FORWARD = "SEND_F", "RECV_F"
SEND_BACKWARD, RECEIVE_BACKWARD = "SEND_B", "RECV_B"


class Action(NamedTuple):
    """What a rank does next: one of the kinds above."""

    kind: str
    stage: int
    chunk: int


class Schedule(NamedTuple):
    """
    Attributes:
        stages_per_rank: how many there must be; None: any number from 2 on.
        order: (P, V, M) -> rank -> what it computes, without messages.
        in_rounds: chunks come in rounds of equal length.
        is_v: the last stage is on the first rank, as stages go down the ranks and up again.
    """

    stages_per_rank: int | None
    order: Callable[[int, int, int], dict[int, list[_Action | None]]]
    in_rounds: bool = False
    is_v: bool = False


def _all_forwards_first(ranks: int, _: int, chunks: int) -> dict[int, list[_Action | None]]:
    kinds = (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
    return {r: [_Action(r, kind, m) for kind in kinds for m in range(chunks)] for r in range(ranks)}


def _one_forward_one_backward(ranks: int, _: int, chunks: int) -> dict[int, list[_Action | None]]:
    # torch 2.13 forgets the first chunk on the last rank (Schedule1F1B._get_pipeline_order), which it only draws.
    return {rank: list(_alternating(rank, min(ranks - 1 - rank, chunks), chunks)) for rank in range(ranks)}


def _alternating(stage: int, ahead: int, chunks: int) -> Iterator[_Action]:
    for i in range(chunks + ahead):
        if i < chunks:
            yield _Action(stage, _ComputationType.FORWARD, i)
        if i >= ahead:
            yield _Action(stage, _ComputationType.FULL_BACKWARD, i - ahead)


def _of_torch(name: str) -> Callable[[int, int, int], dict[int, list[_Action | None]]]:
    def order(ranks: int, per_rank: int, chunks: int) -> dict[int, list[_Action | None]]:
        # torch wants the stages themselves, and reads no more than this of them.
        stage = dict(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=nn.Identity())
        stages = [SimpleNamespace(**stage) for _ in range(per_rank)]
        # Messages are added below: torch 2.13 takes minutes for a thousand chunks.
        body = {"_prepare_schedule_with_comms": lambda self, actions: None}
        kind = type(name, (getattr(torch_schedules, name),), body)
        made = kind(stages, chunks, loss_fn=lambda output, target: output)
        return {rank: list(of_rank) for rank, of_rank in made.pipeline_order.items()}

    return order


SCHEDULES = {
    "gpipe": Schedule(1, _all_forwards_first),
    "1f1b": Schedule(1, _one_forward_one_backward),
    "looped_bfs": Schedule(None, _of_torch("ScheduleLoopedBFS")),
    "interleaved_1f1b": Schedule(None, _of_torch("ScheduleInterleaved1F1B"), in_rounds=True),
    "zero_bubble": Schedule(None, _of_torch("ScheduleInterleavedZeroBubble"), in_rounds=True),
    "zero_bubble_v": Schedule(2, _of_torch("ScheduleZBVZeroBubble"), is_v=True),
}


def rank_of_stage(name: str, ranks: int, per_rank: int) -> list[int]:
    """On which rank of a pipeline every stage lies."""
    down = list(range(ranks))
    return [*down, *reversed(down)] if SCHEDULES[name].is_v else down * per_rank


def num_chunks(name: str, ranks: int, needed: int) -> int:
    """So many chunks a schedule takes: `needed`, or the next number that it can deal out."""
    while SCHEDULES[name].in_rounds and needed % max(1, needed // ranks):
        needed += 1
    return needed


def actions(
    name: str, ranks: int, per_rank: int, chunks: int, rank: int, forward_only: bool = False
) -> tuple[Action, ...]:
    """What one rank does, in order. `chunks`: a number that `num_chunks` gave."""
    return _of_all_ranks(name, ranks, per_rank, chunks, forward_only)[rank]


@functools.lru_cache(maxsize=16)
def _of_all_ranks(
    name: str, ranks: int, per_rank: int, chunks: int, forward_only: bool
) -> tuple[tuple[Action, ...], ...]:
    """The order with its messages. A message is sent behind what makes it, and received where the other rank then is.
    So a rank that waits until a message has left waits for work that depends on nothing later, and no two ranks wait
    for each other."""
    order, places = SCHEDULES[name].order(ranks, per_rank, chunks), rank_of_stage(name, ranks, per_rank)
    kinds = {FORWARD} if forward_only else {FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD}
    computed = [
        [Action(a.computation_type.name, a.stage_index, a.microbatch_index) for a in order[rank] if a is not None]
        for rank in range(ranks)
    ]
    left = [iter([action for action in of_rank if action.kind in kinds]) for of_rank in computed]
    ahead, found = [next(of_rank, None) for of_rank in left], [[] for _ in range(ranks)]
    there = {(FORWARD, 0, chunk) for chunk in range(chunks)}  # what can be worked on
    there |= {(BACKWARD, len(places) - 1, chunk) for chunk in range(chunks)}
    while any(ahead):
        waiting = list(ahead)
        for rank, action in enumerate(waiting):
            if action is None:
                continue
            kind, stage, chunk = action
            direction = FORWARD if kind == FORWARD else BACKWARD
            if kind != WEIGHT_BACKWARD and (direction, stage, chunk) not in there:
                continue
            found[rank].append(action)
            ahead[rank] = next(left[rank], None)
            to = stage + (1 if direction == FORWARD else -1)
            if kind == WEIGHT_BACKWARD or not 0 <= to < len(places):
                continue
            there.add((direction, to, chunk))
            if places[to] != rank:
                found[rank].append(Action(SEND_FORWARD if direction == FORWARD else SEND_BACKWARD, stage, chunk))
                receive = RECEIVE_FORWARD if direction == FORWARD else RECEIVE_BACKWARD
                found[places[to]].append(Action(receive, to, chunk))
        assert ahead != waiting, "every rank waits for another one"
    return tuple(map(tuple, found))


COSTS = {FORWARD: 1, BACKWARD: 2, INPUT_BACKWARD: 1, WEIGHT_BACKWARD: 1}


def idle_share(name: str, ranks: int, per_rank: int, chunks: int) -> float:
    """Of the time of a step's two passes that a rank waits, where a backward takes twice a forward's time, all stages
    the same, and messages none. For `gpipe` and `1f1b` it is (P - 1) / (M + P - 1)."""
    lasts = [_length(name, ranks, per_rank, chunks, forward_only) for forward_only in (True, False)]
    return 1 - 4 * per_rank * chunks / sum(lasts)


def _length(name: str, ranks: int, per_rank: int, chunks: int, forward_only: bool) -> int:
    """When the last rank has done its last action."""
    left = [list(actions(name, ranks, per_rank, chunks, rank, forward_only))[::-1] for rank in range(ranks)]
    free, ended, last = [0] * ranks, {}, ranks * per_rank - 1
    while any(left):
        for rank, of_rank in enumerate(left):
            while of_rank:
                kind, stage, chunk = of_rank[-1]
                if kind not in COSTS:
                    of_rank.pop()
                    continue
                is_forward = kind == FORWARD
                before = (FORWARD, stage - 1) if is_forward else (BACKWARD, stage + 1)
                needed = [] if stage == (0 if is_forward else last) or kind == WEIGHT_BACKWARD else [(*before, chunk)]
                if any(one not in ended for one in needed):
                    break
                free[rank] = max([free[rank], *(ended[one] for one in needed)]) + COSTS[kind]
                # The stage before waits for a backward's first part alone.
                ended[BACKWARD if kind == INPUT_BACKWARD else kind, stage, chunk] = free[rank]
                of_rank.pop()
    return max(free)


def live_chunks(name: str, ranks: int, per_rank: int, chunks: int, rank: int) -> int:
    """The most chunks whose activations a rank holds at once, counted per stage: a forward begins to hold them, the
    backward that ends with gradients of weights gives them up."""
    now = most = 0
    for action in actions(name, ranks, per_rank, chunks, rank):
        now += action.kind == FORWARD
        most = max(most, now)
        now -= action.kind in (BACKWARD, WEIGHT_BACKWARD)
    return most
