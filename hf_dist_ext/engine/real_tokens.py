"""The real tokens of padded rows (R, T, D), without their padding or in tiles that have little of it, and their best
matches (ColBERT, https://huggingface.co/papers/2004.12832, section 3.3).

Letters: R rows, T entries of the second axis, n real tokens of all rows, L places of all tiles, b rows of a tile,
t tokens of some queries, D dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dist_ext.engine.rows import moved


def places_of(mask: Tensor, count: int) -> Tensor:
    """(count,): where the flat mask is true, which is so many times. `nonzero` would count, and the host wait."""
    flat = mask.flatten()
    number = torch.where(flat, flat.cumsum(0) - 1, count)  # what is false goes to a place of its own, at the end
    places = number.new_empty(count + 1)
    return places.scatter_(0, number, torch.arange(len(flat), device=flat.device))[:count]


class Tile(NamedTuple):
    rows: slice  # of the rows in the tiles' order
    places: slice  # of the L places
    mask: Tensor  # (b, T of its longest row), true where a token is real


class RealTokens:
    """Rows in tiles, the longest first, each tile as wide as its longest row; or with `per_tile` None the tokens of
    all rows end to end, in the rows' order.

    lengths: (R,) real tokens of every row, on the host. Wherever they stand in a row, in a tile they begin it.
    """

    def __init__(self, mask: Tensor, lengths: np.ndarray, per_tile: int | None = None):
        rows = np.arange(len(lengths))
        order = rows if per_tile is None else np.argsort(-lengths, kind="stable")
        # A maximum needs a place, also in a tile of rows that have no token.
        widths = lengths if per_tile is None else np.maximum(lengths[order][rows // per_tile * per_tile], 1)
        self.lengths, self.ends, self._device = lengths, np.cumsum(widths), mask.device
        self.num_places = int(widths.sum())
        self.order, self.back = moved(order, self._device), moved(np.argsort(order), self._device)  # (R,)
        begins, width = moved(self.ends - widths, self._device)[:, None], mask.shape[1]
        ordered = mask.index_select(0, self.order)
        real = places_of(ordered, int(lengths.sum()))
        entries = self.order[:, None] * width + torch.arange(width, device=self._device)
        self._entries = entries.flatten().index_select(0, real)  # (n,): in (R * T)
        self._places = (begins + ordered.cumsum(dim=1) - 1).flatten().index_select(0, real)  # (n,): in L
        self.tiles: list[Tile] = []
        if per_tile is not None:
            counts = ordered.sum(dim=1)
            self.tiles = [self._tile(low, low + per_tile, widths, counts) for low in range(0, len(rows), per_tile)]

    def _tile(self, low: int, high: int, widths: np.ndarray, counts: Tensor) -> Tile:
        rows = slice(low, min(high, len(widths)))
        mask = torch.arange(int(widths[low]), device=self._device) < counts[rows, None]
        return Tile(rows, self.places(rows.start, rows.stop), mask)

    def places(self, start: int, stop: int) -> slice:
        """Of some rows, in the tiles' order."""
        first = self.ends[start - 1] if start else 0
        return slice(int(first), int(self.ends[stop - 1]))

    def taken(self, padded: Tensor) -> Tensor:
        """(R, T, D) -> (L, D), zeros where a tile has padding."""
        found = padded.new_zeros(self.num_places, *padded.shape[2:])
        return found.index_copy_(0, self._places, padded.flatten(0, 1).index_select(0, self._entries))


def best_matches(queries: Tensor, documents: Tensor, mask: Tensor) -> Tensor:
    """Tokens of queries (t, D), and documents of a tile (b * T, D) with its mask -> for each token its best product in
    every document, (t, b)."""
    products = (queries @ documents.T).unflatten(1, mask.shape)
    with torch.no_grad():  # a match is none of these, so no gradient reaches them
        products.masked_fill_(~mask, torch.finfo(products.dtype).min)
    return products.max(dim=2).values
