"""Retrieval over a whole corpus: where do the right documents of each query stand?

(1) encode the queries, which every rank gets whole
(2) encode the corpus in parts, all right documents in the first; each rank counts in its share what stands before them
(3) add the counts of all ranks up: the ranks of the right documents, and figures of these

`CorpusEvaluator` runs it where an evaluator of sentence-transformers runs. Letters: Q queries, D embedding, m
documents of this rank's share of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sentence_transformers.base.evaluation import BaseEvaluator
from torch.nn.utils.rnn import pad_sequence

from hf_dist_ext.data.evaluations import Items, RetrievalData
from hf_dist_ext.evaluation.corpus_ranks import CorpusRanks
from hf_dist_ext.evaluation.encoder import SharedEncoder, with_all_ranks
from hf_dist_ext.evaluation.token_vectors import Compared, TokenVectors
from hf_dist_ext.evaluation.views import View, views_of
from hf_dist_ext.run.evaluations import Retrieval
from hf_dist_ext.strategies.base import Strategy

# What is logged of dimensions and quantised values, and what a report shows.
SHORT = ("recall", "ndcg", "mrr", "map")
BATCHES_OF_PICTURES = 8  # that are decoded at a time


class CorpusEvaluator(BaseEvaluator):
    """Every rank encodes its share of the corpus, and none holds more than `corpus_chunk_size` of its embeddings.

    Args:
        similarity: how embeddings are compared, where the data do not say it.
        embed_inputs: as of sentence-transformers' evaluators: (model, rows, encode_fn_name=, ...) -> embeddings.
    """

    def __init__(self, data: RetrievalData, similarity: str, batch_size: int, embed_inputs: Callable | None = None):
        super().__init__()
        self.data, self.similarity, self.batch_size, self.name = data, similarity, batch_size, data.options.name
        self.embed_inputs = embed_inputs or _embedded
        self.primary_metric = f"{self.name}_{views_of(data.options, similarity)[0].similarity}_ndcg@"
        self.primary_metric += str(max(data.options.ndcg_at_k))

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        if isinstance(model, SharedEncoder):
            with with_all_ranks(model, self):
                figures = self.on_all_ranks(model)
        else:
            figures = self.on_all_ranks(model)
        self.store_metrics_in_model_card_data(model, figures, epoch, steps)
        return figures

    def on_all_ranks(self, model: Any) -> dict[str, float]:
        return figures_of(self.data, _Shares(model, self.embed_inputs, self.batch_size), self.similarity)


def _embedded(model: Any, rows: list, encode_fn_name: str, **options: Any) -> Any:
    return getattr(model, f"encode_{encode_fn_name}")(rows, **options)


class _Shares:
    """Embeddings of texts or pictures: of all on every rank, or of every rank's share. Items are dealt to ranks in
    turn, the longest first; a rank with one less repeats an item, since a forward may be a collective."""

    def __init__(self, model: Any, embed: Callable, batch_size: int):
        self.model, self.embed, self.batch_size = model, embed, batch_size
        self.is_shared = isinstance(model, SharedEncoder)
        self.rows = (model.encoding.strategy if self.is_shared else Strategy()).rows

    def whole(self, items: Items, side: str) -> Compared:
        return self._encoded(items, np.arange(len(items)), side)

    def own(self, items: Items, numbers: np.ndarray, side: str) -> tuple[torch.Tensor, Compared]:
        """This rank's share of the items with these numbers: their numbers and embeddings, on the device."""
        numbers = numbers[np.argsort(-items.lengths[numbers], kind="stable")]
        own, most = numbers[self.rows.index :: self.rows.size], len(numbers[:: self.rows.size])
        mine = np.append(own, numbers[-1])[:most]
        encode = lambda: self._encoded(items, mine, side)  # noqa: E731
        found = self.model.encode_apart(encode) if self.is_shared else encode()
        return torch.from_numpy(own).to(found.device), found[: len(own)]

    def _encoded(self, items: Items, numbers: np.ndarray, side: str) -> Compared:
        options: dict[str, Any] = {"encode_fn_name": side, "batch_size": self.batch_size, "show_progress_bar": False}
        is_dense = hasattr(self.model, "truncate_dim")  # which a MultiVectorEncoder has not
        options |= {"convert_to_tensor": True} if is_dense else {}
        size = BATCHES_OF_PICTURES * self.batch_size if items.are_pictures else len(numbers)
        parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        encoded = [self.embed(self.model, items.take(part), **options) for part in parts]
        if is_dense:
            return encoded[0] if len(encoded) == 1 else torch.cat(encoded)
        found = list(chain.from_iterable(encoded))
        lengths = torch.tensor([len(one) for one in found], device=found[0].device)
        vectors = pad_sequence(found, batch_first=True)
        return TokenVectors(vectors, torch.arange(vectors.shape[1], device=lengths.device) < lengths[:, None])

    def added(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the sum over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def lowest(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the smallest of all ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def _reduced(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        if self.rows.size > 1:
            dist.all_reduce(values, how, group=self.rows.peers)
        return values


@torch.no_grad()
def figures_of(data: RetrievalData, shares: _Shares, similarity: str) -> dict[str, float]:
    """Name -> figure. Every rank calls it."""
    options, views = data.options, views_of(data.options, similarity)
    queries = shares.whole(data.queries, "query")  # (1): (Q, D)
    states: list[CorpusRanks] = []
    for index, part in enumerate(_parts(data)):  # (2)
        numbers, documents = shares.own(data.documents, part, "document")  # (m,), (m, D)
        if index == 0:
            states = [_begun(data, view, queries, numbers, documents, shares) for view in views]
        for view, state in zip(views, states, strict=True):
            state.count(numbers, view.of(documents))
    found: dict[str, float] = {}
    gains = np.split(data.gains, np.bincount(data.links[:, 0]).cumsum()[:-1])
    for view, state in zip(views, states, strict=True):
        shares.added(state.ahead)  # (3)
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
    shares: _Shares,
) -> CorpusRanks:
    """With the scores of the right documents, which are all in this part on one rank or another."""
    view.calibrate(documents, shares.lowest)
    given = (torch.from_numpy(array).to(queries.device) for array in (data.links, data.identical, data.order))
    options = data.options
    ks = (options.accuracy_at_k, options.precision_recall_at_k, options.mrr_at_k, options.ndcg_at_k, options.map_at_k)
    state = CorpusRanks(view.of(queries), *given, most=max(map(max, ks)))
    state.score(numbers, view.of(documents))
    shares.added(state.right)
    return state


def ranking_figures(
    ranks: Sequence[np.ndarray], gains: Sequence[np.ndarray], options: Retrieval, only_last: bool = False
) -> dict[str, float]:
    """Means over queries, of the ranks of each one's right documents and of what these are worth. `only_last`: at the
    largest k each, without accuracy and precision."""
    # Importing evaluate takes a second, and only evaluation needs it.
    from hf_dist_ext.evaluation.retrieval_metrics import retrieval_metrics as of

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
