"""Evaluations of rows of texts: do similarities agree with people's, are positives closer, do right documents lead?

Embeddings are gathered, so that every rank computes the same figures from the same numbers. Letters: N rows, n texts,
D embedding, P pairs of texts that are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hf_dist_ext.data.evaluation_rows import RerankingData, SimilarityData, TripletData
from hf_dist_ext.run.evaluations import Evaluation, Reranking, Similarity, Triplet
from hf_dist_ext.training.embedder import ItemsEmbedder
from hf_dist_ext.training.metrics import TIE_TOLERANCE, average_ranks, correlation
from hf_dist_ext.training.token_vectors import Compared, together
from hf_dist_ext.training.views import View, pairwise, views_of

BITS = (0.0, 1.0)  # binary values in pairs with a score, as EmbeddingSimilarityEvaluator has them
TILE = 2**24  # numbers at a time

OfView = Callable[[View], dict[str, float]]


def _figures(
    options: Evaluation, of_loss: str, of_view: OfView, pattern: str, **more: tuple[float, float]
) -> dict[str, float]:
    """Of all views, and the largest where there are several similarities. `pattern`: of a name."""
    found, all_similarities = {}, {}
    for view in views_of(options, of_loss, **more):
        prefix = f"{options.name}_{view.prefix}"
        for figure, value in of_view(view).items():
            found[prefix + pattern.format(figure, view.similarity)] = value
            all_similarities.setdefault(prefix + pattern.format(figure, "max"), []).append(value)
    return found | {name: max(values) for name, values in all_similarities.items() if len(values) > 1}


def _compared(view: View, first: Compared, second: Compared, numbers: np.ndarray, others: np.ndarray) -> torch.Tensor:
    """(n, D) and (n', D), or token vectors, and P numbers of rows of each -> (P,) similarities, on the CPU in
    float64."""
    view.calibrate(together([first, second]), lambda lowest: lowest)  # every rank has all of them
    first, second = view.of(first), view.of(second)
    pairs = torch.from_numpy(np.stack([numbers, others])).to(first.device)
    parts = pairs.split(max(1, TILE // first.shape[1]), dim=1)
    return torch.cat([pairwise(first[a], second[b], view.similarity) for a, b in parts]).double().cpu()


# ---- pairs with a score ----


def similarity(data: SimilarityData, embedder: ItemsEmbedder, of_loss: str) -> dict[str, float]:
    """Pearson's and Spearman's correlation of similarities and scores."""
    options = data.options
    embeddings = embedder.whole(data.items, options.column or embedder.collator.columns[0], options.prompt)

    def of_view(view: View) -> dict[str, float]:
        found = _compared(view, embeddings, embeddings, *data.pairs.T).numpy()
        # A sentence beside itself has a cosine of 1, but for rounding.
        rounded = np.round(found / (TIE_TOLERANCE * max(1.0, np.abs(found).max())))
        spearman = correlation(average_ranks(data.scores), average_ranks(rounded))
        return {"pearson": correlation(data.scores, found), "spearman": spearman}

    return _figures(options, of_loss, of_view, "{0}_{1}", signs=BITS)


def names_of_similarity(options: Similarity, of_loss: str, is_short: bool) -> list[str]:
    figures = dict.fromkeys(["spearman"] if is_short else ["pearson", "spearman"], 0.0)
    return list(_figures(options, of_loss, lambda view: figures, "{0}_{1}"))


# ---- triplets ----


def triplets(data: TripletData, embedder: ItemsEmbedder, of_loss: str) -> dict[str, float]:
    """The share of anchors that are closer to their positive than to their negative."""
    (query_column, query_prompt), (column, prompt) = embedder.sides(data.options)
    anchors = embedder.whole(data.queries, query_column, query_prompt)
    documents = embedder.whole(data.documents, column, prompt)

    def of_view(view: View) -> dict[str, float]:
        right, wrong = (
            _compared(view, anchors, documents, data.anchors, numbers) for numbers in (data.positives, data.negatives)
        )
        return {"accuracy": (right > wrong + data.options.margin).double().mean().item()}

    return _figures(data.options, of_loss, of_view, "{1}_{0}")


def names_of_triplets(options: Triplet, of_loss: str, is_short: bool) -> list[str]:
    return list(_figures(options, of_loss, lambda view: {"accuracy": 0.0}, "{1}_{0}"))


# ---- reranking ----


def reranking(data: RerankingData, embedder: ItemsEmbedder, of_loss: str) -> dict[str, float]:
    """Of each row's documents, where do the right ones stand? A tie counts against them."""
    (query_column, query_prompt), (column, prompt) = embedder.sides(data.options)
    queries = embedder.whole(data.queries, query_column, query_prompt)
    documents = embedder.whole(data.documents, column, prompt)
    sizes = [len(listed) for listed in data.listed]
    asked, listed = np.repeat(data.asked, sizes), np.concatenate(data.listed)

    def of_view(view: View) -> dict[str, float]:
        scores = _compared(view, queries, documents, asked, listed).split(sizes)
        return list_figures([_ranks(*pair) for pair in zip(scores, data.num_right, strict=True)], data.options.at_k)

    return _figures(data.options, of_loss, of_view, "{0}")


def _ranks(scores: torch.Tensor, num_right: int) -> np.ndarray:
    """Of the first `num_right` documents among all of (n,)."""
    wrong = scores[num_right:].nan_to_num(nan=torch.inf)
    right = scores[:num_right].nan_to_num(nan=-torch.inf).sort(descending=True).values
    to_beat = right - TIE_TOLERANCE * right.abs().clamp(min=1.0)
    return ((wrong[None, :] >= to_beat[:, None]).sum(dim=1) + torch.arange(num_right)).numpy()


def list_figures(ranks: list[np.ndarray], k: int) -> dict[str, float]:
    """Means over rows, of the ranks of each one's right documents."""
    # Importing evaluate takes a second, and only evaluation needs it.
    from hf_dist_ext.training.retrieval_metrics import retrieval_metrics as of

    longest = 1 + max(int(of_row.max()) for of_row in ranks)
    return {
        "map": of.mean(of.average_precision, ranks, longest),
        f"mrr@{k}": of.mean(of.reciprocal_rank, ranks, k),
        f"ndcg@{k}": of.mean(of.ndcg, ranks, k),
    }


def names_of_reranking(options: Reranking, of_loss: str, is_short: bool) -> list[str]:
    figures = list_figures([np.zeros(1, dtype=np.int64)], options.at_k)
    return list(_figures(options, of_loss, lambda view: figures, "{0}"))
