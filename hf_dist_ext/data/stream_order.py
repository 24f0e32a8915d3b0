"""A `datasets` stream as one endless order of rows, whatever the batch, the processes and the loader workers.

(1) C readers share the stream's shards: reader r has the shards r, r + C, ... and a state of `datasets` of its own. C
    comes from the stream alone and is kept in the checkpoint, so no number of processes or workers changes the order
(2) the order is dealt in rounds. In a round every reader reads a block of rows, as long for all, and the order takes
    one row of each block in turn. A reader whose shards are read drops out; when all have, the next epoch begins, in
    the middle of a batch if need be: no batch is short, and no row is repeated to fill one
(3) of W ranks with rows of their own, rank r mod W owns reader r, and nobody else reads its shards. The ranks tell
    each other how long the blocks are and the states before them: each knows the order, and can write the checkpoint
(4) the next W*B rows of the order are a batch. A rank keeps the rows of its readers, B at most; the rest are sent to
    the ranks that have fewer: none where W divides C, until readers drop out
(5) rows travel as they are stored. A picture is decoded by the loader worker that makes it into features
(6) the place of a run is an epoch, a round, the rows of it that were used, and the states before the round. A resumed
    run reads the round's blocks again, W may be another now, and compares them with what the checkpoint knows of them

A shuffle buffer of n rows becomes a random order of the rows of a block of n / C: mixed as far, but nothing in memory
that a state would lack.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import fsspec.asyn
import numpy as np
import torch
import torch.distributed as dist
from datasets.features.features import decode_nested_example, require_decoding
from datasets.iterable_dataset import shift_ex_examples_rngs
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data._utils import worker as this_worker
from transformers.utils import logging

from hf_dist_ext.data.storage import with_retries
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

FILE = "stream_position.json"
MAX_READERS = 32  # open files of one process that trains alone; a machine's 8 GPUs read through 4 each
ROUND_ROWS = 1024  # that all readers together read ahead, and read again after a resume, without a shuffle buffer


@dataclass(frozen=True)
class Place:
    """Behind `rows` rows of epoch `epoch`, of which `offset` are of round `round`.

    `states`: reader -> `datasets`' state before its block of this round, None at the beginning of its shards; readers
    that dropped out are not in it. None: not known, so the epoch is dealt from its beginning. `digests`: of blocks.
    """

    epoch: int = 0
    rows: int = 0
    readers: int | None = None  # None: nothing was read yet
    round: int = 0
    offset: int = 0
    states: dict[int, Any] | None = None
    digests: dict[int, str] | None = None


class Ranks(NamedTuple):
    """Who needs rows: this rank, of so many processes, and W of them (or groups of them) with rows of their own."""

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


# ---- what a stream is made of ----


def is_stream(dataset: Any) -> bool:
    return hasattr(dataset, "_ex_iterable") and hasattr(dataset, "load_state_dict")


def _parts(node: Any) -> Iterator[Any]:
    """The iterables that a stream is built of, itself first."""
    yield node
    for inner in [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]:
        if inner is not None:
            yield from _parts(inner)


def _is(node: Any, kind: str) -> bool:
    return type(node).__name__ == f"{kind}ExamplesIterable"


def fingerprint(stream: Any) -> str:
    """Of what the order depends on and is known without reading: columns, shards, seeds of shuffling and mixing."""
    generators = [getattr(part, "generator", None) for part in _parts(stream._ex_iterable)]
    seeds = [one.bit_generator.state for one in generators if isinstance(one, np.random.Generator)]
    facts = [sorted(stream.column_names or ()), stream.num_shards, seeds]
    return hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16).hexdigest()


def number_of_readers(stream: Any) -> int:
    """C. One, where `skip` or `take` count rows over all shards: `datasets` would let each reader count its own."""
    parts = list(_parts(stream._ex_iterable))
    if any(_is(part, "Skip") or _is(part, "Take") for part in parts):
        return 1
    return max(1, min(stream.num_shards, MAX_READERS))


def describe(stream: Any, readers: int, ranks: Ranks) -> str | None:
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


def digest(row: Any) -> str:
    """Of a row's content."""
    found = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        found.update(type(value).__name__.encode())
        if isinstance(value, dict):
            for name in sorted(value, key=str):
                add(name)
                add(value[name])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif isinstance(value, torch.Tensor):
            add(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, bytes):
            found.update(value)
        elif hasattr(value, "tobytes"):  # numpy, PIL
            found.update(value.tobytes())
        elif isinstance(value, str | int | float | bool | None):
            found.update(repr(value).encode())

    add(row)
    return found.hexdigest()


# ---- (1), (2): readers and their blocks ----


class Block(NamedTuple):
    reader: int
    state: Any  # of `datasets`, before it
    rows: list
    digest: str


def _with(stream: Any, **changes: Any) -> Any:
    """A stream with other attributes. `copy.copy` would let both share one `__dict__`."""
    changed = object.__new__(type(stream))
    changed.__dict__.update(stream.__dict__ | changes)
    return changed


def _without_buffers(node: Any) -> Any:
    if _is(node, "BufferShuffled"):  # with what shuffle() puts below it: shards in turn, in batches
        below = node.ex_iterable
        below = below.ex_iterable if _is(below, "InterleavedShards") else below
        return _without_buffers(below.ex_iterable if _is(below, "RebatchedArrow") else below)
    node = copy.copy(node)
    if hasattr(node, "ex_iterable"):
        node.ex_iterable = _without_buffers(node.ex_iterable)
    if hasattr(node, "ex_iterables"):
        node.ex_iterables = [_without_buffers(inner) for inner in node.ex_iterables]
    return node


class Readers:
    """A stream as its C readers: what to read, without shuffle buffers and as it is stored."""

    def __init__(self, stream: Any, count: int):
        buffers = [part for part in _parts(stream._ex_iterable) if _is(part, "BufferShuffled")]
        rows = max((part.buffer_size for part in buffers), default=ROUND_ROWS)
        self.count, self.block_rows = count, -(-rows // count)
        self.seed = int(copy.deepcopy(buffers[0].generator).integers(1 << 63)) if buffers else None
        self.features = {}
        if stream.features and stream._formatting is None:
            self.features = {name: one for name, one in stream.features.items() if require_decoding(one)}
        if self.features:
            stream = stream.decode(False)
        self.stream = _with(stream, _ex_iterable=_without_buffers(stream._ex_iterable))

    def shards_of(self, reader: int, epoch: int) -> Any:
        own = self.stream.shard(num_shards=self.count, index=reader, contiguous=False)
        # Else the readers of a random mix would all draw the same sources, and a batch would be of one.
        own = _with(own, _ex_iterable=shift_ex_examples_rngs(own._ex_iterable, reader))
        return _with(own, _epoch=epoch, _starting_state_dict=None)


class _Open:
    """A reader in an epoch, from `state` on."""

    def __init__(self, readers: Readers, reader: int, epoch: int, number: int, state: Any):
        self.readers, self.reader, self.epoch, self.number, self.state = readers, reader, epoch, number, state
        self.shards, self.rows = None, None

    def block(self) -> Block:
        before = self.state
        rows = with_retries(self._read, f"the stream's shards of reader {self.reader}")
        if self.readers.seed is not None:
            seed = (self.readers.seed, self.epoch, self.reader, self.number)
            rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
        self.number += 1
        return Block(self.reader, before, rows, digest([len(rows), *rows[:1]]))

    def _read(self) -> list:
        # `datasets`, and generators of users, would give a loader worker a share of these shards.
        info, this_worker._worker_info = this_worker._worker_info, None
        try:
            if self.rows is None:
                self.shards = self.readers.shards_of(self.reader, self.epoch)
                if self.state is not None:
                    self.shards.load_state_dict(self.state)
                self.rows = iter(self.shards)
            rows = list(itertools.islice(self.rows, self.readers.block_rows))
            self.state = json.loads(json.dumps(self.shards.state_dict()))
            return rows
        except BaseException:
            self.rows = None  # an iterator that failed is over: a retry begins at the state
            raise
        finally:
            this_worker._worker_info = info


class Blocks(IterableDataset):
    """The blocks of some readers from a place on, in the order in which rounds ask for them."""

    def __init__(self, readers: Readers, own: list[int], start: Place):
        self.readers, self.own, self.start = readers, own, start

    def __iter__(self) -> Iterator[Block]:
        if get_worker_info() is not None:
            fsspec.asyn.reset_lock()  # as `datasets` does: files over the network would hang in a forked process
        states, number = self.start.states, self.start.round
        for epoch in itertools.count(self.start.epoch):
            states = dict.fromkeys(self.own) if states is None else states
            left = [_Open(self.readers, r, epoch, number, states[r]) for r in self.own if r in states]
            while left:
                for one in list(left):
                    block = one.block()
                    if len(block.rows) < self.readers.block_rows:
                        left.remove(one)
                    yield block
            states, number = None, 0


def _as_it_is(block: Block) -> Block:
    return block


# ---- (3), (4) ----


@dataclass
class Round:
    place: Place  # before its first row
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
    """(1) to (4): this rank's batches, of `batch` rows each. `places`: behind the batches that were asked for."""

    def __init__(
        self, stream: Any, batch: int, ranks: Ranks, start: Place, num_workers: int = 0, context: Any = None,
        allow_changed: bool = False, device: Any = None,
    ):  # fmt: skip
        count = number_of_readers(stream)
        if start.readers is not None and start.readers != count:  # allow_changed: other shards
            start = replace(start, states=None)
        self.readers, self.start = Readers(stream, count), replace(start, readers=count)
        self.batch, self.ranks, self.allow_changed, self.device = batch, ranks, allow_changed, device
        self.num_workers, self.context = num_workers, context
        self.places: deque[Place] = deque()
        said = describe(stream, count, ranks)
        if said is not None and ranks.rank == 0:
            logger.warning(said)

    def __iter__(self) -> Iterator[list[Dealt]]:
        self.places.clear()
        order = self._order()
        while True:
            found = list(itertools.islice(order, self.batch * self.ranks.shares))
            begun, offset, *_ = found[-1]
            self.places.append(replace(begun, rows=begun.rows + offset, offset=offset))
            yield self._own([(reader, Dealt(begun.rows + i - 1, row)) for begun, i, reader, row in found])

    def _order(self) -> Iterator[tuple[Place, int, int, Any]]:
        """(place before the round, rows of it up to here, reader, row or None) from the start on."""
        start = self.start
        rounds = self._rounds(start)
        one = next(rounds)
        if start.digests is not None and start.states is not None and one.place.digests != start.digests:
            self._say(
                f"the states of the checkpoint lead to other rows than it has used: the first {start.rows} rows of "
                f"epoch {start.epoch} are read again."
            )
            start = replace(start, states=None)
            rounds = self._rounds(start)
            one = next(rounds)
        skipped = start.rows - one.place.rows
        for dealt in itertools.chain([one], rounds):
            before = dealt.place
            if start.digests is not None and (before.epoch, before.round) == (start.epoch, start.round):
                self._compare(before.digests, start)
            for i, (reader, row) in enumerate(dealt.order(), start=1):
                if skipped:
                    skipped -= 1
                else:
                    yield before, i, reader, row

    def _compare(self, digests: Any, start: Place) -> None:
        if digests == start.digests:
            return
        found = f"the rows around row {start.rows} of epoch {start.epoch} are not those of the checkpoint"
        if not self.allow_changed:
            raise UsageError(
                f"the stream can not go on: {found}, so rows would be repeated and others skipped. Restore the data, "
                "or set allow_changed_data=true."
            )
        self._say(f"allow_changed_data: {found}.")

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            logger.warning(text)

    def _rounds(self, start: Place) -> Iterator[Round]:
        everyone = range(self.readers.count)
        if start.states is None:
            start = Place(start.epoch, readers=start.readers)
        sources = self._sources(start)
        place, left = replace(start, rows=start.rows - start.offset, offset=0), list(start.states or everyone)
        while True:
            own = {r: next(sources[r]) for r in left if self.ranks.reads(r)}
            told = self._tell({r: (len(block.rows), block.state, block.digest) for r, block in own.items()})
            lengths = {r: told[r][0] for r in left}
            total = sum(lengths.values())
            place = replace(
                place, states={r: told[r][1] for r in left}, digests={r: told[r][2] for r in left}
            )  # fmt: skip
            if total:
                yield Round(place, {r: block.rows for r, block in own.items()}, lengths)
            place = replace(place, rows=place.rows + total, round=place.round + 1)
            left = [r for r in left if lengths[r] == self.readers.block_rows]
            if not left:
                if place.rows == 0:
                    raise UsageError("the training stream has no rows. Look at the dataset and its filters.")
                place, left = Place(place.epoch + 1, readers=place.readers), list(everyone)

    def _sources(self, start: Place) -> dict[int, Iterator[Block]]:
        """reader -> what gives its blocks: this process, or with loader workers as many processes that read ahead."""
        own = [r for r in range(self.readers.count) if self.ranks.reads(r)]
        if not self.num_workers:
            return dict.fromkeys(own, iter(Blocks(self.readers, own, start)))
        found: dict[int, Iterator[Block]] = {}
        for i in range(min(self.num_workers, len(own))):
            part = own[i :: self.num_workers]
            loader = DataLoader(
                Blocks(self.readers, part, start), batch_size=None, collate_fn=_as_it_is, num_workers=1,
                prefetch_factor=max(2, len(part)), multiprocessing_context=self.context, generator=torch.Generator(),
            )  # fmt: skip
            found |= dict.fromkeys(part, iter(loader))
        return found

    def _tell(self, own: dict[int, Any]) -> dict[int, Any]:
        if self.ranks.processes == 1:
            return own
        everyone: list[Any] = [None] * self.ranks.processes
        dist.all_gather_object(everyone, own)
        return {reader: fact for facts in everyone for reader, fact in facts.items()}

    def _own(self, batch: list[tuple[int, Dealt]]) -> list[Dealt]:
        """(4) of a global batch, whose rows are here where this rank reads them."""
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


def exchange_rows(to_send: list[list], device: Any) -> list[list]:
    """What this rank has for each rank -> what each has for this one."""
    parts = [pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL) for rows in to_send]
    sizes = torch.tensor([len(part) for part in parts], device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    sizes, incoming = sizes.tolist(), incoming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device)
    found = sent.new_empty(sum(incoming))
    dist.all_to_all_single(found, sent, incoming, sizes)
    content, ends = found.cpu().numpy().tobytes(), list(itertools.accumulate(incoming, initial=0))
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
    """Whether a picture, or one of a list, is a path or bytes; a map() of the user's may have decoded it."""
    if isinstance(value, list | tuple):
        return any(_is_stored(one) for one in value)
    return isinstance(value, dict) and {"bytes", "path"} <= value.keys()


def loader(dealer: Dealer, collate: Callable, **options: Any) -> DataLoader:
    return DataLoader(DealtRows(dealer.readers.features), batch_sampler=dealer, collate_fn=collate, **options)


# ---- (6) ----


def save(place: Place, folder: str) -> None:
    Path(folder, FILE).write_text(json.dumps(asdict(place), indent=1), encoding="utf-8")


def load(folder: str) -> Place | None:
    path = Path(folder, FILE)
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if "readers" not in content:
        raise UsageError(
            f"{path} was written by an earlier version, which read a stream in another order. Resume with that "
            "version, or begin the data anew with ignore_data_skip=true."
        )
    by_reader = {
        name: None if content[name] is None else {int(reader): value for reader, value in content[name].items()}
        for name in ("states", "digests")
    }
    return Place(**content | by_reader)
