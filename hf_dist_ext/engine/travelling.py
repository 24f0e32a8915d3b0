"""The cuts of a batch that was cut where it was made, and whose tensors go to another process and device.

cuts = without_tensors(lay_out(batch, limits))     # in a loader's worker: numbers of the host alone
chunked = cuts_of(cuts, batch)                     # where the batch has arrived; nothing is read from its device
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_dist_ext.engine.chunks import ChunkedBatch, Table
from hf_dist_ext.engine.flat import unfolded
from hf_dist_ext.engine.packing import PackedTokens


def without_tensors(chunked: ChunkedBatch) -> ChunkedBatch:
    """The same cuts, which can not be used before they are those of a batch again."""
    keys = [(*table.features, *table.units) for table in chunked.tables]
    nothing: list[dict[str, Any]] = [dict.fromkeys(of_table, []) for of_table in keys]
    return _holding(chunked, nothing, torch.device("cpu"))


def cuts_of(chunked: ChunkedBatch, batch: Mapping[str, Mapping[str, Any]]) -> ChunkedBatch:
    """The cuts of the batch (column -> features) that they were made of, wherever its tensors are now."""
    columns = {name: unfolded(features) for name, features in batch.items()}
    values = [
        {key: [columns[name][key] for name in table.columns] for key in (*table.features, *table.units)}
        for table in chunked.tables
    ]
    first, *_ = next(iter(values[0].values()))
    return _holding(chunked, values, first.device)


def _holding(chunked: ChunkedBatch, values: list[dict[str, list]], device: torch.device) -> ChunkedBatch:
    made = copy.copy(chunked)
    made.tables = [_table(table, held, device) for table, held in zip(chunked.tables, values, strict=True)]
    return made


def _table(table: Table, values: Mapping[str, list], device: torch.device) -> Table:
    features = {key: replace(feature, values=values[key]) for key, feature in table.features.items()}
    packed = table.packed and PackedTokens(features, table.packed.spans, table.packed.places, device)
    units = {key: replace(units, values=values[key]) for key, units in table.units.items()}
    return replace(table, features=features, units=units, packed=packed, bounds=list(table.bounds), device=device)
