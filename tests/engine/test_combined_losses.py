"""Several losses at once: their weighted sum has the gradients of the plain step, and each part is told."""

import pytest
import torch
from torch import nn

from hf_dist_ext.engine.combined_losses import LossPerSource, SumOfLosses, loss_of
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.tasks.sentence_losses import SentenceTransformersLoss
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
    def targets_of(self, batch):
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
    losses.tile_halvings = 2
    assert losses.tile_halvings == 2 == losses.losses["of_infonce"].tile_halvings


def test_a_source_has_its_loss_and_all_others_the_default():
    first, second = InfoNCELoss(0.1), InfoNCELoss(0.2)
    losses = LossPerSource({"train": first}, second)  # the name of a method, too
    assert losses.of("train") is first and losses.of("other") is second and loss_of(first, "train") is first
    with pytest.raises(KeyError):
        LossPerSource({"train": first}).of("other")
