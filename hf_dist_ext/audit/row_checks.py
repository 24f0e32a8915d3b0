"""What an audit (audit.py) says of rows: which rank trains on which."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_dist_ext.data.mixture import Mixture
from hf_dist_ext.data.order import StandIn
from hf_dist_ext.data.row_facts import split
from hf_dist_ext.engine.combined_losses import num_columns_of
from hf_dist_ext.engine.flat import first_rows, num_rows
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.gathering import Rows

Answer = tuple[bool | None, str]  # whether it is right, None: not looked at; and a note


def rows_of_ranks(batches: Sequence[Mapping[str, Any]], ranks: Rows) -> Answer:
    """By their content. No rank trains on the rows of another, but those that share a model."""
    everyone = collectives.everyones([row for batch in batches for row in row_digests(batch)])
    groups, size = ranks.one_of_each(everyone), ranks.shared_by
    if any(rows != everyone[i - i % size] for i, rows in enumerate(everyone)):
        return False, f"ranks that share a model, in groups of {size}, have other rows than each other"
    pairs = [(i, j) for j in range(len(groups)) for i in range(j) if groups[i] and groups[j]]
    same = [f"{i} and {j}" for i, j in pairs if {*groups[i]} <= {*groups[j]} or {*groups[j]} <= {*groups[i]}]
    if same:
        return False, f"ranks (or groups that share a model) {', '.join(same)} train on the same rows"
    return True, f"{' + '.join(str(len(rows)) for rows in groups)} in {len(batches)} micro-batch(es)"


def names_of_datasets(dataset: Any, loss: Any) -> list[str]:
    """As far as they are known; "" stands for all that are not named."""
    return [*(dataset.sources if isinstance(dataset, Mixture) else num_columns_of(loss))]


def other_datasets(batches: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Which of the datasets were not looked at; a batch is of one on every rank."""
    seen = {source for batch in batches if (source := split(batch)[1].source) is not None}
    others = [name for name in names if name not in {one if one in names else "" for one in seen}]
    if not (seen and others):
        return ""
    left = few([name or "all that have no loss of their own" for name in others])
    return f"the rows are of {few(sorted(seen))}; the rows and losses of {left} were not looked at"


def row_digests(batch: Mapping[str, Any]) -> list[str]:
    """One per anchor, of its own features and those of its positive."""
    if isinstance(batch, StandIn):
        return []
    columns = list(split(batch)[0].values())[:2]
    return ["".join(parts) for parts in zip(*map(_digests_of_rows, columns), strict=False)]


def _digests_of_rows(features: Mapping[str, Any]) -> list[str]:
    if "input_ids" in features and features["input_ids"].dim() < 3:
        mask, ids = features.get("attention_mask"), first_rows(features, num_rows(features))
        if mask is not None and mask.shape == features["input_ids"].shape:
            ids = [[i for i, real in zip(*pair, strict=True) if real] for pair in zip(ids, mask.tolist(), strict=True)]
        return [digest_of(torch.tensor(row)) for row in ids]
    tensors = [tensor for tensor in features.values() if isinstance(tensor, torch.Tensor) and tensor.dim()]
    rows = min((len(tensor) for tensor in tensors), default=0)
    return ["".join(digest_of(tensor[i]) for tensor in tensors if len(tensor) == rows) for i in range(rows)]


def digest_of(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def few(names: Iterable[str]) -> str:
    """Three of them at most, and how many more there are."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
