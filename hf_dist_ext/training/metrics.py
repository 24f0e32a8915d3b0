"""Retrieval metrics: how high does each query rank its right documents among all documents?

    retrieval_metrics(queries, documents, ids)      # row i: query i asks for document i -> {"mrr@10": ..., ...}

(1) ids turn rows into distinct queries, distinct documents, and which documents are right for which query
(2) `retrieval_ranks`: scores in tiles -> the ranks of each query's right documents
(3) the `evaluate` module in retrieval_metrics/ turns ranks into means; it needs no hub

Ids decide, not rows: an image with five captions is one document for five queries, or one query with five right
documents. The numbers are those of sentence-transformers' InformationRetrievalEvaluator over the same queries and
documents (its accuracy@k is recall@k here), but for ties: there the document whose id sorts first wins a tie, so the
numbers depend on what documents are called; here a tie always counts against the query.
Letters: N rows, Q distinct queries, M distinct documents, D embedding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset

from hf_dist_ext.engine.combined_losses import LossPerSource, loss_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.token_vectors import TIE_TOLERANCE, Compared, of_prediction, scores_of
from hf_dist_ext.strategies.base import meanwhile

PAIRED = ("mrr@10", "ndcg@10", "recall@1", "recall@10")
RATED = ("spearman_cosine",)


def retrieval_metrics(
    queries: Compared, documents: Compared, ids: torch.Tensor | None = None, k: int = 10
) -> dict[str, float]:
    """(N, D), (N, D), or token vectors of N rows -> `mrr@k`, `ndcg@k`, `recall@1`, `recall@k`, means over the distinct
    queries.

    `ids` (N, 2): of row i's query and document; rows with the same id hold the same content. A third number is row i's
    group: what is right for a query of a group are the documents of all its rows. None: all rows differ.
    """
    # Importing evaluate takes a second, and only evaluation needs it.
    from hf_dist_ext.evaluation.retrieval_metrics.retrieval_metrics import RetrievalMetrics

    right, groups = None, None
    if ids is not None:  # (1)
        _, query = ids[:, 0].unique(return_inverse=True)
        _, document = ids[:, 1].unique(return_inverse=True)
        queries, documents = queries[_first_rows(query)], documents[_first_rows(document)]
        right, groups = torch.stack([query, document], dim=1), ids[:, 2] if ids.shape[1] > 2 else None
    ranks = retrieval_ranks(queries, documents, right, groups, most=k)  # (2)
    # In memory: processes that evaluate at the same time would wait for each other's lock on the cache file.
    return RetrievalMetrics(keep_in_memory=True).compute(ranks=ranks, k=k)  # (3)


def retrieval_ranks(
    queries: Compared,
    documents: Compared,
    right: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    most: int | None = None,
    tile: int = 2**22,
) -> list[list[int]]:
    """(Q, D), (M, D) -> per query the ranks of its right documents, best first, `most` of them; None: all.

    A rank is the number of documents before this one; 0 is best. A wrong document stands before a right one when it
    scores at least as high, within `TIE_TOLERANCE`, or not a number: a model that maps everything to one point ranks
    last, not first. `right` (N, 2): a query, and a document that is right for it; None: query i asks for document i.
    `groups` (N,): what is right for the query of a row is right for those of all rows of its group too.
    `tile`: scores at a time.
    """
    queries, documents = queries.float(), documents.float()
    if right is None:
        assert len(queries) == len(documents), (len(queries), len(documents))
        right = torch.arange(len(queries))[:, None].expand(-1, 2)
    right_ones = _right_ones(right.cpu(), groups, len(queries), len(documents))
    ranks: list[list[int]] = []
    for start in range(0, len(queries), rows := max(1, tile // len(documents))):
        scores = scores_of(queries[start : start + rows], documents)  # (rows, M)
        is_right = right_ones(start, len(scores)).to(scores.device)
        num_right = is_right.sum(dim=1)
        best = scores.masked_fill(scores.isnan() | ~is_right, -torch.inf)
        best = best.topk(min(int(num_right.max()), most or len(documents))).values  # (rows, right documents)
        to_beat = best - TIE_TOLERANCE * best.abs().clamp(min=1.0)
        num_ahead = torch.empty_like(best, dtype=torch.long)
        for place in range(best.shape[1]):
            is_ahead = ~(scores < to_beat[:, place, None])  # not "greater": NaN compares false
            num_ahead[:, place] = (is_ahead & ~is_right).sum(dim=1) + place
        pairs = zip(num_ahead.tolist(), num_right.tolist(), strict=True)
        ranks += [of_query[:number] for of_query, number in pairs]
    return ranks


def _right_ones(right: torch.Tensor, groups: torch.Tensor | None, num_queries: int, num_documents: int) -> Callable:
    """(first query, how many) -> (rows, M): which documents are right for them, those of all rows that share a key
    with the query, its own or a group's."""
    from scipy.sparse import csr_matrix  # takes a moment, and only evaluation needs it

    query, document = right.T.numpy()
    key = query
    if groups is not None:
        group = np.unique(groups.cpu().numpy(), return_inverse=True)[1]
        query, document, key = np.tile(query, 2), np.tile(document, 2), np.concatenate([key, num_queries + group])
    num_keys, ones = int(key.max()) + 1, np.ones(len(key), dtype=np.int32)
    of_keys = csr_matrix((ones, (key, document)), shape=(num_keys, num_documents))

    def of(start: int, rows: int) -> torch.Tensor:
        here = (query >= start) & (query < start + rows)
        keys = csr_matrix((ones[here], (query[here] - start, key[here])), shape=(rows, num_keys))
        return torch.from_numpy((keys @ of_keys).toarray() > 0)

    return of


def _first_rows(index: torch.Tensor) -> torch.Tensor:
    """(N,) numbers 0 to n - 1 -> (n,): the first row of each."""
    rows = torch.arange(len(index))
    return torch.full((int(index.max()) + 1,), len(index)).scatter_reduce_(0, index, rows, "amin")


def ids_of_rows(ids: dict[str, torch.Tensor] | None, anchor: str, positive: str, rows: torch.Tensor) -> torch.Tensor:
    """What travels as a batch's labels: (B, 2), with groups (B, 3); zeros (B,) when the collator gives no ids."""
    if ids is None or anchor not in ids or positive not in ids:
        return torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    return torch.stack([ids[name] for name in (anchor, positive, "group") if name in ids], dim=1)


def similarity_of(loss: Any) -> str:
    """How the loss compares embeddings, and so do evaluations: "cosine", "dot", or "maxsim" of token vectors."""
    return getattr(loss, "similarity", None) or ("cosine" if getattr(loss, "normalize", False) else "dot")


def paired_of(loss: Any) -> Sequence[str]:
    """What the evaluation of rows is judged by, without "eval_"."""
    return RATED if getattr(loss, "rates_pairs", False) else PAIRED


def names_of_paired(rows: Any, compute_metrics: Any) -> Sequence[str] | None:
    """What the evaluation of rows logs, without "eval_"; None: not known, since `compute_metrics` is the user's, or
    the loss depends on the rows."""
    if isinstance(rows, list | Mapping) and not rows:
        return ()
    if not isinstance(compute_metrics, PairMetrics):
        return None
    loss = compute_metrics.loss
    if not isinstance(rows, Mapping):
        return None if isinstance(loss, LossPerSource) else ("loss", *paired_of(loss))
    return [f"{name}_{one}" for name in rows for one in ("loss", *paired_of(loss_of(loss, name)))]


def labels_of_rows(loss: Any, facts: Any, anchor: str, positive: str, rows: torch.Tensor) -> torch.Tensor:
    """The ids of the rows, or their labels (B,) where the loss rates pairs."""
    if getattr(loss, "rates_pairs", False) and "label" in facts.targets:
        return facts.targets["label"].float()
    return ids_of_rows(facts.ids, anchor, positive, rows)


class PairMetrics:
    """The `compute_metrics` of a `DistTrainer` with this loss: labels are ids of rows, by which documents are ranked,
    or what people said of pairs, which cosines are correlated with."""

    def __init__(self, loss: Any):
        self.loss = loss

    def __call__(self, prediction: Any) -> dict[str, float]:
        if np.issubdtype(prediction.label_ids.dtype, np.floating):
            return metrics_of_rated_pairs(prediction)
        anchors, positives = map(of_prediction, prediction.predictions)
        if similarity_of(self.loss) == "cosine":  # whatever the model returns
            anchors, positives = (torch.nn.functional.normalize(rows, dim=-1) for rows in (anchors, positives))
        labels = torch.from_numpy(prediction.label_ids)
        return retrieval_metrics(anchors, positives, labels if labels.ndim > 1 else None)


def metrics_of_rated_pairs(prediction: Any) -> dict[str, float]:
    """`spearman_cosine`: the correlation of ranks between the pairs' cosines and their labels, as of
    sentence-transformers' EmbeddingSimilarityEvaluator. 0 where all labels or all cosines are equal."""
    from scipy.stats import spearmanr

    first, second = map(torch.from_numpy, prediction.predictions)
    cosines = torch.nn.functional.cosine_similarity(first, second).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one that has equal values alone: the correlation is no number then
        found, _ = spearmanr(cosines, prediction.label_ids)
    return {"spearman_cosine": 0.0 if math.isnan(found) else float(found)}


def loader(run: Any, make: Callable, dataset: Any, *, is_training: bool = False, **options: Any) -> Any:
    """Of a `DistTrainer`, by Trainer's own `make`. With a loss, figures are of all rows (`dataloader_drop_last` is of
    training), and the rows of a stream are read first: accelerate only knows of what has a length which rows are
    repeated ones that fill up a batch."""
    if is_training or run.loss is None:
        return make(dataset=dataset, is_training=is_training, **options)
    with meanwhile(run.args, dataloader_drop_last=False):
        return make(dataset=dataset if hasattr(dataset, "__len__") else _rows_of_stream(dataset), **options)


def _rows_of_stream(stream: Any) -> Dataset | list:
    """Pictures stay as they are stored, and are decoded where a batch is made."""
    features = getattr(stream, "features", None) or {}
    if not any(isinstance(feature, datasets.Image) for feature in features.values()):
        return list(stream)
    return Dataset.from_list(list(stream.decode(False)), features=features)


def check_can_be_computed(args: Any) -> None:
    """Raises UsageError for arguments that do not hand over all rows at once."""
    if args.batch_eval_metrics or not args.eval_do_concat_batches:
        wrong = "batch_eval_metrics=true" if args.batch_eval_metrics else "eval_do_concat_batches=false"
        raise UsageError(
            f"{wrong} hands over one batch at a time, and retrieval metrics rank every query among the documents of "
            f"all rows. Remove {wrong.partition('=')[0]}, or give a compute_metrics of your own."
        )
