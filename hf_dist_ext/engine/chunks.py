"""Tables of sorted rows -> chunks that fit, and embeddings or gradients back to the batch's own order.

(1) engine/layout.py has laid the rows of a batch into tables, one per tower, sorted so that alike rows are neighbours
(2) a table is packed by rows, tokens and image patches; ranks may ask for more chunks than packing needs
(3) a chunk is a slice of a table's rows, trimmed to its own longest one, with the images they own; its features are
    gathered from the collator's tensors when it runs (engine/rows.py). For what is compiled or recorded per shape,
    chunks have few shapes: widths are of few numbers, and rows too, where the last one is repeated for what is missing
(4) what the model returns for the chunks is put back into columns, and gradients are taken apart the same way

Letters: R rows of a table, L its token width, b rows of a chunk, D embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from hf_dist_ext import policy
from hf_dist_ext.engine.packing import PackedTokens
from hf_dist_ext.engine.rows import ChunkOrder, RowFeature, positions_of_edges, positions_of_mask
from hf_dist_ext.errors import UsageError

_REMEDY = (
    "Give DistTrainer the model's processor (processing_class), of whose blank picture the image part is then run, or "
    "use DDP."
)


@dataclass(frozen=True)
class ChunkLimits:
    """What bounds a chunk: rows, tokens (rows x width, padding included), image patches, or nothing (one chunk).

    `packs`: text rows go through the model end to end, without padding, so that tokens are real ones. `has_buckets`:
    padded chunks have few shapes (`bucket`), within the other limits.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    width_multiple: int = 8
    max_patches: int | None = None
    packs: bool = False
    has_buckets: bool = False

    def width(self, tokens: int) -> int:
        """Of a chunk whose longest row has so many tokens."""
        if self.has_buckets:
            return policy.width_in_buckets(tokens, self.width_multiple)
        return -(-max(1, tokens) // self.width_multiple) * self.width_multiple

    def rows(self, rows: int, width: int) -> int:
        """Rows that are computed for so many: with buckets all that fit into a chunk, three fourths of these, a half,
        three eighths, ... and two at least, since a graph for one row is another one."""
        given = (self.max_rows, None if self.max_tokens is None else self.max_tokens // max(1, width))
        bounds = [size for size in given if size is not None]
        if not (self.has_buckets and bounds):
            return rows
        bucket = min(bounds)
        while bucket > 2 and (half := -(-bucket // 2)) >= rows:
            bucket = half
        fourths = -(-3 * bucket // 4)
        return max(rows, fourths if 1 < fourths >= rows else bucket)

    @property
    def is_bounded(self) -> bool:
        return not (self.max_rows is None and self.max_tokens is None and self.max_patches is None)

    def scaled(self, factor: float) -> ChunkLimits:
        """So many times the rows, tokens and patches, rounded down, at least one of each."""
        sizes = {name: getattr(self, name) for name in ("max_rows", "max_tokens", "max_patches")}
        scaled: dict[str, Any] = {name: max(1, int(n * factor)) for name, n in sizes.items() if n is not None}
        return replace(self, **scaled)


@dataclass
class Chunk:
    """Rows that go through the model together.

    `column` is handed to models with one tower per column, else None. An idle chunk repeats a row of the table so
    that a rank without rows left takes part in a collective forward; its embeddings are dropped and its gradient is 0.
    `has_vision`: vision layers run. `width`: tokens of the longest row, padding included where there is any; 0 without
    a token axis. `num_tokens`: of all rows, as they are computed; rows without a token axis. `num_computed`: rows
    that the model computes, those beyond `num_rows` to be dropped. `features` is what the model takes; it is gathered
    anew at every access, so that tokens and pixels exist twice for the running chunk only.
    """

    gather: Callable[[], dict[str, Any]]
    device: torch.device
    width: int
    num_tokens: int
    column: str | None
    table: int
    start: int
    stop: int
    is_idle: bool = False
    has_vision: bool = False
    num_repeated: int = 0  # times the last row stands behind all others

    @property
    def num_computed(self) -> int:
        return self.num_rows + self.num_repeated

    @property
    def features(self) -> dict[str, Any]:
        return self.gather()

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass
class Units:
    """An image key of a table. Its entries stay where the collator put them; chunks gather those of their rows."""

    values: list[Any]  # one tensor (or list of numbers) per column
    places: list[tuple[int, int, int]]  # per sorted row: column's number, first entry, one past the last
    lengths: list[int] | None  # per sorted row: real extent of axis 1
    rounds_length: bool

    def gather(self, rows: Sequence[int], multiple: int) -> Any:
        """Entries of sorted rows, or None where they have none."""
        runs: list[list[int]] = []
        for column, first, last in (self.places[row] for row in rows):
            if runs and runs[-1][0] == column and runs[-1][2] == first:
                runs[-1][2] = last
            elif first < last:
                runs.append([column, first, last])
        if not runs:
            return None
        if isinstance(self.values[0], list):
            return [number for column, first, last in runs for number in self.values[column][first:last]]
        pieces = [self.values[column][first:last] for column, first, last in runs]
        if self.lengths is not None:
            longest = max(self.lengths[row] for row in rows)
            longest = -(-longest // multiple) * multiple if self.rounds_length else longest
            pieces = [piece[:, :longest] for piece in pieces]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


@dataclass
class Table:
    """All rows that go through one tower: those without images first, and in each half the longest first (what does
    not fit fails first). `bounds`: first row and one past the last of every chunk, equal where it is idle."""

    kind: int  # of the rows: tables of one kind reach the same parameters
    columns: list[str]
    places: list[int]  # of the columns in the batch
    row_counts: list[int]
    features: dict[str, RowFeature]
    first_tokens: list[int]  # per column: the table's token at which its own first one stands
    positions: Literal["mask", "edges"] | None  # what position_ids are counted from; None: the model makes its own
    units: dict[str, Units]
    extents: list[tuple[int, int]]  # per sorted row: first real token, one past the last
    patches: list[tuple[int, int]]  # per sorted row: entries, patches in the longest
    num_text_rows: int  # without images
    order: list[int]  # sorted row i is row order[i] of the columns laid end to end
    column: str | None
    width: int
    most_tokens: int | None  # the model's positions
    pads_left: bool
    can_trim: bool
    real_tokens: int
    packed: PackedTokens | None  # None: rows that need their padding
    device: torch.device
    bounds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    def packed_for(self, limits: ChunkLimits) -> PackedTokens | None:
        """The rows without padding, where that is how they are encoded."""
        return self.packed if limits.packs else None

    def window(self, start: int, stop: int, limits: ChunkLimits) -> tuple[int, int]:
        """Token columns [left, right) that rows start..stop need, widened as the limits say where there is room: in
        the table, or with buckets in what the model can read, if a mask tells it what is padding."""
        first = min(first for first, _ in self.extents[start:stop])
        return self._widened(first, max(last for _, last in self.extents[start:stop]), limits)

    def _widened(self, first: int, last: int, limits: ChunkLimits) -> tuple[int, int]:
        if not self.can_trim or self.width == 0:
            return 0, self.width
        width = limits.width(last - first)
        room = self.width
        if limits.has_buckets and "attention_mask" in self.features:  # the batch's own width is any number
            room = width if self.most_tokens is None else max(last - first, self.most_tokens)
        width = min(width, room)
        return (last - width, last) if self.pads_left else (first, first + width)

    def num_repeated(self, start: int, stop: int, limits: ChunkLimits) -> int:
        """Times the last of rows start..stop is repeated. Pictures have sizes of their own, and cost too much."""
        if self.has_vision((start, stop)) or self.packed_for(limits):
            return 0
        left, right = self.window(start, stop, limits)
        return limits.rows(stop - start, right - left) - (stop - start)

    def cost(self, start: int, stop: int, limits: ChunkLimits) -> int:
        """Tokens the chunk computes, padding included (rows when there is no token axis)."""
        if packed := self.packed_for(limits):
            return packed.num_tokens(start, stop)
        left, right = self.window(start, stop, limits)
        return (stop - start + self.num_repeated(start, stop, limits)) * max(1, right - left)

    def num_patches(self, start: int, stop: int) -> int:
        """Image patches the chunk computes, padding included."""
        entries, longest = zip(*self.patches[start:stop], strict=True)
        return sum(entries) * max(longest)

    def pack(self, limits: ChunkLimits) -> None:
        """Without limits all rows are one chunk. Else rows with and without images never share one: text is not padded
        to the length of images, and ranks can agree on the number of chunks of either kind."""
        starts = [0, self.num_text_rows] if limits.is_bounded and 0 < self.num_text_rows < self.num_rows else [0]
        stops = [*starts[1:], self.num_rows]
        self.bounds = [bound for half in zip(starts, stops, strict=True) for bound in self._packed(*half, limits)]

    def _packed(self, begin: int, end: int, limits: ChunkLimits) -> list[tuple[int, int]]:
        """Cut greedily: a chunk closes when the next row would pass a limit. A row beyond a limit is alone."""
        given = (limits.max_rows, limits.max_tokens, limits.max_patches)
        most_rows, most_tokens, most_patches = (math.inf if size is None else size for size in given)
        bounds, start, packed = [], begin, self.packed_for(limits)
        first, last, entries, longest = self.width, 0, 0, 0  # of the open chunk
        for row in range(begin, end):
            (row_first, row_last), (row_entries, row_longest) = self.extents[row], self.patches[row]
            first, last = min(first, row_first), max(last, row_last)
            entries, longest = entries + row_entries, max(longest, row_longest)
            left, right = self._widened(first, last, limits)
            rows = row + 1 - start
            tokens = packed.num_tokens(start, row + 1) if packed else rows * (right - left)
            fits = rows <= most_rows and tokens <= most_tokens and entries * longest <= most_patches
            if row > start and not fits:
                bounds.append((start, row))
                start, first, last, entries, longest = row, row_first, row_last, row_entries, row_longest
        return [*bounds, (start, end)] if end > start else bounds

    def has_vision(self, bound: tuple[int, int]) -> bool:
        return bound[1] > self.num_text_rows

    def split_to(self, num_chunks: int, limits: ChunkLimits, has_vision: bool | None = None) -> None:
        """Halve the costliest chunk until there are num_chunks; past one row per chunk the rest are idle.

        has_vision: count and split the chunks with (without) images only.
        """
        if has_vision and num_chunks and self.num_text_rows == self.num_rows:
            raise UsageError(
                f"columns {self.columns}: another process has rows with images here and this one has none, so they "
                f"can not run the same forwards, which sharded models need. {_REMEDY}"
            )

        def cost(bound: tuple[int, int]) -> int:
            return self.cost(*bound, limits) + self.num_patches(*bound)

        while True:
            own = [b for b in self.bounds if has_vision is None or self.has_vision(b) == has_vision]
            if len(own) >= num_chunks:
                return
            splittable = [bound for bound in own if bound[1] - bound[0] > 1]
            if splittable:
                start, stop = max(splittable, key=cost)
                middle, at = (start + stop) // 2, self.bounds.index((start, stop))
                self.bounds[at : at + 1] = [(start, middle), (middle, stop)]
            elif has_vision is False:
                at = len([bound for bound in self.bounds if not self.has_vision(bound)])
                self.bounds.insert(at, (self.num_text_rows, self.num_text_rows))
            else:
                self.bounds.append((self.num_rows, self.num_rows))

    def runs(self) -> Iterator[tuple[int, int, bool, bool]]:
        """(first row, one past the last, is idle, has images) of every chunk. An idle one repeats the last row of its
        kind, which is the shortest; in a table without text rows, an idle text chunk is a row without its images."""
        for start, stop in self.bounds:
            has_vision = self.has_vision((start, stop))
            if start < stop:
                yield start, stop, False, has_vision
            else:
                last = stop or self.num_rows
                yield last - 1, last, True, has_vision

    def gather(
        self,
        order: ChunkOrder,
        start: int,
        stop: int,
        window: tuple[int, int],
        multiple: int,
        has_vision: bool,
        num_repeated: int,
    ) -> dict[str, Any]:
        """What the model takes for the rows at places start..stop of a chunk order, the last one repeated so often."""
        runs = order.runs(start, stop, num_repeated)
        gathered: dict[str, Any] = {key: feature.gather(runs, *window) for key, feature in self.features.items()}
        if self.positions == "edges":
            gathered["position_ids"] = positions_of_edges(runs, self.first_tokens, *window, self.device)
        elif self.positions == "mask" and not has_vision:
            # What the model gives to all rows of a batch with images; without images it would count from the edge.
            gathered["position_ids"] = positions_of_mask(gathered["attention_mask"])
        if has_vision:
            images = {key: units.gather(order.sorted_rows[start:stop], multiple) for key, units in self.units.items()}
            gathered |= {key: value for key, value in images.items() if value is not None}
        return gathered


class ChunkedBatch:
    """The chunks of one batch. `num_chunks` per table may be raised with `agree` before the first use of `chunks`."""

    def __init__(self, tables: list[Table], limits: ChunkLimits):
        self.tables, self.limits = tables, limits
        self._orders: list[ChunkOrder] | None = None  # made when the bounds are final
        for table in tables:
            table.pack(limits)

    def row_counts(self) -> dict[str, int]:
        """Rows per column, in the order of the batch."""
        columns = [column for t in self.tables for column in zip(t.places, t.columns, t.row_counts, strict=True)]
        return {name: rows for _, name, rows in sorted(columns)}

    def num_chunks(self, by_vision: bool = False) -> list[int]:
        """How many chunks there are. by_vision: without and with images per table, always two numbers per column (0
        where there is no table), for ranks that must run vision layers in the same chunks."""
        if not by_vision:
            return [sum(len(table.bounds) for table in self.tables)]
        seen = [[table.has_vision(bound) for bound in table.bounds] for table in self.tables]
        numbers = [count for has in seen for count in (len(has) - sum(has), sum(has))]
        return numbers + [0] * (2 * len(self.row_counts()) - len(numbers))

    def agree(self, num_chunks: Sequence[int], by_vision: bool = False) -> None:
        """Split further until there are at least the given numbers of chunks (what the slowest rank needs).

        Raises:
            UsageError: by_vision, and this rank has no rows of a kind that another one has.
        """
        assert self._orders is None, "chunks were made before the ranks agreed"
        if not by_vision:
            largest = max(self.tables, key=lambda table: table.num_rows)
            largest.split_to(len(largest.bounds) + num_chunks[0] - self.num_chunks()[0], self.limits)
            return
        if any(num_chunks[2 * len(self.tables) :]):
            raise UsageError(
                f"columns {list(self.row_counts())}: another process has columns with other features (images, or "
                f"padding on another side), so they can not run the same forwards. {_REMEDY}"
            )
        for table, text, images in zip(self.tables, num_chunks[::2], num_chunks[1::2], strict=False):
            table.split_to(text, self.limits, has_vision=False)
            table.split_to(images, self.limits, has_vision=True)

    def chunks(self) -> list[Chunk]:
        return [chunk for index in range(len(self.tables)) for chunk in self._table_chunks(index)]

    @property
    def orders(self) -> list[ChunkOrder]:
        """Per table the order in which chunks hold its rows."""
        if self._orders is None:
            self._orders = [
                ChunkOrder(t.order, t.row_counts, t.bounds, t.device, by_column=t.packed_for(self.limits) is None)
                for t in self.tables
            ]
        return self._orders

    def _table_chunks(self, index: int) -> Iterator[Chunk]:
        own, multiple = self.tables[index], self.limits.width_multiple
        if not own.bounds:
            return  # without rows, and no other process waits for a forward
        source = index if own.num_rows else self._like(own)
        table, order = self.tables[source], self.orders[source]
        for start, stop, is_idle, has_vision in own.runs():
            if source != index:
                start, stop = table.num_rows - 1, table.num_rows
            window, num_repeated = table.window(start, stop, self.limits), table.num_repeated(start, stop, self.limits)
            if packed := table.packed_for(self.limits):
                gather, width = partial(packed.gather, start, stop), max(packed.lengths[start:stop])
            else:
                place = order.sorted_rows.index(start) if is_idle else start
                places = (place, place + stop - start)
                gather = partial(table.gather, order, *places, window, multiple, has_vision, num_repeated)
                width = window[1] - window[0]
            tokens = table.cost(start, stop, self.limits)
            yield Chunk(
                gather, table.device, width, tokens, own.column, index, start, stop, is_idle, has_vision, num_repeated
            )

    def _like(self, empty: Table) -> int:
        """A table whose last row runs idle where other processes have hard negatives and this one has none."""
        keys = empty.features.keys()
        alike = [i for i, table in enumerate(self.tables) if table.num_rows and table.features.keys() == keys]
        if not alike:
            raise UsageError(
                f"columns {empty.columns}: another process has rows here and this one has none, nor rows of another "
                f"column with the features {', '.join(keys)}, so they can not run the same forwards, which sharded "
                "models need. Give every row of a batch a negative, or use DDP."
            )
        return alike[0]

    def to_columns(self, outputs: Sequence[torch.Tensor], chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """Chunk outputs (b, D) -> column -> (rows, D); columns and rows in the order of the batch."""
        columns: dict[str, torch.Tensor] = {}
        for index in range(len(self.tables)):
            own = [o for o, c in zip(outputs, chunks, strict=True) if c.table == index and not c.is_idle]
            columns |= self.table_columns(index, [outputs[0][:0], *own])
        return {name: columns[name] for name in self.row_counts()}  # tables hold them by kind

    def table_columns(self, index: int, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same of one table's chunks, idle ones left out."""
        table, ordered = self.tables[index], torch.cat(list(outputs))  # (R, D) as chunks hold them; R may be 0
        rows = torch.empty_like(ordered).index_copy_(0, self.orders[index].order, ordered)
        return dict(zip(table.columns, rows.split(table.row_counts), strict=True))

    def to_chunks(self, columns: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Column -> (rows, D) -> one (b, D) per chunk; zeros for an idle chunk. The inverse of `to_columns`."""
        sorted_rows = [
            torch.cat([columns[name] for name in table.columns]).index_select(0, order.order)
            for table, order in zip(self.tables, self.orders, strict=True)
        ]
        return [
            sorted_rows[c.table].new_zeros(1, *sorted_rows[c.table].shape[1:])
            if c.is_idle
            else sorted_rows[c.table][c.start : c.stop]
            for c in chunks
        ]

    def count_tokens(self) -> tuple[int, int]:
        """(real tokens, tokens computed with padding) of this rank's batch; from host data, no synchronisation."""
        computed = 0
        for table in self.tables:
            for start, stop, _, _ in table.runs() if table.num_rows else ():
                computed += table.cost(start, stop, self.limits) if table.width else 0
        return sum(table.real_tokens for table in self.tables), computed
