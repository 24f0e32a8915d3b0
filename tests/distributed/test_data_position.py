"""Resuming on another number of processes: the epoch's order goes on, and an update learns from as many rows."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.launching import launch

WORKER = Path(__file__).with_name("position_worker.py")


def rows_seen(folder: Path, name: str) -> tuple[list[list[int]], int, int]:
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}_*.json"))]
    return [found["seen"] for found in ranks], ranks[0]["accumulation"], ranks[0]["step"]


def test_two_processes_go_on_as_one_and_one_as_two(tmp_path):
    """32 rows, 2 epochs, 8 rows per update: two processes of 4 rows, or one of 4 rows twice."""
    launch("multi_gpu_ddp", 2, WORKER, "--folder", tmp_path / "two", "--output", tmp_path / "two_seen")
    two, accumulation, step = rows_seen(tmp_path, "two_seen")
    assert accumulation == 1 and step == 8 and len(two) == 2
    order = [row for i in range(0, 32, 4) for rank in two for row in rank[i : i + 4]]
    assert Counter(order) == Counter(list(range(32)) * 2)

    checkpoint = tmp_path / "two" / "checkpoint-2"
    arguments = ["--folder", tmp_path / "one", "--output", tmp_path / "one_seen", "--resume", checkpoint]
    launch("python", 1, WORKER, *arguments)
    (one,), accumulation, step = rows_seen(tmp_path, "one_seen")
    assert accumulation == 2 and step == 8
    assert one == order[16:]

    checkpoint = tmp_path / "one" / "checkpoint-6"  # in the second epoch of a run that was changed once already
    arguments = ["--folder", tmp_path / "again", "--output", tmp_path / "again_seen", "--resume", checkpoint]
    launch("multi_gpu_ddp", 2, WORKER, *arguments)
    again, accumulation, step = rows_seen(tmp_path, "again_seen")
    assert step == 8 and sorted(again[0] + again[1]) == sorted(order[48:])


def in_order(ranks: list[list[int]], batch: int) -> list[int]:
    return [row for i in range(0, len(ranks[0]), batch) for rank in ranks for row in rank[i : i + batch]]


def streamed(tmp_path: Path, name: str, preset: str, processes: int, *arguments: object) -> tuple[list, int, int]:
    launch(preset, processes, WORKER, "--folder", tmp_path / name, "--output", tmp_path / f"seen_{name}", *arguments)
    return rows_seen(tmp_path, f"seen_{name}")


def test_a_stream_goes_on_with_other_processes_and_loader_workers(tmp_path):
    """30 rows in 4 shards, 10 updates of 8 rows: batches hold the end of an epoch and the beginning of the next."""
    kind = "--stream", "plain"
    two, _, _ = streamed(tmp_path, "two", "multi_gpu_ddp", 2, *kind, "--workers", 2)
    order = in_order(two, 4)
    assert order == [*range(30)] + order[30:] and sorted(order[30:60]) == [*range(30)] and len(order) == 80

    at = "--resume", tmp_path / "two" / "checkpoint-4"
    (one,), accumulation, step = streamed(tmp_path, "one", "python", 1, *kind, *at)
    assert accumulation == 2 and step == 10 and one == order[32:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shuffled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_with_as_many_processes_and_with_more(tmp_path, kind, workers):
    kind = "--stream", kind, "--workers", workers
    two, _, _ = streamed(tmp_path, "two", "multi_gpu_ddp", 2, *kind)
    order, at = in_order(two, 4), ("--resume", tmp_path / "two" / "checkpoint-4")
    again, _, step = streamed(tmp_path, "again", "multi_gpu_ddp", 2, *kind, *at)
    assert step == 10 and in_order(again, 4) == order[32:]
    three, _, step = streamed(tmp_path, "three", "multi_gpu_ddp", 3, *kind, *at, "--batch", 1)
    assert step == 10 and in_order(three, 1)[:40] == order[32:][: len(in_order(three, 1))][:40]
    (one,), accumulation, step = streamed(tmp_path, "one", "python", 1, *kind, *at)
    assert accumulation == 2 and step == 10 and one == order[32:]


@pytest.mark.slow
def test_a_stream_that_every_process_shuffles_anew_is_refused(tmp_path):
    arguments = "--folder", tmp_path / "run", "--output", tmp_path / "seen", "--stream", "unseeded"
    done = launch("multi_gpu_ddp", 2, WORKER, *arguments, check=False)
    assert done.returncode != 0 and "Give shuffle(seed=...)." in done.stderr
