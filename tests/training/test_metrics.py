"""Ranks and the metrics made of them, against loops; what a broken model gets; evaluation in parts."""

import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import evaluate
import numpy as np
import pytest
import torch

from hf_dist_ext.engine.combined_losses import LossPerSource
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.evaluation.retrieval_metrics.retrieval_metrics import RetrievalMetrics
from hf_dist_ext.training.metrics import PairMetrics, labels_of_rows, retrieval_metrics, retrieval_ranks


def unit_vectors(rows, dim=8, seed=0):
    vectors = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=1)


def right_of(targets) -> torch.Tensor:
    return torch.stack([torch.arange(len(targets)), torch.as_tensor(targets)], dim=1)


def flat(ranks: list[list[int]]) -> list[int]:
    assert all(len(of_query) == 1 for of_query in ranks)
    return [rank for of_query in ranks for rank in of_query]


@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_ranks_of_several_right_documents_equal_a_sort(with_groups, most):
    generator = torch.Generator().manual_seed(4)
    queries, documents = (torch.randint(-2, 3, (rows, 4), generator=generator).float() for rows in (17, 30))
    right = torch.stack([torch.randint(0, n, (60,), generator=generator) for n in (17, 30)], dim=1)
    right = torch.cat([right, right_of(torch.arange(17))])
    groups = torch.randint(0, 40, (len(right),), generator=generator) if with_groups else None
    expected = []
    for query in range(17):
        rows = [i for i, (q, _) in enumerate(right.tolist()) if q == query]
        if with_groups:
            own = {int(groups[i]) for i in rows}
            rows += [i for i in range(len(right)) if int(groups[i]) in own]
        wanted = {int(right[i, 1]) for i in rows}
        order = sorted(range(30), key=lambda j: (-float(queries[query] @ documents[j]), j in wanted))
        expected.append([order.index(j) for j in order if j in wanted][:most])
    assert max(map(len, expected)) >= (most or 5)
    for tile in (1, 30, 4 * 30, 10000):
        assert retrieval_ranks(queries, documents, right, groups, most, tile) == expected


def test_a_collapsed_or_broken_model_ranks_last():
    same = torch.ones(30, 8) / 8**0.5
    assert flat(retrieval_ranks(same, same)) == [29] * 30
    # as collapsed as float32 can tell
    assert flat(retrieval_ranks(same + 1e-8 * torch.randn(30, 8), same)) == [29] * 30
    assert flat(retrieval_ranks(torch.full((30, 8), torch.nan), same)) == [29] * 30
    documents = unit_vectors(30)
    documents[5] = torch.nan
    assert flat(retrieval_ranks(unit_vectors(30), documents))[5] == 29
    assert set(retrieval_metrics(same, same).values()) == {0.0}


@pytest.mark.parametrize("k", [1, 3, 10])
def test_metrics_of_several_right_documents_equal_their_definitions(k):
    ranks = [[0, 2, 5], [4], [12, 1], [11, 14]]
    gains = [sum(1 / math.log2(rank + 2) for rank in row if rank < k) for row in ranks]
    ideals = [sum(1 / math.log2(place + 2) for place in range(min(len(row), k))) for row in ranks]
    best = [min(row) for row in ranks]
    expected = {
        f"mrr@{k}": sum(1 / (rank + 1) for rank in best if rank < k) / 4,
        f"ndcg@{k}": sum(gain / ideal for gain, ideal in zip(gains, ideals, strict=True)) / 4,
        "recall@1": 1 / 4,
        f"recall@{k}": sum(rank < k for rank in best) / 4,
    }
    assert RetrievalMetrics(keep_in_memory=True).compute(ranks=ranks, k=k) == pytest.approx(expected, abs=1e-12)


def test_evaluate_loads_the_folder_without_a_hub(tmp_path):
    folder = Path(inspect.getfile(RetrievalMetrics)).parent
    metric = evaluate.load(str(folder), cache_dir=str(tmp_path))
    assert metric.compute(ranks=[0, 1]) == {
        "mrr@10": 0.75,
        "ndcg@10": pytest.approx(0.8154648768),
        "recall@1": 0.5,
    } | {"recall@10": 1.0}
    metric.add_batch(ranks=np.array([3, 0], dtype=np.int64))
    assert metric.compute(k=2)["recall@2"] == 0.5
    assert metric.compute(ranks=[[0, 1], [7]], k=5)["recall@5"] == 0.5


def test_rows_without_ids_are_ranked_under_a_loss_by_dataset_too():
    loss = LossPerSource({"a": InfoNCELoss(), "b": InfoNCELoss()})
    rows = torch.eye(3)

    class Prediction:
        predictions = rows.numpy(), rows.numpy()
        label_ids = labels_of_rows(loss.of("a"), SimpleNamespace(ids=None), "query", "positive", rows).numpy()

    assert PairMetrics(loss)(Prediction)["mrr@10"] == 1.0
