"""The cuts of a batch that was cut where it was made, and whose tensors go to another process and device.

cuts = without_tensors(lay_out(batch, limits))     # in a loader's worker: numbers of the host alone
chunked = cuts_of(cuts, batch)                     # where the batch has arrived; nothing is read from its device

The numbers are those of rows, int32 where there is one for every row. What takes time with the number of rows has been
done when they leave; where they arrive they are copied to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.flat import unfolded
from hf_dist_ext.engine.packing import PackedTokens
from hf_dist_ext.engine.tables import Table


def without_tensors(chunked: ChunkedBatch) -> ChunkedBatch:
    """The same cuts, which can not be used before they are those of a batch again."""
    chunked.prepare()
    cpu = torch.device("cpu")
    tables = [_table(table, dict.fromkeys((*table.features, *table.units), []), cpu) for table in chunked.tables]
    return chunked.of_tables(tables)


def cuts_of(chunked: ChunkedBatch, batch: Mapping[str, Mapping[str, Any]]) -> ChunkedBatch:
    """The cuts of the batch (column -> features) that they were made of, wherever its tensors are now."""
    columns = {name: unfolded(features) for name, features in batch.items()}
    values = [
        {key: [columns[name][key] for name in table.columns] for key in (*table.features, *table.units)}
        for table in chunked.tables
    ]
    first, *_ = next(iter(values[0].values()))
    return chunked.of_tables(
        [_table(table, held, first.device) for table, held in zip(chunked.tables, values, strict=True)]
    )


def _table(table: Table, values: Mapping[str, list], device: torch.device) -> Table:
    features = {key: replace(feature, values=values[key]) for key, feature in table.features.items()}
    packed = table.packed and PackedTokens(features, table.packed.rows, device)
    units = {key: replace(units, values=values[key]) for key, units in table.units.items()}
    return replace(table, features=features, units=units, packed=packed, device=device)
