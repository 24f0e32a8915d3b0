#!/usr/bin/env python
"""What loader workers bring where a stream's pictures are decoded, as ratios measured side by side in one run.

    python scripts/benchmark_streams.py --workers 0 2

A folder of parquet files with JPEG pictures is streamed as a training run streams it
(hf_dist_ext/data/stream_order.py): read, dealt, decoded, made into a tensor. `--step` is what a step of training waits
for its accelerator. The settings take turns, so that other programs on the machine slow down all of them; the median
of each counts. The ratios are to the first row of the table.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import statistics
import time
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hf_dist_ext.data.stream_order import Dealer, DealtRows, Ranks, StreamState


def write_pictures(folder: Path, shards: int, rows: int, side: int) -> None:
    generator = np.random.default_rng(0)
    features = datasets.Features({"image": datasets.Image()})
    datasets.disable_progress_bars()
    for shard in range(shards):
        path = folder / f"{side}-{rows}-{shard}-of-{shards}.parquet"
        if path.exists():
            continue
        stored = []
        for _ in range(rows):
            file = io.BytesIO()
            coarse = Image.fromarray(generator.integers(0, 256, (side // 8, side // 8, 3), np.uint8))
            coarse.resize((side, side)).save(file, "jpeg")
            stored.append({"bytes": file.getvalue(), "path": None})
        datasets.Dataset.from_dict({"image": stored}, features=features).to_parquet(str(path))


def collate(rows: list[dict]) -> torch.Tensor:
    """(B, 224, 224, 3) as an image processor would."""
    pictures = [np.asarray(row["image"].convert("RGB").resize((224, 224)), dtype=np.float32) for row in rows]
    return torch.from_numpy(np.stack(pictures)) / 255


def rows_per_second(folder: Path, batch: int, batches: int, workers: int, step: float) -> float:
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    stream = datasets.load_dataset("parquet", data_files={"train": files}, split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=4 * batch)
    dealer = Dealer(stream, batch, Ranks(0, 1, 1), StreamState(), workers)
    rows = DealtRows(dealer.readers.features)
    made = iter(DataLoader(rows, batch_sampler=dealer, collate_fn=collate, num_workers=workers))
    next(made)  # the workers have started
    started = time.perf_counter()
    count = 0
    for rows in itertools.islice(made, batches):
        count += len(rows)
        time.sleep(step)
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows per second of a decoded stream, by loader workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="of each shard")
    parser.add_argument("--side", type=int, default=640, help="of a picture, in pixels")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--step", type=float, default=0.0, help="seconds")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmark_streams"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_pictures(options.folder, options.shards, options.rows, options.side)
    found: dict[int, list[float]] = {workers: [] for workers in options.workers}
    for _ in range(options.turns):
        for workers, speeds in found.items():
            speeds.append(rows_per_second(options.folder, options.batch, options.batches, workers, options.step))
    first = statistics.median(found[options.workers[0]])
    print(f"{os.cpu_count()} CPU cores, pictures of {options.side} x {options.side}, batches of {options.batch}")
    print(f"each followed by a step of {options.step} s")
    print("| loader workers | rows/s | ratio |\n|---|---|---|")
    for workers, speeds in found.items():
        print(f"| {workers} | {statistics.median(speeds):.0f} | {statistics.median(speeds) / first:.2f} |")


if __name__ == "__main__":
    main()
