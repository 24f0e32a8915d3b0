"""torch.compile and the attention kernels with the gradient cache: same gradients, and no compilation once warm."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from tests.parity import exactness_worker
from tests.parity.exactness_worker import Case


class CompiledGraphs(TrainerCallback):
    """Number of graphs compiled so far, after every step."""

    def __init__(self) -> None:
        self.after_step: list[int] = []

    def on_step_end(self, args, state, control, **others):
        self.after_step.append(counters["stats"]["unique_graphs"])


@pytest.fixture
def compiled_graphs(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    callback = CompiledGraphs()
    original = exactness_worker.DistTrainer
    monkeypatch.setattr(
        exactness_worker,
        "DistTrainer",
        lambda *args, callbacks, **options: original(*args, callbacks=[*callbacks, callback], **options),
    )
    return callback


def test_a_compiled_model_gives_the_same_gradients_and_stops_compiling(compiled_graphs, monkeypatch):
    monkeypatch.setattr(exactness_worker, "BERT", exactness_worker.BERT | {"num_hidden_layers": 1})
    # aot_eager traces forward and backward as inductor does, and leaves out only the generation of kernels
    arguments = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    steps = 5
    error = exactness_worker.measure(
        Case("compiled", model="dropout", same_masks=True, arguments=arguments, steps=steps)
    )
    assert error < 1e-10
    after_step = compiled_graphs.after_step[-steps:]
    assert after_step[0] > 0
    assert after_step[2] == after_step[-1], after_step  # rows and width became dynamic in the first steps


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_kernels_agree(attention, monkeypatch):
    original, built = exactness_worker.build_model, []

    def build(kind: str, config=None):
        built.append(original(kind, config))
        built[-1].backbone.set_attn_implementation(attention)
        return built[-1]

    monkeypatch.setattr(exactness_worker, "build_model", build)
    assert exactness_worker.measure(Case(attention)) < 1e-10
    assert {model.backbone.config._attn_implementation for model in built} == {attention}
