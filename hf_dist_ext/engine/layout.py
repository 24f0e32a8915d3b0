"""A batch of features (column -> features) -> tables of sorted rows, and these as chunks: `lay_out`.

(1) engine/columns.py brings to the host what must be known: every row's first and last real token, its images
(2) rows of all columns that share a tower are laid into one table, unless tokens have no mask, or rows depend on the
    width of their batch: each column then keeps a table and its width
(3) rows are sorted, those without images first and then by length; engine/chunks.py packs them

Sorting changes which rows share a chunk, never what a row computes: a row's padding is masked, so the embedding is
that of the full batch up to float rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.columns import Column, read_columns
from hf_dist_ext.engine.flat import unfolded
from hf_dist_ext.engine.images import UnitLayout
from hf_dist_ext.engine.packing import PackedRows, can_be_packed
from hf_dist_ext.engine.tables import ChunkLimits, Table, Units


def lay_out(
    batch: Mapping[str, Mapping[str, Any]],
    limits: ChunkLimits,
    *,
    shares_tower: bool = True,
    pad_values: Mapping[str, int] | None = None,
    can_trim: bool = True,
    can_shift: bool = False,
    sort: bool = True,
    model_config: Any = None,
) -> ChunkedBatch:
    """Lay a batch (column -> features) out as tables and pack them into chunks.

    Args:
        limits: rows, tokens and image patches per chunk.
        shares_tower: columns go through the same tower, so their rows may share a chunk; False hands each column's
            name to the model and never mixes columns.
        pad_values: value for new padding per key when columns of different width are laid into one table (0 if unset).
        can_trim: False keeps every row at the batch's width. Models that need it are known by their config
            (engine/families.py, free_width).
        can_shift: the model takes `position_ids` and counts from the left edge without them (rotary decoders), so
            padding on the left may be trimmed as well; the positions rows had are then handed along.
        sort: False keeps the batch's order (rows are then trimmed among their neighbours), except that rows without
            images still come before those with.
        model_config: the transformers config of the model, or column -> config where columns have towers of their own.
            It says how image keys belong to rows, and whether text has a fixed width.

    Raises:
        UsageError: features that are not tensors over the same rows, images that can not be matched to rows.
    """
    groups: list[list[Column]] = []
    batch = {name: unfolded(features) for name, features in batch.items()}
    columns = read_columns(batch, limits.max_patches is not None, model_config)
    for column in columns:
        same = next((g for g in groups if shares_tower and _can_mix(g[0], column, can_trim)), None)
        if same is None:
            groups.append([column])
        else:
            same.append(column)
    tables = [
        _make_table(
            part,
            kind=kind,
            column=None if shares_tower else part[0].name,
            pad_values=pad_values or {},
            can_trim=can_trim and part[0].can_trim,
            can_shift=can_shift,
            sort=sort,
            packs=limits.packs,
        )
        for kind, group in enumerate(groups)
        for part in _unmixed(group, can_trim, can_shift)
    ]
    return ChunkedBatch(tables, limits, batch)


def _can_mix(first: Column, other: Column, can_trim: bool) -> bool:
    """Whether rows of both may stand in one tensor per key: same keys, layouts, dtypes and trailing shapes."""
    if first.free_width != other.free_width or (not can_trim and first.width != other.width):
        return False
    return _kinds(first) == _kinds(other)


def _kinds(column: Column) -> dict[str, Any]:
    """Per key all that must be equal in two columns that share a table."""
    kinds: dict[str, Any] = {}
    for key, (value, layout) in column.rows.items():
        free = (layout.row_axis, layout.token_axis)
        kinds[key] = (layout, value.dtype, [size for axis, size in enumerate(value.shape) if axis not in free])
    for key, (entries, units) in column.units.items():
        shape = (entries.dtype, entries.shape[1:]) if isinstance(entries, torch.Tensor) else None
        kinds[key] = (shape, units.lengths is None, units.rounds_length)
    return kinds


def _unmixed(columns: list[Column], can_trim: bool, can_shift: bool) -> list[list[Column]]:
    first = columns[0]
    # With absolute positions a row padded on the left must stay at its own place in its own width.
    has_left_padding = any(column.has_left_padding for column in columns)
    is_bound_to_place = has_left_padding and not can_shift and not first.counts_positions_from_mask
    # Without a mask the model would read what a narrower column is padded with, and some models read it all the same.
    # Columns of equal widths are apart too, since widths differ between processes, which must have the same tables.
    is_masked = first.free_width is None and "attention_mask" in first.rows
    is_bound_to_width = first.width > 0 and can_trim and not is_masked
    return [[column] for column in columns] if is_bound_to_place or is_bound_to_width else [columns]


def _make_table(
    columns: list[Column],
    *,
    kind: int,
    column: str | None,
    pad_values: Mapping[str, int],
    can_trim: bool,
    can_shift: bool,
    sort: bool,
    packs: bool,
) -> Table:
    width = max(c.width for c in columns)
    row_counts = [c.num_rows for c in columns]
    has_left_padding = any(c.has_left_padding for c in columns)
    pads_left = has_left_padding and all((c.extents[:, 1] == c.width).all() for c in columns)
    counts_from_mask = all(c.counts_positions_from_mask for c in columns)
    can_shift = pads_left and (can_shift or counts_from_mask)
    first_tokens = [width - c.width if pads_left else 0 for c in columns]
    spans = np.concatenate([c.extents for c in columns])  # (R, 2)
    extents = spans + np.repeat(first_tokens, row_counts)[:, None].astype(np.int32)
    lengths = extents[:, 1] - extents[:, 0]
    real_tokens = int(lengths.sum())
    if not can_shift:  # keep every row at its absolute positions: trim on the right only
        extents[:, 0], lengths = 0, extents[:, 1]
    has_vision = np.array([has for c in columns for has in c.has_vision], dtype=bool)
    patches = np.array([of_row for c in columns for of_row in c.patches]) if has_vision.any() else None  # (R, 2)
    keys: list[np.ndarray] = [has_vision]  # the last one decides first
    if sort:
        keys = [*([] if patches is None else [-patches.prod(axis=1)]), -lengths, has_vision]
    order = np.lexsort(keys).astype(np.int32)
    features = {key: layout for key, (_, layout) in columns[0].rows.items()}
    packed = None
    if packs and can_trim and patches is None and all(c.is_dense for c in columns) and can_be_packed(features):
        packed = PackedRows(spans, order)
    positions: Literal["mask", "edges"] | None = None
    if "position_ids" not in features and "attention_mask" in features:
        positions = "mask" if counts_from_mask and has_left_padding else "edges" if can_shift else None
    return Table(
        kind=kind,
        columns=[c.name for c in columns],
        places=[c.place for c in columns],
        row_counts=row_counts,
        features=features,
        pad_values=pad_values,
        first_tokens=first_tokens,
        positions=positions,
        units={key: _make_units([c.units[key][1] for c in columns], row_counts) for key in columns[0].units},
        extents=extents[order],
        patches=None if patches is None else patches[order],
        num_text_rows=int(len(order) - has_vision.sum()),
        order=order,
        column=column,
        width=width,
        pads_left=can_shift,
        can_trim=can_trim,
        real_tokens=real_tokens,
        longest=int(lengths.max(initial=0)),
        has_lengths=width > 0 and int(lengths.sum()) == real_tokens and all(c.is_dense for c in columns),
        packed=packed,
    )


def _make_units(layouts: list[UnitLayout], row_counts: list[int]) -> Units:
    places: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    for number, (layout, num_rows) in enumerate(zip(layouts, row_counts, strict=True)):
        last = 0
        for count in layout.counts or (1,) * num_rows:
            places.append((number, last, last + count))
            last += count
        lengths += layout.lengths or ()
    return Units(places, lengths or None, layouts[0].rounds_length)
