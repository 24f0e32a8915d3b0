"""Ranks and the metrics made of them, against loops; what a broken model gets; evaluation in parts."""

import math
from pathlib import Path

import evaluate
import pytest
import torch
from sklearn.metrics import ndcg_score

import hf_dist_ext.retrieval_metrics
from hf_dist_ext.metrics import retrieval_metrics, retrieval_ranks
from hf_dist_ext.retrieval_metrics.retrieval_metrics import RetrievalMetrics


def unit_vectors(rows, dim=8, seed=0):
    vectors = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=1)


def test_ranks_equal_a_sort_for_every_tile():
    queries, documents = unit_vectors(23, seed=1), unit_vectors(40, seed=2)
    target = torch.randint(0, 40, (23,), generator=torch.Generator().manual_seed(3))
    naive = []
    for query, wanted in zip(queries, target.tolist(), strict=True):
        order = sorted(range(40), key=lambda j, query=query: -float(query.double() @ documents[j].double()))
        naive.append(order.index(wanted))
    assert len(set(naive)) > 10
    for tile in (1, 7, 23, 40, 4096):
        ranks = retrieval_ranks(queries, documents, target, tile=tile)
        assert ranks.dtype == torch.long and ranks.tolist() == naive
    # splitting the queries over processes changes nothing
    parts = [retrieval_ranks(queries[rows], documents, target[rows]) for rows in (slice(0, 9), slice(9, 23))]
    assert torch.cat(parts).tolist() == naive
    assert retrieval_ranks(queries.bfloat16(), documents.bfloat16(), target).dtype == torch.long


def test_a_collapsed_or_broken_model_ranks_last():
    same = torch.ones(30, 8) / 8**0.5
    assert retrieval_ranks(same, same).tolist() == [29] * 30
    # as collapsed as float32 can tell
    assert retrieval_ranks(same + 1e-8 * torch.randn(30, 8), same).tolist() == [29] * 30
    assert retrieval_ranks(torch.full((30, 8), torch.nan), same).tolist() == [29] * 30
    documents = unit_vectors(30)
    documents[5] = torch.nan
    assert retrieval_ranks(unit_vectors(30), documents)[5] == 29
    assert set(retrieval_metrics(same, same).values()) == {0.0}


def test_copies_of_the_wanted_document_do_not_compete_with_it():
    documents = unit_vectors(6).repeat(2, 1)
    queries = documents[:6]
    assert retrieval_ranks(queries, documents, torch.arange(6)).tolist() == [1] * 6
    ids = torch.arange(6).repeat(2)
    assert retrieval_ranks(queries, documents, torch.arange(6), document_ids=ids).tolist() == [0] * 6


@pytest.mark.parametrize("k", [1, 3, 10])
def test_metrics_equal_their_definitions(k):
    ranks = [0, 2, 9, 10, 400, 1, 0]
    expected = {
        f"mrr@{k}": sum(1 / (rank + 1) for rank in ranks if rank < k) / 7,
        f"ndcg@{k}": sum(1 / math.log2(rank + 2) for rank in ranks if rank < k) / 7,
        "recall@1": 2 / 7,
        f"recall@{k}": sum(rank < k for rank in ranks) / 7,
    }
    assert RetrievalMetrics(keep_in_memory=True).compute(ranks=ranks, k=k) == pytest.approx(expected, abs=1e-12)


def test_ndcg_equals_scikit_learns():
    queries, documents = unit_vectors(30, seed=1), unit_vectors(30, seed=2) + 0.5 * unit_vectors(30, seed=1)
    expected = ndcg_score(torch.eye(30).numpy(), (queries @ documents.T).numpy(), k=10)
    assert 0.1 < expected < 0.99
    assert retrieval_metrics(queries, documents)["ndcg@10"] == pytest.approx(expected, abs=1e-9)


def test_a_metric_fed_in_parts_equals_one_fed_at_once():
    ranks = torch.randint(0, 30, (101,), generator=torch.Generator().manual_seed(0))
    whole = RetrievalMetrics(keep_in_memory=True).compute(ranks=ranks)
    assert 0 < whole["mrr@10"] < 1
    metric = RetrievalMetrics(keep_in_memory=True)
    for part in (ranks[60:], ranks[:7], ranks[7:60]):  # as processes would deliver them
        metric.add_batch(ranks=part)
    assert metric.compute() == pytest.approx(whole, abs=1e-12)


def test_evaluate_loads_the_folder_without_a_hub(tmp_path):
    folder = Path(hf_dist_ext.retrieval_metrics.__file__).parent
    metric = evaluate.load(str(folder), cache_dir=str(tmp_path))
    assert metric.compute(ranks=[0, 1]) == {
        "mrr@10": 0.75,
        "ndcg@10": pytest.approx(0.8154648768),
        "recall@1": 0.5,
    } | {"recall@10": 1.0}
