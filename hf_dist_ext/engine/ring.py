"""Losses whose candidates go round the processes: of the others' embeddings no rank holds more than two blocks.

Loss, metrics and gradient are those of tiled_infonce.py, whose letters and words hold here, or of sigmoid_loss.py.
With z = sqrt(s) u of every unit vector u a logit is <z_i, z_j>, whoever computes it. As in Inf-CL
(https://huggingface.co/papers/2410.17243, section 3) blocks travel from rank to rank while each works on the one it
has:

(1) the candidates go round. A rank makes of each pair's logit a weight, w (ring_scores.py), and keeps of each own row
    sums of them and its gradient but for a factor, the sum of w z_j. InfoNCE's weight is exp(logit - m) with the
    highest logit m so far, and a higher m scales down what was added up before
    (https://huggingface.co/papers/1805.02867)
(2) these sums and the positive's logit give loss and metrics; backward says what the loss is worth, and every rank
    gathers m and the factor of all rows, two numbers each
(3) the rows go round. A rank computes their logits with its own candidates again: the weight times the factor is the
    gradient of a logit, and its product with the rows is added to the candidates' gradients
(4) own positives, then each gradient through its normalisation

So no gradient travels. Both rounds send what a gather of the candidates and the reduce-scatter of their gradients
send, and less where a row has several candidates. The price is a fourth product of the logits' size.

Nothing here knows of processes: a `Ring` says how blocks come by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dist_ext.engine.ring_scores import Score, Side
from hf_dist_ext.engine.tiled_infonce import (
    MASKED,
    Block,
    Direction,
    Matmul,
    compare_keys,
    gradient_of_raw,
    mask_blocks,
    normalized,
)


class Ring(NamedTuple):
    """The ranks with rows of their own. All of them call both functions together."""

    rank: int  # of this process
    counts: Mapping[str, list[int]]  # column -> rows of every rank
    # (own rows (b, ...), contiguous; rows of every rank) -> (rank, its rows), this rank's first
    visits: Callable[[Tensor, list[int]], Iterator[tuple[int, Tensor]]]
    gather: Callable[[Tensor, list[int]], Tensor]  # own (b, ...), rows of every rank -> (N, ...) in rank order


class RingPlan(NamedTuple):
    score: Score
    ring: Ring
    counts: list[list[int]]  # per column (anchors, positives, negatives): rows of every rank
    is_symmetric: bool
    prefixes: list[tuple[int, float]]  # of tiled_infonce.InfoNCESetup, as `keys`, `margin` and `normalize`
    keys: list[list[tuple[Tensor, Tensor]]]
    margin: float | None
    normalize: bool
    tile: tuple[int, int]  # rows, candidates
    matmul: Matmul

    @property
    def directions(self) -> list[Direction]:
        one_way = Direction(0, tuple(range(1, len(self.counts))))
        return [one_way, Direction(1, (0,))] if self.is_symmetric else [one_way]

    def offset(self, column: int, rank: int) -> int:
        return sum(self.counts[column][:rank])

    def heights(self, columns: range) -> list[int]:
        """Rows of these columns together, of every rank."""
        return [sum(of_rank) for of_rank in zip(*(self.counts[c] for c in columns), strict=True)]

    def own_rows(self, own: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
        """This rank's rows of every column; of a rank whose rows are stand-ins none counts."""
        heights = [of_ranks[self.ring.rank] for of_ranks in self.counts]
        rows = [own[name] for name in names]
        return [one if len(one) == height else one[:height] for one, height in zip(rows, heights, strict=True)]

    def columns_of(self, block: Tensor, columns: range, rank: int) -> dict[int, Tensor]:
        return dict(zip(columns, block.split([self.counts[c][rank] for c in columns]), strict=True))


def scored_in_ring(plan: RingPlan, scale: Tensor, bias: Tensor | None, own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Loss (scalar, mean over own rows) and detached metrics (3,), as of `tiled_infonce`. Every rank calls it, and
    backward of what it gives, which works once.

    scale, bias: (1,), a logit is the similarity times the scale and plus the bias; None is 0. own: this rank's rows of
    every column, as many as `plan.counts` says; gradients are those of the sum of all ranks' losses, each times what
    arrives there from above.
    """
    return _RingLoss.apply(plan, torch.is_grad_enabled(), scale, bias, *own)


class _RingLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: RingPlan, is_grad_enabled: bool, scale: Tensor, bias: Tensor | None, *own: Tensor):
        needs = [is_grad_enabled and needed for needed in ctx.needs_input_grad[2:]]
        with torch.autocast(scale.device.type, enabled=False):
            rounds = _Rounds(plan, scale.detach(), bias, own, needs)
            loss, metrics = rounds.score()
        ctx.save_for_backward(*own)
        ctx.name, ctx.rounds = plan.score.name, rounds if any(needs) else None
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.name} computes its gradient by hand and cannot differentiate it again. "
                "Call backward without create_graph=True."
            )
        if ctx.rounds is None:
            raise RuntimeError(
                f"{ctx.name} with candidates that go round gives its gradient once. Call the loss again before a "
                'second backward, or set cross_device_exchange="gather".'
            )
        rounds, ctx.rounds = ctx.rounds, None
        with torch.autocast(grad_loss.device.type, enabled=False):
            return (None, None, *rounds.gradients(grad_loss, ctx.saved_tensors))


class _Rounds:
    """The state of a loss between its two rounds."""

    def __init__(self, plan: RingPlan, scale: Tensor, bias: Tensor | None, own: Sequence[Tensor], needs: list[bool]):
        self.plan, self.scale, self.bias = plan, scale, bias
        self.needs_scale, self.needs_bias, *self.needs = needs
        self.root = scale.sqrt()
        self.num_rows = len(own[0])  # B
        index, counts = plan.ring.rank, plan.counts
        assert [len(rows) for rows in own] == [of_ranks[index] for of_ranks in counts]
        self.travellers = range(0 if plan.is_symmetric else 1, len(counts))  # columns of candidates
        self.movers = range(2 if plan.is_symmetric else 1)  # columns of rows
        widest = plan.prefixes[0][0]
        self.packed = scale.new_empty(sum(map(len, own)), widest, dtype=plan.matmul.dtype(scale.dtype))
        z = plan.columns_of(self.packed, range(len(counts)), index)
        for column, raw in enumerate(own):
            for tile in self._row_tiles(len(raw)):
                unit, _ = normalized(raw[tile, :widest], plan.normalize, scale.dtype)
                z[column][tile] = unit * self.root
        self.sides = []
        for dim, weight in plan.prefixes:
            of_prefix = {column: self._prefix(rows, dim) for column, rows in z.items()}
            for direction in plan.directions:
                needed = self.needs_scale or self.needs[direction.rows]
                self.sides.append(Side(direction, dim, weight, of_prefix, needed, scale))
        rows = plan.tile[0] * plan.tile[1]
        self.logits = scale.new_empty(rows)
        self.masks = scale.new_empty(rows if plan.keys else 0)

    def _row_tiles(self, height: int) -> Iterator[slice]:
        return _tiles(height, self.plan.tile[0])

    def _prefix(self, z: Tensor, dim: int) -> Tensor:
        """The first dimensions, normalised again."""
        if dim == z.shape[1]:
            return z
        unit, _ = normalized(z[:, :dim], True, self.scale.dtype)
        return (unit * self.root).to(z.dtype)

    def _threshold(self, positives: Tensor) -> Tensor | None:
        return None if self.plan.margin is None else positives - self.plan.margin * self.scale

    def _met(
        self, rows: Tensor, first: int, candidates: Tensor, place: int, offset: int, threshold: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """A tile of rows (T, d) and all of a block's candidates (n, d), some at a time: (which, logits (T, C), masked
        pairs (T,), highest of the others (T,)). The logits are in a buffer that the next ones overwrite.

        first: the candidate that is the positive of the first row, among all ranks'. offset: number of the block's
        first candidate among all ranks' of its column, which is the direction's column `place`.
        """
        for which in _tiles(len(candidates), self.plan.tile[1]):
            shape = len(rows), which.stop - which.start
            size = shape[0] * shape[1]
            low, high = offset + which.start, offset + which.stop
            block = Block(place, low, high, self.logits[:size].view(shape))
            self.plan.matmul.write(rows, candidates[which].T, block.values)
            if self.bias is not None:
                block.values.add_(self.bias)
            block.positives(first)[1].fill_(MASKED)
            masks = []
            if self.plan.keys:
                masks = [Block(place, low, high, self.masks[:size].view(shape))]
                compare_keys(masks[0], self.plan.keys[place], first)
            num_masked, highest = mask_blocks([block], masks, threshold)
            yield which, block.values, num_masked, highest

    # ---- (1) and (2) ----

    def score(self) -> tuple[Tensor, Tensor]:
        plan, index = self.plan, self.plan.ring.rank
        loss, metrics = self.scale.new_zeros(()), self.scale.new_zeros(3)
        own_first = plan.offset(0, index)
        for side in self.sides:
            positives = side.z[side.direction.candidates[0]]
            for tile in self._row_tiles(self.num_rows):
                logits = self.scale.new_empty(tile.stop - tile.start, tile.stop - tile.start)
                plan.matmul.write(side.rows[tile], positives[tile].T, logits)  # as rounded as the others' logits
                side.positives[tile] = logits.diagonal() if self.bias is None else logits.diagonal() + self.bias
        for rank, block in plan.ring.visits(self._part(self.travellers), plan.heights(self.travellers)):
            columns = plan.columns_of(block, self.travellers, rank)
            for number, side in enumerate(self.sides):
                for place, column in enumerate(side.direction.candidates):
                    candidates = side.z[column] if rank == index else self._prefix(columns[column], side.dim)
                    offset = plan.offset(column, rank)
                    for tile in self._row_tiles(self.num_rows):
                        num_masked = self._add_candidates(side, tile, own_first, candidates, place, offset)
                        if number == 0:
                            metrics[1] += num_masked
        for number, side in enumerate(self.sides):
            share = side.weight / (len(plan.directions) * max(self.num_rows, 1))
            loss += plan.score.settle(side, share).sum() * share
            if number == 0:
                metrics[0] = (side.positives > side.highest).sum()
                similarity = side.positives if self.bias is None else side.positives - self.bias
                metrics[2] = (similarity / self.scale).sum()
        metrics[1] /= max(sum(map(sum, plan.counts[1:])) - 1, 1)
        return loss, metrics / max(self.num_rows, 1)

    def _part(self, columns: range) -> Tensor:
        """Own rows of some columns: (b, D), contiguous."""
        start = sum(self.plan.counts[c][self.plan.ring.rank] for c in range(columns.start))
        return self.packed[start : start + self.plan.heights(columns)[self.plan.ring.rank]]

    def _add_candidates(
        self, side: Side, tile: slice, own_first: int, candidates: Tensor, place: int, offset: int
    ) -> Tensor:
        """What a tile of own rows learns of a block; the number of masked pairs."""
        threshold, num_masked = self._threshold(side.positives[tile]), self.scale.new_zeros(())
        met = self._met(side.rows[tile], own_first + tile.start, candidates, place, offset, threshold)
        for which, logits, masked, highest in met:
            num_masked += masked.sum()
            weights, shrink = self.plan.score.absorb(side, tile, logits, highest)
            if side.gradient is not None:
                gradient = side.gradient[tile] if shrink is None else side.gradient[tile].mul_(shrink[:, None])
                self.plan.matmul.add(gradient, weights, candidates[which])
        return num_masked

    # ---- (3) and (4) ----

    def gradients(self, grad_loss: Tensor, own: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the scale, the bias and every column."""
        plan = self.plan
        buffers: list[list[Tensor | None]] = []  # per prefix and column: the gradient of z, (b, d)
        stats, of_scale, of_bias = [], torch.zeros_like(self.scale), torch.zeros_like(self.scale)
        for side in self.sides:
            side.wrong *= grad_loss
            side.factor *= grad_loss
            of_bias += (side.mass * side.factor - side.wrong).sum()
            stats += [side.level, side.factor]
            if plan.margin is not None:
                stats.append(side.positives)
            if side.gradient is None:
                continue
            positives = side.z[side.direction.candidates[0]]
            for tile in self._row_tiles(self.num_rows):
                gradient = side.gradient[tile].mul_(side.factor[tile, None])
                gradient.addcmul_(side.wrong[tile, None], positives[tile], value=-1.0)
                # d/ds of a function of s times the similarity: <z, its gradient> / s
                of_scale += (side.rows[tile] * gradient).sum() / self.scale
        for prefix, (dim, _) in enumerate(plan.prefixes):
            sides = self._sides_of(prefix)
            of_rows = {side.direction.rows: side.gradient for side in sides}
            buffers.append([])
            for column, (rows, is_needed) in enumerate(zip(own, self.needs, strict=True)):
                made = of_rows.get(column) if is_needed else None
                buffers[-1].append(self.scale.new_zeros(len(rows), dim) if is_needed and made is None else made)
        if any(self.needs[column] for column in self.travellers):
            self._to_candidates(torch.stack(stats, dim=1), buffers)
        found = [
            self._of_raw([one for row in buffers if (one := row[i]) is not None], raw) if needed else None
            for i, (raw, needed) in enumerate(zip(own, self.needs, strict=True))
        ]
        return [of_scale if self.needs_scale else None, of_bias if self.needs_bias else None, *found]

    def _sides_of(self, prefix: int) -> list[Side]:
        number = len(self.plan.directions)
        return self.sides[prefix * number : (prefix + 1) * number]

    def _to_candidates(self, stats: Tensor, buffers: list[list[Tensor | None]]) -> None:
        """The gradients of own candidates, from the rows that come by. stats (B, ...): of every side, in order."""
        plan, index = self.plan, self.plan.ring.rank
        everyone = plan.ring.gather(stats, plan.counts[0])  # (N, ...)
        per_side = stats.shape[1] // len(self.sides)
        for rank, block in plan.ring.visits(self._part(self.movers), plan.heights(self.movers)):
            columns, first = plan.columns_of(block, self.movers, rank), plan.offset(0, rank)
            of_rank = everyone[first : first + plan.counts[0][rank]]
            for number, side in enumerate(self.sides):
                level, factor, *positives = of_rank[:, number * per_side : (number + 1) * per_side].unbind(dim=1)
                column = side.direction.rows
                rows = side.z[column] if rank == index else self._prefix(columns[column], side.dim)
                for tile in self._row_tiles(len(rows)):
                    threshold = self._threshold(positives[0][tile]) if positives else None
                    weighted = plan.matmul.factor(rows[tile] * factor[tile, None])
                    for place, candidates in enumerate(side.direction.candidates):
                        buffer = buffers[number // len(plan.directions)][candidates]
                        if buffer is None:
                            continue
                        z, offset = side.z[candidates], plan.offset(candidates, index)
                        met = self._met(rows[tile], first + tile.start, z, place, offset, threshold)
                        for which, logits, _, _ in met:
                            weights = plan.score.weights(logits, level[tile])
                            plan.matmul.add(buffer[which], weights.T, weighted)
        for number, side in enumerate(self.sides):  # own positives
            buffer = buffers[number // len(plan.directions)][side.direction.candidates[0]]
            if buffer is not None:
                for tile in self._row_tiles(self.num_rows):
                    buffer[tile].addcmul_(side.wrong[tile, None], side.rows[tile], value=-1.0)

    def _of_raw(self, buffers: list[Tensor], raw: Tensor) -> Tensor:
        """The embedding's gradient (b, D) from those of the prefixes' z, which it overwrites."""
        is_whole = len(buffers) == 1 and buffers[0].shape == raw.shape
        found = buffers[0] if is_whole else self.scale.new_zeros(raw.shape)
        for tile in self._row_tiles(len(raw)):
            units = [normalized(raw[tile, : b.shape[1]], self.plan.normalize, b.dtype) for b in buffers]
            part = gradient_of_raw(units, [b[tile].mul_(self.root) for b in buffers], raw[tile])
            if not is_whole:
                found[tile] = part
        return found.to(raw.dtype)


def _tiles(height: int, size: int) -> Iterator[slice]:
    for low in range(0, height, size):
        yield slice(low, min(low + size, height))
