"""The cached step's gradient is the plain full-batch step's, whatever the chunks. Core only: no Trainer."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hf_dist_ext.engine.budget import widened
from hf_dist_ext.engine.gradient_cache import SCORE, Phase, cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits

WIDTH = 16


class Encoder(nn.Module):
    """Reads every token of a row, position by position, and nothing of its padding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, input_ids, attention_mask):
        self.calls += 1
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        hidden = torch.tanh(self.layer(hidden)) * attention_mask[..., None]
        return hidden.sum(1) / attention_mask.sum(1, keepdim=True)


def text(rows: int, width: int, seed: int, shortest: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 50, (rows, width), generator=generator) * mask, "attention_mask": mask}


def three_columns() -> dict[str, dict[str, torch.Tensor]]:
    return {"query": text(11, 6, 0), "positive": text(11, 20, 1), "negative": text(22, 13, 2)}


def naive_score(temperature):
    def score(embeddings):
        query, *documents = [nn.functional.normalize(e, dim=-1) for e in embeddings.values()]
        logits = query @ torch.cat(documents).T / temperature
        return nn.functional.cross_entropy(logits, torch.arange(len(query))), {}

    return score


def gradients_of(model: nn.Module, *more: nn.Parameter) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in [*model.parameters(), *more]])
    assert found.abs().max() > 0, "a comparison of zeros proves nothing"
    return found


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def plain_step(model, batch, temperature):
    model.zero_grad()
    temperature.grad = None
    loss, _ = naive_score(temperature)({name: model(**features) for name, features in batch.items()})
    loss.backward()
    return loss.detach(), gradients_of(model, temperature)


@pytest.mark.parametrize("keep_graph", [0, 99])
def test_a_column_of_other_features_may_have_no_row(keep_graph):
    """Hard negatives that are pictures, in a batch whose rows have none."""
    model, temperature, batch = Encoder(), nn.Parameter(torch.tensor(0.5)), three_columns()
    del batch["negative"]
    loss, plain = plain_step(model, batch, temperature)
    model.zero_grad()
    temperature.grad = None
    chunked = lay_out(batch | {"negative": {"pixel_values": torch.zeros(0, 3, 4, 4)}}, ChunkLimits(max_rows=4))
    step = cached_step(
        chunked, lambda chunk: model(**chunk.features), naive_score(temperature), loss_parameters=[temperature],
        keep_graph=keep_graph, wide=widened(chunked, 2),
    )  # fmt: skip
    torch.testing.assert_close(step.loss, loss)
    torch.testing.assert_close(gradients_of(model, temperature), plain, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("limits", [
    ChunkLimits(max_rows=1), ChunkLimits(max_rows=4), ChunkLimits(max_rows=11), ChunkLimits(max_rows=22),
    ChunkLimits(max_rows=1000), ChunkLimits(max_tokens=40), ChunkLimits(max_rows=5, max_tokens=64, width_multiple=1),
    ChunkLimits(),
])  # fmt: skip
@pytest.mark.parametrize("keep_graph", [0, 2, 1000])
@pytest.mark.parametrize("together", [True, False])
def test_gradient_is_the_full_batch_gradient(limits, keep_graph, together):
    model, batch = Encoder(), three_columns()
    temperature = nn.Parameter(torch.tensor([0.1]))
    loss, expected = plain_step(model, batch, temperature)
    model.zero_grad()
    temperature.grad = None
    step = cached_step(
        lay_out(batch, limits),
        encode=lambda chunk: model(**chunk.features),
        score=naive_score(temperature),
        loss_parameters=[temperature],
        keep_graph=keep_graph,
        backward_together=together,
    )
    torch.testing.assert_close(step.loss, loss, rtol=1e-12, atol=0)
    difference = (gradients_of(model, temperature) - expected).norm() / expected.norm()
    assert difference < 1e-12


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("frozen", ["query", "positive"])
def test_a_tower_per_column_and_a_frozen_tower(frozen, sort):
    towers = nn.ModuleDict({"query": Encoder(), "positive": Encoder()})
    towers[frozen].requires_grad_(False)
    batch = {"query": text(9, 8, 0), "positive": text(9, 17, 1)}
    score = naive_score(torch.tensor(0.1))
    score({name: towers[name](**features) for name, features in batch.items()})[0].backward()
    trained = next(tower for name, tower in towers.items() if name != frozen)
    expected = gradients_of(trained)
    towers.zero_grad()
    cached_step(
        lay_out(batch, ChunkLimits(max_rows=4), shares_tower=False, sort=sort),
        encode=lambda chunk: towers[chunk.column](**chunk.features),
        score=score,
    )
    assert (gradients_of(trained) - expected).norm() / expected.norm() < 1e-12
    assert all(p.grad is None for p in towers[frozen].parameters())


class FakeAccelerator:
    """One of two devices whose generators are their own."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(number) for number in range(2)]

    def is_initialized(self):
        return True

    def device_count(self):
        return len(self.generators)

    def get_rng_state(self, device):
        return self.generators[torch.device(device).index].get_state()

    def set_rng_state(self, state, device):
        self.generators[torch.device(device).index].set_state(state)


DRAWN_FROM = {
    "torch": lambda shape: torch.rand(shape),
    "numpy": lambda shape: torch.from_numpy(np.random.random(shape)),
    "random": lambda shape: torch.tensor([random.random() for _ in range(shape[1])]),
    "another device": lambda shape: torch.rand(shape, generator=torch.accelerator.fake.generators[1]),
}


@pytest.mark.parametrize("num_kept", [0, 3])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("source", DRAWN_FROM)
def test_what_a_forward_draws_is_replayed_wherever_it_is_drawn(source, is_wide, num_kept, monkeypatch):
    """Features are on the CPU, the model draws on it or on a device. The step moves all generators on by as much as
    its first forwards did."""
    fake = FakeAccelerator()
    monkeypatch.setattr(torch.accelerator, "fake", fake, raising=False)
    if source == "another device":
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    np.random.seed(0)
    random.seed(0)
    model, batch, seen = Encoder(), three_columns(), []

    def encode(chunk):
        output = model(**chunk.features)
        noise = DRAWN_FROM[source](output.shape)
        seen.append((torch.is_grad_enabled(), chunk.table, chunk.start, noise))
        return output * (1 + noise)

    chunked = lay_out(batch, ChunkLimits(max_rows=5))
    wide = widened(chunked, 2) if is_wide else None
    step = cached_step(chunked, encode, naive_score(torch.tensor(0.1)), keep_graph=num_kept, wide=wide)
    first = {tuple(where): noise for has_graph, *where, noise in seen if not has_graph}
    again = {tuple(where): noise for has_graph, *where, noise in seen if has_graph and tuple(where) in first}
    assert step.drew_randomness and len(again) == step.num_chunks - num_kept > 5
    assert all(torch.equal(first[where], noise) for where, noise in again.items())
    assert step.replay_error.largest == 0
    following = DRAWN_FROM[source]((2, WIDTH))
    assert not any(torch.equal(following, noise[: len(following)]) for *_, noise in seen), "the next step draws others"
    assert len({str(noise.tolist()) for noise in first.values()}) == len(first), "each chunk draws its own"


class WritesState(nn.Module):
    """A moving average that the forward reads and writes."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, **features):
        output = self.encoder(**features)
        self.average.lerp_(output.detach().mean(0), 0.1)
        return output - self.average


@pytest.mark.parametrize("is_wide", [False, True])
def test_an_embedding_that_differs_when_it_is_encoded_again_is_measured(is_wide):
    """By its chunk's column, relative to the largest magnitude; a kept graph is encoded once and has no error."""
    batch = three_columns()

    def run(model, **options):
        chunked = lay_out(batch, ChunkLimits(max_rows=5), shares_tower=False)
        wide = widened(chunked, 2) if is_wide else None
        return cached_step(
            chunked, lambda c: model(**c.features), naive_score(torch.tensor(0.1)), wide=wide, **options
        ).replay_error

    assert run(Encoder()).largest < 1e-14
    assert run(WritesState(), keep_graph=99) is None
    assert 1e-2 < run(WritesState()).largest < 10
    for column in batch:
        noise, of_column = {"query": 1e-3, "positive": 2e-3, "negative": 3e-3} | {column: 0.5}, Encoder()

        def encode(chunk, model=of_column, noise=noise):
            output = model(**chunk.features)
            if not torch.is_grad_enabled():
                return output
            return output + noise[chunk.column] * output.detach().abs().max() * torch.eye(*output.shape)

        chunked = lay_out(batch, ChunkLimits(max_rows=5), shares_tower=False)
        found = cached_step(chunked, encode, naive_score(torch.tensor(0.1))).replay_error
        ratio, place = found.worst()
        assert (
            place.partition(",")[0] == column
            and ratio == pytest.approx(0.5)
            and found.largest.item() == pytest.approx(0.5)
        )


@pytest.mark.parametrize("is_wrong", [False, True])
def test_padding_among_token_vectors_is_not_compared(is_wrong):
    """A window of attention with nothing but padding in it gives what the width of the chunk makes of it."""
    layer = nn.Linear(WIDTH, WIDTH)

    def encode(chunk):
        ids, mask = chunk.features["input_ids"], chunk.features["attention_mask"].bool()
        vectors = layer(nn.functional.one_hot(ids % WIDTH, WIDTH).double())
        wrong = 1.5 if is_wrong and torch.is_grad_enabled() else 1.0
        return {"vectors": torch.where(mask[..., None], vectors * wrong, ids.shape[1]), "mask": mask}

    def score(embeddings):
        query, positive = [(e["vectors"] * e["mask"][..., None]).sum(1) for e in embeddings.values()]
        return naive_score(torch.tensor(0.1))({"query": query, "positive": positive})

    batch = {"query": text(11, 6, 0), "positive": text(11, 20, 1)}
    chunked = lay_out(batch, ChunkLimits(max_rows=2))
    found = cached_step(chunked, encode, score, wide=widened(chunked, 4)).replay_error.largest
    assert found > 1e-3 if is_wrong else found < 1e-12


def test_what_is_not_a_number_in_both_passes_is_no_replay_error():
    """Of a batch whose update is left out; others of its chunks are compared all the same."""
    model = Encoder()

    def encode(chunk):
        output = model(**chunk.features)
        return output * torch.nan if chunk.start else output + torch.is_grad_enabled() * output.detach().max()

    chunked = lay_out(three_columns(), ChunkLimits(max_rows=5))
    error = cached_step(chunked, encode, naive_score(torch.tensor(0.1))).replay_error
    assert 0.1 < error.largest < 10


@pytest.mark.parametrize("keep_graph, expected", [(0, 2.0), (4, None), (1000, 1.0)])
def test_forward_calls_are_counted(keep_graph, expected):
    model = Encoder()
    chunked = lay_out(three_columns(), ChunkLimits(max_rows=5))
    total = len(chunked.chunks())
    step = cached_step(
        chunked, lambda chunk: model(**chunk.features), naive_score(torch.tensor(0.1)), keep_graph=keep_graph
    )
    assert model.calls == step.num_forwards
    assert model.calls == (2 * total - keep_graph if expected is None else expected * total)


def test_one_chunk_is_a_plain_step():
    model = Encoder()
    batch = {"query": text(4, 6, 0), "positive": text(4, 6, 1)}
    step = cached_step(
        lay_out(batch, ChunkLimits(max_rows=8)), lambda c: model(**c.features), naive_score(torch.tensor(0.1))
    )
    assert (step.num_chunks, model.calls) == (1, 1)


def test_exactly_one_phase_completes_the_gradients_and_it_is_the_last():
    for keep_graph in (0, 3, 1000):
        model, phases = Encoder(), []

        def noted(phase: Phase, phases=phases):
            phases.append(phase)
            return torch.enable_grad() if phase.has_graph or phase.kind == SCORE else torch.no_grad()

        cached_step(
            lay_out(three_columns(), ChunkLimits(max_rows=5)),
            lambda chunk, model=model: model(**chunk.features),
            naive_score(torch.tensor(0.1)),
            phase=noted,
            keep_graph=keep_graph,
            backward_together=False,
        )
        assert phases[-1].is_last
        assert [phase.kind for phase in phases].count(SCORE) == 1
        assert all(phase.has_graph for phase in phases if phase.is_last)


def test_the_fp16_scale_enters_once_and_before_anything_is_rounded():
    torch.set_default_dtype(torch.float32)
    model, batch = Encoder(), three_columns()
    _, expected = plain_step(model, batch, nn.Parameter(torch.tensor([0.1])))
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def encode(chunk):
        with torch.autocast("cpu", torch.float16):
            return model(**chunk.features).half()  # a model whose embeddings leave in half precision

    tiny = 2.0**-14  # gradients that float16 holds only when scaled

    def score(embeddings):
        assert all(rows.dtype == torch.float32 for rows in embeddings.values())
        loss, metrics = naive_score(torch.tensor(0.1))(embeddings)
        return loss * tiny, metrics

    cached_step(
        lay_out(batch, ChunkLimits(max_rows=4)), encode, score, backward=lambda loss: scaler.scale(loss).backward()
    )
    scaler.unscale_(optimizer)
    found = gradients_of(model) / tiny
    assert (found - expected[:-1]).norm() / expected.norm() < 2e-2


def test_nothing_trainable_is_an_error():
    model = Encoder().requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        cached_step(
            lay_out(three_columns(), ChunkLimits(max_rows=5)),
            lambda chunk: model(**chunk.features),
            naive_score(torch.tensor(0.1)),
        )


def test_the_example_at_the_head_of_the_file_runs():
    import doctest

    from hf_dist_ext.engine import gradient_cache

    torch.set_default_dtype(torch.float32)
    assert doctest.testmod(gradient_cache).failed == 0
