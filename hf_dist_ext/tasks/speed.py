"""The arithmetic that this machine's CPU reaches in training, measured for a moment.

    python -m hf_dist_ext.tasks.speed --width 384 --inner 1536 --heads 12 --length 128 --rows 16

One transformer layer runs forward and backward on random rows for a second, and its quickest run counts, since other
programs may take the cores meanwhile. `hf-dist plan --device cpu` starts this as a process of its own: the planner
imports no torch. Prints floating-point operations per second.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

SECONDS = 1.0


def operations(width: int, inner: int, length: int, rows: int) -> int:
    """Of a forward and a backward, which is two forwards: four projections, two of the inner part, scores and their
    product with the values; a multiply-add is two."""
    per_token = 4 * width * width + 2 * width * inner + 2 * length * width
    return 3 * 2 * rows * length * per_token


def reached(
    width: int, inner: int, heads: int, length: int, rows: int, dropout: float, is_half: bool, seconds: float = SECONDS
) -> float:
    layer = nn.TransformerEncoderLayer(width, heads, inner, dropout, activation="gelu", batch_first=True)
    x = torch.randn(rows, length, width, requires_grad=True)

    def run() -> float:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            out = layer(x)
        out.float().sum().backward()
        return time.perf_counter() - began

    run()  # the first one allocates
    taken = [run()]
    while sum(taken) < seconds:
        taken.append(run())
    return operations(width, inner, length, rows) / min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("width", "inner", "heads", "length", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--half", action="store_true")
    given = parser.parse_args()
    print(reached(given.width, given.inner, given.heads, given.length, given.rows, given.dropout, given.half))


if __name__ == "__main__":
    main()
