"""MRR, nDCG and recall from the ranks of the relevant documents, as an `evaluate` module that needs no hub.

    metric = evaluate.load("hf_dist_ext/retrieval_metrics")     # or RetrievalMetrics()
    metric.add_batch(ranks=[0, 3])
    metric.add_batch(ranks=[12])
    metric.compute(k=10)                                        # {"mrr@10": ..., "ndcg@10": ..., ...}

`evaluate.load` copies this file alone and scans its imports, so it imports nothing of ours, one module per line.
"""

import datasets
import evaluate
import numpy as np

DESCRIPTION = "MRR, nDCG and recall for queries with one relevant document each, from that document's rank."

INPUTS = """
Args:
    ranks: for each query the number of documents ranked before its relevant one; 0 is best.
    k: the cutoff, 10 by default.

Returns, each a mean over the queries:
    mrr@k: 1 / (rank + 1) for ranks below k, else 0.
    ndcg@k: 1 / log2(rank + 2) for ranks below k, else 0; the ideal gain of one relevant document is 1.
    recall@1, recall@k: the share of ranks below 1 and below k.
"""


class RetrievalMetrics(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"ranks": datasets.Value("int64")}),
        )

    def _compute(self, ranks, k: int = 10) -> dict[str, float]:
        if k < 1:
            raise ValueError(f"k={k} looks at no document. Use 1 or more.")
        ranks = np.asarray(ranks)
        is_found = ranks < k
        return {
            f"mrr@{k}": float(np.mean(is_found / (ranks + 1.0))),
            f"ndcg@{k}": float(np.mean(is_found / np.log2(ranks + 2.0))),
            "recall@1": float(np.mean(ranks < 1)),
            f"recall@{k}": float(np.mean(is_found)),
        }
