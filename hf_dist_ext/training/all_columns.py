"""A batch of one rank may lack a column that another rank's has: hard negatives, which none of its rows has.

The rank then gets the column without rows, so that all ranks gather the same columns in the same order, as one process
with the rows of all would see them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from hf_dist_ext.data.tokens import without_rows
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives


def digest(names: Iterable[str]) -> int:
    """One number for the names and their order."""
    content = "\0".join(names).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


def of_all_ranks(names: Iterable[str]) -> list[str]:
    """The names that any rank has, in the order of the rank that has most. Every rank calls it."""
    everyone = [bytes(said).decode() for said in collectives.exchange(list("\0".join(names).encode()))]
    of_ranks = [said.split("\0") if said else [] for said in everyone]
    return list(dict.fromkeys(name for own in sorted(of_ranks, key=len, reverse=True) for name in own))


def completed(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch with the columns of all ranks. Every rank calls it. A column that no row here has is one of negatives,
    which are read as positives are.

    Raises:
        UsageError: the ranks have other anchors or positives.
    """
    pairs, names, found = of_all_ranks(list(batch)[:2]), of_all_ranks(batch), dict(batch)
    if len(pairs) > 2:
        raise UsageError(
            f"the batches of the processes have other columns: {list(batch)} here, {names} together. The first two, "
            "anchor and positive, must be the same on all of them. Give every row the same columns, in one order."
        )
    for name in names:
        if name not in batch:
            found[name] = without_rows(batch[list(batch)[-1]])
    return type(batch)({name: found[name] for name in names})
