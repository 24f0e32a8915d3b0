"""Memory that runs out in a later step: smaller chunks, the same weights and losses as if it had not."""

import pytest
import torch

from hf_dist_ext.errors import RunError
from tests.test_trainer import trainer


def short_of_memory(of, at_call: int, largest: int, error=torch.OutOfMemoryError):
    """From its n-th call on, the model holds no more than so many rows with a graph, or in the pass without one."""
    encode, calls = of._encode, []

    def encoding(model, chunk, **options):
        calls.append(chunk.num_rows)
        if len(calls) >= at_call and chunk.num_rows > largest:
            raise error("not enough memory")
        return encode(model, chunk, **options)

    of._encode = encoding
    return calls


def weights(of) -> torch.Tensor:
    parameters = [*of.model.parameters(), *of.loss.parameters()]
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in parameters])


def losses(of) -> list[float]:
    return [line["loss"] for line in of.state.log_history if "loss" in line]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("at_call", [1, 11, 15, 16])  # the first call, and every pass of later steps
def test_the_step_is_run_again_in_smaller_chunks_with_the_same_result(tmp_path, at_call, accumulation, monkeypatch):
    said = []
    monkeypatch.setattr("hf_dist_ext.out_of_memory.logger.warning", said.append)
    options = dict(gradient_cache_chunk_size=4, num_rows=64, gradient_accumulation_steps=accumulation)
    options |= dict(learning_rate=0.01, lr_scheduler_type="constant", include_num_input_tokens_seen="all")
    whole = trainer(tmp_path, **options)
    start = weights(whole)
    whole.train()
    assert not torch.allclose(weights(whole), start)
    short = trainer(tmp_path, **options)
    calls = short_of_memory(short, at_call, 2)
    short.train()
    assert len(said) == 1 and "rank 0 ran out of memory; chunks are 0.5 of what was given" in said[0]
    assert max(calls[-4:]) == 2
    assert torch.allclose(weights(short), weights(whole), atol=1e-6) and losses(short) == pytest.approx(losses(whole))
    accuracy = [[line["accuracy"] for line in of.state.log_history if "accuracy" in line] for of in (short, whole)]
    assert accuracy[0] == accuracy[1] and short.guard.total == 0


def test_what_fits_in_no_chunk_ends_the_run(tmp_path):
    short = trainer(tmp_path, gradient_cache_chunk_size=4)
    short_of_memory(short, 10, 0)
    with pytest.raises(RunError, match="rank 0 ran out of memory with the smallest chunks"):
        short.train()


def test_an_automatic_size_is_halved_in_later_steps_too(tmp_path):
    options = dict(gradient_cache_chunk_size="auto", gradient_cache_memory_gib=2e-5, max_steps=8, num_rows=64)
    whole, short = (trainer(tmp_path, **options) for _ in range(2))
    usual = short_of_memory(whole, 10**9, 1)
    whole.train()
    late = len(usual) * 3 // 4
    largest = max(usual[late:])
    calls = short_of_memory(short, late, largest // 2)
    short.train()
    assert largest > 2 and max(calls[:late]) >= largest and max(calls[-2:]) <= largest // 2
    assert torch.allclose(weights(short), weights(whole), atol=1e-6)


def test_another_error_is_not_taken_for_it(tmp_path):
    short = trainer(tmp_path, gradient_cache_chunk_size=4)
    short_of_memory(short, 10, 2, error=RuntimeError)
    with pytest.raises(RuntimeError, match="not enough memory"):
        short.train()
