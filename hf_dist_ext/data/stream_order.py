"""A `datasets` stream is one endless order of rows, whatever the batch, the processes and the loader workers.

(1) C readers share the stream's shards: reader r has the shards r, r + C, ... and a state of `datasets` of its own. C
    follows from the stream alone and is kept in the checkpoint, so no number of processes or workers changes the order
(2) The order is dealt in rounds. In a round every reader reads a block of rows, as long for all (stream_readers.py),
    and the order takes one row of each block in turn. A reader whose shards are read drops out. When all have dropped
    out, the next epoch begins, in the middle of a batch if need be: no batch is short, and no row is repeated to fill
    one
(3) Of W ranks with rows of their own, rank r mod W owns reader r, and no other rank reads its shards. The ranks tell
    each other the lengths of the blocks and the states before them, so that each rank knows the order and can write
    the checkpoint
(4) The next W*B rows of the order are a batch. A rank keeps the rows of its readers, B at most, and sends the others
    to the ranks that have fewer. Where W divides C, nothing is sent until readers drop out
(5) Rows travel as they are stored. The loader worker that makes a picture into features decodes it
(6) `StreamState` says how far a run has come: an epoch, a round, the rows of it that were used, and the readers'
    states before the round. A resumed run, whose W may be another, reads the round's blocks again and compares them
    with the digests in the checkpoint

Of several streams each batch is the next one of a stream that is drawn, the same on every rank. Every stream is dealt
by a `Dealer` of its own, so what holds of one stream holds of each. The sources of BLOCK batches are drawn together,
by the seed and the block's number, so that a resumed run needs to know how many batches were before it.

A shuffle buffer of n rows becomes a random order of the rows of a block of n / C: mixed as far, but nothing in memory
that a state would lack.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from datasets.features.features import decode_nested_example
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers.utils import logging

from hf_dist_ext.data.mixture import SOURCE, MixedStream, drawn
from hf_dist_ext.data.stream_readers import Blocks, Readers, StreamBlock, fingerprint, number_of_readers
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

FILE = "stream_position.json"
BLOCK = 1024  # batches whose sources are drawn together


@dataclass(frozen=True)
class StreamState:
    """A run has used `rows` rows of epoch `epoch`, of which `offset` are of round `round`.

    `states`: reader -> `datasets`' state before its block of this round, None at the beginning of its shards; readers
    that dropped out are not in it. None: not known, so the epoch is dealt from its beginning. `digests`: of the
    round's blocks, reader -> digest. `sources`: of several streams, the state of each; `round` is
    then the number of batches that were dealt, and `rows` those of all.
    """

    epoch: int = 0
    rows: int = 0
    readers: int | None = None  # None: nothing was read yet
    round: int = 0
    offset: int = 0
    states: dict[int, Any] | None = None
    digests: dict[int, str] | None = None
    sources: dict[str, StreamState] | None = None

    def forgotten(self) -> StreamState:
        """The same place in other data: dealt from the beginning of the epoch."""
        sources = self.sources and {name: state.forgotten() for name, state in self.sources.items()}
        return replace(self, states=None, sources=sources)


class Ranks(NamedTuple):
    """This rank among so many processes, of which W (or W groups, `shares`) have rows of their own."""

    rank: int
    processes: int
    shares: int

    @property
    def per_share(self) -> int:
        return self.processes // self.shares

    def reads(self, reader: int) -> bool:
        return self.reading(reader) == self.rank

    def reading(self, reader: int) -> int:
        """The rank that owns a reader, the first of its group."""
        return reader % self.shares * self.per_share


def sources_of(stream: Any) -> dict[str, Any]:
    """The streams that are read, by name."""
    return stream.sources if isinstance(stream, MixedStream) else {"": stream}


def check_stream(args: Any, stream: Any) -> None:
    """Raises UsageError for what would make processes or epochs disagree about the one order."""
    by_epoch = [
        name for name in ("eval_strategy", "save_strategy", "logging_strategy") if getattr(args, name) == "epoch"
    ]
    if by_epoch:
        raise UsageError(
            f"{by_epoch[0]}='epoch' with a stream: its epochs follow each other inside of a batch. Set it to 'steps'."
        )
    if args.world_size == 1:
        return
    if any(getattr(part, "_distributed", None) is not None for part in sources_of(stream).values()):
        raise UsageError(
            "the stream was split by split_dataset_by_node, and would be split again here. Give every process the "
            "whole stream."
        )
    prints: list[Any] = [None] * args.world_size
    dist.all_gather_object(prints, fingerprint(stream))
    if len(set(prints)) > 1:
        raise UsageError(
            "the stream is not the same on every process: other columns or shards, or shuffled without a seed. Give "
            "shuffle(seed=...)."
        )


def describe_readers(stream: Any, readers: int, ranks: Ranks) -> str | None:
    """What a user should know about who reads, None where every process reads as much as the others."""
    if readers >= ranks.shares:
        return None
    why = f"has {stream.num_shards} shard{'s' * (stream.num_shards > 1)}"
    if readers < stream.num_shards:
        why = "has skip() or take() in it, which count over all shards"
    return (
        f"the stream {why}, so {readers} of {ranks.shares} processes read{'s' * (readers == 1)} it and send the "
        "others their rows, not yet decoded. Where reading is what takes the time, give it more shards: more files, "
        "reshard(), or to_iterable_dataset(num_shards=...)."
    )


def _as_it_is(block: StreamBlock) -> StreamBlock:
    return block


# ---- (3), (4) ----


@dataclass
class Round:
    before: StreamState  # before its first row
    rows: dict[int, list] = field(default_factory=dict)  # of this rank's readers
    lengths: dict[int, int] = field(default_factory=dict)  # of all readers that are left

    def order(self) -> Iterator[tuple[int, Any]]:
        """(reader, row) in turn; None for a row that another rank has."""
        for i in range(max(self.lengths.values())):
            for reader, length in self.lengths.items():
                if i < length:
                    yield reader, self.rows[reader][i] if reader in self.rows else None


class Dealt(NamedTuple):
    """A row as it is stored, under its number in the epoch's order."""

    number: int
    row: Any


class Dealer(Sampler[list[Dealt]]):
    """(1) to (4): this rank's batches, of `batch` rows each.

    A loader asks for batches before they are used. `states` holds the stream's state after each of them, and whoever
    uses a batch takes the first.
    """

    def __init__(
        self, stream: Any, batch: int, ranks: Ranks, start: StreamState, num_workers: int = 0, context: Any = None,
        allow_changed: bool = False, device: Any = None,
    ):  # fmt: skip
        count = number_of_readers(stream)
        if start.readers is not None and start.readers != count:  # allow_changed: other shards
            start = replace(start, states=None)
        self.readers, self.start = Readers(stream, count), replace(start, readers=count)
        self.batch, self.ranks, self.allow_changed, self.device = batch, ranks, allow_changed, device
        self.num_workers, self.context = num_workers, context
        self.states: deque[StreamState] = deque()
        said = describe_readers(stream, count, ranks)
        if said is not None and ranks.rank == 0:
            logger.warning(said)

    @property
    def features(self) -> dict[str, Any]:
        """Of the columns that are decoded where a batch is made."""
        return self.readers.features

    def __iter__(self) -> Iterator[list[Dealt]]:
        self.states.clear()
        order = self._order()
        while True:
            rows = list(itertools.islice(order, self.batch * self.ranks.shares))
            begun, offset, *_ = rows[-1]
            self.states.append(replace(begun, rows=begun.rows + offset, offset=offset))
            yield self._own([(reader, Dealt(begun.rows + i - 1, row)) for begun, i, reader, row in rows])

    def _order(self) -> Iterator[tuple[StreamState, int, int, Any]]:
        """(state before the round, rows of it up to here, reader, row or None) from the start on."""
        start, rounds = self.start, self._rounds(self.start)
        first = next(rounds)
        if start.digests is not None and start.states is not None and first.before.digests != start.digests:
            self._say(
                f"the states of the checkpoint lead to other rows than it has used: the first {start.rows} rows of "
                f"epoch {start.epoch} are read again."
            )
            rounds = self._rounds(replace(start, states=None))
            first = next(rounds)
        skipped = start.rows - first.before.rows
        for dealt in itertools.chain([first], rounds):
            before = dealt.before
            if start.digests is not None and (before.epoch, before.round) == (start.epoch, start.round):
                self._compare(before.digests, start)
            for i, (reader, row) in enumerate(dealt.order(), start=1):
                if skipped:
                    skipped -= 1
                else:
                    yield before, i, reader, row

    def _compare(self, digests: Any, start: StreamState) -> None:
        if digests == start.digests:
            return
        text = f"the rows around row {start.rows} of epoch {start.epoch} are not those of the checkpoint"
        if not self.allow_changed:
            raise UsageError(
                f"the stream can not go on: {text}, so rows would be repeated and others skipped. Restore the data "
                "and shuffle_buffer_rows, or set allow_changed_data=true."
            )
        self._say(f"allow_changed_data: {text}.")

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            logger.warning(text)

    def _rounds(self, start: StreamState) -> Iterator[Round]:
        everyone = range(self.readers.count)
        if start.states is None:
            start = StreamState(start.epoch, readers=start.readers)
        sources = self._sources(start)
        state, left = replace(start, rows=start.rows - start.offset, offset=0), list(start.states or everyone)
        while True:
            own = {r: next(sources[r]) for r in left if self.ranks.reads(r)}
            told = self._tell({r: (len(block.rows), block.state, block.digest) for r, block in own.items()})
            lengths = {r: told[r][0] for r in left}
            total = sum(lengths.values())
            states, digests = {r: told[r][1] for r in left}, {r: told[r][2] for r in left}
            state = replace(state, states=states, digests=digests)
            if total:
                yield Round(state, {r: block.rows for r, block in own.items()}, lengths)
            state = replace(state, rows=state.rows + total, round=state.round + 1)
            left = [r for r in left if lengths[r] == self.readers.block_rows]
            if not left:
                if state.rows == 0:
                    raise UsageError("the training stream has no rows. Look at the dataset and its filters.")
                state, left = StreamState(state.epoch + 1, readers=state.readers), list(everyone)

    def _sources(self, start: StreamState) -> dict[int, Iterator[StreamBlock]]:
        """Gives for each reader who reads its blocks: this process, or a loader worker that reads ahead."""
        own = [r for r in range(self.readers.count) if self.ranks.reads(r)]
        blocks = partial(Blocks, self.readers, epoch=start.epoch, number=start.round, states=start.states)
        if not self.num_workers:
            return dict.fromkeys(own, iter(blocks(own)))
        sources: dict[int, Iterator[StreamBlock]] = {}
        for i in range(min(self.num_workers, len(own))):
            part = own[i :: self.num_workers]
            loader = DataLoader(
                blocks(part), batch_size=None, collate_fn=_as_it_is, num_workers=1,
                prefetch_factor=max(2, len(part)), multiprocessing_context=self.context, generator=torch.Generator(),
            )  # fmt: skip
            sources |= dict.fromkeys(part, iter(loader))
        return sources

    def _tell(self, own: dict[int, Any]) -> dict[int, Any]:
        if self.ranks.processes == 1:
            return own
        everyone: list[Any] = [None] * self.ranks.processes
        dist.all_gather_object(everyone, own)
        return {reader: fact for facts in everyone for reader, fact in facts.items()}

    def _own(self, batch: list[tuple[int, Dealt]]) -> list[Dealt]:
        """Does (4) with a global batch: gives this rank's share, for which ranks send each other rows."""
        ranks, room, takers = self.ranks, [self.batch] * self.ranks.shares, []
        for reader, _ in batch:
            owner = reader % ranks.shares
            takers.append(owner if room[owner] else None)
            room[owner] -= bool(room[owner])
        free = (share for share in range(ranks.shares) for _ in range(room[share]))
        takers = [next(free) if share is None else share for share in takers]

        to_send: list[list[Dealt]] = [[] for _ in range(ranks.processes)]
        is_sending = False
        for (reader, dealt), share in zip(batch, takers, strict=True):
            sender = ranks.reading(reader)
            for rank in range(share * ranks.per_share, (share + 1) * ranks.per_share):
                is_sending |= rank != sender
                if sender == ranks.rank != rank:
                    to_send[rank].append(dealt)
        received = [iter(rows) for rows in exchange_rows(to_send, self.device)] if is_sending else []
        return [
            dealt if ranks.reads(reader) else next(received[ranks.reading(reader)])
            for (reader, dealt), share in zip(batch, takers, strict=True)
            if share == ranks.rank // ranks.per_share
        ]


# ---- several streams ----


class MixedDealer(Sampler[list[Dealt]]):
    """This rank's batches, of `batch` rows each. The arguments are those of `Dealer`, but for the `seed` of the draws.

    `states` holds the state after each batch that a loader has asked for, and whoever uses a batch takes the first.
    """

    def __init__(self, stream: MixedStream, batch: int, ranks: Ranks, start: StreamState, *more: Any, seed: int):
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


def dealer_of(stream: Any, *given: Any, seed: int) -> Dealer | MixedDealer:
    """What deals a stream, or several: the arguments are those of `Dealer`, and the `seed` of a mixture's draws."""
    return MixedDealer(stream, *given, seed=seed) if isinstance(stream, MixedStream) else Dealer(stream, *given)


# ---- (4) ----


def exchange_rows(to_send: list[list], device: Any) -> list[list]:
    """Sends each rank the rows in its place of `to_send`; gives the rows that each rank has sent to this one."""
    parts = [pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL) for rows in to_send]
    sizes = torch.tensor([len(part) for part in parts], device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    sizes, incoming = sizes.tolist(), incoming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device)
    received = sent.new_empty(sum(incoming))
    dist.all_to_all_single(received, sent, incoming, sizes)
    content, ends = received.cpu().numpy().tobytes(), list(itertools.accumulate(incoming, initial=0))
    return [pickle.loads(content[begin:end]) for begin, end in itertools.pairwise(ends)]


# ---- (5) ----


class DealtRows(Dataset):
    """Rows that are their own index: a loader worker decodes those of its batches."""

    def __init__(self, features: dict[str, Any]):
        self.features = features

    def __getitem__(self, dealt: Dealt) -> Any:
        row = dealt.row
        stored = [name for name in self.features if _is_stored(row.get(name))]
        return row | {name: decode_nested_example(self.features[name], row[name]) for name in stored}


def _is_stored(value: Any) -> bool:
    """Whether a picture, or one of a list or beside a text, is a path or bytes; a map() of the user's may have decoded
    it."""
    if isinstance(value, dict):
        return {"bytes", "path"} <= value.keys() or any(map(_is_stored, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_stored, value))


# ---- (6) ----


def save(state: StreamState, folder: str) -> None:
    Path(folder, FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")


def load(folder: str) -> StreamState | None:
    path = Path(folder, FILE)
    if not path.is_file():
        return None
    return _state_of(json.loads(path.read_text(encoding="utf-8")))


def _state_of(content: dict[str, Any]) -> StreamState:
    """JSON has texts where readers have numbers."""
    by_reader = {
        name: None if content[name] is None else {int(reader): value for reader, value in content[name].items()}
        for name in ("states", "digests")
    }
    sources = {name: _state_of(state) for name, state in (content.get("sources") or {}).items()}
    return StreamState(**content | by_reader | {"sources": sources or None})
