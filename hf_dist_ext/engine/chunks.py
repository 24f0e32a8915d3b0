"""Tables of sorted rows -> chunks that fit, and embeddings or gradients back to the batch's own order.

(1) engine/layout.py has laid the rows of a batch into tables, one per tower, sorted so that alike rows are neighbours
(2) a table is packed by rows, tokens and image patches (engine/tables.py); ranks may ask for more chunks than that
(3) a chunk is a slice of a table's rows, trimmed to its own longest one, with the images they own; its features are
    gathered from the collator's tensors when it runs (engine/rows.py)
(4) what the model returns for the chunks is put back into columns, and gradients are taken apart the same way

What takes time with the number of rows is done once per batch, in numpy, and may be done where the batch is made:

    cuts = lay_out(batch, limits).without_tensors()     # in a loader's worker: numbers of the host alone
    chunked = cuts.of_batch(batch)                      # where the batch has arrived; nothing is read from its device

Letters: R rows of a table, b rows of a chunk, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from hf_dist_ext.engine.flat import unfolded
from hf_dist_ext.engine.packing import PackedTokens
from hf_dist_ext.engine.rows import ChunkOrder, Places, order_of_chunks
from hf_dist_ext.engine.tables import REMEDY, ChunkLimits, Table
from hf_dist_ext.errors import UsageError


@dataclass
class Chunk:
    """Rows start..stop of a table (`source`) that go through the model together.

    `column` is handed to models with one tower per column, else None. An idle chunk repeats a row of the table so that
    a rank without rows left takes part in a collective forward; its embeddings are dropped and its gradient is 0.
    `has_vision`: vision layers run. `width`: tokens of the longest row, padding included where there is any; 0 without
    a token axis. `num_tokens`: of all rows, as they are computed; rows without a token axis. `columns`: whose rows
    these are. `is_full`: whether none of its texts is padded; None: not known, or rows end to end. `window`: its token
    columns. `places`: where its rows stand in the order of all chunks. `features` is what the model takes; it is
    gathered anew at every access, so that tokens and pixels exist twice for the running chunk only.
    """

    gather: Callable[[], dict[str, Any]]
    width: int
    num_tokens: int
    column: str | None
    table: int
    start: int
    stop: int
    is_idle: bool = False
    has_vision: bool = False
    columns: Sequence[str] = ()
    is_full: bool | None = None
    source: int = 0  # the table that its rows are of: another one where an idle chunk's own has none
    window: tuple[int, int] = (0, 0)
    places: Sequence[Places] = ()

    @property
    def features(self) -> dict[str, Any]:
        return self.gather()

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class ChunkedBatch:
    """The chunks of one batch. `num_chunks` per table may be raised with `agree` before the first use of `chunks`.
    `columns`: their features, as `flat.unfolded` names them; all else are numbers of the host."""

    def __init__(self, tables: list[Table], limits: ChunkLimits, columns: Mapping[str, Mapping[str, Any]]):
        self.tables, self.limits, self.columns = tables, limits, columns
        self.bounds = [table.pack(limits) for table in tables]

    def within(self, limits: ChunkLimits) -> ChunkedBatch:
        """The same sorted rows in other chunks."""
        return ChunkedBatch(self.tables, limits, self.columns)

    def without_tensors(self) -> ChunkedBatch:
        """The same cuts, which can not be used before they are those of a batch again. All numbers of the host are
        made: chunks are then made of them in a time that does not depend on the rows."""
        _ = self.cuts
        return self.of_batch({})

    def of_batch(self, batch: Mapping[str, Mapping[str, Any]]) -> ChunkedBatch:
        """The cuts of the batch (column -> features) that they were made of, wherever its tensors are now."""
        made = copy(self)
        made.columns = {name: unfolded(features) for name, features in batch.items()}
        made.bounds = [list(bounds) for bounds in self.bounds]
        if "orders" in vars(self):
            made.orders = [replace(order, device=made.device) for order in self.orders]
        for name in ("_chunks", "_values"):
            vars(made).pop(name, None)
        return made

    @property
    def device(self) -> torch.device:
        values = [value for features in self.columns.values() for value in features.values()]
        return next((value.device for value in values if not isinstance(value, list)), torch.device("cpu"))

    def row_counts(self) -> dict[str, int]:
        """Rows per column, in the order of the batch."""
        columns = [column for t in self.tables for column in zip(t.places, t.columns, t.row_counts, strict=True)]
        return {name: rows for _, name, rows in sorted(columns)}

    def num_chunks(self, by_vision: bool = False) -> list[int]:
        """How many chunks there are. by_vision: without and with images per table, always two numbers per column (0
        where there is no table), for ranks that must run vision layers in the same chunks."""
        if not by_vision:
            return [sum(map(len, self.bounds))]
        tables = zip(self.tables, self.bounds, strict=True)
        seen = [[table.has_vision(bound) for bound in bounds] for table, bounds in tables]
        numbers = [count for has in seen for count in (len(has) - sum(has), sum(has))]
        return numbers + [0] * (2 * len(self.row_counts()) - len(numbers))

    def agree(self, num_chunks: Sequence[int], by_vision: bool = False) -> None:
        """Split further until there are at least the given numbers of chunks (what the slowest rank needs).

        Raises:
            UsageError: by_vision, and this rank has no rows of a kind that another one has.
        """
        assert "_chunks" not in vars(self), "chunks were made before the ranks agreed"
        own = self.num_chunks(by_vision)
        if not any(most > now for most, now in zip(num_chunks, own, strict=True)):
            return
        vars(self).pop("cuts", None)
        vars(self).pop("orders", None)
        if not by_vision:
            table, bounds = max(zip(self.tables, self.bounds, strict=True), key=lambda pair: pair[0].num_rows)
            table.split_to(bounds, len(bounds) + num_chunks[0] - own[0], self.limits)
            return
        if any(num_chunks[2 * len(self.tables) :]):
            raise UsageError(
                f"columns {list(self.row_counts())}: another process has columns with other features (images, or "
                f"padding on another side), so they can not run the same forwards. {REMEDY}"
            )
        tables = zip(self.tables, self.bounds, num_chunks[::2], num_chunks[1::2], strict=False)
        for table, bounds, text, images in tables:
            table.split_to(bounds, text, self.limits, has_vision=False)
            table.split_to(bounds, images, self.limits, has_vision=True)

    def chunks(self) -> list[Chunk]:
        return self._chunks

    @cached_property
    def _chunks(self) -> list[Chunk]:
        return [replace(cut, gather=partial(self._gather, cut)) for cuts in self.cuts for cut in cuts]

    def _gather(self, cut: Chunk) -> dict[str, Any]:
        table, values = self.tables[cut.source], self._values[cut.source]
        if isinstance(values, PackedTokens):
            return values.gather(cut.places)
        order, multiple = self.orders[cut.source], self.limits.width_multiple
        return table.gather(values, order, cut.places, cut.window, multiple, cut.has_vision)

    @cached_property
    def _values(self) -> list[dict[str, list] | PackedTokens]:
        """Per table key -> one value per column, or its rows without padding."""
        found: list[dict[str, list] | PackedTokens] = []
        for table, order in zip(self.tables, self.orders, strict=True):
            keys, packed = (*table.features, *table.units), table.packed_for(self.limits)
            values = {key: [self.columns[name][key] for name in table.columns] for key in keys}
            found.append(values if packed is None else PackedTokens(values, packed, order))
        return found

    @cached_property
    def orders(self) -> list[ChunkOrder]:
        """Per table the order in which chunks hold its rows."""
        return [
            order_of_chunks(t.order, t.row_counts, bounds, self.device)
            for t, bounds in zip(self.tables, self.bounds, strict=True)
        ]

    @cached_property
    def cuts(self) -> list[list[Chunk]]:
        """Every table's chunks, without what gathers their features: numbers of the host."""
        return [list(self._table_cuts(index)) for index in range(len(self.tables))]

    def _table_cuts(self, index: int) -> Iterator[Chunk]:
        own, limits = self.tables[index], self.limits
        if not self.bounds[index]:
            return  # without rows, and no other process waits for a forward
        source = index if own.num_rows else self._like(own)
        table, order = self.tables[source], self.orders[source]
        for start, stop, is_idle, has_vision in own.runs(self.bounds[index]):
            if source != index:
                start, stop = table.num_rows - 1, table.num_rows
            window, tokens = table.window(start, stop, limits), table.cost(start, stop, limits)
            packed = table.packed_for(limits)
            width = packed.width(start, stop) if packed else window[1] - window[0]
            place = int(np.flatnonzero(order.laid == table.order[start])[0]) if is_idle else start
            places = order.places(place, place + stop - start)
            yield Chunk(
                dict,
                width,
                tokens,
                own.column,
                index,
                start,
                stop,
                is_idle,
                has_vision,
                columns=[table.columns[column] for column, *_ in places],
                is_full=None if packed else table.is_full(start, stop, width),
                source=source,
                window=window,
                places=places,
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
        for index, table in enumerate(self.tables):
            own = [o for o, c in zip(outputs, chunks, strict=True) if c.table == index and not c.is_idle]
            ordered = torch.cat([outputs[0][:0], *own])  # (R, D) as chunks hold them; R may be 0
            rows = torch.empty_like(ordered).index_copy_(0, self.orders[index].order.long(), ordered)
            columns |= zip(table.columns, rows.split(table.row_counts), strict=True)
        return {name: columns[name] for name in self.row_counts()}  # tables hold them by kind

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
        cuts = [cuts for table, cuts in zip(self.tables, self.cuts, strict=True) if table.num_rows and table.width]
        return sum(table.real_tokens for table in self.tables), sum(cut.num_tokens for own in cuts for cut in own)

    def costliest(self) -> int:
        """Tokens, padding included, of the chunk that has most."""
        return max(cut.num_tokens for cuts in self.cuts for cut in cuts if not cut.is_idle)
