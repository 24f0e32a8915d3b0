"""Mined negatives: exactly the documents that ranks and margin name, and never one of the query's own."""

import numpy as np
import pytest
import torch

from hf_dist_ext.data import hard_negatives
from hf_dist_ext.data.hard_negatives import Pairs, Wanted, mine, nearest, nearest_by_faiss

ROWS = 60


def unit(rows: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, 8, generator=draw), dim=-1)


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    monkeypatch.setattr(hard_negatives, "QUERIES", 7)
    monkeypatch.setattr(hard_negatives, "TILE", 11)


@pytest.fixture
def rows() -> list[tuple[str, str, int]]:
    """Queries with several positives, documents that answer several queries, texts that are both, and groups."""
    draw = np.random.default_rng(0)
    rows = [(f"q{draw.integers(25)}", f"d{draw.integers(40)}", int(draw.integers(30))) for _ in range(ROWS)]
    rows += [("d3", "d9", 31), ("q1", "q2", 32)]  # a query that is a document, a document that is a query
    assert len({query for query, *_ in rows}) < 30 and len({document for _, document, _ in rows}) < 45
    return rows


def own(rows: list, query: str, by_group: bool) -> set[str]:
    """The texts that are right for a query, or the query itself, row by row."""
    groups = {group for text, _, group in rows if text == query} if by_group else set()
    return {document for text, document, group in rows if text == query or group in groups} | {query}


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"relative_margin": None}, {"relative_margin": 0.3},
        {"rank_min": 3, "rank_max": 9, "negatives": 4, "relative_margin": None},
        {"rank_max": 500, "negatives": 500, "relative_margin": None},
        {"sampling": "random", "relative_margin": None, "rank_max": 12},
    ],
    ids=str,
)  # fmt: skip
def test_negatives_are_those_that_ranks_and_margin_name_and_never_the_querys_own(rows, options, by_group):
    queries, documents, groups = zip(*rows, strict=True)
    pairs = Pairs(queries, documents, groups if by_group else None, more=["more", "d9"])
    assert pairs.documents.count("d9") == 1 and "more" in pairs.documents
    of_queries, of_documents = unit(len(pairs.queries), 1), unit(len(pairs.documents), 2)
    wanted = Wanted(**options)
    found = [one for chunk in mine(pairs, of_queries, of_documents, wanted) for one in chunk]
    assert len(found) == len(pairs.queries) and sum(len(one.negatives) for one in found) > len(found)
    scores, num_left_out = of_queries @ of_documents.T, 0
    for query, one in enumerate(found):
        text, negatives = pairs.queries[query], [pairs.documents[number] for number in one.negatives]
        not_own = own(rows, text, by_group)
        assert not not_own.intersection(negatives)
        num_left_out += len(not_own)
        ranked = [d for d in scores[query].argsort(descending=True).tolist() if pairs.documents[d] not in not_own]
        ranked = ranked[wanted.rank_min : wanted.rank_max]
        positives = [d for d, document in enumerate(pairs.documents) if (text, document) in {row[:2] for row in rows}]
        lowest = scores[query, positives].min()
        if wanted.relative_margin is not None:
            ranked = [d for d in ranked if scores[query, d] <= lowest - wanted.relative_margin * lowest.abs()]
        if wanted.sampling == "top":
            assert one.negatives == ranked[: wanted.negatives]
        else:
            assert len(one.negatives) == wanted.negatives and set(one.negatives) <= set(ranked)
            assert one.negatives == sorted(one.negatives, key=ranked.index)
        assert one.scores == pytest.approx(scores[query, one.negatives].tolist(), abs=1e-6)
        assert one.positives == pytest.approx({d: scores[query, d].item() for d in positives}, abs=1e-6)
    assert num_left_out > len(found), "there is something to leave out"


def test_random_negatives_follow_from_the_seed(rows):
    queries, documents, _ = zip(*rows, strict=True)
    pairs = Pairs(queries, documents)
    embeddings = unit(len(pairs.queries), 1), unit(len(pairs.documents), 2)

    def drawn(seed: int) -> list[list[int]]:
        wanted = Wanted(sampling="random", relative_margin=None, rank_max=20, seed=seed)
        return [one.negatives for chunk in mine(pairs, *embeddings, wanted) for one in chunk]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_teacher_scores_candidates_and_positives_in_the_models_place(rows):
    """Its scores may be of any size and sign."""
    queries, documents, _ = zip(*rows, strict=True)
    pairs, wanted = Pairs(queries, documents), Wanted(relative_margin=0.5, rank_max=10)
    embeddings = unit(len(pairs.queries), 1), unit(len(pairs.documents), 2)
    value = {(q, d): float(np.random.default_rng([i, j]).normal(scale=5))
             for i, q in enumerate(pairs.queries) for j, d in enumerate(pairs.documents)}  # fmt: skip
    taught = mine(pairs, *embeddings, wanted, teacher=lambda texts: np.array([value[pair] for pair in texts]))
    plain = mine(pairs, *embeddings, Wanted(relative_margin=None, rank_max=10, negatives=10))
    found = [one for chunk in taught for one in chunk]
    candidates = [one.negatives for chunk in plain for one in chunk]
    assert sum(len(one.negatives) for one in found) > 20
    for query, one in enumerate(found):
        text = pairs.queries[query]
        of_positives = {d: value[text, pairs.documents[d]] for d in pairs.positives[query]}
        highest = min(of_positives.values()) - 0.5 * abs(min(of_positives.values()))
        fits = {d: value[text, pairs.documents[d]] for d in candidates[query]}
        expected = sorted((d for d in fits if fits[d] <= highest), key=fits.get, reverse=True)[:5]
        assert one.negatives == expected and one.scores == pytest.approx([fits[d] for d in expected])
        assert one.positives == pytest.approx(of_positives)


@pytest.mark.parametrize("k", [5, 100])
def test_faiss_finds_what_torch_finds(k):
    pytest.importorskip("faiss")
    queries, documents, left_out = unit(20, 1), unit(50, 2), [{i, 2 * i, 49} for i in range(20)]
    (scores, found), (by_faiss, same) = (
        search(queries, documents, left_out, k) for search in (nearest, nearest_by_faiss)
    )
    torch.testing.assert_close(scores, by_faiss, atol=1e-6, rtol=0)
    assert torch.equal(found, same) and (found >= 0).sum() > 90


def test_memory_is_that_of_a_tile_not_of_all_scores(monkeypatch):
    """Every matrix that is made has at most a chunk's rows and, for scores, a tile's columns."""
    pairs = Pairs([f"q{i}" for i in range(40)], [f"d{i}" for i in range(400)][:40], more=[f"d{i}" for i in range(400)])
    largest = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda self, *a, **o: (largest.append(self.numel()), topk(self, *a, **o))[1]
    )
    for _ in mine(pairs, unit(40, 1), unit(len(pairs.documents), 2), Wanted(rank_max=20)):
        pass
    assert 0 < max(largest) <= 7 * (11 + 20)
