"""Several losses at once: their weighted sum has the gradients of the plain step, and each part is told."""

import pytest
import torch
from torch import nn

from hf_dist_ext.engine.combined_losses import LossPerSource, SumOfLosses, loss_of
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from tests.engine.test_losses import assert_close

LABELS = {"label": torch.tensor([0.1, 0.9, 0.5, 0.4, 1.0, 0.0, 0.3], dtype=torch.float64)}


def parts() -> dict[str, nn.Module]:
    return {
        "infonce": InfoNCELoss(0.3, learnable_temperature=True),
        "siglip": SigmoidLoss(bias=-2.0),
        "cosent": SentenceTransformersLoss("CoSENTLoss", 4, scale=3.0),
    }


def test_the_weighted_sum_has_the_gradients_of_the_plain_step():
    torch.manual_seed(0)
    weights, losses = {"infonce": 0.7, "cosent": 0.2}, SumOfLosses(parts(), {"infonce": 0.7, "cosent": 0.2}).double()
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    batch = {name: {"x": torch.randn(7, 6, dtype=torch.float64)} for name in ("query", "positive")}
    trained = [*encoder.parameters(), *losses.parameters()]
    embeddings = {name: encoder(features["x"]) for name, features in batch.items()}
    alone = parts()
    for name, loss in alone.items():
        loss.double().load_state_dict(losses.losses[f"of_{name}"].state_dict())
    plain = {
        name: loss(embeddings, **({"targets": LABELS} if name == "cosent" else {})) for name, loss in alone.items()
    }
    total = sum(weights.get(name, 1.0) * part.loss for name, part in plain.items())
    own = [*encoder.parameters(), *(p for loss in alone.values() for p in loss.parameters())]
    expected = torch.autograd.grad(total, own)
    assert len(expected) == 4 + 1 + 2 and all(gradient.abs().max() > 1e-4 for gradient in expected)

    step = cached_step(
        lay_out(batch, ChunkLimits(max_rows=2)),
        lambda chunk: encoder(chunk.features["x"]),
        lambda embeddings: losses(embeddings, targets=LABELS),
        loss_parameters=losses.parameters(),
    )
    assert step.num_chunks == 7
    assert_close(step.loss, total.detach())
    for parameter, gradient in zip(trained, expected, strict=True):
        assert_close(parameter.grad, gradient)
    for name, part in plain.items():
        assert_close(step.metrics[f"{name}_loss"], part.loss.detach())
    assert step.metrics["infonce_accuracy"] == plain["infonce"].metrics["accuracy"]


class Guided(nn.Module):
    def targets_of(self, batch, constants=None):
        return {name: features["ids"] for name, features in batch.items()}


def test_two_guides_would_give_a_row_two_embeddings_under_one_name_and_are_refused():
    SumOfLosses({"one": Guided(), "infonce": InfoNCELoss()})
    with pytest.raises(UsageError, match="one and other both have a guide"):
        SumOfLosses({"one": Guided(), "infonce": InfoNCELoss(), "other": Guided()})


def test_what_is_asked_of_a_loss_is_asked_of_all():
    losses = SumOfLosses(parts())
    assert losses.normalize and losses.cross_device_negatives and not losses.compares_all_pairs
    assert not losses.rates_pairs, "evaluations follow the first"
    assert SumOfLosses({"a": SentenceTransformersLoss("MultipleNegativesRankingLoss", 4)}).compares_all_pairs


def test_a_source_has_its_loss_and_all_others_the_default():
    first, second = InfoNCELoss(0.1), InfoNCELoss(0.2)
    losses = LossPerSource({"train": first}, second)  # the name of a method, too
    assert losses.of("train") is first and losses.of("other") is second and loss_of(first, "train") is first
    with pytest.raises(UsageError):
        LossPerSource({"train": first}).of("other")


class Distance(nn.Module):
    """As a user writes it. `form`: of what it returns."""

    def __init__(self, form: str, **attributes):
        super().__init__()
        self.form = form
        vars(self).update(attributes)

    def forward(self, own, everyone=None, row_offset=0, ids=None, targets=None):
        self.given = everyone, row_offset, ids, targets
        loss = (own["query"] - own["positive"]).pow(2).mean()
        return {"tensor": loss, "pair": (loss, {"distance": loss.detach()})}[self.form]


def test_a_part_may_return_a_tensor_or_a_pair_as_a_loss_alone_may():
    rows = {name: torch.randn(3, 4) for name in ("query", "positive")}
    loss, metrics = SumOfLosses({"one": Distance("tensor"), "two": Distance("pair")}, {"two": 2.0})(rows)
    distance = (rows["query"] - rows["positive"]).pow(2).mean()
    assert_close(loss, 3 * distance)
    assert metrics.keys() == {"one_loss", "two_loss", "two_distance"} and metrics["two_loss"] == distance


class Everyone(dict):
    """As strategies/gathering.py has it: with the number of rows on the ranks before this one."""

    starts = {"query": 2, "positive": 2, "negative": 5}


def test_a_part_that_asks_for_its_own_rows_sees_no_others():
    """Nor their texts and labels, also where ranks have other numbers of negatives."""
    sizes, own_sizes = {"query": 5, "positive": 5, "negative": 9}, {"query": 3, "positive": 3, "negative": 4}
    own = {name: torch.randn(size, 4) for name, size in own_sizes.items()}
    everyone = Everyone({name: torch.randn(size, 4) for name, size in sizes.items()})
    ids = {name: torch.arange(size) for name, size in (sizes | {"group": 5}).items()}
    alone, with_all = Distance("tensor", cross_device_negatives=False), Distance("tensor")
    SumOfLosses({"alone": alone, "all": with_all})(own, everyone, 2, ids, {"label": torch.arange(5)})
    assert with_all.given[:3] == (everyone, 2, ids)
    given, row_offset, own_ids, targets = alone.given
    assert given is None and row_offset == 0 and targets["label"].tolist() == [2, 3, 4]
    assert {name: found.tolist() for name, found in own_ids.items()} == {
        "query": [2, 3, 4], "positive": [2, 3, 4], "negative": [5, 6, 7, 8], "group": [2, 3, 4],
    }  # fmt: skip
