"""SigLIP's sigmoid loss in tiles, gradient included: every pair of a row and a candidate is a question of its own.

For row i and candidate j with similarity c_ij, scale s, bias b, and z_ij = 1 for i's positive, else -1
(https://huggingface.co/papers/2303.15343, section 3.1):

    l_ij = s c_ij + b
    loss_i = - sum over j of log sigmoid(z_ij l_ij)

No row needs a sum over its candidates, so a tile is done with at once, its backward too (manual_gradient.py).

Shapes: B own rows, N all ranks' rows, D embedding, T tile rows, C candidates of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from hf_dist_ext.engine.false_negatives import Keys, keys_of
from hf_dist_ext.engine.losses import LossOutput, checked_columns, unit_vectors
from hf_dist_ext.engine.manual_gradient import sum_of_tiles
from hf_dist_ext.engine.tiled_infonce import Block, compare_keys
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
    ) -> None:
        super().__init__()
        if not 0 < scale < math.inf or not math.isfinite(bias):
            raise UsageError(f"scale={scale} must be a positive number and bias={bias} a number, such as 10 and -10.")
        if min(rows_per_tile, candidates_per_tile) < 1:
            raise UsageError(f"rows_per_tile={rows_per_tile}, candidates_per_tile={candidates_per_tile}: at least 1.")
        self.mask_false_negatives, self.normalize = mask_false_negatives, normalize
        self.rows_per_tile, self.candidates_per_tile = rows_per_tile, candidates_per_tile
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
        anchor, *candidates = names = checked_columns(own, everyone, row_offset, everyone is own)
        dtype = torch.promote_types(own[anchor].dtype, torch.float32)
        heights = {name: len(everyone[name]) for name in candidates}
        keys = keys_of(names, heights, ids, dtype) if ids and self.mask_false_negatives else []
        scale, bias = self.log_scale.to(dtype).exp(), self.bias.to(dtype)
        tile = self.rows_per_tile, self.candidates_per_tile
        units = [
            unit_vectors(one, self.normalize, dtype) for one in (own[anchor], *(everyone[name] for name in candidates))
        ]
        rows, columns = units[0].split(tile[0]), [unit.split(tile[1]) for unit in units[1:]]
        metrics = scale.new_zeros(3)
        loss = sum_of_tiles("SigmoidLoss", partial(_tiles, keys, row_offset, metrics), scale, bias, rows, columns)
        metrics[1] /= max(sum(map(len, units[1:])) - 1, 1)
        loss, metrics = loss / max(len(units[0]), 1), metrics / max(len(units[0]), 1)
        of_rows = dict(zip(("accuracy", "masked_share", "positive_similarity"), metrics.unbind(), strict=True))
        return LossOutput(loss, of_rows | {"scale": scale.detach().squeeze(0), "bias": bias.detach().squeeze(0)})

    def extra_repr(self) -> str:
        return f"scale={self.log_scale.exp().item():.4g}, bias={self.bias.item():.4g}"


def _tiles(
    keys: Keys,
    first: int,
    metrics: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_tiles: Sequence[Tensor],
    columns: Sequence[Sequence[Tensor]],
) -> Iterator[Tensor]:
    """Of every tile of rows (T, D) and of candidates (C, D) the sum of their pairs' losses. Adds to metrics (3,).

    first: the candidate that is the positive of the first row.
    """
    for rows in row_tiles:
        logit = rows.new_full((len(rows),), -math.inf)  # of each row's positive
        highest = logit.clone()  # of its other candidates
        for column, tiles in enumerate(columns):
            low = 0
            for candidates in tiles:
                similarity = rows @ candidates.T  # (T, C)
                logits, high = similarity * scale + bias, low + len(candidates)
                others = Block(column, low, high, logits.detach())  # which no backward reads
                signed = Block(column, low, high, -logits)
                which, of_positives = others.positives(first)
                if which.stop > which.start:
                    logit[which] = of_positives
                    of_positives.fill_(-math.inf)
                    signed.positives(first)[1].neg_()
                    metrics[2] += Block(column, low, high, similarity.detach()).positives(first)[1].sum()
                terms = -logsigmoid(signed.values)
                if keys:
                    mask = Block(column, low, high, torch.empty_like(similarity))
                    compare_keys(mask, keys[column], first)
                    terms = terms * (1 - mask.values)
                    others.values.masked_fill_(mask.values > 0, -math.inf)
                    metrics[1] += mask.values.sum()
                highest, low = torch.maximum(highest, others.values.amax(dim=1)), high
                yield terms.sum()
        metrics[0] += (logit > highest).sum()
        first += len(rows)
