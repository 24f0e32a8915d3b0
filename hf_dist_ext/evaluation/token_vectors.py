"""What evaluations compare: rows of one vector each, a tensor (n, D), or rows of many, `TokenVectors`.

    score(q, d) = sum over real t of  max over real u of  <q_t, d_u>          (engine/late_interaction.py)

Products of tokens exist for a few rows at a time, of all rows with all without padding (engine/real_tokens.py).

Letters: n and m rows, b documents of a tile, T tokens of a row, t real tokens of all queries, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from hf_dist_ext.engine.real_tokens import RealTokens, best_matches

VECTORS, MASK = "vectors", "mask"
# float32 rounds scores of unit vectors to about 1e-7, in another way for every tile shape.
TIE_TOLERANCE = 1e-6
TILE = 2**22  # products of tokens at a time
DOCUMENTS = 64  # of about one length at a time


class TokenVectors:
    """(n, T, D) with a mask (n, T), true where a token is real; every row has one."""

    def __init__(self, vectors: torch.Tensor, mask: torch.Tensor):
        self.vectors, self.mask = vectors, mask.bool()

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: Any) -> TokenVectors:
        return TokenVectors(self.vectors[rows], self.mask[rows])

    def float(self) -> TokenVectors:
        return TokenVectors(self.vectors.float(), self.mask)

    def scores(self, documents: TokenVectors) -> torch.Tensor:
        """(n, m)"""
        lengths = torch.cat([self.mask.sum(dim=1), documents.mask.sum(dim=1)]).cpu().numpy()
        of_rows = RealTokens(self.mask, lengths[: len(self)])
        in_tiles = RealTokens(documents.mask, lengths[len(self) :], DOCUMENTS)
        tokens, of_documents = of_rows.taken(self.vectors), in_tiles.taken(documents.vectors)
        found = tokens.new_zeros(len(self), len(documents))
        for tile in in_tiles.tiles if len(self) else ():
            parts = tokens.split(max(1, TILE // tile.mask.numel()))
            best = torch.cat([best_matches(part, of_documents[tile.places], tile.mask) for part in parts])  # (t, b)
            found[:, tile.rows] = torch.segment_reduce(best, "sum", lengths=self.mask.sum(dim=1), axis=0)
        return found.index_select(1, in_tiles.back)


Compared = torch.Tensor | TokenVectors


def compared(output: Any, loss: Any) -> Compared:
    """What a column encodes to, as the loss compares it."""
    if isinstance(output, torch.Tensor):
        return output
    vectors = output[VECTORS]
    return TokenVectors(normalize(vectors, dim=-1) if getattr(loss, "normalize", False) else vectors, output[MASK])


def scores_of(queries: Compared, documents: Compared) -> torch.Tensor:
    """(n, m)"""
    return queries @ documents.T if isinstance(queries, torch.Tensor) else queries.scores(documents)


# ---- on the way through Trainer's evaluation, which pads what differs in width with -100 ----


def as_prediction(embeddings: Compared) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if isinstance(embeddings, torch.Tensor):
        return embeddings.contiguous()
    return embeddings.vectors.contiguous(), embeddings.mask.int()


def of_prediction(arrays: np.ndarray | Sequence[np.ndarray]) -> Compared:
    if isinstance(arrays, np.ndarray):
        return torch.from_numpy(arrays)
    vectors, mask = map(torch.from_numpy, arrays)
    return TokenVectors(vectors, mask > 0)
