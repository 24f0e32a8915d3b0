"""What it costs to compare the embeddings of both passes of a cached step: a ratio of steps by turns.

    OMP_NUM_THREADS=1 python scripts/benchmark_replay.py
    python scripts/benchmark_replay.py --device cuda --pairs 4096 --chunk_rows 256

Both steps have the same weights, rows and chunks; in one of them nothing is compared.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch
from benchmark_gradient_cache import Models, Step, our_step, ratio, take_turns
from benchmark_packing import MODELS, batch_of_lengths

from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.engine.replay import Comparison
from hf_dist_ext.models.from_run import build


def without_comparison(step: Step) -> Step:
    def quiet() -> torch.Tensor:
        with mock.patch.object(Comparison, "add", lambda *given: None):
            return step()

    return quiet


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
        found = ratio(take_turns(steps, options.turns, options.device), "compared", "not compared", key)
        print(f"{name:<22} a step of {options.pairs} pairs in chunks of {options.chunk_rows}: {found:.4f}", flush=True)


if __name__ == "__main__":
    main()
