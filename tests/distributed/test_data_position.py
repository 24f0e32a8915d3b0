"""Resuming on another number of processes: the epoch's order goes on, and an update learns from as many rows."""

import json
from collections import Counter
from pathlib import Path

from tests.distributed import position_worker
from tests.distributed.forked import launch


def rows_seen(folder: Path, name: str) -> tuple[list[list[int]], int, int]:
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}_*.json"))]
    return [found["seen"] for found in ranks], ranks[0]["accumulation"], ranks[0]["step"]


def test_two_processes_go_on_as_one_and_one_as_two(tmp_path):
    """32 rows, 2 epochs, 8 rows per update: two processes of 4 rows, or one of 4 rows twice."""
    launch("multi_gpu_ddp", 2, position_worker.main, "--folder", tmp_path / "two", "--output", tmp_path / "two_seen")
    two, accumulation, step = rows_seen(tmp_path, "two_seen")
    assert accumulation == 1 and step == 8 and len(two) == 2
    order = [row for i in range(0, 32, 4) for rank in two for row in rank[i : i + 4]]
    assert Counter(order) == Counter(list(range(32)) * 2)

    checkpoint = tmp_path / "two" / "checkpoint-2"
    arguments = ["--folder", tmp_path / "one", "--output", tmp_path / "one_seen", "--resume", checkpoint]
    launch("python", 1, position_worker.main, *arguments)
    (one,), accumulation, step = rows_seen(tmp_path, "one_seen")
    assert accumulation == 2 and step == 8
    assert one == order[16:]

    checkpoint = tmp_path / "one" / "checkpoint-6"  # in the second epoch of a run that was changed once already
    arguments = ["--folder", tmp_path / "again", "--output", tmp_path / "again_seen", "--resume", checkpoint]
    launch("multi_gpu_ddp", 2, position_worker.main, *arguments)
    again, accumulation, step = rows_seen(tmp_path, "again_seen")
    assert step == 8 and sorted(again[0] + again[1]) == sorted(order[48:])
