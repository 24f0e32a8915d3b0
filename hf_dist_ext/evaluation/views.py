"""Embeddings as an evaluation compares them: whole, their leading dimensions alone, and quantised.

Dimensions are cut first, as sentence-transformers' `truncate_dim`; what is quantised has length 1 before.
`quantize_embeddings` of sentence-transformers gives the same values. Letters: n rows, D dimensions of the model, d of
the view.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch.nn.functional import normalize

from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.token_vectors import Compared
from hf_dist_ext.run.evaluations import Evaluation


class View:
    """
    Args:
        similarity: "cosine" or "dot"; of token vectors "maxsim".
        dim: d; None: D.
        precision: "int8", "binary" or None. The cosine of two rows of signs falls as their Hamming distance grows.
    """

    def __init__(self, similarity: str, dim: int | None = None, precision: str | None = None):
        self.similarity, self.dim, self.precision = similarity, dim, precision
        self._ranges: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def prefix(self) -> str:
        """Of its figures' names."""
        parts = [f"dim{self.dim}" if self.dim else "", self.precision or ""]
        return "".join(f"{part}_" for part in parts if part)

    def calibrate(self, embeddings: torch.Tensor, lowest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """From (n, D), of which n may be 0: the range of every dimension that int8 divides into 256 steps. `lowest`:
        of all ranks."""
        if self.precision == "int8":
            rows = self._cut(embeddings)
            edge = rows.new_full((1, rows.shape[1]), torch.inf)
            low, high = lowest(torch.cat([rows, edge]).amin(dim=0)), -lowest(torch.cat([-rows, edge]).amin(dim=0))
            step = (high - low) / 255
            self._ranges = low, torch.where(step == 0, 1.0, step)

    def of(self, embeddings: Compared) -> Compared:
        """(n, D) -> (n, d) in float32; for "cosine" of length 1. Token vectors keep their dimensions."""
        if self.similarity == "maxsim":
            return embeddings.float()
        rows = self._cut(embeddings)
        if self.precision == "int8":
            low, step = self._ranges
            rows = (((rows - low) / step).floor().clamp(0, 255) - 128) / 128
        elif self.precision == "binary":
            rows = torch.where(rows > 0, 1.0, -1.0)
        return normalize(rows, dim=-1) if self.similarity == "cosine" else rows

    def _cut(self, embeddings: torch.Tensor) -> torch.Tensor:
        if self.dim is not None and self.dim > embeddings.shape[1]:
            raise UsageError(f"dims has {self.dim}, but embeddings have {embeddings.shape[1]} dimensions.")
        rows = embeddings[:, : self.dim].float()
        return normalize(rows, dim=-1) if self.precision else rows


def views_of(options: Evaluation, similarity: str) -> list[View]:
    """All that `options` ask for, the whole embeddings first. `similarity`: of the loss."""
    asked = [options.similarity_fn_names or [similarity], [None, *(options.dims or ())]]
    asked = [*asked, [None, *(options.precisions or ())]]
    return [View(name, dim, precision) for dim, precision, name in product(asked[1], asked[2], asked[0])]
