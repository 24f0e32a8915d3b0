"""torch.compile and the attention kernels with the gradient cache: same gradients, and no compilation once warm."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import varlen
from transformers import TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.models import packing
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.parity import exactness_worker
from tests.parity.exactness_worker import Case
from tests.tiny_models import embedding_model


class CompiledGraphs(TrainerCallback):
    """Number of graphs compiled so far, after every step and evaluation."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.counts: list[int] = []

    def on_step_end(self, *arguments, **others):
        self.counts.append(counters["stats"]["unique_graphs"])

    on_evaluate = on_step_end


def trained(
    folder, num_rows: int, callbacks=(), dtype=torch.float32, dropout: float = 0.3, **arguments
) -> list[torch.Tensor]:
    """All gradients of every step, one tensor each."""
    model, loss, recorder = exactness_worker.build_model("bert"), InfoNCELoss(), exactness_worker.GradientRecorder()
    recorder.loss = loss
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    options = {"gradient_cache_chunk_size": 4, "per_device_train_batch_size": 16, "gradient_cache_packing": False}
    options |= arguments
    args = DistTrainingArguments(
        output_dir=str(folder), learning_rate=0.0, max_grad_norm=0, report_to=[], save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    case = Case("compiled")
    DistTrainer(
        model.train().to(dtype), args, data_collator=lambda rows: exactness_worker.collate(case, rows, 0), loss=loss,
        train_dataset=list(range(num_rows)), eval_dataset=list(range(100, 105)), callbacks=[recorder, *callbacks],
    ).train()  # fmt: skip
    return [torch.cat([g.flatten().cpu() for g in of_step.values()]) for of_step in recorder.steps]


@pytest.mark.parametrize("packs, layers, graphs_of_run", [(False, 1, 2), (True, 1, 18), (True, 3, 18)])
def test_batches_of_all_lengths_and_an_evaluation_are_compiled_once_per_pass(
    tmp_path, monkeypatch, packs, layers, graphs_of_run
):
    """Packed chunks in parts between the attentions, which layers share."""
    monkeypatch.setattr(exactness_worker, "BERT", exactness_worker.BERT | {"num_hidden_layers": layers})
    # aot_eager traces forward and backward as inductor does, and leaves out only the generation of kernels
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "use_cpu": True, "dtype": torch.float64}
    options |= {"per_device_train_batch_size": 7, "num_train_epochs": 2, "eval_strategy": "epoch"}
    options["gradient_cache_packing"] = packs
    graphs = CompiledGraphs()
    found = trained(tmp_path, 17, [graphs], **options)  # batches of 7, 7 and 3 rows
    assert len(found) == 6
    # the pass without gradients and the one with them; while it trains, Trainer evaluates the model in no wrapper
    assert graphs.counts == [graphs_of_run] * 8
    kept = trained(tmp_path, 17, gradient_cache_keep_graph=99, **options)
    for own, wanted in zip(found, kept, strict=True):  # dropout: the same masks in the replay
        assert wanted.norm() > 0 and (own - wanted).norm() < 1e-10 * wanted.norm()


def by_row(attend, offsets, *given):
    """`attend` for the heads of each row, (h, t, d), one after another; results end to end, (t, h, d)."""
    spans = offsets.tolist()
    rows = [
        attend(*(one[start:end].transpose(0, 1) for one in given))
        for start, end in zip(spans[:-1], spans[1:], strict=True)
    ]
    return tuple(torch.cat(parts, 1).transpose(0, 1).contiguous() for parts in zip(*rows, strict=True))


def weights_of(query, key, scale):
    return (query @ key.mT * scale).softmax(-1)


def forward_on_cpu(query, key, value, offsets, _, longest, more, is_causal=False, scale=None, *rest):
    assert longest == more == offsets.diff().max(), "the longest row of another chunk was held in the graph"
    assert not is_causal and scale
    attended = by_row(lambda q, k, v: (weights_of(q, k, scale) @ v,), offsets, query, key, value)
    return *attended, torch.zeros(query.shape[1::-1]), torch.zeros(2, dtype=torch.uint64)


def backward_on_cpu(gradient, query, key, value, _, lse, offsets, *sizes):
    scale = sizes[5]

    def of_row(gradient, q, k, v):
        weights, of_weights = weights_of(q, k, scale), gradient @ v.mT
        of_scores = scale * weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
        return of_scores @ k, of_scores.mT @ q, weights.mT @ gradient

    return by_row(of_row, offsets, gradient, query, key, value)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_kernel_for_rows_of_all_lengths_is_an_operator_of_the_models_graph(tmp_path, monkeypatch, backend):
    """torch's own is CUDA's alone: here it has one for the CPU."""
    monkeypatch.setattr(exactness_worker, "BERT", exactness_worker.BERT | {"num_hidden_layers": 3})
    varlen._varlen_attn.register_kernel("cpu")(forward_on_cpu)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward_on_cpu)
    options = {"use_cpu": True, "dtype": torch.float64, "dropout": 0.0, "per_device_train_batch_size": 7}
    wanted = trained(tmp_path, 17, num_train_epochs=1, **options)
    monkeypatch.setattr(packing, "_takes_all_lengths", lambda query: True)
    options |= {"torch_compile": True, "torch_compile_backend": backend, "gradient_cache_packing": True}
    graphs = CompiledGraphs()
    found = trained(tmp_path, 17, [graphs], num_train_epochs=2, **options)
    assert graphs.counts == [8] * 6, "for two passes, whatever the layers"
    for own, one in zip(found, wanted * 2, strict=True):
        assert one.norm() > 0 and (own - one).norm() < 1e-10 * one.norm()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_kernels_agree(attention, monkeypatch):
    original, built = exactness_worker.build_model, []

    def build(kind: str, *options):
        built.append(original(kind, *options))
        built[-1].transformers_model.set_attn_implementation(attention)
        return built[-1]

    monkeypatch.setattr(exactness_worker, "build_model", build)
    assert exactness_worker.measure(Case(attention)) < 1e-10
    assert {model.transformers_model.config._attn_implementation for model in built} == {attention}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_on_cuda_dropout_is_replayed(tmp_path):
    options = {"torch_compile": True, "max_steps": 3, "tf32": False}
    torch._dynamo.reset()
    *_, wanted = trained(tmp_path, 16, gradient_cache_keep_graph=99, **options)
    torch._dynamo.reset()
    *_, found = trained(tmp_path, 16, **options)
    assert wanted.norm() > 0 and (found - wanted).norm() < 1e-4 * wanted.norm()  # float32


@pytest.mark.slow
def test_inductor_draws_the_same_dropout_masks_with_and_without_a_graph():
    dropout = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    torch.manual_seed(0)
    model = embedding_model(exactness_worker.BERT | dropout).train()
    compiled, encode = torch.compile(model, backend="inductor", dynamic=True), embedder_of(model).call
    for rows, width in ((4, 16), (3, 8), (4, 24)):
        features = {"input_ids": torch.randint(1, 99, (rows, width)), "attention_mask": torch.ones(rows, width).long()}
        state = torch.get_rng_state()
        with torch.no_grad():
            first = encode(compiled, features)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(first, encode(compiled, features).detach()) and torch.equal(after, torch.get_rng_state())
        assert not torch.equal(first, encode(compiled, features).detach())  # masks do differ


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
