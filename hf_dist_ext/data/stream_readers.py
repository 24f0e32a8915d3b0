"""The readers of a `datasets` stream and the blocks of rows that they read: (1) and (2) of data/stream_order.py.

What is known of the inside of a `datasets` stream is known here alone: which iterables it is built of, where its
shuffle buffers are, and how a reader gets its share of the shards and a state of its own.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import fsspec.asyn
import numpy as np
import torch
from datasets.features.features import require_decoding
from datasets.iterable_dataset import shift_ex_examples_rngs
from datasets.table import CastError
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as this_worker

from hf_dist_ext.data.columns import refuse_late_columns, refuse_late_type
from hf_dist_ext.data.mixture import MixedStream
from hf_dist_ext.errors import UsageError

MAX_READERS = 32  # open files of one process that trains alone; a machine's 8 GPUs read through 4 each
FIRST_ROWS = 16  # of a source, that ranks compare
ROUND_ROWS = 1024  # that all readers together read ahead, and read again after a resume, without a shuffle buffer


# ---- what a stream is made of ----


def is_stream(dataset: Any) -> bool:
    """Of `datasets`, or several of them."""
    return isinstance(dataset, MixedStream) or hasattr(dataset, "_ex_iterable") and hasattr(dataset, "load_state_dict")


def _parts(node: Any) -> Iterator[Any]:
    """The iterables that a stream is built of, itself first."""
    yield node
    for inner in [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]:
        if inner is not None:
            yield from _parts(inner)


def _is(node: Any, kind: str) -> bool:
    return type(node).__name__ == f"{kind}ExamplesIterable"


def fingerprint(stream: Any) -> str:
    """A digest of what the order depends on and is known without reading: columns, shards, seeds; of all sources."""
    if isinstance(stream, MixedStream):
        facts = [stream.shares, *((name, fingerprint(source)) for name, source in stream.sources.items())]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    generators = [getattr(part, "generator", None) for part in _parts(stream._ex_iterable)]
    seeds = [one.bit_generator.state for one in generators if isinstance(one, np.random.Generator)]
    facts = [sorted(stream.column_names or ()), stream.num_shards, seeds]
    return hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16).hexdigest()


def digests_of_first_rows(stream: Any) -> list[str]:
    """Digests of the rows that its sources begin with, before any buffer shuffles them."""
    sources = [
        part for part in _parts(stream._ex_iterable) if next(itertools.islice(_parts(part), 1, None), None) is None
    ]
    rows = itertools.chain.from_iterable(itertools.islice(copy.copy(source), FIRST_ROWS) for source in sources)
    return [digest([value for value in row.values() if not isinstance(value, dict)]) for _, row in rows]


def number_of_readers(stream: Any) -> int:
    """C. It is 1 where `skip` or `take` count rows over all shards: `datasets` would let each reader count its own."""
    parts = list(_parts(stream._ex_iterable))
    if any(_is(part, "Skip") or _is(part, "Take") for part in parts):
        return 1
    return max(1, min(stream.num_shards, MAX_READERS))


def digest(row: Any) -> str:
    """A digest of a row's content."""
    return hashlib.blake2b(repr(_plain(row)).encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(name), _plain(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if hasattr(value, "tobytes"):  # numpy, PIL
        value = value.tobytes()
    return value if isinstance(value, str | bytes | int | float | None) else type(value).__name__


# ---- readers and their blocks ----


class StreamBlock(NamedTuple):
    reader: int
    state: Any  # what `datasets` says of the reader before it reads the block
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
    """A reader in an epoch, from `state` on; its next block is of round `number`."""

    def __init__(self, readers: Readers, reader: int, epoch: int, number: int, state: Any):
        self.readers, self.reader, self.epoch, self.number, self.state = readers, reader, epoch, number, state
        self.shards, self.rows = None, None

    def block(self) -> StreamBlock:
        before = self.state
        rows = self._read()
        if self.readers.seed is not None:
            seed = (self.readers.seed, self.epoch, self.reader, self.number)
            rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
        self.number += 1
        return StreamBlock(self.reader, before, rows, digest([len(rows), *rows[:1]]))

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
        except CastError as error:
            refuse_late_columns("the stream", error)
        except UnicodeDecodeError as error:  # of a JSON file; one of CSV fails before
            raise UsageError(f"the stream is not UTF-8 text: {error}.") from error
        except TypeError as error:
            refuse_late_type("the stream", error, self.readers.stream.features)
            raise
        finally:
            this_worker._worker_info = info


@dataclass(eq=False)
class Blocks(IterableDataset):
    """The blocks of the readers `own`, in the order in which rounds ask for them, from round `number` of an epoch on.

    `states`: reader -> its state before that round; None: the epoch begins.
    """

    readers: Readers
    own: list[int]
    epoch: int
    number: int
    states: dict[int, Any] | None

    def __iter__(self) -> Iterator[StreamBlock]:
        if get_worker_info() is not None:
            fsspec.asyn.reset_lock()  # as `datasets` does: files over the network would hang in a forked process
        states, number = self.states, self.number
        for epoch in itertools.count(self.epoch):
            states = dict.fromkeys(self.own) if states is None else states
            left = [_Open(self.readers, r, epoch, number, states[r]) for r in self.own if r in states]
            while left:
                for reader in list(left):
                    block = reader.block()
                    if len(block.rows) < self.readers.block_rows:
                        left.remove(reader)
                    yield block
            states, number = None, 0
