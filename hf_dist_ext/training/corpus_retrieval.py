"""Retrieval over a whole corpus: where do the right documents of each query stand?

(1) encode the queries, which every rank gets whole
(2) encode the corpus in parts, all right documents in the first; each rank counts in its share what stands before them
(3) add the counts of all ranks up: the ranks of the right documents, and figures of these

Letters: Q queries, D embedding, m documents of this rank's share of a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hf_dist_ext.data.evaluations import RetrievalData
from hf_dist_ext.run.evaluations import Retrieval
from hf_dist_ext.training.corpus_ranks import CorpusRanks
from hf_dist_ext.training.embedder import ItemsEmbedder
from hf_dist_ext.training.token_vectors import Compared
from hf_dist_ext.training.views import View, views_of

# What is logged of dimensions and quantised values, and what a report shows.
SHORT = ("recall", "ndcg", "mrr", "map")


def run(data: RetrievalData, embedder: ItemsEmbedder, similarity: str) -> dict[str, float]:
    """Name -> figure. Every rank calls it."""
    options, views = data.options, views_of(data.options, similarity)
    (query_column, query_prompt), (column, prompt) = embedder.sides(options)
    queries = embedder.whole(data.queries, query_column, query_prompt)  # (1): (Q, D)
    states: list[CorpusRanks] = []
    for index, part in enumerate(_parts(data)):  # (2)
        numbers, documents = embedder.own(data.documents, part, column, prompt)  # (m,), (m, D)
        if index == 0:
            states = [_begun(data, view, queries, numbers, documents, embedder) for view in views]
        for view, state in zip(views, states, strict=True):
            state.count(numbers, view.of(documents))
    found: dict[str, float] = {}
    gains = np.split(data.gains, np.bincount(data.links[:, 0]).cumsum()[:-1])
    for view, state in zip(views, states, strict=True):
        embedder.added(state.ahead)  # (3)
        figures = ranking_figures(state.of_queries(), gains, options, only_last=bool(view.prefix))
        found |= {f"{options.name}_{view.prefix}{view.similarity}_{name}": value for name, value in figures.items()}
    return found


def _parts(data: RetrievalData) -> list[np.ndarray]:
    """Numbers of documents: all right ones in the first part."""
    is_right = np.zeros(len(data.documents), dtype=bool)
    is_right[data.links[:, 1]] = True
    numbers, size = np.argsort(~is_right, kind="stable"), data.options.corpus_chunk_size
    first = max(size, int(is_right.sum()))
    return [part for part in np.split(numbers, range(first, len(numbers), size)) if len(part)]


def _begun(
    data: RetrievalData,
    view: View,
    queries: Compared,
    numbers: torch.Tensor,
    documents: Compared,
    embedder: ItemsEmbedder,
) -> CorpusRanks:
    """With the scores of the right documents, which are all in this part on one rank or another."""
    view.calibrate(documents, embedder.lowest)
    given = (torch.from_numpy(array).to(queries.device) for array in (data.links, data.identical, data.order))
    options = data.options
    ks = (options.accuracy_at_k, options.precision_recall_at_k, options.mrr_at_k, options.ndcg_at_k, options.map_at_k)
    state = CorpusRanks(view.of(queries), *given, most=max(map(max, ks)))
    state.score(numbers, view.of(documents))
    embedder.added(state.right)
    return state


def ranking_figures(
    ranks: Sequence[np.ndarray], gains: Sequence[np.ndarray], options: Retrieval, only_last: bool = False
) -> dict[str, float]:
    """Means over queries, of the ranks of each one's right documents and of what these are worth. `only_last`: at the
    largest k each, without accuracy and precision."""
    # Importing evaluate takes a second, and only evaluation needs it.
    from hf_dist_ext.training.retrieval_metrics import retrieval_metrics as of

    figures = {
        "accuracy": (of.accuracy, options.accuracy_at_k),
        "precision": (of.precision, options.precision_recall_at_k),
        "recall": (of.recall, options.precision_recall_at_k),
        "ndcg": (of.ndcg, options.ndcg_at_k),
        "mrr": (of.reciprocal_rank, options.mrr_at_k),
        "map": (of.average_precision, options.map_at_k),
    }
    if only_last:
        figures = {name: (of_query, [max(ks)]) for name, (of_query, ks) in figures.items() if name in SHORT}
    return {
        f"{name}@{k}": of.mean(of_query, ranks, k, *([gains] if name == "ndcg" else []))
        for name, (of_query, ks) in figures.items()
        for k in ks
    }


def names(options: Retrieval, similarity: str, is_short: bool = False) -> list[str]:
    return [
        f"{options.name}_{view.prefix}{view.similarity}_{name}"
        for view in views_of(options, similarity)
        for name in ranking_figures([np.zeros(1)], [np.ones(1)], options, is_short or bool(view.prefix))
    ]
