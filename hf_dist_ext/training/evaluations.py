"""What a run evaluates beside its held-out rows, with the model as it is.

    evaluations = Evaluations(read_evaluations([...]), loss, model, collator)
    evaluations.run(embedder, "eval")       # {"eval_nfcorpus_cosine_ndcg@10": ..., ...}

Figures have the names that sentence-transformers' evaluators give them; those of dimensions and quantised values have
`dim256_`, `int8_` or `dim256_int8_` after the evaluation's name. Every rank computes them from the same numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hf_dist_ext.data.evaluations import RetrievalData
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.evaluations import Retrieval, Sides
from hf_dist_ext.training.corpus_ranks import CorpusRanks
from hf_dist_ext.training.embedder import Embedder
from hf_dist_ext.training.views import View, views_of

# What is logged of dimensions and quantised values, and what a report shows.
SHORT = ("recall", "ndcg", "mrr", "map")


class Evaluations:
    """
    Args:
        given: of `read_evaluations`.
        similarity: how the loss compares embeddings: "cosine" or "dot".
        collator: of the training rows.
    """

    def __init__(self, given: Sequence[Any], similarity: str, collator: Any):
        self.given, self.similarity = list(given), similarity
        self._due: str | None = None
        if given and not (hasattr(collator, "features") and hasattr(collator, "columns")):
            raise UsageError(
                f"evaluations encode texts as the columns of a batch, which {type(collator).__name__} does not make "
                "one by one. Use hf_dist_ext.data.ContrastiveCollator."
            )
        for data in self.given:
            _check_columns(data.options, collator.columns)

    @property
    def names(self) -> list[str]:
        """Of all figures, without "eval_"."""
        return [name for data in self.given for name in NAMES[type(data)](data.options, self.similarity)]

    @property
    def headlines(self) -> list[str]:
        """The names that a report shows."""
        return [name for data in self.given for name in NAMES[type(data)](data.options, self.similarity, True)]

    def check(self, best: str | None, paired: Sequence[str] | None, model: Any) -> None:
        """Before anything runs. Raises UsageError.

        Args:
            best: `metric_for_best_model`.
            paired: what the evaluation of rows gives, without "eval_"; None: not known.
            model: without its wrappers.
        """
        width = getattr(model, "embedding_dim", None)
        for options in (data.options for data in self.given):
            if width and (wide := [dim for dim in options.dims or () if dim > width]):
                raise UsageError(f'evaluation "{options.name}": dims has {wide[0]}, but embeddings have {width}.')
        if paired is None or best is None or (name := best.removeprefix("eval_")) in (known := [*paired, *self.names]):
            return
        near = difflib.get_close_matches(name, known, 3, 0.3) or known
        raise UsageError(
            f'metric_for_best_model="{best}" is none of the {len(known)} figures of this run\'s evaluations. Closest: '
            f"{', '.join(near[:3])}."
        )

    @contextmanager
    def due(self, prefix: str | None) -> Iterator[None]:
        """Around an evaluation of the trainer: the figures are added once, to those of its first loop. None: not."""
        is_outer = self._due is None and bool(self.given)
        self._due = prefix if is_outer else self._due
        try:
            yield
        finally:
            self._due = None if is_outer else self._due

    def take_due(self) -> str | None:
        """The prefix of figures that are wanted now."""
        prefix, self._due = self._due, None
        return prefix

    @torch.no_grad()
    def run(self, embedder: Embedder, prefix: str) -> dict[str, float]:
        """Every rank calls it."""
        found = {}
        for data in self.given:
            found |= RUNS[type(data)](data, embedder, self.similarity)
        return {f"{prefix}_{name}": float(value) for name, value in found.items()}


def _check_columns(options: Any, columns: Sequence[str]) -> None:
    for field in ("query_column", "corpus_column"):
        column = getattr(options, field, None)
        if column is not None and column not in columns:
            raise UsageError(
                f'evaluation "{options.name}": {field}="{column}" is no column of this run: {", ".join(columns)}.'
            )


# ---- retrieval over a corpus ----


def retrieval(data: RetrievalData, embedder: Embedder, similarity: str) -> dict[str, float]:
    """(1) encode the queries  (2) encode the corpus in parts, the right documents in the first; each rank counts in
    its share what stands before them  (3) add the counts up"""
    options, views = data.options, views_of(data.options, similarity)
    (query_column, query_prompt), (column, prompt) = sides(options, embedder.collator)
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
    queries: torch.Tensor,
    numbers: torch.Tensor,
    documents: torch.Tensor,
    embedder: Embedder,
) -> CorpusRanks:
    """With the scores of the right documents, which are all in this part on one rank or another."""
    view.calibrate(documents, embedder.lowest)
    given = (torch.from_numpy(array).to(queries.device) for array in (data.links, data.identical, data.order))
    state = CorpusRanks(view.of(queries), *given)
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


def names_of_retrieval(options: Retrieval, similarity: str, is_short: bool = False) -> list[str]:
    return [
        f"{options.name}_{view.prefix}{view.similarity}_{name}"
        for view in views_of(options, similarity)
        for name in ranking_figures([np.zeros(1)], [np.ones(1)], options, is_short or bool(view.prefix))
    ]


def sides(options: Sides, collator: Any) -> list[tuple[str, str | None]]:
    """Column and prompt of queries and of documents."""
    query, document, *_ = collator.columns
    return [
        (options.query_column or query, options.query_prompt),
        (options.corpus_column or document, options.corpus_prompt),
    ]


RUNS = {RetrievalData: retrieval}
NAMES = {RetrievalData: names_of_retrieval}
