"""In which order the ranks of a pipeline work: torch's schedules as lists of actions.

A model is cut into stages; every chunk goes through the forwards of all stages (F) and back through their backwards
(B). A backward may be cut in two: the gradient of the stage's input (I), which the stage before waits for, and those
of its weights (W), which nobody waits for. A schedule says in which order each rank does this for its stages and all
chunks, and where a tensor is sent to the next rank or received.

`actions` asks torch for the order and adds the messages; nothing here needs a process group. What a schedule holds and
how long its ranks wait is foretold in policy.py. Letters: P ranks of a pipeline, V stages per rank, M chunks.
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
MESSAGES = {FORWARD: (SEND_FORWARD, RECEIVE_FORWARD), BACKWARD: (SEND_BACKWARD, RECEIVE_BACKWARD)}
UNITS = {FORWARD: 1, BACKWARD: 2, INPUT_BACKWARD: 1, WEIGHT_BACKWARD: 1}  # how long a stage works, in forwards


class Action(NamedTuple):
    """What a rank does next: one of the kinds above."""

    kind: str
    stage: int
    chunk: int


Order = dict[int, list[_Action | None]]  # rank -> what it computes, without messages


def _all_forwards_first(ranks: int, _: int, chunks: int) -> Order:
    kinds = (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
    return {r: [_Action(r, kind, m) for kind in kinds for m in range(chunks)] for r in range(ranks)}


def _one_forward_one_backward(ranks: int, _: int, chunks: int) -> Order:
    # torch 2.13 forgets the first chunk on the last rank (Schedule1F1B._get_pipeline_order), which it only draws.
    return {rank: list(_alternating(rank, min(ranks - 1 - rank, chunks), chunks)) for rank in range(ranks)}


def _alternating(stage: int, ahead: int, chunks: int) -> Iterator[_Action]:
    for i in range(chunks + ahead):
        if i < chunks:
            yield _Action(stage, _ComputationType.FORWARD, i)
        if i >= ahead:
            yield _Action(stage, _ComputationType.FULL_BACKWARD, i - ahead)


def _of_torch(name: str) -> Callable[[int, int, int], Order]:
    def order(ranks: int, per_rank: int, chunks: int) -> Order:
        # torch wants the stages themselves, and reads no more than this of them.
        stage = dict(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=nn.Identity())
        stages = [SimpleNamespace(**stage) for _ in range(per_rank)]
        # Messages are added below: torch 2.13 takes minutes for a thousand chunks.
        body = {"_prepare_schedule_with_comms": lambda self, actions: None}
        kind = type(name, (getattr(torch_schedules, name),), body)
        made = kind(stages, chunks, loss_fn=lambda output, target: output)
        return {rank: list(of_rank) for rank, of_rank in made.pipeline_order.items()}

    return order


SCHEDULES = {  # of (P, V, M)
    "gpipe": _all_forwards_first,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _of_torch("ScheduleInterleaved1F1B"),
    "zero_bubble": _of_torch("ScheduleInterleavedZeroBubble"),
}


def actions(
    name: str, ranks: int, per_rank: int, chunks: int, rank: int, forward_only: bool = False
) -> tuple[Action, ...]:
    """What one rank does, in order. `chunks`: a number that `policy.dealt_chunks` gave."""
    return _of_all_ranks(name, ranks, per_rank, chunks, forward_only)[rank]


@functools.lru_cache(maxsize=16)
def _of_all_ranks(
    name: str, ranks: int, per_rank: int, chunks: int, forward_only: bool
) -> tuple[tuple[Action, ...], ...]:
    """The order with its messages, each where it is made if all stages take equally long.

    All messages of a pipeline have one order then, which every rank keeps: no two ranks wait for each other, and in
    the one stream through which NCCL sends what a rank sends and receives, none waits behind another that comes long
    after it."""
    order, last = SCHEDULES[name](ranks, per_rank, chunks), ranks * per_rank - 1
    kinds = {FORWARD} if forward_only else UNITS.keys()
    computed = [
        [Action(a.computation_type.name, a.stage_index, a.microbatch_index) for a in order[rank] if a is not None]
        for rank in range(ranks)
    ]
    left = [[action for action in of_rank if action.kind in kinds][::-1] for of_rank in computed]
    now, found = [0] * ranks, [[] for _ in range(ranks)]  # (when, is it work, its place among messages, action)
    ready = {(FORWARD, 0, chunk): 0 for chunk in range(chunks)}  # what can be worked on, and since when
    ready |= {(BACKWARD, last, chunk): 0 for chunk in range(chunks)}
    while any(left):
        before = list(map(len, left))
        for rank, of_rank in enumerate(left):
            while of_rank:
                kind, stage, chunk = of_rank[-1]
                direction = FORWARD if kind == FORWARD else BACKWARD
                if kind != WEIGHT_BACKWARD and (direction, stage, chunk) not in ready:
                    break
                start = now[rank] if kind == WEIGHT_BACKWARD else max(now[rank], ready[direction, stage, chunk])
                found[rank].append((start, True, (), of_rank.pop()))
                end = now[rank] = start + UNITS[kind]
                to = stage + (1 if direction == FORWARD else -1)
                if kind == WEIGHT_BACKWARD or not 0 <= to <= last:
                    continue
                ready[direction, to, chunk] = end
                send, receive = MESSAGES[direction]
                found[rank].append((end, False, (direction, to, chunk), Action(send, stage, chunk)))
                found[to % ranks].append((end, False, (direction, to, chunk), Action(receive, to, chunk)))
        assert before != list(map(len, left)), "every rank waits for another one"
    return tuple(tuple(action for *_, action in sorted(of_rank)) for of_rank in found)
