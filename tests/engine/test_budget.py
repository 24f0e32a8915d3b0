"""The automatic chunk size and number of kept graphs fill the memory there is, that of a formula."""

import json
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_dist_ext.engine.budget import ChunkBudget, longest_row, widened
from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import REPLAY, SCORE, Phase, cached_step, encode_without_graph
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.strategies import collectives
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.meter import memory_used
from tests.distributed.forked import Run
from tests.engine.test_gradient_cache import Encoder, gradients_of, naive_score, plain_step, text
from tests.formula_device import CUDA, Formula, with_memory
from tests.tiny_models import CHECKPOINTING, embedding_model, model_config
from tests.training.test_trainer import trainer


def run(model, chunked, budget=None, score=None, **options):
    score, encode = score or naive_score(torch.tensor(0.1)), lambda chunk: model(**chunk.features)
    if budget is None:
        return cached_step(chunked, encode, score, **options)
    with budget.measured_step():
        return cached_step(chunked, encode, score, phase=budget.phase, **options)


def batch(rows: int = 120):
    return {"query": text(rows, 12, 0, shortest=6), "positive": text(rows, 40, 1, shortest=20)}


def cut(budget: ChunkBudget, data, given: ChunkLimits = ChunkLimits(), may_settle: bool = True) -> ChunkedBatch:  # noqa: B008
    chunked = lay_out(data, ChunkLimits(packs=given.packs))
    budget.propose(may_settle)
    return chunked.within(budget.limits(longest_row(chunked), budget.proposed, given))


class OnFormula(nn.Module):
    """Tells the formula what runs."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.device: Formula | None = None
        self.most_tokens = 0

    def forward(self, input_ids, attention_mask):
        self.device.chunk(input_ids.numel())
        if torch.is_grad_enabled():
            self.most_tokens = max(self.most_tokens, input_ids.numel())
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.sum(1)


class PackedOnFormula(OnFormula):
    def forward(self, input_ids, packed_rows, position_ids):
        (rows,) = super().forward(input_ids, torch.ones_like(input_ids)).expand(1, len(packed_rows), -1)
        return rows


@pytest.fixture
def on_formula(monkeypatch):
    """on_formula(model, **sizes): a device of 1.5 MB that the model runs on."""

    def on_formula(model: OnFormula, total: int = 1_500_000, **sizes) -> Formula:
        device = model.device = Formula(model, total, **{"fixed": 10_000, "per_token": 500, "of_loss": 0} | sizes)
        monkeypatch.setattr(torch, "get_device_module", lambda *_: device)
        return device

    return on_formula


def settled_on(device: Formula, budget: ChunkBudget, data, step=None, given=ChunkLimits()) -> ChunkedBatch:  # noqa: B008
    """Steps and updates until the sizes are found: the chunks of the next step."""
    model = device.model

    def holding(embeddings):
        device.hold(device.of_loss)
        return naive_score(torch.tensor(0.1))(embeddings)

    for number in range(12):
        model.zero_grad()
        chunked = cut(budget, data, given, may_settle=number > 0)
        if not budget.is_measuring:
            return chunked
        step(chunked) if step else run(model, chunked, budget, score=holding)
        device.state = 2 * device.bytes_of(model.parameters())  # from the first update on
    raise AssertionError("never settled")


def free_on(device: Formula) -> float:
    return (device.total - device.memory_allocated()) * 0.95


def test_a_budget_below_one_row_is_said_to_be_exceeded(on_formula, caplog):
    model = OnFormula()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    settled_on(on_formula(model, total=4 * weights + 10_000 + 500 * 30), ChunkBudget(CUDA, None), batch())
    said = [line for line in caplog.messages if "will be exceeded" in line]
    assert len(said) == 1 and "a row of 40 tokens" in said[0] and "gradient_cache_memory_gib" in said[0]


def test_longer_rows_get_fewer_tokens_and_are_measured(on_formula):
    budget = ChunkBudget(CUDA, None)
    settled_on(on_formula(OnFormula()), budget, batch())
    longest, tokens = budget.measured.width, budget.measured.tokens
    assert budget.limits(longest, tokens, ChunkLimits()).max_tokens == tokens and not budget.is_measuring
    assert budget.limits(2 * longest, tokens, ChunkLimits()).max_tokens == tokens // 2 and budget.is_measuring


def test_the_measurement_is_resumed_on_the_same_kind_of_device(on_formula):
    budget, other = ChunkBudget(CUDA, None), ChunkBudget(CUDA, None)
    settled_on(on_formula(OnFormula()), budget, batch())
    assert other.resume(budget.state()) and not other.is_measuring
    other.propose(may_settle=True)
    assert other.proposed == budget.measured.tokens > 0
    assert not ChunkBudget(CUDA, None).resume(budget.state() | {"device": "another"})
    assert not ChunkBudget(CUDA, None).resume({"device": "a formula", "bytes_per_token": 3.0})


@pytest.mark.parametrize("per_token, fixed, of_loss", [(500, 0, 0), (500, 60_000, 30_000), (3000, 5_000, 400_000)])
def test_the_chunk_takes_what_the_device_has_left(on_formula, per_token, fixed, of_loss):
    model, sizes = OnFormula(), []
    device = on_formula(model, fixed=fixed, per_token=per_token, of_loss=of_loss)
    budget = ChunkBudget(CUDA, None)

    def step(chunked):
        model.most_tokens = 0
        run(model, chunked, budget)
        sizes.append(model.most_tokens)

    chunked = settled_on(device, budget, batch(), step)
    used = device.bytes_of(model.parameters()) + fixed + per_token * budget.measured.tokens
    assert 0.85 * free_on(device) < used <= free_on(device)
    assert all(later <= 2.1 * size for size, later in zip(sizes, sizes[1:], strict=False)), "measured on the way"
    assert chunked.costliest() <= budget.measured.tokens
    assert abs(budget.measured.bytes_per_token - per_token) < 0.02 * per_token


class Ragged(Formula):
    """Of whose memory a share of what was held at most lies in pieces that nothing fits into."""

    wasted, highest = 0.15, 0

    def hold(self, held: int) -> None:
        super().hold(held)
        self.highest = max(self.highest, self.most)

    def memory_reserved(self, device=None) -> int:
        return max(self.memory_allocated(), int((1 + self.wasted) * self.highest))

    def empty_cache(self) -> None:
        self.highest = 0

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self.total - self.memory_reserved(), self.total


def test_memory_in_pieces_that_nothing_fits_into_is_left_out_of_the_budget(on_formula, monkeypatch):
    model, budget = OnFormula(), ChunkBudget(CUDA, None)
    monkeypatch.setattr("tests.engine.test_budget.Formula", Ragged)
    device = on_formula(model)
    chunked = settled_on(device, budget, batch())
    device.empty_cache()
    run(model, chunked)
    assert 0.7 * device.total < device.memory_reserved() <= device.total


def test_new_gradients_are_no_bytes_per_token(on_formula):
    """They take more than all tokens. The first backward of a step, here of its largest chunk, makes them, and its
    peak holds some of them only."""
    model = OnFormula(width=256)
    device, budget = on_formula(model), ChunkBudget(CUDA, None)
    gradients = device.bytes_of(model.parameters())
    for sizes in ([80, 72, 72], [160, 152, 152]):
        replay(budget, device, sizes)
    assert budget.measured.bytes_per_token == 500 and gradients > 10 * 500 * 160
    assert budget.measured.intercept == gradients + device.fixed


def replay(budget: ChunkBudget, device: Formula, sizes: list[int], width: int = 40) -> None:
    """A step of chunks of so many tokens, in rows of a width."""
    device.model.zero_grad()
    with budget.measured_step():
        for tokens in sizes:
            with budget.phase(Phase(REPLAY, SimpleNamespace(width=width, num_tokens=tokens))):
                device.chunk(tokens)
                for parameter in device.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)


def test_sizes_of_other_widths_make_a_line_where_there_is_none(on_formula):
    """And do not replace one."""
    device, budget = on_formula(OnFormula(width=256)), ChunkBudget(CUDA, None)
    replay(budget, device, [80, 80], width=16)
    replay(budget, device, [160, 160], width=40)
    line = device.bytes_of(device.model.parameters()) + device.fixed, 500
    assert (budget.measured.intercept, budget.measured.bytes_per_token) == line
    device.per_token = 600
    replay(budget, device, [320, 320], width=100)
    assert budget.measured.intercept == line[0] and budget.measured.bytes_per_token == pytest.approx(600, rel=0.01)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
def test_of_a_sharded_model_this_ranks_share_counts(on_formula):
    model = OnFormula(width=64)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
        device = on_formula(model, total=160_000)
        budget = ChunkBudget(CUDA, None)
        settled_on(device, budget, batch(350))
        of_gradients = device.bytes_of(model.parameters())
    finally:
        torch.distributed.destroy_process_group()
    assert of_gradients == pytest.approx(whole / 4, rel=0.05)
    used = of_gradients + 10_000 + 500 * budget.measured.tokens
    assert 0.85 * free_on(device) < used <= free_on(device)


@pytest.mark.parametrize("finds_size", [False, True])
def test_kept_graphs_leave_room_for_the_loss(on_formula, finds_size):
    model, of_loss = OnFormula(), 1_000_000
    device = on_formula(model, total=3_000_000, of_loss=of_loss)
    budget = ChunkBudget(CUDA, None, finds_size=finds_size, keeps_graphs=True)
    given = ChunkLimits() if finds_size else ChunkLimits(max_rows=8)
    costliest = settled_on(device, budget, batch(), given=given).costliest()
    kept, gradients = budget.keep_graph(costliest), device.bytes_of(model.parameters())
    assert budget.measured.loss_bytes == of_loss and kept >= 2
    used = (kept + 1) * 500 * costliest + 10_000 + gradients + of_loss
    assert free_on(device) - 500 * costliest < used <= free_on(device)


@pytest.mark.parametrize("of_loss", [1_200_000, 5_000_000])
def test_a_loss_that_takes_most_of_the_memory_leaves_the_chunk_all_of_it(on_formula, of_loss):
    """It runs when no chunk is there."""
    model = OnFormula()
    device = on_formula(model, of_loss=of_loss)
    budget = ChunkBudget(CUDA, None, keeps_graphs=True)
    chunked = settled_on(device, budget, batch())
    used = device.bytes_of(model.parameters()) + 10_000 + 500 * budget.measured.tokens
    assert 0.85 * free_on(device) < used <= free_on(device)
    assert budget.keep_graph(chunked.costliest()) == 0


def test_of_a_frozen_backbone_the_forwards_are_measured_by_their_peaks(on_formula):
    model = OnFormula()
    device = on_formula(model, fixed=20_000, per_token=4000, of_loss=900_000, without_graph=250)
    budget = ChunkBudget(CUDA, None, has_graphs=False)

    def step(chunked):
        with budget.measured_step():
            encode_without_graph(chunked, lambda chunk: model(**chunk.features), budget.phase)
            with budget.phase(Phase(SCORE)):
                device.hold(device.of_loss)

    settled_on(device, budget, batch(600), step)
    assert budget.measured.bytes_per_token == pytest.approx(250, rel=0.02)
    assert 0.85 * free_on(device) < 20_000 + 250 * budget.measured.tokens <= free_on(device)


def test_the_log_says_the_highest_share_of_the_devices_memory(on_formula):
    device = on_formula(OnFormula(), total=2**30)
    lying = device.memory_allocated()
    device.hold(2**28 - lying)
    device.reset_peak_memory_stats()
    assert memory_used(CUDA) == {
        "peak_memory_gib": round(lying / 2**30, 3), "memory_share": round(lying / 2**30, 4)
    }  # fmt: skip
    device.hold(2**28 - lying)
    assert memory_used(CUDA) == {"peak_memory_gib": 0.25, "memory_share": 0.25}


@pytest.mark.parametrize(
    "kind, size, given, kept", [("cuda", "auto", None, "auto"), ("cuda", "auto", 0, 0), ("cuda", 4, None, 0),
                                ("cpu", "auto", None, 0), ("cpu", 4, "auto", "auto")]
)  # fmt: skip
def test_graphs_are_kept_by_themselves_where_an_accelerator_finds_the_chunks(
    tmp_path, monkeypatch, kind, size, given, kept
):
    options = dict(gradient_cache_chunk_size=size, gradient_cache_keep_graph=given)
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **options)
    monkeypatch.setattr(DistTrainingArguments, "device", torch.device(kind))
    assert args.num_kept_graphs == kept


@pytest.mark.parametrize("gib, tokens", [(None, 46603), (1e-3, 46)])  # of 4 * 30 * 32 * 6 bytes
def test_on_a_cpu_an_automatic_chunk_has_tokens_by_the_layers_and_their_width(tmp_path, gib, tokens):
    made = trainer(tmp_path, bert(), gradient_cache_chunk_size="auto", gradient_cache_memory_gib=gib)
    assert made.chunk_budget is None and made.step.sizes._limits().max_tokens == pytest.approx(tokens, abs=1)
    made.train()
    assert made.step.layout.num_kept == 0


def test_packed_chunks_are_measured_by_their_real_tokens(on_formula):
    model = PackedOnFormula()
    device = on_formula(model, fixed=20_000)
    budget = ChunkBudget(CUDA, None)
    chunked = settled_on(device, budget, batch(400), given=ChunkLimits(packs=True))
    lengths = [chunk.features["input_ids"].numel() for chunk in chunked.chunks()]
    used = device.bytes_of(model.parameters()) + 20_000 + 500 * max(lengths)
    assert 0.85 * free_on(device) < used <= free_on(device)
    assert len(lengths) > 3 and chunked.count_tokens() == (sum(lengths), sum(lengths))


def passes(of) -> dict[bool, list[int]]:
    """Tokens of every chunk that a trainer encodes, by whether it has a graph."""
    found: dict[bool, list[int]] = {True: [], False: []}

    def encoding(model, chunk, encode=of.step._encode, **options):
        found[torch.is_grad_enabled()].append(chunk.num_tokens)
        return encode(model, chunk, **options)

    of.step._encode = encoding
    return found


def bert(layers: int = 6) -> SentenceTransformer:
    config = model_config("bert", num_hidden_layers=layers, vocab_size=64, hidden_dropout_prob=0.0)
    return embedding_model(config | {"attention_probs_dropout_prob": 0.0}, projection_dim=16)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_activation_checkpointing_leaves_no_room_for_a_wider_first_pass(tmp_path, is_checkpointed):
    made = trainer(tmp_path, bert(), gradient_cache_chunk_size=2, **{CHECKPOINTING: is_checkpointed})
    found = passes(made)
    made.train()
    assert max(found[False]) == max(found[True]) if is_checkpointed else max(found[False]) > 2 * max(found[True])


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


def test_a_large_first_step_is_measured_on_single_chunks_before_it(tmp_path):
    """And its updates are those of chunks that were given."""
    many = dict(per_device_train_batch_size=600, num_rows=600, max_steps=2)
    made = trainer(tmp_path, gradient_cache_chunk_size="auto", gradient_cache_keep_graph=0, **many)
    rows = []
    made.model.register_forward_pre_hook(
        lambda *given, **more: rows.append(len(given[2]["input_ids"])), with_kwargs=True
    )
    with with_memory(made, tokens=1000):
        made.train()
    steps = [line["num_chunks"] for line in made.state.log_history if "loss" in line]
    assert rows[:4] == [8, 8, 16, 16] and rows[4] == rows[5] > 16, "two replays of each size"
    assert 1 < steps[1] <= steps[0] < 1200 / 16 / 2
    assert len(rows) < 2 * 20 + 2 * sum(steps)
    given = trainer(tmp_path / "given", gradient_cache_chunk_size=50, **many)
    given.train()
    before = trainer(tmp_path / "before", **many).model
    for one, other, first in zip(*(t.parameters() for t in (made.model, given.model, before)), strict=True):
        torch.testing.assert_close(one, other)
        assert not torch.equal(one.cpu(), first.cpu())


def test_ranks_measure_chunks_of_one_size_before_a_large_first_step(tmp_path):
    def train(say) -> str:
        options = dict(gradient_cache_chunk_size="auto", gradient_cache_keep_graph=0)
        made = trainer(tmp_path, per_device_train_batch_size=400, num_rows=800, max_steps=2, **options)
        tried, probe = [], made.step.sizes.cut
        made.step.sizes.cut = lambda *given, **more: tried.append((cut := probe(*given, **more)).chunked.limits) or cut
        with with_memory(made, tokens=1000 * (1 + collectives.rank())):
            made.train()
        numbers = [number or 0 for limits in tried for number in (limits.max_rows, limits.max_tokens)]
        everyone = collectives.exchange(numbers)
        return str(len(numbers) > 10 and all(row == numbers for row in everyone))

    assert Run("ddp", tmp_path / "log", train).result() == "True"


def test_a_measurement_counts_for_the_fields_that_it_was_made_with(tmp_path):
    options = dict(gradient_cache_chunk_size="auto", max_steps=12)
    made = trainer(tmp_path / "made", gradient_cache_memory_gib=1e-4, **options)
    with with_memory(made, tokens=64):
        made.train()
    state = json.loads(json.dumps(made.chunk_budget.state()))
    assert not made.chunk_budget.is_measuring
    changes = {"same": {}, "memory": {"gradient_cache_memory_gib": 1e-3}, "fsdp": {"gradient_cache_fsdp": "speed"}}
    for name, change in changes.items():
        other = trainer(tmp_path / name, **({"gradient_cache_memory_gib": 1e-4} | options | change))
        with with_memory(other, tokens=64):
            assert other.chunk_budget.resume(state) == (name == "same")
