"""A batch of features -> chunks that fit, and embeddings or gradients back to the batch's own order.

(1) rows of all columns that share a tower are laid into one table
(2) every row's real extent (first and last real token) comes to the host, once per batch
(3) rows are sorted by length and packed by rows and/or tokens; ranks may ask for more chunks than packing needs
(4) a chunk is a slice of the sorted table, trimmed to its own longest row
(5) what the model returns for the chunks is put back into columns, and gradients are taken apart the same way

Sorting changes which rows share a chunk, never what a row computes: a row's padding is masked, so the embedding is
that of the full batch up to float rounding. Letters: R rows of a table, L its token width, b rows of a chunk,
D embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .errors import UsageError

# Axis 1 of these is the token axis; they are trimmed together. Everything else is cut along its rows only.
TOKEN_AXIS_KEYS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids", "inputs_embeds", "labels"}
)


@dataclass(frozen=True)
class ChunkLimits:
    """What bounds a chunk: rows, tokens (rows x width, padding included), both, or neither (None, None: one chunk)."""

    max_rows: int | None = None
    max_tokens: int | None = None
    width_multiple: int = 8


@dataclass
class Chunk:
    """Rows that go through the model together.

    `column` is handed to models with one tower per column, else None. An idle chunk repeats a row of the table so
    that a rank without rows left takes part in a collective forward; its embeddings are dropped and its gradient is 0.
    """

    features: dict[str, torch.Tensor]
    column: str | None
    table: int
    start: int
    stop: int
    is_idle: bool = False

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass
class Table:
    """All rows that go through one tower, sorted by length (longest first: what does not fit fails first)."""

    columns: list[str]
    row_counts: list[int]
    features: dict[str, torch.Tensor]  # each (R, ...), sorted
    extents: list[tuple[int, int]]  # per sorted row: first real token, one past the last
    order: torch.Tensor  # (R,) sorted row i is row order[i] of the columns laid end to end
    column: str | None
    width: int
    pads_left: bool
    can_trim: bool
    bounds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    def window(self, start: int, stop: int, multiple: int) -> tuple[int, int]:
        """Token columns [left, right) that rows start..stop need, widened to a multiple where the table has room."""
        first = min(first for first, _ in self.extents[start:stop])
        return self._widened(first, max(last for _, last in self.extents[start:stop]), multiple)

    def _widened(self, first: int, last: int, multiple: int) -> tuple[int, int]:
        if not self.can_trim or self.width == 0:
            return 0, self.width
        width = min(self.width, -(-max(1, last - first) // multiple) * multiple)
        if self.pads_left:
            return max(0, last - width), last
        return first, min(self.width, first + width)

    def cost(self, start: int, stop: int, limits: ChunkLimits) -> int:
        """Tokens the chunk computes, padding included (rows when there is no token axis)."""
        left, right = self.window(start, stop, limits.width_multiple)
        return (stop - start) * max(1, right - left)

    def pack(self, limits: ChunkLimits) -> None:
        """Cut greedily: a chunk closes when the next row would pass a limit. A row longer than max_tokens is alone."""
        self.bounds, start = [], 0
        first, last = self.width, 0  # the open chunk's extent
        for row, (row_first, row_last) in enumerate(self.extents):
            first, last = min(first, row_first), max(last, row_last)
            left, right = self._widened(first, last, limits.width_multiple)
            tokens = (row + 1 - start) * (right - left)
            too_many_rows = limits.max_rows is not None and row - start >= limits.max_rows
            too_many_tokens = limits.max_tokens is not None and tokens > limits.max_tokens
            if row > start and (too_many_rows or too_many_tokens):
                self.bounds.append((start, row))
                start, first, last = row, row_first, row_last
        if self.num_rows > start:
            self.bounds.append((start, self.num_rows))

    def split_to(self, num_chunks: int, limits: ChunkLimits) -> None:
        """Halve the costliest chunk until there are num_chunks; past one row per chunk the rest are idle (empty)."""
        while len(self.bounds) < num_chunks:
            splittable = [bound for bound in self.bounds if bound[1] - bound[0] > 1]
            if not splittable:
                self.bounds.append((self.num_rows, self.num_rows))
                continue
            start, stop = max(splittable, key=lambda bound: self.cost(*bound, limits))
            middle = (start + stop) // 2
            at = self.bounds.index((start, stop))
            self.bounds[at : at + 1] = [(start, middle), (middle, stop)]


class ChunkedBatch:
    """The chunks of one batch. `num_chunks` per table may be raised with `agree` before the first use of `chunks`."""

    def __init__(self, tables: list[Table], limits: ChunkLimits):
        self.tables, self.limits = tables, limits
        for table in tables:
            table.pack(limits)

    def num_chunks(self) -> list[int]:
        """Chunks per table."""
        return [len(table.bounds) for table in self.tables]

    def agree(self, num_chunks: Sequence[int]) -> None:
        """Split further until every table has at least the given number of chunks (what the slowest rank needs)."""
        for table, wanted in zip(self.tables, num_chunks, strict=True):
            table.split_to(wanted, self.limits)

    def chunks(self) -> list[Chunk]:
        return [chunk for index in range(len(self.tables)) for chunk in self._table_chunks(index)]

    def _table_chunks(self, index: int) -> Iterator[Chunk]:
        table = self.tables[index]
        for start, stop in table.bounds:
            is_idle = start == stop
            first, last = (0, 1) if is_idle else (start, stop)
            left, right = table.window(first, last, self.limits.width_multiple)
            features = {
                key: value[first:last, left:right] if _has_token_axis(key, value, table.width) else value[first:last]
                for key, value in table.features.items()
            }
            yield Chunk(features, table.column, index, first, last, is_idle)

    def to_columns(self, outputs: Sequence[torch.Tensor], chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """Chunk outputs (b, D) -> column -> (rows, D) in the batch's order."""
        columns: dict[str, torch.Tensor] = {}
        for index, table in enumerate(self.tables):
            parts = [o for o, c in zip(outputs, chunks, strict=True) if c.table == index and not c.is_idle]
            ordered = torch.cat(parts)  # (R, D) sorted by length
            rows = torch.empty_like(ordered).index_copy_(0, table.order, ordered)
            columns.update(zip(table.columns, rows.split(table.row_counts), strict=True))
        return columns

    def to_chunks(self, columns: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Column -> (rows, D) -> one (b, D) per chunk; zeros for an idle chunk. The inverse of `to_columns`."""
        sorted_rows = [
            torch.cat([columns[name] for name in table.columns]).index_select(0, table.order) for table in self.tables
        ]
        return [
            torch.zeros_like(sorted_rows[c.table][:1]) if c.is_idle else sorted_rows[c.table][c.start : c.stop]
            for c in chunks
        ]

    def count_tokens(self) -> tuple[int, int]:
        """(real tokens, tokens computed with padding) of this rank's batch; from host data, no synchronisation."""
        real = sum(last - first for table in self.tables for first, last in table.extents)
        computed = sum(
            (c.stop - c.start) * c.features["input_ids"].shape[1] for c in self.chunks() if "input_ids" in c.features
        )
        return real, computed


def lay_out(
    batch: Mapping[str, Mapping[str, torch.Tensor]],
    limits: ChunkLimits,
    *,
    shares_tower: bool = True,
    pad_values: Mapping[str, int] | None = None,
    can_trim: bool = True,
    can_shift: bool = False,
    sort: bool = True,
) -> ChunkedBatch:
    """Lay a batch (column -> features) out as tables and pack them into chunks.

    Args:
        limits: rows and tokens per chunk.
        shares_tower: columns go through the same tower, so their rows may share a chunk; False hands each column's
            name to the model and never mixes columns.
        pad_values: value for new padding per key when columns of different width are laid into one table (0 if unset).
        can_trim: False for models that read a fixed position of a fixed width (SigLIP text).
        can_shift: the model takes `position_ids` and counts from the left edge without them (rotary decoders), so
            padding on the left may be trimmed as well; the positions rows had are then handed along.
        sort: False keeps the batch's order (rows are then trimmed among their neighbours).

    Raises:
        UsageError: features that are not tensors over the same rows.
    """
    for column, features in batch.items():
        _check_features(column, features)
    groups: list[list[str]] = []
    for column, features in batch.items():
        same = next((g for g in groups if shares_tower and _can_mix(batch[g[0]], features)), None)
        if same is None:
            groups.append([column])
        else:
            same.append(column)
    extents = _row_extents(batch)
    tables = [
        _make_table(
            names,
            [batch[name] for name in names],
            [extents[name] for name in names],
            column=None if shares_tower else names[0],
            pad_values=pad_values or {},
            can_trim=can_trim,
            can_shift=can_shift,
            sort=sort,
        )
        for part in groups
        for names in _unmixed_when_padded_left(part, extents, batch, can_shift)
    ]
    return ChunkedBatch(tables, limits)


def _unmixed_when_padded_left(
    names: list[str], extents: Mapping[str, list[tuple[int, int]]], batch: Mapping, can_shift: bool
) -> list[list[str]]:
    # With absolute positions a row padded on the left must stay at its own place in its own width.
    has_left_padding = any(first > 0 for name in names for first, _ in extents[name])
    return [[name] for name in names] if has_left_padding and not can_shift else [names]


def _make_table(
    names: list[str],
    parts: list[Mapping[str, torch.Tensor]],
    extents: list[list[tuple[int, int]]],
    *,
    column: str | None,
    pad_values: Mapping[str, int],
    can_trim: bool,
    can_shift: bool,
    sort: bool,
) -> Table:
    widths = [_token_width(part) for part in parts]
    width = max(widths)
    row_counts = [_num_rows(part) for part in parts]
    pads_left = any(first > 0 for part in extents for first, _ in part) and all(
        last == own_width for part, own_width in zip(extents, widths, strict=True) for _, last in part
    )
    rows: list[tuple[int, int]] = []
    for part, own_width in zip(extents, widths, strict=True):
        shift = width - own_width if pads_left else 0
        rows += [(first + shift, last + shift) for first, last in part]
    if not can_shift:  # keep every row at its absolute positions: trim on the right only
        rows = [(0, last) for _, last in rows]
    order = sorted(range(len(rows)), key=lambda i: rows[i][0] - rows[i][1]) if sort else list(range(len(rows)))
    device = next(iter(parts[0].values())).device
    index = torch.tensor(order, device=device)
    is_sorted = order == list(range(len(rows)))
    features = {}
    for key in parts[0]:
        values = [
            _widen(part[key], width - own_width, pads_left, pad_values.get(key, 0))
            if _has_token_axis(key, part[key], own_width)
            else part[key]
            for part, own_width in zip(parts, widths, strict=True)
        ]
        laid = values[0] if len(values) == 1 else torch.cat(values)
        features[key] = laid if is_sorted else laid.index_select(0, index)
    if pads_left and can_shift and "position_ids" not in features and "attention_mask" in features:
        shifts = [width - own for own, count in zip(widths, row_counts, strict=True) for _ in range(count)]
        shift = torch.tensor([shifts[i] for i in order], device=device)
        # The positions every row had in its own width: rotary tables are rounded, so equal distances are not enough.
        features["position_ids"] = (torch.arange(width, device=device) - shift[:, None]).clamp(min=0)
    return Table(
        columns=names,
        row_counts=row_counts,
        features=features,
        extents=[rows[i] for i in order],
        order=index,
        column=column,
        width=width,
        pads_left=pads_left and can_shift,
        can_trim=can_trim,
    )


def _row_extents(batch: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, list[tuple[int, int]]]:
    """First real token and one past the last, per row and column: the only copy to the host this module makes."""
    stacked, places = [], {}
    extents: dict[str, list[tuple[int, int]]] = {}
    for column, features in batch.items():
        width, rows = _token_width(features), _num_rows(features)
        mask = features.get("attention_mask")
        if mask is None or mask.dim() != 2 or width == 0:
            extents[column] = [(0, width)] * rows
            continue
        real = mask != 0  # (R, L)
        position = torch.arange(width, device=mask.device)
        first = torch.where(real, position, width).amin(dim=1)
        last = torch.where(real, position + 1, 0).amax(dim=1)
        empty = last == 0  # a row without a real token keeps its first one, so that it has a shape
        stacked.append(torch.stack([torch.where(empty, 0, first), torch.where(empty, 1, last)], dim=1))
        places[column] = rows
    if stacked:
        on_host = iter(torch.cat(stacked).tolist())
        for column, rows in places.items():
            extents[column] = [tuple(next(on_host)) for _ in range(rows)]
    return extents


def _check_features(column: str, features: Mapping[str, torch.Tensor]) -> None:
    bad = [key for key, value in features.items() if not isinstance(value, torch.Tensor) or value.dim() == 0]
    if bad or not features:
        raise UsageError(
            f"column {column!r}: {bad or 'no features'} can not be cut into chunks; a column is a mapping of tensors "
            "whose first axis is the row."
        )
    rows = {key: value.shape[0] for key, value in features.items()}
    if len(set(rows.values())) > 1:
        raise UsageError(
            f"column {column!r}: its features do not hold the same rows: {rows}. Every tensor's first axis is the row."
        )


def _can_mix(first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether rows of both may stand in one tensor per key: same keys, dtypes and trailing shapes."""
    if first.keys() != other.keys():
        return False
    widths = _token_width(first), _token_width(other)
    return all(
        a.dtype == b.dtype
        and a.dim() == b.dim()
        and (
            a.shape[2:] == b.shape[2:]
            if _has_token_axis(key, a, widths[0]) and _has_token_axis(key, b, widths[1])
            else a.shape[1:] == b.shape[1:]
        )
        for key, a, b in ((key, first[key], other[key]) for key in first)
    )


def _num_rows(features: Mapping[str, torch.Tensor]) -> int:
    return next(iter(features.values())).shape[0]


def _token_width(features: Mapping[str, torch.Tensor]) -> int:
    for key in ("input_ids", "inputs_embeds", "attention_mask"):
        if key in features and features[key].dim() >= 2:
            return features[key].shape[1]
    return 0


def _has_token_axis(key: str, value: torch.Tensor, width: int) -> bool:
    return key in TOKEN_AXIS_KEYS and value.dim() >= 2 and value.shape[1] == width


def _widen(value: torch.Tensor, by: int, on_left: bool, fill: int) -> torch.Tensor:
    if by == 0:
        return value
    padding = value.new_full((value.shape[0], by, *value.shape[2:]), fill)
    return torch.cat([padding, value] if on_left else [value, padding], dim=1)
