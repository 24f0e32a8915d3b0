"""Hard negatives: documents that a model ranks high for a query, and that are not the query's own.

(1) `Pairs` makes rows into distinct queries and documents. A query's own documents are those of every row with its
    text, those of rows that share a group with such a row, and a document that is the query's text itself
(2) `nearest` ranks all other documents by their scores: exact search, in tiles, so that memory does not grow with the
    number of documents times that of queries
(3) `mine` takes the ranks `rank_min` to `rank_max`, leaves out what scores too close to the query's positives, and
    chooses among the rest. A teacher, such as a cross-encoder, may score positives and candidates anew for that

The relative margin is that of NV-Retriever (https://huggingface.co/papers/2407.15831, section 3.1, TopK-PercPos).
Letters: Q distinct queries, M distinct documents, q queries of a chunk, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

QUERIES = 256  # of a chunk
TILE = 1 << 16  # documents that are scored at a time

Scores = tuple[
    torch.Tensor, torch.Tensor
]  # (q, k) float32 and the documents' numbers; -inf and -1 where there is none


class Pairs:
    """Rows of a query and its document as numbers of distinct texts.

    `groups`: an id for each row, or None; rows with the same one are right for each other. `more`: documents that
    are right for no query.
    """

    def __init__(
        self,
        queries: Iterable[str],
        documents: Iterable[str],
        groups: Iterable | None = None,
        more: Iterable[str] = (),
    ):
        number_of_query: dict[str, int] = {}
        self.query_of_row = [number_of_query.setdefault(text, len(number_of_query)) for text in queries]
        number_of_document: dict[str, int] = {}
        self.document_of_row = [number_of_document.setdefault(text, len(number_of_document)) for text in documents]
        for text in more:
            number_of_document.setdefault(text, len(number_of_document))
        self.queries, self.documents = list(number_of_query), list(number_of_document)
        self.positives: list[set[int]] = [set() for _ in self.queries]
        self._itself = [number_of_document.get(text) for text in self.queries]
        self._groups: list[set] = [set() for _ in self.queries]
        self._of_group: dict = {}
        rows = list(zip(self.query_of_row, self.document_of_row, strict=True))
        for query, document in rows:
            self.positives[query].add(document)
        for (query, document), group in zip(rows, groups, strict=True) if groups is not None else ():
            self._groups[query].add(group)
            self._of_group.setdefault(group, set()).add(document)

    def own(self, query: int) -> set[int]:
        """The documents that can be no negatives of a query."""
        itself = self._itself[query]
        of_groups = (self._of_group[group] for group in self._groups[query])
        return self.positives[query].union([] if itself is None else [itself], *of_groups)


def nearest(queries: torch.Tensor, documents: torch.Tensor, own: Sequence[Iterable[int]], k: int) -> Scores:
    """(q, D), (M, D) -> the `k` documents that score highest for each query, without its `own`, the best first.

    It runs where `queries` are, TILE documents at a time, and gives its result there.
    """
    pairs = [(row, document) for row, of_query in enumerate(own) for document in of_query]
    rows, left_out = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
    best = queries.new_full((len(queries), k), -torch.inf)
    found = torch.full((len(queries), k), -1, device=queries.device)
    for first in range(0, len(documents), TILE):
        tile = documents[first : first + TILE].to(queries.device)
        scores = queries @ tile.T  # (q, tile)
        is_here = (left_out >= first) & (left_out < first + len(tile))
        scores[rows[is_here].to(scores.device), (left_out[is_here] - first).to(scores.device)] = -torch.inf
        scores, places = scores.topk(min(k, len(tile)))
        best, order = torch.cat([best, scores], dim=1).topk(k)
        found = torch.cat([found, places + first], dim=1).gather(1, order)
    return best, found.masked_fill(best.isneginf(), -1)


def nearest_by_faiss(queries: torch.Tensor, documents: torch.Tensor, own: Sequence[Iterable[int]], k: int) -> Scores:
    """The same by faiss' exact search, which knows nothing of `own`: it is asked for as many more."""
    import faiss

    own = [set(of_query) for of_query in own]
    asked = min(len(documents), k + max(map(len, own), default=0))
    scores, places = faiss.knn(
        queries.cpu().numpy(), documents.cpu().numpy(), asked, metric=faiss.METRIC_INNER_PRODUCT
    )
    scores, places = torch.from_numpy(scores), torch.from_numpy(places)
    for row, of_query in enumerate(own):
        scores[row, torch.isin(places[row], torch.tensor(sorted(of_query), dtype=places.dtype))] = -torch.inf
    missing = (0, max(0, k - asked))
    scores = torch.nn.functional.pad(scores, missing, value=-torch.inf)
    best, order = scores.topk(k)
    return best, torch.nn.functional.pad(places, missing, value=-1).gather(1, order).masked_fill(best.isneginf(), -1)


@dataclass(frozen=True)
class Wanted:
    """Which negatives: at most `negatives` for a query, of ranks from `rank_min` on to below `rank_max` among the
    documents that are not its own. `relative_margin`: what scores above p - margin * |p| is left out, p the lowest
    score of the query's positives; None: nothing is. "top" takes the highest scores, "random" draws by `seed`."""

    negatives: int = 5
    rank_min: int = 0
    rank_max: int = 100
    relative_margin: float | None = 0.05
    sampling: Literal["top", "random"] = "top"
    seed: int = 0


@dataclass
class Mined:
    """Of a query: numbers and scores of its negatives, the best first, and the scores of its positives."""

    negatives: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    positives: dict[int, float] = field(default_factory=dict)


def mine(
    pairs: Pairs,
    queries: torch.Tensor,
    documents: torch.Tensor,
    wanted: Wanted,
    *,
    teacher: Callable[[list[tuple[str, str]]], Iterable[float]] | None = None,
    search: Callable[..., Scores] = nearest,
    device: str = "cpu",
) -> Iterator[list[Mined]]:
    """What is found for the queries, a chunk of them after another.

    Args:
        queries: (Q, D) float32, of `pairs.queries`; scores are dot products, so cosines where they have length 1.
        documents: (M, D) float32, of `pairs.documents`.
        teacher: gives scores of (query text, document text) instead.
        device: where embeddings are compared.
    """
    draw = torch.Generator().manual_seed(wanted.seed)
    for first in range(0, len(queries), QUERIES):
        numbers = range(first, min(first + QUERIES, len(queries)))
        own = [pairs.own(number) for number in numbers]
        of_chunk = queries[first : first + QUERIES].to(device)
        ranked = search(of_chunk, documents, own, wanted.rank_max)
        scores, found = (values.cpu()[:, wanted.rank_min :] for values in ranked)  # (q, ranks)
        positives = [sorted(pairs.positives[number]) for number in numbers]
        if teacher is None:
            of_positives = [
                (documents[right] @ query).tolist() for right, query in zip(positives, of_chunk.cpu(), strict=True)
            ]
        else:
            scores, of_positives = _taught(pairs, numbers, found, positives, teacher)
        chosen, scores = _choose(scores, torch.tensor([min(values) for values in of_positives]), wanted, draw)
        yield [
            Mined(
                [number for number, value in zip(row, of_row, strict=True) if value > -torch.inf],
                [value for value in of_row if value > -torch.inf],
                dict(zip(right, values, strict=True)),
            )
            for row, of_row, right, values in zip(
                found.gather(1, chosen).tolist(), scores.tolist(), positives, of_positives, strict=True
            )
        ]


def _choose(scores: torch.Tensor, lowest: torch.Tensor, wanted: Wanted, draw: torch.Generator) -> Scores:
    """Places (q, negatives) in `scores`, and their scores, -inf where there are not so many."""
    if wanted.relative_margin is not None:
        highest = (lowest - lowest.abs() * wanted.relative_margin)[:, None]
        scores = scores.masked_fill(scores > highest, -torch.inf)
    count = min(wanted.negatives, scores.shape[1])
    if wanted.sampling == "random":
        drawn = torch.rand(scores.shape, generator=draw).masked_fill(scores.isneginf(), -1.0).topk(count).indices
        chosen_scores, order = scores.gather(1, drawn).sort(dim=1, descending=True)
        return drawn.gather(1, order), chosen_scores
    best = scores.topk(count)
    return best.indices, best.values


def _taught(
    pairs: Pairs, numbers: range, found: torch.Tensor, positives: list[list[int]], teacher: Callable
) -> tuple[torch.Tensor, list[list[float]]]:
    """The teacher's scores: (q, ranks) of candidates, and of each query's positives."""
    asked = [
        (row, place, document)
        for row, of_row in enumerate(found.tolist())
        for place, document in enumerate(of_row)
        if document >= 0
    ]
    texts = [(pairs.queries[numbers[row]], pairs.documents[document]) for row, _, document in asked]
    right = [
        (pairs.queries[number], pairs.documents[document])
        for number, of_query in zip(numbers, positives, strict=True)
        for document in of_query
    ]
    values = torch.as_tensor(teacher(texts + right), dtype=torch.float32).cpu()
    scores = torch.full(found.shape, -torch.inf)
    if asked:
        rows, places, _ = torch.tensor(asked).T
        scores[rows, places] = values[: len(texts)]
    of_positives = iter(values[len(texts) :].tolist())
    return scores, [[next(of_positives) for _ in of_query] for of_query in positives]
