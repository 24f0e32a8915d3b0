"""What it costs to compare the embeddings of both passes of a cached step.

    OMP_NUM_THREADS=1 python scripts/benchmark_replay.py
    python scripts/benchmark_replay.py --device cuda --pairs 4096 --chunk_rows 256

(1) counted: operators that compute (views do not), and the bytes that they read and write, of the comparison alone
    and of the whole step
(2) timed inside of the step: seconds in the comparison, of the whole step's (on a CPU, where operators run at once)
(3) timed by turns: a step that compares beside one that does not, of the same weights, rows and chunks
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from benchmark_gradient_cache import Models, Step, our_step, ratio, take_turns
from benchmark_packing import MODELS, batch_of_lengths
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist_ext.engine.replay import Comparison
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.from_run import build


def without_comparison(step: Step) -> Step:
    def quiet() -> torch.Tensor:
        with mock.patch.object(Comparison, "add", lambda *given: None):
            return step()

    return quiet


class Counter(TorchDispatchMode):
    """Operators that compute, and bytes of the tensors that they take and give."""

    operators = moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor)]
            self.operators += 1
            self.moved += sum(one.numel() * one.element_size() for one in tensors)
        return found


@contextmanager
def around_comparisons(watched: Callable[[Callable], Callable]) -> Iterator[None]:
    add, result = watched(Comparison.add), watched(Comparison.result)
    with mock.patch.object(Comparison, "add", add), mock.patch.object(Comparison, "result", result):
        yield


def counts(step: Step) -> tuple[Counter, Counter]:
    """Of the comparison, and of the whole step."""
    own, whole = Counter(), Counter()

    def counted(method: Callable) -> Callable:
        def call(*given: Any) -> Any:
            with own:
                return method(*given)

        return call

    with whole, around_comparisons(counted):
        step()
    return own, whole


def share_of_seconds(step: Step, turns: int) -> float:
    """Of one thread's CPU seconds."""
    spent = 0.0

    def timed(method: Callable) -> Callable:
        def call(*given: Any) -> Any:
            nonlocal spent
            begin = time.thread_time()
            found = method(*given)
            spent += time.thread_time() - begin
            return found

        return call

    begin = time.thread_time()
    with around_comparisons(timed):
        for _ in range(turns):
            step()
    return spent / (time.thread_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--chunk_rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    key = "cpu_seconds" if options.device == "cpu" else "seconds"
    for name in options.models:
        torch.manual_seed(0)
        config = {"vocab_size": 500, "pad_token_id": 0} | MODELS[name]
        model = build(model_config=config).to(options.device)
        batch = batch_of_lengths(lambda at: 16 + int(33 * at), options.pairs, options.device)
        step = our_step(Models(model, model, options.device), batch, ChunkLimits(max_rows=options.chunk_rows))
        steps = {"compared": step, "not compared": without_comparison(step)}
        take_turns(steps, 2, options.device)  # warm up
        own, whole = counts(step)
        said = f"{own.operators} of {whole.operators:,} operators, {own.moved / whole.moved:.3%} of the bytes"
        if options.device == "cpu":
            said += f", {share_of_seconds(step, options.turns):.2%} of the CPU seconds"
        found = ratio(take_turns(steps, options.turns, options.device), "compared", "not compared", key)
        print(
            f"{name:<22} {options.pairs} pairs in chunks of {options.chunk_rows}: {said}, by turns {found:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
