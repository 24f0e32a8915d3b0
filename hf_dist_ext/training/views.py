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
from hf_dist_ext.run.evaluations import Evaluation
from hf_dist_ext.training.token_vectors import Compared, scores_of_pairs


class View:
    """
    Args:
        similarity: "cosine", "dot", "euclidean" or "manhattan"; of token vectors "maxsim".
        dim: d; None: D.
        precision: "int8", "binary" or None.
        signs: what two values of a bit are. (-1, 1): the cosine of two rows falls as their Hamming distance grows.
    """

    def __init__(
        self,
        similarity: str,
        dim: int | None = None,
        precision: str | None = None,
        signs: tuple[float, float] = (-1.0, 1.0),
    ):
        self.similarity, self.dim, self.precision, self.signs = similarity, dim, precision, signs
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
        """(n, D) -> (n, d) in float32; for "cosine" of length 1. Token vectors stay what they are."""
        if self.similarity == "maxsim":
            return embeddings
        rows = self._cut(embeddings)
        if self.precision == "int8":
            low, step = self._ranges
            rows = (((rows - low) / step).floor().clamp(0, 255) - 128) / 128
        elif self.precision == "binary":
            rows = torch.where(rows > 0, self.signs[1], self.signs[0])
        return normalize(rows, dim=-1) if self.similarity == "cosine" else rows

    def _cut(self, embeddings: torch.Tensor) -> torch.Tensor:
        if self.dim is not None and self.dim > embeddings.shape[1]:
            raise UsageError(f"dims has {self.dim}, but embeddings have {embeddings.shape[1]} dimensions.")
        rows = embeddings[:, : self.dim].float()
        return normalize(rows, dim=-1) if self.precision else rows


def views_of(options: Evaluation, similarity: str, **more: tuple[float, float]) -> list[View]:
    """All that `options` ask for, the whole embeddings first. `similarity`: of the loss."""
    asked = [options.similarity_fn_names or [similarity], [None, *(options.dims or ())]]
    asked = [*asked, [None, *(options.precisions or ())]]
    return [View(name, dim, precision, **more) for dim, precision, name in product(asked[1], asked[2], asked[0])]


def pairwise(first: Compared, second: Compared, similarity: str) -> torch.Tensor:
    """(n, d), (n, d) as a view gives them -> (n,), larger for pairs that are alike."""
    if similarity in ("cosine", "dot", "maxsim"):
        return scores_of_pairs(first, second)
    return -torch.linalg.vector_norm(first - second, ord=2 if similarity == "euclidean" else 1, dim=-1)
