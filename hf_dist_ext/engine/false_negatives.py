"""Which pairs of a row and a candidate are no negatives, since their texts say so: equal ids, column by column.

Comparing every row with every candidate costs as much memory traffic as scoring them, and the default order of rows
keeps equal texts out of a batch. So a step asks once, before its first forward, which ids repeat at all (`RowIds`),
and the loss compares those alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from hf_dist_ext.errors import UsageError

Keys = list[list[tuple[Tensor, Tensor]]]  # of `keys_of`
GROUP = "group"


class RowIds(dict[str, Tensor]):
    """Ids of all rows, column -> (N,), beside which the device is asked what repeats.

    Args:
        columns: of the batch, in order: anchors, positives, hard negatives.

    Make it before the device is given much to do: `repeating` waits for what was in its queue until then.
    """

    def __init__(self, ids: Mapping[str, Tensor], columns: Sequence[str]):
        super().__init__(ids)
        anchor, positive, *negatives = columns if len(columns) > 1 else (*columns, "")
        found = {name: _has_repeats(ids[name]) for name in (anchor, positive, GROUP) if name in ids}
        for negative in negatives if positive in ids else ():
            if negative in ids:
                found[negative] = _have_common(ids[positive], ids[negative])
        self._names, self._arrived, self._flags = list(found), None, torch.zeros(0)
        if not found:
            return
        flags = torch.stack(list(found.values()))
        self._flags = flags.to("cpu", non_blocking=True)  # pinned memory, where it comes from CUDA
        if flags.device.type != "cpu":
            self._arrived = torch.Event(flags.device)
            self._arrived.record()

    @cached_property
    def repeating(self) -> frozenset[str]:
        """Keys whose ids two rows have in common; hard negatives that have an id of the positives."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return frozenset(name for name, repeats in zip(self._names, self._flags.tolist(), strict=True) if repeats)


def _has_repeats(values: Tensor) -> Tensor:
    ordered = values.sort().values
    return (ordered[1:] == ordered[:-1]).any()


def _have_common(some: Tensor, others: Tensor) -> Tensor:
    if not len(some):
        return torch.zeros((), dtype=torch.bool, device=some.device)
    ordered = some.sort().values
    return (ordered[torch.searchsorted(ordered, others).clamp(max=len(some) - 1)] == others).any()


def keys_of(columns: list[str], heights: Mapping[str, int], ids: Mapping[str, Tensor], dtype: torch.dtype) -> Keys:
    """Per column of candidates the pairs (key of each of the N rows, key of each candidate); any in common masks.
    [] where nothing can be masked.

    heights: all ranks' rows of every column of candidates; anchors and groups are as many as positives.
    """
    anchor, positive, *negatives = columns
    for name, values in ids.items():
        if name not in (*columns, GROUP):
            raise UsageError(f"ids has {name!r}, which is no column. Give ids of {', '.join(columns)} or 'group'.")
        num_rows = heights[positive if name in (anchor, GROUP) else name]
        if values.shape != (num_rows,):
            raise UsageError(f"ids[{name!r}] has the shape {tuple(values.shape)}. Give one id per row: ({num_rows},).")
    masking = ids.repeating if isinstance(ids, RowIds) else ids.keys()
    names = dict.fromkeys(name for name in (anchor, positive, GROUP) if name in masking)
    keys = [[(rank, rank) for name in names for rank in _ranks([ids[name]], dtype)]]
    for negative in negatives:
        keys.append([])
        if positive in ids and negative in masking:
            of_positives, of_negatives = _ranks([ids[positive], ids[negative]], dtype)
            keys[-1].append((of_positives, of_negatives))
    return keys if any(keys) else []


def _ranks(ids: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Whole numbers, equal where the ids are, small enough to be floats, which compare fastest."""
    values = torch.cat(ids)
    assert values.shape[0] <= 2**24, f"float32 cannot tell {values.shape[0]} ids apart"
    ordered, order = values.sort()
    rank = torch.zeros_like(values)
    rank[1:] = (ordered[1:] != ordered[:-1]).cumsum(dim=0)  # torch.unique would wait for the device to learn its size
    return list(torch.empty_like(rank).scatter_(0, order, rank).to(dtype).split([len(part) for part in ids]))
