"""MRR, nDCG and recall from the ranks of the right documents, as an `evaluate` module that needs no hub.

    metric = evaluate.load("hf_dist_ext/training/retrieval_metrics")     # or RetrievalMetrics()
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
        best = np.asarray([of_query.min(initial=np.iinfo(np.int64).max) for of_query in of_queries])
        gains = [(1 / np.log2(of_query[of_query < k] + 2.0)).sum() for of_query in of_queries]
        ideal = np.cumsum(1 / np.log2(np.arange(k) + 2.0))  # of 1 right document to k
        most = [ideal[min(max(len(of_query), 1), k) - 1] for of_query in of_queries]
        return {
            f"mrr@{k}": float(np.mean((best < k) / (best + 1.0))),
            f"ndcg@{k}": float(np.mean(np.divide(gains, most))),
            "recall@1": float(np.mean(best < 1)),
            f"recall@{k}": float(np.mean(best < k)),
        }
