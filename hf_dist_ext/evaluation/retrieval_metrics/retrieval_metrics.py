"""MRR, nDCG and recall from the ranks of the right documents, as an `evaluate` module that needs no hub.

    metric = evaluate.load("hf_dist_ext/evaluation/retrieval_metrics")   # or RetrievalMetrics()
    metric.add_batch(ranks=[0, 3])
    metric.add_batch(ranks=[12])
    metric.compute(k=10)                                        # {"mrr@10": ..., "ndcg@10": ..., ...}
    metric.compute(ranks=[[0, 3], [12]])                        # the first query has two right documents

`evaluate.load` copies this file alone and scans its imports, so it imports nothing of ours, one module per line.
"""

import datasets
import evaluate
import numpy as np

DESCRIPTION = "MRR, nDCG and recall for queries with one or several right documents, from the ranks of those."

INPUTS = """
Args:
    ranks: for each query the number of documents ranked before its right one; 0 is best. Or a list per query, of all
        its right documents (the best k of them are enough).
    k: the cutoff, 10 by default.

Returns, each a mean over the queries:
    mrr@k: 1 / (rank + 1) of the best rank when that is below k, else 0.
    ndcg@k: the sum of 1 / log2(rank + 2) over ranks below k, divided by its value when all right documents come first.
    recall@1, recall@k: the share of queries with a rank below 1 and below k. For a query with several right documents
        one of them is enough, as in image-text retrieval; sentence-transformers calls this accuracy@k.
"""


class RetrievalMetrics(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=[
                datasets.Features({"ranks": datasets.Value("int64")}),
                datasets.Features({"ranks": datasets.Sequence(datasets.Value("int64"))}),
            ],
        )

    def _compute(self, ranks, k: int = 10) -> dict[str, float]:
        if k < 1:
            raise ValueError(f"k={k} looks at no document. Use 1 or more.")
        of_queries = [np.atleast_1d(np.asarray(of_query, dtype=np.int64)) for of_query in ranks]
        return {
            f"mrr@{k}": mean(reciprocal_rank, of_queries, k),
            f"ndcg@{k}": mean(ndcg, of_queries, k),
            "recall@1": mean(accuracy, of_queries, 1),
            f"recall@{k}": mean(accuracy, of_queries, k),
        }


def mean(of_query, queries, k: int) -> float:
    """Of a figure below, over the ranks of each query."""
    return float(np.mean([of_query(ranks, k) for ranks in queries]))


# ---- of one query; `ranks` (R,): those of its right documents ----


def reciprocal_rank(ranks: np.ndarray, k: int) -> float:
    best = ranks.min(initial=np.iinfo(np.int64).max - 1)
    return (best < k) / (best + 1.0)


def ndcg(ranks: np.ndarray, k: int) -> float:
    """All right documents are worth the same (Jarvelin and Kekalainen 2002)."""
    most = (1 / np.log2(np.arange(min(len(ranks), k)) + 2.0)).sum()
    return (1 / np.log2(ranks[ranks < k] + 2.0)).sum() / (most or 1.0)


def accuracy(ranks: np.ndarray, k: int) -> float:
    return float((ranks < k).any())
