"""The automatic chunk size and number of kept graphs fill the memory there is, measured on a CPU and by a formula."""

import pytest
import torch
from torch import nn

from hf_dist_ext.engine.budget import ChunkBudget, Measured, costliest_chunk, longest_row, widened
from hf_dist_ext.engine.chunks import ChunkedBatch, ChunkLimits
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.peak import peak_bytes
from hf_dist_ext.frozen.encode_once import forward_bytes_per_token
from hf_dist_ext.models.embedding_model import EmbeddingModel
from tests.engine.test_gradient_cache import Encoder, gradients_of, naive_score, plain_step, text
from tests.tiny_models import CHECKPOINTING, model_config
from tests.training.test_trainer import trainer

CPU = torch.device("cpu")


def run(model, chunked, budget=None, score=None, **options):
    score, encode = score or naive_score(torch.tensor(0.1)), lambda chunk: model(**chunk.features)
    if budget is None:
        return cached_step(chunked, encode, score, **options)
    with budget.measured_step():
        return cached_step(chunked, encode, score, phase=budget.phase, **options)


def batch(rows: int = 120):
    return {"query": text(rows, 12, 0, shortest=6), "positive": text(rows, 40, 1, shortest=20)}


def cut(budget: ChunkBudget, data, given: ChunkLimits = ChunkLimits(), may_settle: bool = True) -> ChunkedBatch:  # noqa: B008
    chunked = lay_out(data, ChunkLimits())
    budget.propose(may_settle)
    return ChunkedBatch(chunked.tables, budget.limits(longest_row(chunked), budget.proposed, given))


def settled(budget: ChunkBudget, model, data, given: ChunkLimits = ChunkLimits()) -> ChunkedBatch:  # noqa: B008
    """Measuring steps, and the chunks of the step after them."""
    for number in range(12):
        chunked = cut(budget, data, given, may_settle=number > 0)
        if not budget.is_measuring:
            assert number >= 2
            return chunked
        model.zero_grad()
        run(model, chunked, budget)
    raise AssertionError("never settled")


@pytest.mark.parametrize("budget_bytes", [100_000, 400_000])
def test_chunks_fill_the_budget_and_stay_inside(budget_bytes):
    model, data = Encoder(), batch()
    chunked = settled(ChunkBudget(CPU, budget_bytes, weights=model.parameters), model, data)
    peaks = []
    for chunk in chunked.chunks():
        with peak_bytes(CPU, model.parameters()) as peak:
            model(**chunk.features).sum().backward()
        peaks.append(peak())
    assert 0.5 * budget_bytes < max(peaks) <= budget_bytes


def test_kept_graphs_stay_inside_the_budget():
    model, data, budget_bytes = Encoder(), batch(), 600_000
    budget = ChunkBudget(CPU, budget_bytes, weights=model.parameters, finds_size=False, keeps_graphs=True)
    chunked = settled(budget, model, data, ChunkLimits(max_rows=8))
    kept = budget.keep_graph(costliest_chunk(chunked))
    assert 2 <= kept < len(chunked.chunks())
    with peak_bytes(CPU, model.parameters()) as peak:
        step = run(model, chunked, keep_graph=kept)
    assert step.num_forwards == 2 * step.num_chunks - kept
    assert 0.5 * budget_bytes < peak() <= budget_bytes


def test_a_budget_below_one_row_is_said_to_be_exceeded(tmp_path, caplog):
    options = dict(gradient_cache_chunk_size="auto", max_steps=6)
    trainer(tmp_path / "enough", gradient_cache_memory_gib=1e-3, **options).train()
    assert "will be exceeded" not in caplog.text
    small = trainer(tmp_path / "small", gradient_cache_memory_gib=1e-8, **options)
    small.train()
    said = [line for line in caplog.messages if "will be exceeded" in line]
    assert len(said) == 1 and "a row of 8 tokens" in said[0] and "gradient_cache_memory_gib" in said[0]
    assert small.meter.most_chunks >= 16  # of 8 rows in two columns


def test_longer_rows_get_fewer_tokens_and_are_measured():
    model, data = Encoder(), batch()
    budget = ChunkBudget(CPU, 100_000, weights=model.parameters)
    settled(budget, model, data)
    longest, tokens = budget.measured.width, budget.measured.tokens
    assert budget.limits(longest, tokens, ChunkLimits()).max_tokens == tokens and not budget.is_measuring
    assert budget.limits(2 * longest, tokens, ChunkLimits()).max_tokens == tokens // 2 and budget.is_measuring


def test_the_measurement_is_resumed_on_the_same_kind_of_device():
    budget = ChunkBudget(CPU, 100_000)
    settled(budget, Encoder(), batch())
    other = ChunkBudget(CPU, 100_000)
    assert other.resume(budget.state()) and not other.is_measuring
    other.propose(may_settle=True)
    assert other.proposed == budget.measured.tokens > 0
    assert not ChunkBudget(CPU, 100_000).resume(budget.state() | {"device": "another"})
    assert not ChunkBudget(CPU, 100_000).resume({"device": "cpu", "bytes_per_token": 3.0})


class Formula:
    """Stands in for torch.cuda: memory is what a formula says of the chunks that ran and of the gradients there are.

    Weights and (after the first update) an optimizer's state lie there always. A chunk with a graph holds `fixed`
    bytes and `per_token`, and its backward leaves the gradients; the loss holds `of_loss`.
    """

    def __init__(self, model: nn.Module, total: int, fixed: int, per_token: int, of_loss: int):
        self.model, self.total = model, total
        self.fixed, self.per_token, self.of_loss = fixed, per_token, of_loss
        self.state = self.most = 0
        self.embeddings = 0

    def bytes_of(self, tensors) -> int:
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    def memory_allocated(self, device=None) -> int:
        parameters = list(self.model.parameters())
        return self.bytes_of(parameters) + self.bytes_of(p.grad for p in parameters) + self.state + self.embeddings

    def hold(self, held: int) -> None:
        self.most = max(self.most, self.memory_allocated() + held)

    def chunk(self, tokens: int) -> int:
        """Bytes beside what lies there; new gradients are made meanwhile."""
        missing = self.bytes_of(p for p in self.model.parameters() if p.grad is None)
        held = self.fixed + self.per_token * tokens
        self.hold(held + missing // 2)
        return held

    def max_memory_allocated(self, device=None) -> int:
        return max(self.most, self.memory_allocated())

    def reset_peak_memory_stats(self, device=None) -> None:
        self.most = self.memory_allocated()

    memory_reserved = memory_allocated

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self.total - self.memory_allocated(), self.total

    def get_device_name(self, device=None) -> str:
        return "a formula"


class OnFormula(nn.Module):
    """Tells the formula what runs."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.device: Formula | None = None
        self.most_tokens = 0

    def forward(self, input_ids, attention_mask):
        if torch.is_grad_enabled():
            self.device.chunk(input_ids.numel())
            self.most_tokens = max(self.most_tokens, input_ids.numel())
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.sum(1)


@pytest.mark.parametrize("per_token, fixed, of_loss", [(500, 0, 0), (500, 60_000, 30_000), (3000, 5_000, 400_000)])
def test_the_chunk_takes_what_the_device_has_left(monkeypatch, per_token, fixed, of_loss):
    model, data = OnFormula(), batch()
    device = model.device = Formula(model, 1_500_000, fixed, per_token, of_loss)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: device)
    budget = ChunkBudget(torch.device("cuda"), None)
    gradients = device.bytes_of(model.parameters())
    sizes = []
    for number in range(12):
        model.zero_grad()
        chunked = cut(budget, data, may_settle=number > 0)
        if not budget.is_measuring:
            break
        model.most_tokens = 0
        run(model, chunked, budget)
        sizes.append(model.most_tokens)
        device.state = 2 * gradients  # from the first update on
    free = (device.total - device.memory_allocated()) * 0.95
    used = gradients + fixed + per_token * budget.measured.tokens
    assert 0.85 * free < used <= free, (used, free)
    assert all(later <= 2.1 * size for size, later in zip(sizes, sizes[1:], strict=False)), "measured on the way"
    assert costliest_chunk(chunked) <= budget.measured.tokens
    assert abs(budget.measured.bytes_per_token - per_token) < 0.02 * per_token


def test_kept_graphs_leave_room_for_the_loss(monkeypatch):
    model, data, of_loss = OnFormula(), batch(), 300_000
    device = model.device = Formula(model, 2_000_000, 10_000, 500, of_loss)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: device)
    budget = ChunkBudget(torch.device("cuda"), None, finds_size=False, keeps_graphs=True)

    def holding(embeddings):
        device.hold(of_loss)
        return naive_score(torch.tensor(0.1))(embeddings)

    for number in range(4):
        model.zero_grad()
        chunked = cut(budget, data, ChunkLimits(max_rows=8), may_settle=number > 0)
        if not budget.is_measuring:
            break
        run(model, chunked, budget, score=holding)
    costliest = costliest_chunk(chunked)
    kept, free = budget.keep_graph(costliest), (device.total - device.memory_allocated()) * 0.95
    gradients = device.bytes_of(model.parameters())
    assert budget.measured.loss_bytes == of_loss and kept >= 2
    used = (kept + 1) * 500 * costliest + 10_000 + gradients + of_loss
    assert free - 500 * costliest < used <= free


def passes(of) -> dict[bool, list[int]]:
    """Tokens of every chunk that a trainer encodes, by whether it has a graph."""
    found: dict[bool, list[int]] = {True: [], False: []}

    def encoding(model, chunk, encode=of.step._encode, **options):
        found[torch.is_grad_enabled()].append(chunk.num_tokens)
        return encode(model, chunk, **options)

    of.step._encode = encoding
    return found


def bert(layers: int = 6) -> EmbeddingModel:
    config = model_config("bert", num_hidden_layers=layers, vocab_size=64, hidden_dropout_prob=0.0)
    return EmbeddingModel.from_config(config | {"attention_probs_dropout_prob": 0.0}, projection_dim=16)


def test_over_a_frozen_backbone_the_pass_that_runs_is_the_one_that_was_measured(tmp_path):
    model, gib = bert(), 1.5e-3
    options = dict(gradient_cache_chunk_size="auto", gradient_cache_memory_gib=gib, trainable_modules=["projection"])
    made = trainer(tmp_path, model, **options, per_device_train_batch_size=64, max_steps=8, num_rows=512)
    found = passes(made)
    made.train()
    assert not made.chunk_budget.is_measuring
    held = max(found[False]) * forward_bytes_per_token(model.config)
    assert 0.6 * gib * 2**30 < held <= gib * 2**30


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_activation_checkpointing_leaves_no_room_for_a_wider_first_pass(tmp_path, is_checkpointed):
    made = trainer(tmp_path, bert(), gradient_cache_chunk_size=2, **{CHECKPOINTING: is_checkpointed})
    found = passes(made)
    made.train()
    assert max(found[False]) == max(found[True]) if is_checkpointed else max(found[False]) > 2 * max(found[True])


def test_no_parameter_from_before_wrapping_is_kept_alive():
    import gc
    import weakref

    model = nn.Linear(4, 4)
    budget = ChunkBudget(CPU, 1000, weights=lambda: model.parameters())
    found = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert found() is None and budget.measured == Measured()


def test_saved_bytes_are_counted_once_and_without_weights():
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    rows = torch.randn(10, 64)
    with peak_bytes(CPU, [weight]) as peak:
        hidden = rows @ weight.T  # saves rows
        (hidden.sin() + rows.sum()).sum().backward()  # saves hidden
    assert peak() == rows.untyped_storage().nbytes() + hidden.untyped_storage().nbytes()


def test_a_wider_first_pass_calls_the_model_less_and_changes_no_gradient():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, data = Encoder(), batch(30)
    _, expected = plain_step(model, data, torch.nn.Parameter(torch.tensor([0.1])))
    model.zero_grad()
    chunked = lay_out(data, ChunkLimits(max_rows=5))
    step = run(model, chunked, wide=widened(chunked, 4))
    assert step.num_chunks == 12 and step.num_forwards == 3 + 12 and not step.drew_randomness
    assert (gradients_of(model) - expected[:-1]).norm() / expected.norm() < 1e-12
    torch.set_default_dtype(torch.float32)


def test_a_wider_first_pass_is_given_up_when_the_model_draws_random_numbers():
    torch.manual_seed(0)
    model, data = Encoder(dropout=0.5).train(), batch(30)
    state = torch.get_rng_state()
    chunked = lay_out(data, ChunkLimits(max_rows=5))
    step = run(model, chunked, wide=widened(chunked, 4))
    found = gradients_of(model)
    model.zero_grad()
    torch.set_rng_state(state)
    run(model, chunked)
    assert step.drew_randomness and torch.equal(found, gradients_of(model))


def test_recomputed_activations_of_a_checkpointed_layer_are_counted():
    from torch.utils.checkpoint import checkpoint

    layers = [torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)) for _ in range(3)]
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    start = torch.randn(32, 8)
    with peak_bytes(CPU, [*weights, start]) as peak:
        x = start
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
    assert weights[0].grad is not None
    # two inputs wait in the graph; the last layer, run again, holds what its ReLU made
    assert peak() == 4 * 32 * (8 + 8 + 64)
