#!/usr/bin/env python
"""What an order without duplicates in a batch costs: seconds and memory of every process, from datasets on disk.

    python scripts/benchmark_order.py                        # 1e5, 1e6 and 1e7 rows on two processes
    python scripts/benchmark_order.py --rows 100000 --processes 4

Each process does what a run does: number the texts of query and positive (`row_ids.shared_ids`; the first process to
come writes a file, the others wait for it), then draw the order of an epoch. A later start, as a resume is one, finds
the file. Memory is the largest growth of what a process has for itself, and, beside it, the file that all processes of
a machine map together. The largest figure of all processes is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_dist_ext.data.row_ids import shared_ids
from hf_dist_ext.data.sampling import NoDuplicatesSampler

COLUMNS = ("query", "positive")
WRITTEN = 1 << 18  # rows at a time


def write_dataset(path: Path, rows: int) -> None:
    """Texts of about 60 bytes; one query in twenty is that of an earlier row."""
    draw, schema = np.random.default_rng(0), pa.schema({name: pa.string() for name in COLUMNS})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for first in range(0, rows, WRITTEN):
            number = np.arange(first, min(first + WRITTEN, rows))
            query = np.where(draw.random(len(number)) < 0.05, draw.integers(0, number + 1), number)
            words = pa.scalar("of a text about as long as a search query is"), pa.scalar(" ")
            columns = [
                pc.binary_join_element_wise(pa.scalar(name), pa.array(values).cast(pa.string()), *words)
                for name, values in zip(COLUMNS, (query, number), strict=True)
            ]
            stream.write_batch(pa.record_batch(columns, schema=schema))


class Memory:
    """The largest growth of the process's own memory (maps of files are not in it) since it was made."""

    def __init__(self) -> None:
        self.begin = self.most = self._own()
        self.stops = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    @staticmethod
    def _own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    def _watch(self) -> None:
        while not self.stops.wait(0.005):
            self.most = max(self.most, self._own())

    def grown(self) -> int:
        self.stops.set()
        self.thread.join()
        return max(self.most, self._own()) - self.begin


def process(path: Path, window: int, answers: Any) -> None:
    dataset, memory, found = datasets.Dataset.from_file(str(path)), Memory(), {}
    started, cpu = time.perf_counter(), time.process_time()
    ids = shared_ids(dataset, COLUMNS)
    found["numbers, seconds"], found["numbers, CPU seconds"] = time.perf_counter() - started, time.process_time() - cpu
    started, cpu = time.perf_counter(), time.process_time()
    order = NoDuplicatesSampler(ids, window).order()
    found["order, seconds"], found["order, CPU seconds"] = time.perf_counter() - started, time.process_time() - cpu
    assert len(order) == len(dataset)
    found["own memory, MB"] = memory.grown() / 1e6
    found["file that all map, MB"] = ids.nbytes / 1e6 if isinstance(ids, np.memmap) else 0.0
    answers.put(found)


def start(path: Path, processes: int, window: int) -> list[dict[str, float]]:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=process, args=(path, window, answers)) for _ in range(processes)]
    for child in children:
        child.start()
    found = [answers.get(timeout=3600) for _ in children]
    for child in children:
        child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of an order without duplicates in a batch.")
    parser.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--window", type=int, default=256, help="rows of a global batch")
    parser.add_argument("--output", type=Path, help="a JSON file for every figure")
    options = parser.parse_args()
    report: dict[str, Any] = {"processes": options.processes, "window": options.window, "results": []}
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
        for rows in options.rows:
            path = Path(folder, "rows.arrow")
            write_dataset(path, rows)
            for name in ("first start", "later start"):
                found = start(path, options.processes, options.window)
                worst = {key: max(of_process[key] for of_process in found) for key in found[0]}
                report["results"].append({"rows": rows, "start": name, "largest of a process": worst, "all": found})
                figures = ", ".join(f"{key} {value:.2f}" for key, value in worst.items())
                print(f"{rows:,} rows, {name}: {figures}", flush=True)
            path.unlink()
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
