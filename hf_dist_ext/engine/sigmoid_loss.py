"""SigLIP's sigmoid loss in tiles, gradient included: every pair of a row and a candidate is a question of its own.

For row i and candidate j with similarity c_ij, scale s, bias b, and z_ij = 1 for i's positive, else -1
(https://huggingface.co/papers/2303.15343, section 3.1):

    l_ij = s c_ij + b
    loss_i = - sum over j of log sigmoid(z_ij l_ij)
    dloss_i / dl_ij = sigmoid(l_ij) - [z_ij = 1]

No row needs a sum over its candidates, so a tile is done with at once: loss and gradient are made in the forward pass
(manual_gradient.py). Blocks and normalisation are those of tiled_infonce.py. Candidates go round the processes as
InfoNCE's do (ring.py).

Shapes: B own rows, N all ranks' rows, D embedding, T tile rows, C candidates of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from hf_dist_ext.engine.false_negatives import keys_of
from hf_dist_ext.engine.losses import Exchange, LossOutput, check_exchange, checked_columns, ring_of
from hf_dist_ext.engine.manual_gradient import with_gradients
from hf_dist_ext.engine.matmul import Matmul
from hf_dist_ext.engine.ring import Ring, RingPlan, scored_in_ring
from hf_dist_ext.engine.ring_scores import Sigmoid
from hf_dist_ext.engine.tiled_infonce import Block, compare_keys, gradient_of_raw, normalized
from hf_dist_ext.errors import UsageError


class SigmoidLoss(nn.Module):
    """SigLIP's sigmoid loss (https://huggingface.co/papers/2303.15343, section 3.1) over columns of embeddings.

    Columns are those of `InfoNCELoss`: anchors, their positives, and any hard negatives, which belong to nobody.

    Args:
        scale: s at the start; the paper's value.
        bias: b at the start; the paper's value.
        learnable: trains `log_scale` and `bias` (one element each, float32).
        mask_false_negatives: with `ids`, leaves out the pairs that `InfoNCELoss` leaves out.
        normalize: L2-normalise here.
        rows_per_tile: memory is a few buffers of this times `candidates_per_tile`.
        candidates_per_tile: see `rows_per_tile`.
        cross_device_exchange: of `InfoNCELoss`.
    """

    def __init__(
        self,
        scale: float = 10.0,
        bias: float = -10.0,
        learnable: bool = True,
        mask_false_negatives: bool = True,
        normalize: bool = True,
        rows_per_tile: int = 512,
        candidates_per_tile: int = 2048,
        cross_device_exchange: Exchange = "auto",
    ) -> None:
        super().__init__()
        if not 0 < scale < math.inf or not math.isfinite(bias):
            raise UsageError(f"scale={scale} must be a positive number and bias={bias} a number, such as 10 and -10.")
        if min(rows_per_tile, candidates_per_tile) < 1:
            raise UsageError(f"rows_per_tile={rows_per_tile}, candidates_per_tile={candidates_per_tile}: at least 1.")
        check_exchange(cross_device_exchange)
        self.cross_device_exchange = cross_device_exchange
        self.mask_false_negatives, self.normalize = mask_false_negatives, normalize
        self.rows_per_tile, self.candidates_per_tile = rows_per_tile, candidates_per_tile
        self.tile_halvings = 0  # of a tile's rows, after a lack of memory
        # One element, not zero dimensions: FSDP cannot shard a 0-D parameter.
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)]), requires_grad=learnable)
        self.bias = nn.Parameter(torch.tensor([float(bias)]), requires_grad=learnable)

    def forward(
        self,
        own: Mapping[str, Tensor],
        everyone: Mapping[str, Tensor] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """The loss, and as metrics accuracy, masked_share, positive_similarity, scale and bias. Arguments and dtypes
        as of `InfoNCELoss`."""
        everyone = own if everyone is None else everyone
        if ring := ring_of(self.cross_device_exchange, own, everyone):
            return self._in_ring(own, ring, ids)
        anchor, *candidates = names = checked_columns(own, everyone, row_offset, everyone is own)
        rows, columns = own[anchor], [everyone[name] for name in candidates]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        heights = dict(zip(candidates, map(len, columns), strict=True))
        plan = _SigmoidSetup(
            keys=keys_of(names, heights, ids, dtype) if ids and self.mask_false_negatives else [],
            row_offset=row_offset,
            normalize=self.normalize,
            rows_per_tile=max(1, self.rows_per_tile >> self.tile_halvings),
            candidates_per_tile=self.candidates_per_tile,
        )
        scale, bias = self.log_scale.to(dtype).exp(), self.bias.to(dtype)
        made = partial(_loss_and_gradients, plan)
        return self._output(*with_gradients("SigmoidLoss", made, scale, bias, rows, *columns), scale, bias)

    def _in_ring(self, own: Mapping[str, Tensor], ring: Ring, ids: Mapping[str, Tensor] | None) -> LossOutput:
        """The same where candidates go round."""
        names = checked_columns(own, own, 0, reads_anchors=True)
        dtype = torch.promote_types(own[names[0]].dtype, torch.float32)
        counts = [ring.counts[name] for name in names]
        heights = dict(zip(names, map(sum, counts), strict=True))
        plan = RingPlan(
            score=Sigmoid(),
            ring=ring,
            counts=counts,
            is_symmetric=False,
            prefixes=[(own[names[0]].shape[1], 1.0)],
            keys=keys_of(names, heights, ids, dtype) if ids and self.mask_false_negatives else [],
            margin=None,
            normalize=self.normalize,
            tile=(max(1, self.rows_per_tile >> self.tile_halvings), self.candidates_per_tile),
            matmul=Matmul(),
        )
        scale, bias = self.log_scale.to(dtype).exp(), self.bias.to(dtype)
        return self._output(*scored_in_ring(plan, scale, bias, plan.own_rows(own, names)), scale, bias)

    def _output(self, loss: Tensor, metrics: Tensor, scale: Tensor, bias: Tensor) -> LossOutput:
        of_rows = dict(zip(("accuracy", "masked_share", "positive_similarity"), metrics.unbind(), strict=True))
        return LossOutput(loss, of_rows | {"scale": scale.detach().squeeze(0), "bias": bias.detach().squeeze(0)})

    def extra_repr(self) -> str:
        return f"scale={self.log_scale.exp().item():.4g}, bias={self.bias.item():.4g}"


class _SigmoidSetup(NamedTuple):
    keys: list[list[tuple[Tensor, Tensor]]]  # per column of candidates: (key of each of N rows, key of each candidate)
    row_offset: int  # own row i's positive is candidate row_offset + i of the first column
    normalize: bool
    rows_per_tile: int
    candidates_per_tile: int


def _loss_and_gradients(
    plan: _SigmoidSetup, scale: Tensor, bias: Tensor, rows: Tensor, *columns: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Loss, metrics (3,) and the gradients of scale, bias, rows and columns."""
    num_rows, needs_gradients = len(rows), any(needs)
    units = [normalized(e, plan.normalize, scale.dtype) for e in (rows, *columns)]
    (unit_rows, _), *unit_columns = units
    buffers = [torch.zeros_like(unit) for unit, _ in units] if needs_gradients else []
    loss, metrics = scale.new_zeros(()), scale.new_zeros(3)
    of_scale, of_bias = torch.zeros_like(scale), torch.zeros_like(bias)
    for start in range(0, num_rows, plan.rows_per_tile):
        tile = slice(start, min(start + plan.rows_per_tile, num_rows))
        first = plan.row_offset + start  # the candidate that is the positive of the tile's first row
        of_tile = unit_rows[tile]  # (T, D)
        positives = (of_tile * unit_columns[0][0][first : first + len(of_tile)]).sum(dim=1)  # (T,)
        highest = torch.full_like(positives, -math.inf)  # of the other candidates
        for column, (unit, _) in enumerate(unit_columns):
            for low in range(0, len(unit), plan.candidates_per_tile):
                candidates = slice(low, min(low + plan.candidates_per_tile, len(unit)))
                similarity = of_tile @ unit[candidates].T  # (T, C)
                logits = Block(column, low, candidates.stop, similarity * scale + bias)
                own, entries = logits.positives(first)
                terms = softplus(logits.values)
                gradient = torch.sigmoid(logits.values)
                logits.positives(first)[1].fill_(-math.inf)  # no other candidate of its row
                if plan.keys:
                    mask = Block(column, low, candidates.stop, torch.empty_like(similarity))
                    compare_keys(mask, plan.keys[column], first)
                    terms *= 1 - mask.values
                    gradient *= 1 - mask.values
                    logits.values.masked_fill_(mask.values > 0, -math.inf)
                    metrics[1] += mask.values.sum()
                highest = torch.maximum(highest, logits.values.amax(dim=1))
                # log sigmoid(l) of a positive instead of log sigmoid(-l)
                of_positives = Block(column, low, candidates.stop, terms).positives(first)[1]
                of_positives.copy_(softplus(-(positives[own] * scale + bias)))
                loss += terms.sum()
                if not needs_gradients:
                    continue
                entries = Block(column, low, candidates.stop, gradient).positives(first)[1]
                entries.copy_(-torch.sigmoid(-(positives[own] * scale + bias)))
                of_scale += (gradient * similarity).sum()
                of_bias += gradient.sum()
                buffers[0][tile].addmm_(gradient, unit[candidates])
                buffers[1 + column][candidates].addmm_(gradient.T, of_tile)
        metrics[0] += (positives * scale + bias > highest).sum()
        metrics[2] += positives.sum()
    share = max(num_rows, 1)
    metrics[1] /= max(sum(map(len, columns)) - 1, 1)
    gradients: list[Tensor | None] = [of_scale / share, of_bias / share]
    for embedding, of_embedding, buffer in zip((rows, *columns), units, buffers, strict=False):
        gradients.append(gradient_of_raw([of_embedding], [buffer.mul_(scale / share)], embedding))
    return loss / share, metrics / share, gradients if needs_gradients else [None] * len(needs)
