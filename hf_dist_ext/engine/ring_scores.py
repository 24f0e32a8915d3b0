"""What a loss makes of the scores that come by in a ring (ring.py): the softmax of InfoNCE, the sigmoid of SigLIP.

The formulas are those of tiled_infonce.py and sigmoid_loss.py. A pair that is masked, and a row's own positive, have
the logit MASKED, of which an exponential and a sigmoid are 0. B own rows, T rows of a tile, C candidates of a tile.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from hf_dist_ext.engine.tiled_infonce import MASKED, Direction


class Side:
    """Own rows in one direction, of one prefix, and what they know of the candidates that came by."""

    def __init__(
        self,
        direction: Direction,
        dim: int,
        weight: float,
        z: dict[int, Tensor],
        needs_gradient: bool,
        like: Tensor,
    ):
        self.direction, self.dim, self.weight, self.z = direction, dim, weight, z
        self.rows = z[direction.rows]  # (B, d)
        self.positives = like.new_empty(len(self.rows))  # (B,) logits
        self.highest = like.new_full((len(self.rows),), MASKED)  # (B,) logit other than the positive's
        self.total, self.mass = like.new_zeros(
            2, len(self.rows)
        )  # (B,) sums over others: of the loss, of its gradient
        self.gradient = like.new_zeros(self.rows.shape) if needs_gradient else None
        # of the loss of all rows: -d / d(the positive's logit); what the others' weights are multiplied by; (B,)
        self.wrong, self.factor = self.total, self.total
        self.level = self.highest  # (B,) which others' weights are computed with


class Score(Protocol):
    name: str

    def absorb(self, side: Side, tile: slice, logits: Tensor, highest: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tile of own rows meets candidates. The weight of each pair (T, C), in the memory of its logits, and by
        what the rows' earlier gradients shrink (T,). highest: of each row's logits (T,)."""
        ...

    def settle(self, side: Side, share: float) -> Tensor:
        """After all candidates: the rows' losses (B,), of which each is worth `share`."""
        ...

    def weights(self, logits: Tensor, level: Tensor) -> Tensor:
        """Of pairs (T, C) that other ranks' rows have absorbed, in the memory of their logits; level (T,)."""
        ...


class Softmax:
    name = "InfoNCELoss"

    def absorb(self, side: Side, tile: slice, logits: Tensor, highest: Tensor) -> tuple[Tensor, Tensor | None]:
        highest = torch.maximum(highest, side.highest[tile])
        shrink = (side.highest[tile] - highest).exp_()
        side.highest[tile] = highest
        weights = self.weights(logits, highest)
        side.total[tile] = side.total[tile] * shrink + weights.sum(dim=1)
        return weights, shrink

    def settle(self, side: Side, share: float) -> Tensor:
        lead = side.positives - (side.highest + side.total.log())
        side.wrong = torch.sigmoid(-lead).mul_(share)
        side.factor = side.wrong / side.total
        return -logsigmoid(lead)

    def weights(self, logits: Tensor, level: Tensor) -> Tensor:
        return logits.sub_(level[:, None]).exp_()


class Sigmoid:
    name = "SigmoidLoss"

    def absorb(self, side: Side, tile: slice, logits: Tensor, highest: Tensor) -> tuple[Tensor, Tensor | None]:
        side.highest[tile] = torch.maximum(highest, side.highest[tile])
        side.total[tile] += softplus(logits).sum(dim=1)
        weights = logits.sigmoid_()
        side.mass[tile] += weights.sum(dim=1)
        return weights, None

    def settle(self, side: Side, share: float) -> Tensor:
        side.wrong = torch.sigmoid(-side.positives).mul_(share)
        side.factor = torch.full_like(side.positives, share)
        return side.total + softplus(-side.positives)

    def weights(self, logits: Tensor, level: Tensor) -> Tensor:
        return logits.sigmoid_()
