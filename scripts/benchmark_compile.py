"""What `torch_compile` costs a cached step, and what the few shapes of its chunks cost: code-search pairs, a BERT.

    OMP_NUM_THREADS=1 python scripts/benchmark_compile.py                      # two CPU cores: a quarter of an hour
    python scripts/benchmark_compile.py --device cuda --width 768 --layers 12 --pairs 16384 --chunk_rows 512

(1) shapes: two epochs are laid out with and without buckets, and tokens and shapes are counted
(2) graphs: the same batches are run with graphs for any shape (as DistTrainer asks for), with those that dynamo
    chooses by itself, and with one for every shape (as accelerate's launcher asks for); the graphs are counted
(3) time: a step of the compiled model and uncompiled ones, padded and packed, take turns. The first step, in which the
    model is compiled, over the padded one, and all later ones over both (medians of the ratios within a turn)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate.utils import TorchDynamoPlugin
from benchmark_gradient_cache import Batch, Models, Size, our_step, ratio, take_turns, text_batches
from model_sizes import bert
from torch import nn
from torch._dynamo.utils import counters

from hf_dist_ext.engine.chunks import Chunk
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.models.from_run import build
from hf_dist_ext.training import compiling

WAYS = {"any shape": True, "dynamo's choice": None, "one shape each": False}


def batches(everything: Batch, pairs: int, epochs: int = 2) -> Iterator[Batch]:
    """In a new order in every epoch; the last batch of an epoch is smaller."""
    generator, num_rows = torch.Generator().manual_seed(0), len(next(iter(everything.values()))["input_ids"])
    for _ in range(epochs):
        for rows in torch.randperm(num_rows, generator=generator).split(pairs):
            yield {name: {key: value[rows] for key, value in of.items()} for name, of in everything.items()}


def shapes_of(batch: Batch, limits: ChunkLimits) -> set[tuple[int, int]]:
    return {(chunk.num_computed, chunk.width) for chunk in lay_out(batch, limits).chunks()}


def count_shapes(everything: Batch, pairs: int, limits: ChunkLimits) -> None:
    tokens, shapes = {False: 0, True: 0}, {False: set(), True: set()}
    for batch in batches(everything, pairs):
        for has_buckets in (False, True):
            of_these = replace(limits, has_buckets=has_buckets)
            tokens[has_buckets] += lay_out(batch, of_these).count_tokens()[1]
            shapes[has_buckets] |= shapes_of(batch, of_these)
    limit = f"{limits.max_rows} rows" if limits.max_rows else f"{limits.max_tokens:,} tokens"
    more = tokens[True] / tokens[False] - 1
    print(f"{pairs:<8}{limit:<16}{len(shapes[False]):>8}{len(shapes[True]):>12}{more:>16.1%}", flush=True)


def compiled(model: nn.Module, backend: str, mode: str | None, way: str) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    plugin = TorchDynamoPlugin(backend=backend, mode=mode)
    compiling.prepare(SimpleNamespace(), plugin)
    plugin.dynamic = WAYS[way]
    return torch.compile(model, **plugin.to_kwargs())


def encoder(model: nn.Module, wrapped: nn.Module):
    embedder = embedder_of(model)

    def encode(chunk: Chunk) -> torch.Tensor:
        return embedder.call(wrapped, chunk.features)[: chunk.num_rows].clone()

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=5632, help="pairs of an epoch")
    parser.add_argument("--length", type=int, default=128, help="tokens at which texts are cut")
    parser.add_argument("--chunk_rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--timed", nargs="+", choices=list(WAYS), default=["any shape"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--mode", help='of torch.compile, such as "reduce-overhead" on a GPU')
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--code_root", type=Path, help="read code-search pairs here instead of the standard library")
    options = parser.parse_args()
    tokenizer, batch_of = text_batches(Size("", {}, text_length=options.length), options.code_root, options.device)
    everything = batch_of(options.rows)

    print(f"{'pairs':<8}{'chunk':<16}{'shapes':>8}{'in buckets':>12}{'more tokens':>16}")
    for pairs in (options.pairs, max(2, options.pairs * 3 // 10)):
        for limits in (ChunkLimits(options.chunk_rows), ChunkLimits(max_tokens=128 * options.chunk_rows)):
            count_shapes(everything, pairs, limits)

    torch.manual_seed(0)
    config = bert(options.width, options.layers, max(1, options.width // 64), vocab_size=len(tokenizer))
    model = build(model_config=config).to(options.device).train()
    models = Models(model, model, options.device)
    plain, limits = ChunkLimits(options.chunk_rows), ChunkLimits(options.chunk_rows, has_buckets=True)

    print(f"\n{'graphs (backend eager) for':<30}{'after a step':>14}{'after two epochs':>18}")
    for way in WAYS:
        encode, after_step = encoder(model, compiled(model, "eager", None, way)), None
        for batch in batches(everything, options.pairs):
            our_step(models, batch, limits, encode=encode, packing=False)()
            after_step = after_step or counters["stats"]["unique_graphs"]
        print(f"{way:<30}{after_step:>14}{counters['stats']['unique_graphs']:>18}", flush=True)

    # Compilers are processes of their own, so the first step is of seconds; later ones as in benchmark_packing.py.
    key = "cpu_seconds" if options.device == "cpu" else "seconds"
    batch = batch_of(options.pairs)
    others = {name: our_step(models, batch, plain, packing=name == "packed") for name in ("padded", "packed")}
    for step in others.values():
        step()  # these warm up; of the compiled ones the first step is what is measured
    print(f"\n{options.backend:<30}{'graphs':>8}{'first step':>12}{'seconds':>10}{'later':>8}{'of packed':>12}")
    for way in options.timed:
        encode = encoder(model, compiled(model, options.backend, options.mode, way))
        steps = {"compiled": our_step(models, batch, limits, encode=encode, packing=False), **others}
        first = take_turns(steps, 1, options.device)
        later = take_turns(steps, options.turns, options.device)
        graphs, seconds = counters["stats"]["unique_graphs"], first["compiled"]["seconds"][0]
        of_padded, of_packed = (ratio(later, "compiled", name, key) for name in others)
        relative = ratio(first, "compiled", "padded")
        print(f"{way:<30}{graphs:>8}{relative:>12.1f}{seconds:>10.0f}{of_padded:>8.2f}{of_packed:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
