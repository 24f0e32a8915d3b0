"""Exact ranks of right documents in a corpus that comes in parts and is spread over ranks.

The rank of a right document is the number of documents that stand before it, so no list of hits is kept or merged:
(1) the scores of the right documents themselves, each from the process that has encoded it, are told to all
(2) every process counts, part by part of its own documents, how many stand before each
(3) the counts of all processes are added up

A figure at k asks whether a rank is below k, so (2) looks at the k + 1 highest scores of a query in a part. Where
these leave open how many are before a right document, as many scores are equal to its own, it looks at all of them.

Of two documents with the same score the one whose id sorts first comes first, as in sentence-transformers'
InformationRetrievalEvaluator; what is no number comes before every right document. Scores are the same within
`TIE_TOLERANCE`, since float32 rounds them in another way for every shape. Letters: Q queries, D embedding, M
documents, m of a part, L links: pairs of a query and a document right for it, sorted by query.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_dist_ext.evaluation.token_vectors import TIE_TOLERANCE, Compared, scores_of, scores_of_pairs

TILE = 2**22  # scores at a time
LOWEST = -1e30  # the score of a right document that has none


class CorpusRanks:
    """
    Args:
        queries: (Q, D), or their token vectors.
        links: (L, 2) numbers of query and document.
        identical: (S, 2) the same, of documents that do not count for a query; sorted by query.
        order: (M,) places of the documents' ids among the sorted ids.
        most: ranks are exact below it, and at least as large where they are not below it.
    """

    def __init__(
        self, queries: Compared, links: torch.Tensor, identical: torch.Tensor, order: torch.Tensor, most: int
    ):
        self.queries, self.order, self.most = queries, order, most
        self.query, self.document = links.T.contiguous()
        self.skipping, self.skipped = identical.T.contiguous()
        self.right = torch.zeros(len(links), device=links.device)  # (L,) scores
        self.ahead = torch.zeros_like(self.query)  # (L,) what the ranks count up to

    def score(self, numbers: torch.Tensor, documents: Compared) -> None:
        """(1): `numbers` (m,), `documents` (m, D), some of them right. `right` is then to be added up over ranks."""
        place = self._places(numbers)[self.document]
        is_here = place >= 0
        scores = scores_of_pairs(self.queries[self.query[is_here]], documents[place[is_here]])
        self.right[is_here] = scores.nan_to_num(nan=LOWEST)

    def count(self, numbers: torch.Tensor, documents: Compared) -> None:
        """(2), with the right scores of all ranks."""
        if not len(numbers):
            return
        place, size = self._places(numbers), max(1, TILE // len(numbers))
        for first in range(0, len(self.queries), size):
            scores = scores_of(self.queries[first : first + size], documents).nan_to_num(nan=torch.inf)
            skips = _between(self.skipping, first, first + size)
            skipped = place[self.skipped[skips]]
            is_here = skipped >= 0
            scores[self.skipping[skips][is_here] - first, skipped[is_here]] = -torch.inf
            links = _between(self.query, first, first + size)
            self._count_best(links, self.query[links] - first, scores, self.order[numbers])

    def _count_best(self, links: slice, row: torch.Tensor, scores: torch.Tensor, order: torch.Tensor) -> None:
        """`scores` (t, m) of some queries, `links` those of them, `row` where the query of each stands."""
        best, columns = scores.topk(min(self.most + 1, scores.shape[1]))
        found, num_above = self._ahead(links, best[row], order[columns][row])
        right = self.right[links]
        is_open = (num_above < self.most) & (best[row, -1] >= right - _tolerance(right))
        if best.shape[1] < scores.shape[1] and is_open.any():
            for rest in is_open.nonzero().squeeze(1).split(max(1, TILE // scores.shape[1])):
                found[rest] = self._ahead(rest + links.start, scores[row[rest]], order)[0]
        self.ahead[links] += found

    def _ahead(
        self, links: slice | torch.Tensor, scores: torch.Tensor, order: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per link, of the documents with `scores` (links, n) and `order`: how many stand before its own, and how many
        of them by their score."""
        right, own = self.right[links, None], self.order[self.document[links], None]
        # A product of matrices may round a document's score up (by 1e-3 with tf32), but no document is before itself.
        is_above = (scores > right + _tolerance(right)) & (order != own)
        is_tied = ~is_above & (scores >= right - _tolerance(right))
        is_before = is_tied & (order < own)
        num_above = is_above.sum(dim=1)
        return num_above + is_before.sum(dim=1), num_above

    def _places(self, numbers: torch.Tensor) -> torch.Tensor:
        """(M,) where a document stands in a part; -1: it does not."""
        places = torch.full_like(self.order, -1)
        places[numbers] = torch.arange(len(numbers), device=numbers.device)
        return places

    def of_queries(self) -> list[np.ndarray]:
        """(3): per query the ranks of its right documents in the order of the links, once `ahead` is added up."""
        counts = torch.bincount(self.query, minlength=len(self.queries)).cumsum(0)[:-1]
        return np.split(self.ahead.cpu().numpy(), counts.cpu().numpy())


def _tolerance(scores: torch.Tensor) -> torch.Tensor:
    return TIE_TOLERANCE * scores.abs().clamp(min=1.0)


def _between(queries: torch.Tensor, first: int, stop: int) -> slice:
    """Which of the sorted numbers of queries are from `first` on and below `stop`."""
    return slice(*torch.searchsorted(queries, queries.new_tensor([first, stop])).tolist())
