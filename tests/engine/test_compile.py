"""torch.compile and the attention kernels with the gradient cache: same gradients, and no compilation once warm."""

from contextlib import nullcontext

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.utils import counters
from torch.nn.attention import varlen
from transformers import TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import packing
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.ddp import DDP
from hf_dist_ext.strategies.fsdp import FSDP
from hf_dist_ext.strategies.zero import ZeRO
from hf_dist_ext.training import compiling
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


@pytest.fixture
def uncompiled(monkeypatch):
    """What `torch.compile` was called with; models stay what they are."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: calls.append(options) or model)
    return calls


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


def hook_models(monkeypatch, before=None, after=None) -> None:
    """Models of the exactness cases call `before(model, arguments)` and `after(model, arguments, output)`."""

    def build(*arguments, **options):
        model = embedding_model(*arguments, **options)
        if before is not None:
            model.register_forward_pre_hook(before)
        if after is not None:
            model.register_forward_hook(after)
        return model

    monkeypatch.setattr(exactness_worker, "embedding_model", build)


@pytest.mark.parametrize("options, shapes", [
    ({"gradient_cache_chunk_size": 5}, {(rows, width) for rows in (5, 4, 3, 2) for width in (8, 16, 24, 32)}),
    ({"gradient_cache_chunk_size": None, "gradient_cache_chunk_tokens": 90},
     {(11, 8), (9, 8), (6, 8), (5, 8), (3, 8), (2, 8), (5, 16), (4, 16), (3, 16), (2, 16), (3, 24), (2, 24), (2, 32)}),
])  # fmt: skip
def test_chunks_of_few_shapes_give_the_gradient_of_the_batch(options, shapes, uncompiled, monkeypatch):
    seen: set[tuple[int, ...]] = set()
    hook_models(monkeypatch, before=lambda model, given: seen.add(tuple(given[0]["input_ids"].shape)))
    arguments = {"torch_compile": True} | options
    case = Case("buckets", model="bert", columns=exactness_worker.THREE, arguments=arguments, rows=-2, steps=3)
    assert exactness_worker.measure(case) < 1e-10
    (call,) = uncompiled
    assert call["dynamic"] is True and torch._dynamo.config.recompile_limit >= 64
    assert len(seen & shapes) > 3
    reference = {(rows, width) for rows in (4, 6, 12, 18) for width in exactness_worker.WIDTHS.values()}
    assert seen - reference <= shapes


@pytest.mark.parametrize("model, more", [
    ("qwen3", {}),  # padded on the left: wider than the batch on that side
    ("deep", {}),  # a pass without gradients in larger chunks
    ("towers", {}),
    ("bert", {"trainable_modules": ["projection"]}),
])  # fmt: skip
def test_every_kind_of_step_is_exact_in_few_shapes(model, more, uncompiled):
    arguments = {"torch_compile": True, "gradient_cache_chunk_size": 5} | more  # a last chunk of fewer rows
    case = Case("buckets", model=model, arguments=arguments)
    assert exactness_worker.measure(case) < 1e-10 and uncompiled


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


def test_embeddings_without_a_graph_outlive_the_next_replay(monkeypatch, uncompiled):
    """Every result without a graph lies in the same memory, as that of a replayed CUDA graph does."""
    memory = torch.zeros(9, 32, dtype=torch.float64)

    def put_there(model, given, output):
        if not torch.is_grad_enabled():
            embeddings = output["sentence_embedding"]
            memory[: len(embeddings)] = embeddings
            output["sentence_embedding"] = memory[: len(embeddings)]

    hook_models(monkeypatch, after=put_there)
    arguments = {"torch_compile": True}
    assert exactness_worker.measure(Case("one buffer", model="deep", arguments=arguments)) < 1e-10
    assert memory.any()


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"gradient_cache_keep_graph": 2}])
def test_gradients_of_a_chunk_outlive_the_next_replay(more, monkeypatch, uncompiled):
    """The parameters' first gradients lie in memory that the next forward with a graph writes over, as those of a
    replayed CUDA graph do."""
    memory: list[torch.Tensor] = []

    def write_over(model, given):
        if torch.is_grad_enabled():
            for gradient in memory:
                gradient.fill_(float("nan"))
            for parameter in model.parameters():
                if parameter.grad is None and parameter.requires_grad:
                    watch(parameter)

    def watch(parameter: torch.nn.Parameter) -> None:
        def take(parameter: torch.nn.Parameter) -> None:
            handle.remove()
            memory.append(parameter.grad)

        handle = parameter.register_post_accumulate_grad_hook(take)

    case = Case("one gradient", arguments={"torch_compile": True} | more)
    hook_models(monkeypatch, before=write_over)
    assert exactness_worker.measure(case) < 1e-10
    assert memory and uncompiled


@pytest.mark.parametrize("mode, strategy, is_refused", [
    ("reduce-overhead", FSDP, True), ("max-autotune", FSDP, True), ("reduce-overhead", ZeRO, True),
    ("reduce-overhead", DDP, False), ("reduce-overhead", Strategy, False),
    ("max-autotune-no-cudagraphs", FSDP, False), (None, FSDP, False),
])  # fmt: skip
def test_cuda_graphs_are_refused_where_gradients_would_be_added_up_in_them(mode, strategy, is_refused):
    plugin = TorchDynamoPlugin(backend="inductor", mode=mode)
    with pytest.raises(UsageError, match=f'torch_compile_mode="{mode}"') if is_refused else nullcontext():
        compiling.check(plugin, strategy())
    compiling.check(TorchDynamoPlugin(backend="no", mode=mode), strategy())


@pytest.mark.parametrize("strategy, is_refused", [(FSDP, True), (ZeRO, True), (DDP, False), (Strategy, False)])
def test_the_backend_of_cuda_graphs_alone_is_refused_there_too(strategy, is_refused):
    with pytest.raises(UsageError, match='torch_compile_backend="cudagraphs"') if is_refused else nullcontext():
        compiling.check(TorchDynamoPlugin(backend="cudagraphs"), strategy())


needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("mode", [
    pytest.param(mode, marks=needs_cuda) for mode in ("default", "reduce-overhead")
])  # fmt: skip
def test_compiled_on_cuda_dropout_is_replayed_and_outputs_are_not_overwritten(mode, tmp_path):
    options = {"torch_compile": True, "torch_compile_mode": mode, "max_steps": 3, "tf32": False}
    torch._dynamo.reset()
    *_, wanted = trained(tmp_path, 16, gradient_cache_keep_graph=99, **options)
    torch._dynamo.reset()
    *_, found = trained(tmp_path, 16, **options)  # CUDA graphs are replayed from the second step on
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
