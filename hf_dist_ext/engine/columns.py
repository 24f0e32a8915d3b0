"""What the host knows of a batch's columns before they are cut: rows, lengths, and where every feature keeps its rows.

Every column says which small integer tensors it needs the values of, and the values of all columns come to the host in
one copy. Every feature then gets a layout: entries one per row (`RowLayout`), or several (`UnitLayout`, images). A
feature whose rows can not be told without doubt is refused, since a wrong guess would train on mixed-up rows.

Letters: R rows, L token width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_dist_ext.engine import images
from hf_dist_ext.engine.families import free_width
from hf_dist_ext.engine.flat import FlatRows
from hf_dist_ext.engine.images import UnitLayout
from hf_dist_ext.errors import UsageError

# Tokens that nobody attends to and that have a vector all the same, with which ColBERT lengthens its queries.
EXPANSION = "query_expansion_positions"
# Axis 1 of these is the token axis; they are trimmed together. Everything else is cut along its rows only.
TOKEN_AXIS_KEYS = frozenset(
    f"input_ids attention_mask token_type_ids mm_token_type_ids position_ids inputs_embeds labels {EXPANSION}".split()
)


@dataclass(frozen=True)
class RowLayout:
    """A feature with one entry per row: on which axis, and where its tokens are."""

    row_axis: int = 0
    token_axis: int | None = None


@dataclass
class Column:
    """One column's features with their layouts, and what the host knows of its rows."""

    name: str
    place: int  # among the batch's columns
    num_rows: int
    width: int
    extents: np.ndarray  # (R, 2) int32, per row: first real token, one past the last
    is_dense: bool  # every row has real tokens, and no others between them
    rows: dict[str, tuple[torch.Tensor | FlatRows, RowLayout]]
    units: dict[str, tuple[Any, UnitLayout]]
    has_vision: list[bool]  # per row: whether vision layers run for it
    patches: list[tuple[int, int]]  # per row: entries, patches in the longest
    counts_positions_from_mask: bool
    free_width: int | None  # of the model (engine/families.py)
    keeps_width: bool = False  # a feature that nobody here knows is as wide as the tokens, and may be of them

    @property
    def can_trim(self) -> bool:
        return not self.keeps_width and (self.free_width is None or self.width <= self.free_width)

    @property
    def has_left_padding(self) -> bool:
        return bool((self.extents[:, 0] > 0).any())


def read_columns(batch: Mapping[str, Mapping[str, Any]], needs_patches: bool, model_config: Any) -> list[Column]:
    """Arguments as in `lay_out` (engine/layout.py); `batch` as `flat.unfolded` names its features.

    Raises:
        UsageError: features that are not tensors over the same rows, images that can not be matched to rows.
    """
    asked = {
        (name, key): value for name, features in batch.items() for key, value in _questions(name, features).items()
    }
    host: dict[str, dict[str, list]] = {name: {} for name in batch}
    for (name, key), values in zip(asked, _to_host(list(asked.values())), strict=True):
        host[name][key] = values
    return [
        _read_column(place, name, features, _config_of(name, model_config), host[name], needs_patches)
        for place, (name, features) in enumerate(batch.items())
    ]


def _config_of(column: str, model_config: Any) -> Any:
    return model_config.get(column) if isinstance(model_config, Mapping) else model_config


def _questions(name: str, features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Small integer tensors whose values the host must know."""
    _check_features(name, features)
    extents = _row_extents(features)
    return ({} if extents is None else {"extents": extents}) | images.questions(features)


def _read_column(
    place: int,
    name: str,
    features: Mapping[str, Any],
    config: Any,
    host: dict[str, list],
    needs_patches: bool,
) -> Column:
    num_rows, width = _num_rows(features), _token_width(features)
    extents = _known_extents(features, host)
    if extents is None:
        extents = np.tile(np.array([0, width, width > 0], dtype=np.int32), (num_rows, 1))
    column = Column(
        name=name,
        place=place,
        num_rows=num_rows,
        width=width,
        extents=extents[:, :2],
        is_dense=bool(extents[:, 2].all()),
        rows={},
        units={},
        has_vision=[False] * num_rows,
        patches=[(0, 1)] * num_rows,
        counts_positions_from_mask=False,
        free_width=free_width(config),
    )
    vision = None
    if images.has_images(features):
        vision = images.describe(name, features, num_rows, width > 0, config, host)
        if vision.patches is None and needs_patches:
            raise UsageError(
                f"column {name!r}: a limit on image patches needs the patch size, and there is no config with "
                "vision_config.patch_size (or patch_size). Bound chunks by rows instead."
            )
        column.has_vision = vision.has_vision
        column.patches = vision.patches or column.patches
        column.counts_positions_from_mask = vision.counts_positions_from_mask
    for key, value in images.without_counts(features, config).items():
        layout: RowLayout | UnitLayout
        if vision is not None and key in vision.units:
            layout = vision.units[key]
        else:
            layout = _found_layout(column, key, value, vision)
            column.keeps_width |= layout == RowLayout() and value.dim() > 1 and value.shape[1] == width > 0
        if isinstance(layout, RowLayout):
            column.rows[key] = (value, layout)
        else:
            column.units[key] = (value, layout)
    return column


# ---- a layout for every feature ----


def _found_layout(
    column: Column, key: str, value: torch.Tensor, vision: images.Vision | None
) -> RowLayout | UnitLayout:
    num_rows, width = column.num_rows, column.width
    if key == "position_ids" and value.dim() == 3 and value.shape[1:] == (num_rows, width):
        return RowLayout(1, 2)  # one plane per axis of a multimodal rotary embedding
    if key in (*TOKEN_AXIS_KEYS, *images.ROW_KEYS) and value.shape[0] == num_rows:
        return RowLayout(0, 1 if value.dim() >= 2 and value.shape[1] == width else None)
    per_row = {layout.counts for layout in vision.units.values() if layout.counts} if vision else set()
    fitting = {counts for counts in per_row if sum(counts) == value.shape[0]} - {(1,) * num_rows}
    if value.shape[0] == num_rows and not fitting:
        return RowLayout()
    if value.shape[0] != num_rows and len(fitting) == 1:
        return UnitLayout(fitting.pop())
    raise images.cannot_cut(column.name, key, value, num_rows)


def _check_features(column: str, features: Mapping[str, Any]) -> None:
    lists = {*images.ALL_COUNT_NAMES, "second_per_grid_ts"} - {"batch_num_images"}
    bad = [
        key
        for key, value in features.items()
        if not (isinstance(value, torch.Tensor | FlatRows) and value.dim())
        and not (isinstance(value, list) and key in lists)
    ]
    if bad or not any(isinstance(value, torch.Tensor | FlatRows) for value in features.values()):
        raise UsageError(
            f"column {column!r}: {bad or 'no features'} can not be cut into chunks; a column is a mapping of tensors "
            "whose first axis is the row."
        )


def _num_rows(features: Mapping[str, Any]) -> int:
    for key in ("input_ids", "inputs_embeds", "attention_mask"):
        if key in features:
            return features[key].shape[0]
    return next(value for value in features.values() if isinstance(value, torch.Tensor)).shape[0]


def _token_width(features: Mapping[str, Any]) -> int:
    for key in ("input_ids", "inputs_embeds", "attention_mask"):
        if key in features and features[key].dim() >= 2:
            return features[key].shape[1]
    return 0


# ---- values that come to the host ----


def _row_extents(features: Mapping[str, Any]) -> torch.Tensor | None:
    """(R, 3): first real token, one past the last, and whether all between them are real, per row."""
    mask, width = features.get("attention_mask"), _token_width(features)
    if mask is None or mask.dim() != 2 or width == 0 or isinstance(mask, FlatRows):
        return None
    real = mask != 0  # (R, L)
    if EXPANSION in features:
        real |= features[EXPANSION] != 0
    position = torch.arange(width, device=mask.device)
    first = torch.where(real, position, width).amin(dim=1)
    last = torch.where(real, position + 1, 0).amax(dim=1)
    is_dense = real.sum(dim=1) == last - first
    empty = last == 0  # a row without a real token keeps its first one, so that it has a shape
    return torch.stack([torch.where(empty, 0, first), torch.where(empty, 1, last), is_dense], dim=1)


def _known_extents(features: Mapping[str, Any], host: Mapping[str, list]) -> np.ndarray | None:
    """As `_row_extents`, int32: of rows that travelled flat without asking, of others as the host was told."""
    mask = features.get("attention_mask")
    if isinstance(mask, FlatRows):
        return mask.places.extents() if mask.places.width else None
    return np.array(host["extents"], dtype=np.int32).reshape(-1, 3) if host.get("extents") else None


def _to_host(tensors: Sequence[torch.Tensor]) -> list[list]:
    """Values of integer tensors with one or two axes: the only copy from an accelerator that cutting a batch makes."""
    far = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    copied = torch.cat([tensor.reshape(-1).long() for tensor in far]).cpu() if far else torch.empty(0)
    parts = iter(copied.split([tensor.numel() for tensor in far]))
    return [(t if t.device.type == "cpu" else next(parts).view_as(t)).tolist() for t in tensors]
