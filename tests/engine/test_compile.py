"""torch.compile and the attention kernels with the gradient cache: same gradients, and no compilation once warm."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
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

    def build(kind: str, *options):
        built.append(original(kind, *options))
        built[-1].backbone.set_attn_implementation(attention)
        return built[-1]

    monkeypatch.setattr(exactness_worker, "build_model", build)
    assert exactness_worker.measure(Case(attention)) < 1e-10
    assert {model.backbone.config._attn_implementation for model in built} == {attention}


class OneBuffer(EmbeddingModel):
    """Returns every result without a graph in the same memory, as a replayed CUDA graph does."""

    def forward(self, **features):
        output = super().forward(**features)
        if not torch.is_grad_enabled():
            type(self).memory[: len(output.embeddings)] = output.embeddings
            output.embeddings = type(self).memory[: len(output.embeddings)]
        return output


def test_embeddings_without_a_graph_outlive_the_next_replay(monkeypatch):
    monkeypatch.setattr(OneBuffer, "memory", torch.zeros(9, 32, dtype=torch.float64), raising=False)
    monkeypatch.setattr(exactness_worker, "EmbeddingModel", OneBuffer)
    arguments = {"torch_compile": True, "torch_compile_backend": "eager"}
    assert exactness_worker.measure(Case("one buffer", model="deep", arguments=arguments)) < 1e-10
    assert OneBuffer.memory.any()


needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_cuda(folder, collate, **arguments) -> list[torch.Tensor]:
    """Gradients of the second step, in which CUDA graphs are replayed."""
    torch._dynamo.reset()
    model, loss, recorder = exactness_worker.build_model("dropout"), InfoNCELoss(), exactness_worker.GradientRecorder()
    recorder.loss = loss
    options = {"gradient_cache_chunk_size": 4, "max_steps": 3} | arguments
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, learning_rate=0.0, max_grad_norm=0, report_to=[],
        save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    trainer = DistTrainer(
        model, args, data_collator=collate, train_dataset=list(range(16)), loss=loss, callbacks=[recorder]
    )
    trainer.train()
    return [gradient.flatten().cpu() for gradient in recorder.steps[-1]]


@pytest.mark.parametrize("mode", [
    pytest.param(mode, marks=needs_cuda) for mode in ("default", "reduce-overhead")
])  # fmt: skip
def test_compiled_on_cuda_dropout_is_replayed_and_outputs_are_not_overwritten(mode, tmp_path):
    def collate(rows):
        return exactness_worker.collate(Case("cuda"), rows, 0)

    options = {"torch_compile": True, "torch_compile_mode": mode}
    wanted = on_cuda(tmp_path, collate, gradient_cache_keep_graph=99, **options)
    found = on_cuda(tmp_path, collate, **options)
    wanted, found = torch.cat(wanted), torch.cat(found)
    assert wanted.norm() > 0 and (found - wanted).norm() < 1e-4 * wanted.norm()  # float32


@pytest.mark.slow
def test_inductor_draws_the_same_dropout_masks_with_and_without_a_graph():
    dropout = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    torch.manual_seed(0)
    model = EmbeddingModel.from_config(exactness_worker.BERT | dropout).train()
    compiled = torch.compile(model, backend="inductor")
    for rows, width in ((4, 16), (3, 8), (4, 24)):  # the later ones run with dynamic shapes
        features = {"input_ids": torch.randint(1, 99, (rows, width)), "attention_mask": torch.ones(rows, width).long()}
        state = torch.get_rng_state()
        with torch.no_grad():
            first = compiled(**features).embeddings
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(first, compiled(**features).embeddings.detach()) and torch.equal(
            after, torch.get_rng_state()
        )
        assert not torch.equal(first, compiled(**features).embeddings.detach())  # masks do differ


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_at_a_small_temperature_stays_near_float32():
    torch.manual_seed(0)
    embeddings = [torch.nn.functional.normalize(torch.randn(512, 256, device="cuda"), dim=-1) for _ in range(2)]
    embeddings[1] = torch.nn.functional.normalize(embeddings[0] + 0.05 * embeddings[1], dim=-1)
    gradients = []
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):  # high: TF32
        torch.set_float32_matmul_precision(precision)
        leaves = [rows.clone().requires_grad_() for rows in embeddings]
        try:
            InfoNCELoss(temperature=0.01)(dict(zip(("query", "positive"), leaves, strict=True))).loss.backward()
        finally:
            torch.set_float32_matmul_precision(before)
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves]))
    # A score near 1 is off by up to 2^-11 with TF32's ten bits, a logit at temperature 0.01 by 0.05.
    assert (gradients[1] - gradients[0]).norm() < 0.1 * gradients[0].norm()
