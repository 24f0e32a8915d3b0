"""Batches of several streams: each batch is the next one of a stream that is drawn, the same on every rank.

Every source is dealt by a `Dealer` of its own (stream_order.py), so what holds of one stream holds of each: an
endless order whatever the processes and loader workers, each row read once. The sources of BLOCK batches are drawn
together, by the seed and the block's number, so that a resumed run needs to know how many batches were before it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Sampler

from hf_dist_ext.data.mixture import SOURCE, MixedStream, drawn
from hf_dist_ext.data.stream_order import Dealer, Dealt, Ranks, StreamState

BLOCK = 1024


class MixedDealer(Sampler[list[Dealt]]):
    """This rank's batches, of `batch` rows each. The arguments are those of `Dealer`, but for the `seed` of the draws.

    `states` holds the state after each batch that a loader has asked for, and whoever uses a batch takes the first.
    """

    def __init__(
        self, stream: MixedStream, batch: int, ranks: Ranks, start: StreamState, *more: Any, seed: int
    ):  # fmt: skip
        self.stream, self.start, self.seed, self.rows = stream, start, seed, batch * ranks.shares
        known = start.sources or {}
        self.dealers = {
            name: Dealer(source, batch, ranks, known.get(name, StreamState()), *more)
            for name, source in stream.sources.items()
        }
        self.states: deque[StreamState] = deque()

    @property
    def features(self) -> dict[str, Any]:
        """Of the columns that are decoded where a batch is made."""
        return {name: one for dealer in self.dealers.values() for name, one in dealer.features.items()}

    def __iter__(self) -> Iterator[list[Dealt]]:
        self.states.clear()
        names, batches = list(self.dealers), {name: iter(dealer) for name, dealer in self.dealers.items()}
        state = replace(self.start, sources={name: dealer.start for name, dealer in self.dealers.items()})
        for number in self._sources(state.round):
            name = names[number]
            rows = next(batches[name])
            of_source = self.dealers[name].states.pop()
            state = replace(
                state, rows=state.rows + self.rows, round=state.round + 1, sources=state.sources | {name: of_source}
            )
            self.states.append(state)
            yield [dealt._replace(row=dealt.row | {SOURCE: name}) for dealt in rows]

    def _sources(self, first: int) -> Iterator[int]:
        """The number of each batch's source, from batch `first` on."""
        for block in itertools.count(first // BLOCK):
            numbers = drawn(self.stream.shares, BLOCK, (self.seed, block)).tolist()
            yield from numbers[max(0, first - block * BLOCK) :]
