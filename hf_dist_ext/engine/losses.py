"""Losses over embeddings: no collectives, no rank, no model. `loss(own, everyone, row_offset, ids) -> LossOutput`.

The one thing to know: a loss is the mean over this rank's OWN rows, scored against everyone's. The caller gathers
(differentiably) and weighs the ranks; the loss only reads what it is given. Any callable of this signature will do.

(1) check the columns: anchor, positive, then any hard negatives
(2) turn ids into keys, per column of candidates: rows and candidates that share one are no negatives
    (engine/false_negatives.py)
(3) hand over to engine/tiled_infonce.py, which computes loss and gradient tile by tile
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from hf_dist_ext import policy
from hf_dist_ext.engine.false_negatives import Keys, keys_of
from hf_dist_ext.engine.tiled_infonce import MASKED, Direction, InfoNCESetup, tiled_infonce
from hf_dist_ext.errors import UsageError

MAX_INVERSE_TEMPERATURE = 100.0  # CLIP's bound (https://huggingface.co/papers/2103.00020, section 2.5)


class LossOutput(NamedTuple):
    loss: Tensor  # scalar, the mean over this rank's own rows
    metrics: dict[str, Tensor]  # detached scalars, means over the same rows


def as_output(returned: Any) -> LossOutput:
    """What a loss returned: a tensor, or a pair with its metrics."""
    return LossOutput(*returned) if isinstance(returned, tuple) else LossOutput(returned, {})


class InfoNCELoss(nn.Module):
    """InfoNCE (https://huggingface.co/papers/1807.03748) with in-batch and hard negatives over columns of embeddings.

    The first column holds the anchors, the second their positives (row i belongs to row i), every further column hard
    negatives, in any number. An anchor's candidates are everyone's positives and everyone's hard negatives.

    Args:
        temperature: divides the similarities.
        learnable_temperature: trains `log_inverse_temperature` (one element, float32), from log(1 / temperature).
            Every call first holds it within [0, log 100], CLIP's bounds: a temperature from 0.01 to 1.
        symmetric: also scores own positives against everyone's anchors; the loss is the mean of both directions. Hard
            negatives do not join the reverse direction: they are nobody's positive, so they have no anchor to find.
        matryoshka_dims: the loss is the weighted sum of the whole loss, margin included, on the first d dimensions,
            normalised again, for each d listed, as in sentence-transformers' MatryoshkaLoss. The full width counts
            only if it is listed. Metrics are those of the widest listed.
        matryoshka_weights: of each of `matryoshka_dims`; None: 1 each.
        mask_false_negatives: with `ids`, leaves out of anchor i's sum every candidate, other than its own positive,
            that has the text of i's positive, or is the positive of a row with i's anchor text or i's group. The
            reverse direction leaves out the same pairs.
        false_negative_margin: leaves out every candidate more similar than (i's positive - margin). Which ones is a
            constant of the gradient. None = off.
        in_batch_negatives: false leaves an anchor its own positive and its own hard negatives as candidates: of K B
            rows in a further column, rows K i to K i + K - 1. Nothing is gathered.
        cross_device_negatives: whether the trainer passes all ranks' embeddings as `everyone`; not read here.
        normalize: L2-normalise here, which is harmless when the embeddings are normalised already. A vector of zeros
            stays zeros and gets no gradient: it has no direction to turn.
        rows_per_tile: memory is at most 4 buffers of this times the candidates. None: 512 on a CPU (fastest or within
            2 % of it at 2,048 to 16,384 rows of width 128 to 768), else 1024; fewer where the buffers would take more
            than policy.LOSS_TILE_BYTES.
        candidates_per_tile: so many at a time should fit the cache. None: 512 on a CPU, else whole columns (chosen,
            not measured).
    """

    def __init__(
        self,
        temperature: float = 0.05,
        learnable_temperature: bool = False,
        symmetric: bool = False,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        mask_false_negatives: bool = True,
        false_negative_margin: float | None = None,
        cross_device_negatives: bool = True,
        normalize: bool = True,
        rows_per_tile: int | None = None,
        candidates_per_tile: int | None = None,
        in_batch_negatives: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise UsageError(f"temperature={temperature} must be a positive number, for example 0.05.")
        if learnable_temperature and not 1 / MAX_INVERSE_TEMPERATURE <= temperature <= 1:
            raise UsageError(
                f"learnable_temperature=true holds the temperature within 0.01 to 1, so temperature={temperature} "
                "cannot be its start. Start inside, or keep it fixed."
            )
        if false_negative_margin is not None and not math.isfinite(false_negative_margin):
            raise UsageError(f"false_negative_margin={false_negative_margin} must be a number, or None for off.")
        for name, size in (("rows_per_tile", rows_per_tile), ("candidates_per_tile", candidates_per_tile)):
            if size is not None and size < 1:
                raise UsageError(f"{name}={size} must be at least 1, or None for the default.")
        of_batch = {
            "symmetric": symmetric, "rows_per_tile": rows_per_tile, "candidates_per_tile": candidates_per_tile,
        }  # fmt: skip
        if not in_batch_negatives and (useless := {name: value for name, value in of_batch.items() if value}):
            name, value = useless.popitem()
            raise UsageError(
                f"{name}={value} is about scores against other rows, and in_batch_negatives=false computes none. "
                "Remove one of them."
            )
        self.symmetric = symmetric
        self.in_batch_negatives = in_batch_negatives
        self.matryoshka = _matryoshka(matryoshka_dims, matryoshka_weights, normalize)
        self.mask_false_negatives = mask_false_negatives
        self.false_negative_margin = false_negative_margin
        self.cross_device_negatives = cross_device_negatives and in_batch_negatives
        self.normalize = normalize
        self.rows_per_tile = rows_per_tile
        self.candidates_per_tile = candidates_per_tile
        self.fixed_temperature = None if learnable_temperature else temperature
        # One element, not zero dimensions: FSDP cannot shard a 0-D parameter.
        start = torch.tensor([-math.log(temperature)], dtype=torch.float32)
        self.log_inverse_temperature = nn.Parameter(start) if learnable_temperature else None

    @property
    def takes_negatives_as_columns(self) -> bool:
        """Whether it must know whose a negative is, so that every row needs as many."""
        return not self.in_batch_negatives

    @property
    def temperature(self) -> float:
        """In use now. A learnable one is read back from its device; the metric "temperature" is not."""
        if self.fixed_temperature is not None:
            return self.fixed_temperature
        assert self.log_inverse_temperature is not None
        return math.exp(-min(max(self.log_inverse_temperature.item(), 0.0), math.log(MAX_INVERSE_TEMPERATURE)))

    def forward(
        self,
        own: Mapping[str, Tensor],
        everyone: Mapping[str, Tensor] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """The loss, and as metrics accuracy, masked_share, positive_similarity and temperature.

        own: column -> (rows, D); everyone: column -> (all rows, D) in rank order, None = own. Own row i is everyone's
        row row_offset + i. ids: column -> (all rows,) integers, equal where texts are, and perhaps "group" -> (N,).
        Gradients reach own through the rows' role and everyone through the candidates'. bf16 and fp16 are computed and
        accumulated in float32, under autocast too.
        """
        everyone = own if everyone is None else everyone
        columns = checked_columns(own, everyone, row_offset, self.symmetric or everyone is own)  # (1)
        rows = own[columns[0]]
        if self.matryoshka is not None and self.matryoshka[0][0] > rows.shape[1]:
            raise UsageError(
                f"matryoshka_dims lists {self.matryoshka[0][0]}, but the embeddings have {rows.shape[1]} dimensions. "
                f"List dimensions up to {rows.shape[1]}."
            )
        candidates = columns[1:]
        dtypes = [own[name].dtype for name in columns] + [everyone[name].dtype for name in candidates]
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        heights = {name: len(everyone[name]) for name in candidates}
        keys = keys_of(columns, heights, ids, dtype) if ids and self.mask_false_negatives else []  # (2)
        inverse_temperature = self._inverse_temperature(dtype, rows.device)
        if not self.in_batch_negatives:
            loss, metrics = self._scored_by_row(own, columns, row_offset, keys, inverse_temperature)
        else:
            loss, metrics = self._scored(own, everyone, columns, row_offset, keys, inverse_temperature)
        names = ("accuracy", "masked_share", "positive_similarity")
        temperature = inverse_temperature.detach().reciprocal().squeeze(0)
        return LossOutput(loss, {**dict(zip(names, metrics.unbind(), strict=True)), "temperature": temperature})

    def _scored(
        self,
        own: Mapping[str, Tensor],
        everyone: Mapping[str, Tensor],
        columns: list[str],
        row_offset: int,
        keys: Keys,
        inverse_temperature: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Loss and metrics (3,) of own rows against the columns of all."""
        anchor, positive, *negatives = columns
        embeddings: list[Tensor] = []
        candidates = tuple(_index_of(everyone[column], embeddings) for column in (positive, *negatives))
        directions = [Direction(_index_of(own[anchor], embeddings), candidates)]
        if self.symmetric:
            candidates = (_index_of(everyone[anchor], embeddings),)
            directions.append(Direction(_index_of(own[positive], embeddings), candidates))
        on_cpu, item = own[anchor].device.type == "cpu", inverse_temperature.dtype.itemsize
        num_candidates = max(sum(embeddings[i].shape[0] for i in direction.candidates) for direction in directions)
        most_rows = 512 if on_cpu else policy.LOSS_TILE_ROWS
        fitting_rows = self.rows_per_tile or policy.loss_tile_rows(num_candidates, most_rows, item)
        plan = InfoNCESetup(
            directions=directions,
            prefixes=self.matryoshka or [(own[anchor].shape[1], 1.0)],
            keys=keys,
            row_offset=row_offset,
            margin=self.false_negative_margin,
            normalize=self.normalize,
            rows_per_tile=fitting_rows,
            candidates_per_tile=self.candidates_per_tile or (512 if on_cpu else None),
        )
        return tiled_infonce(plan, inverse_temperature, embeddings)  # (3)

    def _scored_by_row(
        self, own: Mapping[str, Tensor], columns: list[str], row_offset: int, keys: Keys, inverse_temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same of own rows against their own positive and hard negatives alone."""
        num_rows = len(own[columns[0]])  # B
        heights = {name: len(own[name]) for name in columns}
        each = [heights[name] // max(num_rows, 1) for name in columns]  # K: of an anchor
        if num_rows and not sum(each[2:]) or [num_rows * of_row for of_row in each] != [*heights.values()]:
            raise UsageError(
                f"in_batch_negatives=false needs hard negatives, as many for every row, and the columns have so many "
                f"rows: {heights}. Add negatives, or set in_batch_negatives=true."
            )
        rows = slice(row_offset, row_offset + num_rows)
        same_text = [torch.zeros(num_rows, k, dtype=torch.bool, device=own[columns[0]].device) for k in each[2:]]
        for mask, pairs in zip(same_text, keys[1:], strict=False):
            for of_rows, of_candidates in pairs:
                mask |= of_rows[rows, None] == of_candidates.view(len(of_rows), -1)[rows]
        loss, metrics = inverse_temperature.new_zeros(()), inverse_temperature.new_zeros(3)
        for position, (dim, weight) in enumerate(self.matryoshka or [(own[columns[0]].shape[1], 1.0)]):
            anchors, *candidates = (
                unit_vectors(own[name][:, :dim], self.normalize, loss.dtype).view(num_rows, k, dim)
                for name, k in zip(columns, each, strict=True)
            )
            scores = (torch.cat(candidates, dim=1) * anchors).sum(dim=2)  # (B, 1 + negatives), the positive first
            masked = torch.cat(same_text, dim=1)
            if self.false_negative_margin is not None:
                masked = masked | (scores[:, 1:] > scores[:, :1] - self.false_negative_margin)
            positives = scores[:, 0] * inverse_temperature
            others = (scores[:, 1:] * inverse_temperature).masked_fill(masked, MASKED)
            loss = loss - weight * logsigmoid(positives - others.logsumexp(dim=1)).sum() / max(num_rows, 1)
            if position == 0:
                is_right, share = (positives[:, None] > others).all(dim=1), masked.to(loss.dtype).mean(dim=1)
                of_each = torch.stack([is_right.to(loss.dtype), share, scores[:, 0].detach()])  # (3, B)
                metrics = of_each.sum(dim=1) / max(num_rows, 1)
        return loss, metrics

    def _inverse_temperature(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(1,), with a graph to the parameter when it is learnable."""
        if self.fixed_temperature is not None:
            return torch.full((1,), 1 / self.fixed_temperature, dtype=dtype, device=device)
        assert self.log_inverse_temperature is not None
        # The parameter itself is held, as in CLIP: clamping in the formula would cut the gradient at the bound, and
        # the temperature could never come back.
        with torch.no_grad():
            self.log_inverse_temperature.clamp_(0.0, math.log(MAX_INVERSE_TEMPERATURE))
        return self.log_inverse_temperature.to(dtype).exp()

    def extra_repr(self) -> str:
        learnable = self.log_inverse_temperature is not None
        return f"temperature={self.temperature:.4g}, learnable_temperature={learnable}, symmetric={self.symmetric}"


def unit_vectors(raw: Tensor, normalize: bool, dtype: torch.dtype) -> Tensor:
    """(rows, d), with a graph; a vector of zeros stays zeros and gets no gradient."""
    raw = raw.to(dtype)
    norm = torch.linalg.vector_norm(raw, dim=1, keepdim=True)
    return raw * torch.where(norm > 1e-12, norm, math.inf).reciprocal() if normalize else raw


def _index_of(embedding: Tensor, embeddings: list[Tensor]) -> int:
    """Its position; a new one is appended. A tensor in two roles is normalised once and has one gradient buffer."""
    for index, known in enumerate(embeddings):
        if known is embedding:
            return index
    embeddings.append(embedding)
    return len(embeddings) - 1


def checked_columns(
    own: Mapping[str, Tensor], everyone: Mapping[str, Tensor], row_offset: int, reads_anchors: bool
) -> list[str]:
    columns = list(own)
    if len(columns) < 2:
        raise UsageError(f"InfoNCE needs an anchor and a positive column, got {columns}. Add the positives.")
    if set(everyone) != set(columns):
        raise UsageError(f"own has the columns {columns}, everyone {list(everyone)}. Pass the same columns in both.")
    anchor, positive = columns[:2]
    width = own[anchor].shape[-1]
    for column in columns:
        # Everyone's anchors are read by the symmetric loss only, and reading a column is what gathers it.
        for rows in (own[column],) if column == anchor and not reads_anchors else (own[column], everyone[column]):
            if rows.ndim != 2 or rows.shape[1] != width:
                raise UsageError(
                    f"column {column!r} has embeddings of shape {tuple(rows.shape)}, {anchor!r} has width {width}. "
                    "Return (rows, dimensions) of one width for every column, by a projection where towers differ."
                )
    for side in (own, everyone) if reads_anchors else (own,):
        if side[anchor].shape[0] != side[positive].shape[0]:
            raise UsageError(
                f"{anchor!r} has {side[anchor].shape[0]} rows, its positives {positive!r} {side[positive].shape[0]}. "
                "Give every anchor one positive."
            )
    own_rows, all_rows = own[anchor].shape[0], everyone[positive].shape[0]
    if not 0 <= row_offset <= all_rows - own_rows:
        raise UsageError(
            f"row_offset={row_offset} puts {own_rows} own rows outside everyone's {all_rows}. "
            "Pass the number of rows on the ranks before this one."
        )
    return columns


def _matryoshka(
    dims: Sequence[int] | None, weights: Sequence[float] | None, normalize: bool
) -> list[tuple[int, float]] | None:
    """(dimensions, weight) widest first."""
    if dims is None:
        if weights is not None:
            raise UsageError(f"matryoshka_weights={list(weights)} needs matryoshka_dims. Give both or neither.")
        return None
    if not normalize:
        raise UsageError(
            "matryoshka_dims normalises every prefix again, normalize=false forbids it. Drop one of them."
        )
    weights = [1.0] * len(dims) if weights is None else list(weights)
    if not dims or len(set(dims)) != len(dims) or min(dims) < 1:
        raise UsageError(f"matryoshka_dims={list(dims)} must be different whole numbers, each at least 1.")
    if len(weights) != len(dims) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise UsageError(
            f"matryoshka_weights={weights} must be one number >= 0 per entry of matryoshka_dims={list(dims)}, "
            "and not all zero."
        )
    return sorted(zip(dims, weights, strict=True), reverse=True)
