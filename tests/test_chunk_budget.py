"""The automatic chunk size and number of kept graphs hold the memory budget, measured on the CPU."""

import pytest
import torch

from hf_dist_ext.chunk_budget import ChunkBudget, costliest_chunk, longest_row, peak_bytes, widened
from hf_dist_ext.chunking import ChunkedBatch, ChunkLimits, lay_out
from hf_dist_ext.gradient_cache import cached_step
from tests.test_gradient_cache import Encoder, gradients_of, naive_score, plain_step, text

CPU = torch.device("cpu")


def run(model, chunked, budget=None, **options):
    encode = lambda chunk: model(**chunk.features)  # noqa: E731
    sync = lambda phase: torch.enable_grad() if phase.with_graph else torch.no_grad()  # noqa: E731
    if budget is not None:
        encode, sync = budget.encode(encode), budget.sync(sync)
    return cached_step(chunked, encode, naive_score(torch.tensor(0.1)), sync=sync, **options)


def batch(rows: int = 120):
    return {"query": text(rows, 12, 0, shortest=6), "positive": text(rows, 40, 1, shortest=20)}


def settled(budget_bytes: int, model, data, **options) -> tuple[ChunkBudget, ChunkedBatch]:
    """A measuring step, then the chunks of the next one."""
    budget = ChunkBudget(CPU, budget_bytes, agree=int, weights=model.parameters(), **options)
    chunked = lay_out(data, ChunkLimits())
    chunked = ChunkedBatch(chunked.tables, budget.limits(longest_row(chunked), ChunkLimits()))
    assert budget.is_measuring and (options.get("fixed") or len(chunked.chunks()) >= 20)
    run(model, chunked, budget)
    budget.step_ended()
    chunked = ChunkedBatch(chunked.tables, budget.limits(longest_row(chunked), ChunkLimits()))
    assert not budget.is_measuring
    return budget, chunked


@pytest.mark.parametrize("budget_bytes", [100_000, 400_000])
def test_chunks_fill_the_budget_and_stay_inside(budget_bytes):
    model, data = Encoder(), batch()
    budget, chunked = settled(budget_bytes, model, data)
    peaks = []
    for chunk in chunked.chunks():
        with peak_bytes(CPU, model.parameters()) as peak:
            model(**chunk.features).sum().backward()
        peaks.append(peak())
    assert 0.5 * budget_bytes < max(peaks) <= budget_bytes


def test_kept_graphs_stay_inside_the_budget():
    model, data, budget_bytes = Encoder(), batch(), 300_000
    fixed = ChunkLimits(max_rows=8)
    budget, chunked = settled(budget_bytes, model, data, fixed=fixed, keeps_graphs=True)
    kept = budget.keep_graph(costliest_chunk(chunked))
    assert 2 <= kept < len(chunked.chunks())
    with peak_bytes(CPU, model.parameters()) as peak:
        step = run(model, chunked, keep_graph=kept)
    assert step.num_forwards == 2 * step.num_chunks - kept
    assert 0.5 * budget_bytes < peak() <= 1.05 * budget_bytes  # the loss's own logits are no activations of a chunk


def test_longer_rows_are_measured_again():
    model, data = Encoder(), batch()
    budget, _ = settled(100_000, model, data)
    longest = budget.measured.width
    assert budget.limits(longest, ChunkLimits()).max_tokens and not budget.is_measuring
    assert budget.limits(longest + 1, ChunkLimits()).max_rows == 8 and budget.is_measuring


def test_the_measurement_is_resumed_on_the_same_kind_of_device():
    budget, _ = settled(100_000, Encoder(), batch())
    other = ChunkBudget(CPU, 100_000, agree=int)
    assert other.resume(budget.state()) and other.tokens == budget.tokens and not other.is_measuring
    assert not ChunkBudget(CPU, 100_000, agree=int).resume(budget.state() | {"device": "another"})


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
