"""Blocks of rows that go round the ranks: each rank sends what it has to the next one and works on it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


def visits(own: torch.Tensor, heights: Sequence[int], index: int, group: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its rows) of every rank, this one's first, then the one before it, and so on. All ranks call it.

    W - 1 messages are sent and as many received, none for a rank without rows. While a block is used the next one
    arrives, so that at most two blocks of others live at once. A block is valid until the next one is asked for.

    own: (b, ...), contiguous. heights: rows of every rank. index: of this rank among those of `group` (None: all).
    """
    size, held, block = len(heights), index, own
    buffers = [own.new_empty(max(heights), *own.shape[1:]) for _ in range(min(2, size - 1))]
    for hop in range(size):
        coming, works = (held - 1) % size, []
        arriving = buffers[hop % len(buffers)][: heights[coming]] if buffers else block
        if hop < size - 1:
            messages = [(dist.isend, block, (index + 1) % size), (dist.irecv, arriving, (index - 1) % size)]
            works = _start([one for one in messages if len(one[1])], group)
        yield held, block
        for work in works:
            work.wait()
        held, block = coming, arriving


def _start(messages: list[tuple[Any, torch.Tensor, int]], group: Any) -> list[Any]:
    sent = [dist.P2POp(kind, tensor, group=group, group_peer=peer) for kind, tensor, peer in messages]
    return dist.batch_isend_irecv(sent) if sent else []
