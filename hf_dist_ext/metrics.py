"""Retrieval metrics: how high does each query rank its own document among all documents?

    retrieval_metrics(queries, documents)                       # query i asks for document i -> {"mrr@10": ..., ...}

(1) `retrieval_ranks`: scores in tiles -> the rank of each query's document, one integer per query
(2) the `evaluate` module in retrieval_metrics/ turns ranks into means; it needs no hub

Ranks, not scores or embeddings, are what to gather from processes: metrics are means over queries, so any split
of the queries over processes gives the same numbers, provided every process ranks against all documents.
Letters: Q queries, M documents, D embedding.
"""

from __future__ import annotations

import torch

# float32 rounds scores of unit vectors to about 1e-7, in another way for every tile shape.
TIE_TOLERANCE = 1e-6


def retrieval_ranks(
    queries: torch.Tensor,
    documents: torch.Tensor,
    target: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    tile: int = 4096,
) -> torch.Tensor:
    """(Q, D), (M, D) -> (Q,) int64: how many documents score at least as high as the query's own, `target` (Q,).

    0 is best. Ties count against the query, within `TIE_TOLERANCE`, and so does a score that is not a number: a model
    that maps everything to one point ranks last, not first. `target` None: query i asks for document i. Documents
    with the id (`document_ids`, (M,)) of the query's own are the same document and do not compete with it.
    """
    queries, documents = queries.float(), documents.float()
    if target is None:
        assert len(queries) == len(documents), (len(queries), len(documents))
        target = torch.arange(len(queries))
    if document_ids is None:
        document_ids = torch.arange(len(documents))
    target, document_ids = target.to(queries.device), document_ids.to(queries.device)
    target_ids = document_ids[target]  # (Q,)
    target_scores = (queries * documents[target]).sum(dim=1)  # (Q,)
    to_beat = target_scores - TIE_TOLERANCE * target_scores.abs().clamp(min=1.0)
    ranks = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    for query_rows in torch.arange(len(queries), device=queries.device).split(tile):
        for document_tile, ids_tile in zip(documents.split(tile), document_ids.split(tile), strict=True):
            scores = queries[query_rows] @ document_tile.T  # (tile, tile)
            is_ahead = ~(scores < to_beat[query_rows, None])  # not "greater": NaN compares false
            is_other = ids_tile != target_ids[query_rows, None]
            ranks[query_rows] += (is_ahead & is_other).sum(dim=1)
    return ranks


def retrieval_metrics(
    queries: torch.Tensor,
    documents: torch.Tensor,
    target: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    k: int = 10,
) -> dict[str, float]:
    """`mrr@k`, `ndcg@k`, `recall@1`, `recall@k` of embeddings; the arguments are those of `retrieval_ranks`."""
    # Importing evaluate takes a second, and only evaluation needs it.
    from hf_dist_ext.retrieval_metrics.retrieval_metrics import RetrievalMetrics

    ranks = retrieval_ranks(queries, documents, target, document_ids)
    # In memory: processes that evaluate at the same time would wait for each other's lock on the cache file.
    return RetrievalMetrics(keep_in_memory=True).compute(ranks=ranks.cpu().numpy(), k=k)
