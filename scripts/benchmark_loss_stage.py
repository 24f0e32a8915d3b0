"""The loss stage alone, ours beside sentence-transformers': embeddings in, loss and gradient of the embeddings out.

    python scripts/benchmark_loss_stage.py                          # batch 2,048, chunk 32, width 128 and 384
    python scripts/benchmark_loss_stage.py --rows 8192 --widths 768 --json loss_stage.json

Both sides start from the same embeddings, cut in chunks as a gradient cache leaves them, and end with one gradient per
chunk. Theirs is `CachedMultipleNegativesRankingLoss.calculate_loss(..., with_backward=True)`, the part between its two
embedding passes, whose mini-batch size is both its chunk and its rows per backward; it is swept, since a larger one
is faster and costs memory. Contestants take turns; a ratio is the median of the ratios within a turn, so that a busy
machine slows both sides of it. Peak memory is counted, not sampled: the bytes of all tensors alive without the inputs.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist_ext.engine.losses import InfoNCELoss

TEMPERATURE = 0.05
TARGET = 3.0  # times faster than theirs at batch 2,048, chunk 32


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages made inside and still alive: now, and at the highest."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self._free(storage._cdata)
                self.alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def our_stage(columns: list[Tensor], chunk_size: int, ids: dict[str, Tensor] | None = None) -> Callable:
    loss = InfoNCELoss(TEMPERATURE)
    chunks = [column.split(chunk_size) for column in columns]
    names = ["query", "positive", *(f"negative{i}" for i in range(len(columns) - 2))]

    def stage() -> tuple[Tensor, list[list[Tensor]]]:
        leaves = {name: torch.cat(c).requires_grad_() for name, c in zip(names, chunks, strict=True)}
        output = loss(leaves, ids=ids)
        output.loss.backward()
        return output.loss.detach(), [list(leaf.grad.split(chunk_size)) for leaf in leaves.values()]

    return stage


def their_stage(columns: list[Tensor], mini_batch_size: int) -> Callable:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    # The model is only asked for its first module here: the embeddings are given.
    model = nn.Sequential(nn.Identity())
    loss = CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=mini_batch_size)
    chunks = [column.split(mini_batch_size) for column in columns]

    def stage() -> tuple[Tensor, list[list[Tensor]]]:
        leaves = [[chunk.detach().requires_grad_() for chunk in column] for column in chunks]
        total = loss.calculate_loss(leaves, with_backward=True)
        return total, [[leaf.grad for leaf in column] for column in leaves]

    return stage


def make_columns(rows: int, width: int, num_columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    others = [0.3 * queries + torch.randn(rows, width, generator=generator, dtype=torch.float64)]
    others += [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(num_columns - 2)]
    return [column.to(device, dtype) for column in (queries, *others)]


def seconds_of_turns(stages: dict[str, Callable], turns: int, device: str) -> dict[str, list[float]]:
    """Per stage its seconds in every turn; the first turn warms up and is dropped, and every turn starts elsewhere."""
    names = list(stages)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            stages[name]()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_bytes(stage: Callable) -> int:
    with PeakBytes() as memory:
        kept = stage()
    del kept
    return memory.peak


def gradient_error(ours: Callable, theirs: Callable) -> float:
    """Largest difference, relative to the largest gradient of the column."""
    errors = []
    for our_chunks, their_chunks in zip(ours()[1], theirs()[1], strict=True):
        wanted = torch.cat(their_chunks)
        assert wanted.abs().max() > 0
        errors.append(((torch.cat(our_chunks) - wanted).abs().max() / wanted.abs().max()).item())
    return max(errors)


def compare(width: int, options: argparse.Namespace) -> dict:
    """All figures of one width; prints its table."""
    columns = make_columns(options.rows, width, 2 + options.negatives, torch.float32, options.device)
    exact = make_columns(options.rows, width, 2 + options.negatives, torch.float64, options.device)
    ids = {name: torch.arange(options.rows, device=options.device) for name in ("query", "positive")}
    at_chunk = f"sentence-transformers, mini-batch {options.chunk}"
    stages = {"ours": our_stage(columns, options.chunk), "ours, ids masked": our_stage(columns, options.chunk, ids)}
    for size in sorted({options.chunk, *options.mini_batches}):
        stages[f"sentence-transformers, mini-batch {size}"] = their_stage(columns, size)

    seconds = seconds_of_turns(stages, options.turns, options.device)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peaks = {name: peak_bytes(stage) for name, stage in stages.items()}
    over_ours = {
        name: statistics.median(theirs / ours for theirs, ours in zip(values, seconds["ours"], strict=True))
        for name, values in seconds.items()
    }
    print(f"\nbatch {options.rows}, chunk {options.chunk}, width {width}, {options.negatives} hard negatives per row")
    print(f"{'stage':<42}{'ms':>10}{'x ours':>9}{'peak MiB':>11}")
    for name in stages:
        print(f"{name:<42}{medians[name] * 1e3:>10.1f}{over_ours[name]:>9.2f}{peaks[name] / 2**20:>11.1f}")
    errors = {
        "float32": gradient_error(stages["ours"], stages[at_chunk]),
        "float64": gradient_error(our_stage(exact, options.chunk), their_stage(exact, options.chunk)),
    }
    print(
        "max gradient difference, relative: " + ", ".join(f"{error:.1e} in {name}" for name, error in errors.items())
    )
    best = min((name for name in stages if not name.startswith("ours")), key=medians.get)
    print(f"ours is {over_ours[at_chunk]:.2f} times faster at chunk {options.chunk} (target {TARGET:.0f}), ", end="")
    print(f"{over_ours[best]:.2f} times faster than their best ({best.split(', ')[1]})")
    return {
        "width": width,
        "seconds": seconds,
        "peak_bytes": peaks,
        "max_relative_gradient_error": errors,
        "their_best": best,
        "loss_stage_over_sentence_transformers": 1 / over_ours[at_chunk],
        "loss_stage_over_sentence_transformers_best": 1 / over_ours[best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048, help="the batch")
    parser.add_argument("--chunk", type=int, default=32, help="rows per chunk of the gradient cache")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--negatives", type=int, default=0, help="hard-negative columns")
    parser.add_argument("--mini_batches", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048], help="theirs")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    packages = {name: version(name) for name in ("torch", "sentence-transformers")}
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    machine += f", {torch.backends.cpu.get_cpu_capability()}" if options.device == "cpu" else f", {options.device}"
    print(f"{machine}; " + ", ".join(f"{name} {number}" for name, number in packages.items()))
    results = [compare(width, options) for width in options.widths]
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        command = " ".join(["python", "scripts/benchmark_loss_stage.py", *sys.argv[1:]])
        report = {"command": command, "machine": machine, "versions": packages, **settings, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
