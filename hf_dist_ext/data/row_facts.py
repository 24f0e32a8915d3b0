"""What a batch is made of: columns of features, and what travels with their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hf_dist_ext.data.collator import CONSTANTS, CUTS, RESERVED
from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.data.order import StandIn
from hf_dist_ext.errors import UsageError

NOT_OF_LOSS = ("row", SOURCE)  # of a batch's ids: for reports


class RowFacts(NamedTuple):
    """What travels with the rows of a batch and never reaches the model.

    ids: column -> (rows,) integers that are equal where texts are.
    targets: what the loss compares with: "label" -> (B, ...), or column -> (rows of that column, ...).
    """

    ids: Mapping[str, torch.Tensor] | None
    targets: Mapping[str, torch.Tensor]
    source: str | None = None  # of the batch, where there are several
    cuts: Any = None  # training/ahead.py's Cuts, where the batch was cut when it was made
    constants: Mapping[str, Mapping[str, Any]] = {}  # column -> what the model is told of it beside features


def split(inputs: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, torch.Tensor]], RowFacts]:
    """The batch's columns, and the reserved `ids` and `targets`."""
    if not isinstance(inputs, Mapping) or not all(isinstance(value, Mapping) for value in inputs.values()):
        raise UsageError(
            "with a loss over embeddings a batch is a mapping column -> features, e.g. "
            f'{{"query": {{"input_ids": ...}}, "positive": {{...}}}}; got {_shape_of(inputs)}. '
            "Use hf_dist_ext.data.ContrastiveCollator."
        )
    columns = {name: features for name, features in inputs.items() if name not in RESERVED}
    columns = StandIn(columns) if isinstance(inputs, StandIn) else columns
    if not columns:
        raise UsageError(f"a batch needs a column of features, got only {list(inputs)}.")
    ids = inputs.get("ids")
    source = (ids or {}).get(SOURCE)
    ids = ids if ids is None else {name: values for name, values in ids.items() if name not in NOT_OF_LOSS}
    cuts, constants = inputs.get(CUTS, {}).get("all"), inputs.get(CONSTANTS) or {}
    return columns, RowFacts(ids, inputs.get("targets") or {}, source, cuts, constants)


def _shape_of(inputs: Any) -> str:
    return f"keys {list(inputs)}" if isinstance(inputs, Mapping) else type(inputs).__name__
