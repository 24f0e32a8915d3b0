"""Prints what candidates that go round cost and save, and what products of bfloat16 factors are off by.

python tests/parity/ring_table.py            # about 5 minutes on two cores

(1) bytes of the loss on a rank, masks of false negatives included, counted without computing
(2) CPU seconds of the loss with four products beside those with three, one process, the best of three
(3) relative error of the gradient with bf16_products, against float32
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_dist_ext import policy  # noqa: E402
from hf_dist_ext.engine.losses import InfoNCELoss  # noqa: E402
from hf_dist_ext.engine.ring import Ring  # noqa: E402
from hf_dist_ext.strategies import ring  # noqa: E402
from tests.engine.test_losses import LiveBytes  # noqa: E402

MIB = 2**20


class Everyone(dict):
    ring: Ring


def everyone_of(own: dict, counts: list[int]) -> Everyone:
    """Of the first of several ranks; blocks of others never arrive."""
    everyone = Everyone(own)
    everyone.ring = Ring(
        0,
        dict.fromkeys(own, counts),
        lambda rows, heights: ring.visits(rows, heights, 0, None),
        lambda rows, heights: rows if len(heights) == 1 else rows.new_zeros(sum(heights), *rows.shape[1:]),
    )
    return everyone


def counted(num_rows: int, width: int, ranks: int, exchange: str) -> int:
    counts = [num_rows // ranks] * ranks
    with mock.patch.object(ring, "_start", lambda messages, group: []), FakeTensorMode():
        own = {name: torch.zeros(counts[0], width, requires_grad=True) for name in ("query", "positive")}
        ids = {name: torch.zeros(num_rows, dtype=torch.long) for name in own}
        loss = InfoNCELoss(false_negative_margin=0.1, cross_device_exchange=exchange, candidates_per_tile=10**9)
        if exchange == "ring":
            loss.rows_per_tile = policy.LOSS_TILE_ROWS
        with LiveBytes() as live:
            if exchange == "ring":
                everyone = everyone_of(own, counts)
            else:
                everyone = {name: torch.cat([rows] * ranks) for name, rows in own.items() if name != "query"}
                everyone = {"query": own["query"], **everyone}
            loss(own, everyone, ids=ids).loss.backward()
    return live.most


def pairs(num_rows: int, width: int, similarity: float) -> dict[str, torch.Tensor]:
    query, noise = (normalize(torch.randn(num_rows, width), dim=1) for _ in range(2))
    return {"query": query, "positive": normalize(similarity * query + (1 - similarity**2) ** 0.5 * noise, dim=1)}


def step(columns: dict, goes_round: bool = False, **options) -> tuple[float, float, torch.Tensor]:
    """(loss, CPU seconds, gradient)"""
    own = {name: rows.clone().requires_grad_() for name, rows in columns.items()}
    loss = InfoNCELoss(cross_device_exchange="ring", **options)
    start = time.process_time()
    value = loss(own, everyone_of(own, [len(own["query"])]) if goes_round else None).loss
    value.backward()
    seconds = time.process_time() - start
    return value.item(), seconds, torch.cat([rows.grad.flatten() for rows in own.values()])


def main() -> None:
    torch.manual_seed(0)
    rows, width = 65536, 1024
    print(f"(1) MiB of the loss on a rank, {rows} rows x {width}, queries and positives")
    for ranks in (2, 4, 8):
        formula = policy.ring_bytes([[rows // ranks] * ranks] * 2, width)
        of_ring, of_gather = counted(rows, width, ranks, "ring"), counted(rows, width, ranks, "gather")
        print(
            f"{ranks} ranks: ring {of_ring / MIB:.0f} (formula {formula / MIB:.0f}), gather {of_gather / MIB:.0f}",
            flush=True,
        )
    print("(2) CPU seconds: ring over gather")
    for num_rows, dimensions in ((4096, 256), (8192, 768)):
        columns = pairs(num_rows, dimensions, 0.3)
        times = [[step(columns, goes_round)[1] for goes_round in (False, True)] for _ in range(3)]
        gather, of_ring = (min(column) for column in zip(*times, strict=True))
        print(f"{num_rows} x {dimensions}: {of_ring:.2f} / {gather:.2f} = {of_ring / gather:.2f}", flush=True)
    print("(3) bf16_products, 4096 x 768: relative error of the gradient, of the loss")
    for temperature, similarity in ((0.05, 0.3), (0.05, 0.8), (0.02, 0.3), (0.01, 0.3)):
        columns = pairs(4096, 768, similarity)
        wanted, _, exact = step(columns, temperature=temperature)
        for goes_round in (False, True):
            value, _, found = step(columns, goes_round, temperature=temperature, bf16_products=True)
            error = (found - exact).norm() / exact.norm()
            print(
                f"temperature {temperature}, cosine of pairs {similarity}, {'ring' if goes_round else 'gather'}: "
                f"{error:.1e}, {abs(value - wanted) / wanted:.1e} of {wanted:.2g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
