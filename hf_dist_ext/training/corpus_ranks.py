"""Exact ranks of right documents in a corpus that comes in parts and is spread over ranks.

The rank of a right document is the number of documents that stand before it, so no list of hits is kept or merged:
(1) the scores of the right documents themselves, each from the process that has encoded it, are told to all
(2) every process counts, part by part of its own documents, how many score higher
(3) the counts of all processes are added up

Of two documents with the same score the one whose id sorts first comes first, as in sentence-transformers'
InformationRetrievalEvaluator; what is no number comes before every right document. Scores are the same within
`TIE_TOLERANCE`, since float32 rounds them in another way for every shape. Letters: Q queries, D embedding, M
documents, m of a part, L links: pairs of a query and a document right for it, sorted by query.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_dist_ext.training.metrics import TIE_TOLERANCE

TILE = 2**22  # scores at a time
LOWEST = -1e30  # the score of a right document that has none


class CorpusRanks:
    """
    Args:
        queries: (Q, D).
        links: (L, 2) numbers of query and document.
        identical: (S, 2) the same, of documents that do not count for a query; sorted by query.
        order: (M,) places of the documents' ids among the sorted ids.
    """

    def __init__(self, queries: torch.Tensor, links: torch.Tensor, identical: torch.Tensor, order: torch.Tensor):
        self.queries, self.order = queries, order
        self.query, self.document = links.T.contiguous()
        self.skipping, self.skipped = identical.T.contiguous()
        self.right = queries.new_zeros(len(links))  # (L,) scores
        self.ahead = torch.zeros_like(self.query)  # (L,) what the ranks count up to

    def score(self, numbers: torch.Tensor, documents: torch.Tensor) -> None:
        """(1): `numbers` (m,), `documents` (m, D), some of them right. `right` is then to be added up over ranks."""
        place = self._places(numbers)[self.document]
        is_here = place >= 0
        scores = (self.queries[self.query[is_here]] * documents[place[is_here]]).sum(dim=1)
        self.right[is_here] = scores.nan_to_num(nan=LOWEST)

    def count(self, numbers: torch.Tensor, documents: torch.Tensor) -> None:
        """(2), with the right scores of all ranks."""
        if not len(numbers):
            return
        order, place = self.order[numbers], self._places(numbers)
        for links in torch.arange(len(self.query), device=numbers.device).split(max(1, TILE // len(numbers))):
            query = self.query[links]
            first, last = int(query[0]), int(query[-1])
            scores = (self.queries[first : last + 1] @ documents.T).nan_to_num(nan=torch.inf)
            start, stop = torch.searchsorted(self.skipping, self.skipping.new_tensor([first, last + 1])).tolist()
            skipped = place[self.skipped[start:stop]]
            is_here = skipped >= 0
            scores[self.skipping[start:stop][is_here] - first, skipped[is_here]] = -torch.inf
            scores = scores[query - first]  # (links, m)
            right = self.right[links, None]
            tolerance = TIE_TOLERANCE * right.abs().clamp(min=1.0)
            is_before = order < self.order[self.document[links], None]
            is_ahead = (scores > right + tolerance) | ((scores >= right - tolerance) & is_before)
            self.ahead[links] += is_ahead.sum(dim=1)

    def _places(self, numbers: torch.Tensor) -> torch.Tensor:
        """(M,) where a document stands in a part; -1: it does not."""
        places = torch.full_like(self.order, -1)
        places[numbers] = torch.arange(len(numbers), device=numbers.device)
        return places

    def of_queries(self) -> list[np.ndarray]:
        """(3): per query the ranks of its right documents in the order of the links, once `ahead` is added up."""
        counts = torch.bincount(self.query, minlength=len(self.queries)).cumsum(0)[:-1]
        return np.split(self.ahead.cpu().numpy(), counts.cpu().numpy())
