"""Frozen parts run without randomness, without statistics, and without a graph that nobody needs."""

import copy
from dataclasses import dataclass

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.frozen.image_stand_in import ImageStandIn
from hf_dist_ext.frozen.run_mode import set_frozen_mode
from hf_dist_ext.frozen.who_trains import plan_freezing
from tests.tiny_models import CHECKPOINTING, SMALL
from tests.tiny_vision_language import Calls, collate, row, tiny_llava

TOWER, PROJECTOR, LANGUAGE = "model.vision_tower", "model.multi_modal_projector", "model.language_model"


def frozen_llava(*trainable: str, **changes) -> nn.Module:
    model = tiny_llava(**changes)
    plan_freezing(model, list(trainable)).apply(model)
    set_frozen_mode(model)
    return model.train()


def test_frozen_dropout_and_statistics_stand_still_while_the_rest_trains():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

        def forward(self, x):
            return self.head(self.tower(x))

    torch.manual_seed(0)
    model = Net()
    plan_freezing(model, ["head"]).apply(model)
    set_frozen_mode(model)
    before = copy.deepcopy(model.tower.state_dict())
    head_before = model.head[1].running_mean.clone()
    for _ in range(3):
        model.train()
        x = torch.randn(8, 4)
        assert torch.equal(model.tower(x), model.tower(x))
        model(x).sum().backward()
    assert all(torch.equal(value, before[key]) for key, value in model.tower.state_dict().items())
    assert not torch.equal(model.head[1].running_mean, head_before)  # the head did train
    assert model.head.training and model.head[2].training


def test_functional_dropout_of_frozen_attention_is_off_and_comes_back():
    model = frozen_llava("projector")
    batch = collate([row(True)])
    model.zero_grad()
    first, second = model(**batch).loss, model(**batch).loss
    assert first == second
    plan_freezing(model, frozen_modules=["vision"]).apply(model)
    set_frozen_mode(model)
    model.train()
    assert model(**batch).loss != model(**batch).loss  # the language model trains with its dropout again


def test_modules_that_checkpoint_keep_training_with_their_own_drop_rates_at_zero():
    class Layer(nn.Module):
        gradient_checkpointing = False

        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), 0.5

        def forward(self, x):
            return F.dropout(self.linear(x), self.dropout, self.training)

    model = nn.ModuleDict({"frozen": Layer(), "head": nn.Linear(4, 4)})
    plan_freezing(model, ["head"]).apply(model)
    set_frozen_mode(model)
    model.train()
    assert model["frozen"].training and model["frozen"].dropout == 0.0
    plan_freezing(model, ["head", "frozen"]).apply(model)
    set_frozen_mode(model)
    assert model["frozen"].dropout == 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_leading_tower_runs_once_and_is_never_back_propagated(checkpointing):
    model = frozen_llava("projector")
    if checkpointing:
        getattr(model, f"{CHECKPOINTING}_enable")()
        model.train()
    layers = [f"{TOWER}.encoder.layers.0", f"{LANGUAGE}.layers.0"]
    calls = Calls(model, [*layers, f"{TOWER}.encoder.layers.0.mlp", f"{LANGUAGE}.layers.0.mlp"])
    model(**collate([row(True), row(True, 1)])).loss.backward()
    assert model.model.multi_modal_projector.linear_1.weight.grad.abs().sum() > 0
    assert calls.forward[layers[0]] == 1 and calls.backward[layers[0]] == 0
    assert calls.forward[f"{TOWER}.encoder.layers.0.mlp"] == 1
    # the language model is behind the projector: its graph is needed, and checkpointing of it stays on
    assert calls.backward[layers[1]] == 1
    assert calls.forward[f"{LANGUAGE}.layers.0.mlp"] == (2 if checkpointing else 1)


def test_an_error_inside_a_frozen_module_leaves_gradients_on():
    model = frozen_llava("projector")
    with pytest.raises(ValueError):
        model(input_ids=row(True)["input_ids"][None], pixel_values=torch.zeros(1, 3, 8, 8))
    assert torch.is_grad_enabled()


def test_a_batch_without_images_gives_the_projector_zero_gradients_and_the_same_loss():
    batch = collate([row(False), row(False, 1)])
    model = frozen_llava("projector")
    plain = model(**batch).loss
    assert not plain.requires_grad
    ImageStandIn(model, {"pixel_values": torch.zeros(1, 3, 16, 16)}, is_collective=lambda: False)
    loss = model(**batch).loss
    assert loss == plain
    loss.backward()
    gradients = [p.grad for p in model.model.multi_modal_projector.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    calls = Calls(model, [PROJECTOR])
    model.zero_grad()
    model(**collate([row(True), row(False)])).loss.backward()  # images are there: nothing stands in
    assert calls.forward[PROJECTOR] == 1 and gradients_are_alive(model)


def test_the_blank_picture_is_moved_once_and_has_the_precision_of_its_encoder():
    model, blank = frozen_llava("projector"), torch.zeros(1, 3, 16, 16)
    ImageStandIn(model, {"pixel_values": blank}, is_collective=lambda: False)
    seen, batch = [], collate([row(False), row(False)])
    encode = model.get_image_features
    model.get_image_features = lambda **features: seen.append(features["pixel_values"]) or encode(**features)
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
        model.to(dtype)
        model(**batch).loss.backward()
    assert [one.dtype for one in seen] == [torch.float32] * 2 + [torch.float64] * 2
    assert seen[2] is seen[3] and seen[2] is not blank


def gradients_are_alive(model: nn.Module) -> bool:
    return model.model.multi_modal_projector.linear_1.weight.grad.abs().sum() > 0


def test_generation_stands_in_once():
    model = frozen_llava("projector").eval()
    ImageStandIn(model, {"pixel_values": torch.zeros(1, 3, 16, 16)}, is_collective=lambda: True)
    calls = Calls(model, [PROJECTOR])
    model.generate(input_ids=row(False)["input_ids"][None], max_new_tokens=4, do_sample=False, min_new_tokens=4)
    assert calls.forward[PROJECTOR] == 1


def test_a_gradient_that_is_asked_for_inside_of_an_object_is_kept():
    """A frozen part that is handed a dataclass, and a frozen decoder whose cache holds the keys that are trained."""

    @dataclass
    class States:
        hidden: torch.Tensor

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, states: States) -> torch.Tensor:
            return self.inner(states.hidden)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.projector, self.part = nn.Linear(4, 4), Frozen()

        def forward(self, x):
            return self.part(States(self.projector(x)))

    torch.manual_seed(0)
    model = Net()
    plan_freezing(model, ["projector"]).apply(model)
    set_frozen_mode(model)
    model(torch.randn(2, 4)).sum().backward()
    assert model.projector.weight.grad.norm() > 0 and model.part.inner[0].weight.grad is None

    decoder, tuning = LlamaForCausalLM(LlamaConfig(**SMALL)), PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=3)
    model, ids = get_peft_model(decoder, tuning), torch.randint(1, 30, (2, 6))
    plan_freezing(model, frozen_modules=["base_model"]).apply(model)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        (trained,) = [p for p in model.parameters() if p.requires_grad]
        assert trained.grad.norm() > 0
        return trained.grad.clone()

    plain = gradient()
    set_frozen_mode(model)
    torch.testing.assert_close(gradient(), plain)
