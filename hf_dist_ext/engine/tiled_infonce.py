"""The arithmetic of InfoNCE in tiles, gradient included: the full batch's loss without the full batch's logits.

The one thing to know: the gradient is made during the forward pass (manual_gradient.py).

For row i with its positive p, scale s = 1 / temperature and similarities c:

    lead_i = s c_ip - log(sum over unmasked j other than p of exp(s c_ij))
    loss_i = softplus(-lead_i)                           the usual log-softmax of the positive
    dloss_i / d(s c_ij) = q_i softmax_ij over the others, -q_i at p, with q_i = sigmoid(-lead_i)

Keeping the positive out of the sum keeps small losses and their gradients exact, and the sum is what accuracy needs.

(1) normalise every column once, and once per prefix of it
(2) for a tile of rows: which candidates are known false negatives? Tiles of 0.0 and 1.0, since comparing into booleans
    and masked_fill are ten times slower on a CPU
(3) the tile's logits against all candidates, block by block, and the highest of the others
(4) their exponentials and sum: loss and metrics of these rows
(5) the tile is now the gradient of the logits but for a factor per row: one product gives the rows' gradient, one adds
    to the single gradient buffer of each column
(6) after the last tile: each buffer through its normalisation

The time is that of three matrix products of the logits' size, the memory O(tile x candidates). A second pass that
computes the logits again would do with O(tile), at four products: 10 to 40 % slower on a CPU.

Shapes: B own rows, N all ranks' rows, D embedding, M candidates (N positives and all hard negatives), T tile rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hf_dist_ext.engine.manual_gradient import with_gradients

MASKED = -1e30  # a logit that weighs nothing; finite, because -inf - -inf is NaN in a row whose others are all masked


class Direction(NamedTuple):
    """Who is scored against whom, as positions among the embeddings. The positives are the first candidates."""

    rows: int
    candidates: tuple[int, ...]


class InfoNCESetup(NamedTuple):
    directions: list[Direction]  # the loss is their mean, the metrics are the first's
    prefixes: list[tuple[int, float]]  # (dimensions, weight), widest first: the loss is the weighted sum
    keys: list[list[tuple[Tensor, Tensor]]]  # per column of candidates: (key of each of N rows, key of each candidate)
    row_offset: int  # own row i's positive is candidate row_offset + i
    margin: float | None
    normalize: bool
    rows_per_tile: int
    candidates_per_tile: int | None  # None = whole columns


def tiled_infonce(
    plan: InfoNCESetup, inverse_temperature: Tensor, embeddings: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Loss (scalar, mean over own rows) and detached metrics (3,): accuracy, masked share, positives' similarity.

    inverse_temperature: (1,), in the dtype that all of this is computed in. Gradients have their inputs' dtypes.
    """
    return with_gradients("InfoNCELoss", partial(_loss_and_gradients, plan), inverse_temperature, *embeddings)


def _loss_and_gradients(
    plan: InfoNCESetup, inverse_temperature: Tensor, *embeddings: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Loss, metrics and the gradients (None where not needed) of the inverse temperature and of every embedding."""
    needs_temperature, *needs_embedding = needs
    num_rows = embeddings[plan.directions[0].rows].shape[0]  # B
    heights = [[embeddings[i].shape[0] for i in direction.candidates] for direction in plan.directions]
    tile_rows = min(plan.rows_per_tile, num_rows)
    logits_buffer = inverse_temperature.new_empty(tile_rows * max(map(sum, heights)))
    mask_buffer = inverse_temperature.new_empty(tile_rows * sum(heights[0]) if plan.keys else 0)
    loss = inverse_temperature.new_zeros(())
    metrics = inverse_temperature.new_zeros(3)
    temperature_gradient = torch.zeros_like(inverse_temperature)

    # (1) per prefix and embedding: unit vectors with their inverse norms, and the gradient of the unit vectors
    units = [[normalized(e[:, :dim], plan.normalize, loss.dtype) for e in embeddings] for dim, _ in plan.prefixes]
    buffers = [
        [torch.zeros_like(unit) if needed else None for (unit, _), needed in zip(row, needs_embedding, strict=True)]
        for row in units
    ]

    for start in range(0, num_rows, tile_rows or 1):
        rows = slice(start, min(start + tile_rows, num_rows))
        first = plan.row_offset + start  # the candidate that is the positive of the tile's first row
        masks = _blocks(mask_buffer, rows, heights[0], plan.candidates_per_tile) if plan.keys else []
        for mask in masks:
            compare_keys(mask, plan.keys[mask.column], first)  # (2)

        for prefix, (_, weight) in enumerate(plan.prefixes):
            for which, direction in enumerate(plan.directions):
                unit_rows = units[prefix][direction.rows][0][rows]  # (T, d)
                scaled_rows = unit_rows * inverse_temperature
                columns = [units[prefix][i][0] for i in direction.candidates]
                blocks = _blocks(logits_buffer, rows, heights[which], plan.candidates_per_tile)
                positives = _score(blocks, scaled_rows, columns, first)  # (3)
                threshold = None if plan.margin is None else positives - plan.margin * inverse_temperature
                num_masked, highest = mask_blocks(blocks, masks, threshold)
                total = torch.zeros_like(positives)
                for block in blocks:  # (4)
                    total += block.values.sub_(highest[:, None]).exp_().sum(dim=1)
                lead = positives - (highest + total.log())
                row_weight = weight / (len(plan.directions) * num_rows)
                loss -= logsigmoid(lead).sum() * row_weight
                if prefix == which == 0:
                    metrics[0] += (positives > highest).sum()
                    metrics[1] += num_masked.sum() / max(sum(heights[0]) - 1, 1)
                    metrics[2] += (positives / inverse_temperature).sum()
                if not any(needs):
                    continue
                factor = (torch.sigmoid(-lead) * row_weight / total)[:, None]  # (T, 1)
                column_buffers = [buffers[prefix][i] for i in direction.candidates]
                weighted_rows = scaled_rows * factor
                row_gradient = _add_gradients(blocks, weighted_rows, columns, column_buffers, first, total)  # (5)
                row_gradient *= factor * inverse_temperature
                row_buffer = buffers[prefix][direction.rows]
                if row_buffer is not None:
                    row_buffer[rows] += row_gradient
                # d/ds of a function of s times the similarity: <row, its gradient> / s
                temperature_gradient += (unit_rows * row_gradient).sum() / inverse_temperature

    # (6)
    gradients: list[Tensor | None] = [temperature_gradient if needs_temperature else None]
    for i, embedding in enumerate(embeddings):
        own = [buffer for row in buffers if (buffer := row[i]) is not None]  # one per prefix, none where not needed
        gradients.append(gradient_of_raw([row[i] for row in units], own, embedding) if own else None)
    return loss, metrics / max(num_rows, 1), gradients


class Block(NamedTuple):
    """A tile's values for candidates low to high of one of the columns."""

    column: int
    low: int
    high: int
    values: Tensor  # (T, high - low), contiguous

    def positives(self, first: int) -> tuple[slice, Tensor]:
        """The tile's rows whose positive (candidate first + row) is in this block, and a view of those entries."""
        num_rows, width = self.values.shape
        start = max(self.low - first, 0)
        stop = max(min(self.high - first, num_rows), start) if self.column == 0 else start
        left = min(first + start - self.low, width)
        return slice(start, stop), self.values[start:stop, left : left + stop - start].diagonal()


def _blocks(buffer: Tensor, rows: slice, heights: list[int], candidates_per_tile: int | None) -> list[Block]:
    """The columns cut at candidates_per_tile, each block a view of its own stretch of the buffer."""
    num_rows = rows.stop - rows.start
    blocks, used = [], 0
    for column, height in enumerate(heights):
        for low in range(0, height, candidates_per_tile or max(height, 1)):
            high = min(low + (candidates_per_tile or height), height)
            size = num_rows * (high - low)
            blocks.append(Block(column, low, high, buffer[used : used + size].view(num_rows, high - low)))
            used += size
    return blocks


def compare_keys(mask: Block, keys: list[tuple[Tensor, Tensor]], first: int) -> None:
    """Write 1 where a row and a candidate have any key in common, 0 elsewhere and at the row's own positive."""
    mask.values.zero_()
    same = torch.empty_like(mask.values)
    for row_keys, candidate_keys in keys:
        tile_keys = row_keys[first : first + same.shape[0], None]
        torch.maximum(
            mask.values, torch.eq(tile_keys, candidate_keys[mask.low : mask.high], out=same), out=mask.values
        )
    mask.positives(first)[1].zero_()


def lead_of_positives(
    scores: list[Tensor], keys: list[list[tuple[Tensor, Tensor]]], first: int, metrics: Tensor
) -> Tensor:
    """lead_i (T,) of rows whose logits are given, (T, N) of every column, with their graph. Adds the number of right
    answers and of masked pairs (2,) up.

    keys: of `InfoNCESetup`. first: the first row's positive is this candidate of the first column, and so on.
    """
    is_other = []
    for column, values in enumerate(scores):
        mask = Block(column, 0, values.shape[1], torch.zeros_like(values))
        if keys:
            compare_keys(mask, keys[column], first)
            metrics[1] += mask.values.sum()
        mask.positives(first)[1].fill_(1)
        is_other.append(mask.values == 0)
    positives = Block(0, 0, scores[0].shape[1], scores[0]).positives(first)[1]  # (T,)
    others = torch.cat(scores, dim=1).masked_fill(~torch.cat(is_other, dim=1), MASKED)
    metrics[0] += (positives > others.amax(dim=1)).sum()
    return positives - others.logsumexp(dim=1)


def _score(blocks: list[Block], scaled_rows: Tensor, columns: list[Tensor], first: int) -> Tensor:
    """Write the logits; return those of the positives (T,), which are masked in the blocks."""
    positives = scaled_rows.new_empty(scaled_rows.shape[0])
    for block in blocks:
        torch.mm(scaled_rows, columns[block.column][block.low : block.high].T, out=block.values)
        rows, entries = block.positives(first)
        positives[rows] = entries
        entries.fill_(MASKED)
    return positives


def mask_blocks(blocks: list[Block], masks: list[Block], threshold: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mask the false negatives by key and by similarity; return per row their number and the highest logit left."""
    num_masked = blocks[0].values.new_zeros(blocks[0].values.shape[0])
    highest = torch.full_like(num_masked, MASKED)
    for position, block in enumerate(blocks):
        # The reverse direction has the first column's blocks only, and the same pairs are false negatives in it.
        mask = masks[position].values if masks else None
        if threshold is not None:
            above = torch.gt(block.values, threshold[:, None], out=torch.empty_like(block.values))
            mask = above if mask is None else above.maximum(mask)
        if mask is not None:
            num_masked += mask.sum(dim=1)
            block.values.add_(mask, alpha=MASKED)
        highest = torch.maximum(highest, block.values.amax(dim=1))
    return num_masked, highest


def _add_gradients(
    blocks: list[Block],
    weighted_rows: Tensor,
    columns: list[Tensor],
    column_buffers: list[Tensor | None],
    first: int,
    total: Tensor,
) -> Tensor:
    """Add the candidates' gradients to their buffers; return the rows' (T, d) but for the factor per row."""
    row_gradient = torch.zeros_like(weighted_rows)
    for block in blocks:
        rows, entries = block.positives(first)
        entries.copy_(-total[rows])
        candidates = slice(block.low, block.high)
        row_gradient.addmm_(block.values, columns[block.column][candidates])
        column_buffer = column_buffers[block.column]
        if column_buffer is not None:
            column_buffer[candidates].addmm_(block.values.T, weighted_rows)
    return row_gradient


def normalized(raw: Tensor, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Unit vectors (rows, d) and inverse norms (rows, 1), which are 0 for vectors of zeros; or raw and None."""
    raw = raw.to(dtype)
    if not normalize:
        return raw, None
    norm = torch.linalg.vector_norm(raw, dim=1, keepdim=True)
    inverse_norm = torch.where(norm > 1e-12, norm.reciprocal(), 0.0)
    return raw * inverse_norm, inverse_norm


def gradient_of_raw(units: list[tuple[Tensor, Tensor | None]], buffers: list[Tensor], embedding: Tensor) -> Tensor:
    """The embedding's gradient (rows, D) from those of its unit prefixes, which it overwrites."""
    for (unit, inverse_norm), buffer in zip(units, buffers, strict=True):
        if inverse_norm is not None:  # d(x / |x|) keeps what is at right angles to x, over its length
            buffer.addcmul_(unit, (unit * buffer).sum(dim=1, keepdim=True), value=-1.0).mul_(inverse_norm)
    if buffers[0].shape == embedding.shape:
        total, *rest = buffers
    else:
        total, rest = torch.zeros_like(embedding, dtype=buffers[0].dtype), buffers
    for buffer in rest:
        total[:, : buffer.shape[1]] += buffer
    return total
