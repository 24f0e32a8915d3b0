"""Trainers that are compared: each in a process of its own, a step of one after a step of another.

(1) each contestant is forked; it makes its trainer and says so
(2) a step runs when the parent says "go", while all others wait. It is what lies between two calls of `on_step_end`:
    loading a batch, forward, loss, backward, optimizer
(3) each turn begins with another contestant. The first turn warms up; in the last, tensors are counted, and it is not
    timed. Every contestant has the same batch in a turn
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

FORK = multiprocessing.get_context("fork")  # a process that starts afresh imports for seconds


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


def describe_machine(device: str) -> str:
    words = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    if device == "cpu":
        return f"{words}, {torch.backends.cpu.get_cpu_capability()}, no GPU used"
    return f"{words}, {torch.cuda.get_device_name()}"


class AllocatedBytes:
    """On a GPU what the allocator says: bytes of the tensors made inside that are alive together, at the highest."""

    peak = 0

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def __exit__(self, *_: Any) -> None:
        self.peak = torch.cuda.max_memory_allocated() - self.before


class Turns(TrainerCallback):
    """In a contestant's process. A loop without Trainer calls `begin`, `begin_step` and `end_step`, and adds to
    `losses`."""

    def __init__(self, connection: Connection, steps: int, device: str = "cpu"):
        self.connection, self.steps, self.taken = connection, steps, 0
        self.losses: list[float] = []
        self.is_on_gpu = device != "cpu"
        self.memory = AllocatedBytes() if self.is_on_gpu else PeakBytes()

    def begin(self) -> None:
        self.resident = torch.cuda.memory_reserved() if self.is_on_gpu else psutil.Process().memory_info().rss
        self._wait()

    def begin_step(self) -> None:
        if self.taken == self.steps - 1:
            self.memory.__enter__()

    def end_step(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize()
        seconds = {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}
        self.taken += 1
        if self.taken == self.steps:
            self.memory.__exit__(None, None, None)
        self.connection.send(seconds)
        if self.taken < self.steps:
            self._wait()

    def end(self) -> None:
        if self.is_on_gpu:
            peak = torch.cuda.max_memory_reserved()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        figures = {"peak_bytes": self.memory.peak, "grown_bytes": peak - self.resident, "losses": self.losses}
        self.connection.send(figures)

    def _wait(self) -> None:
        self.connection.recv()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    # as Trainer calls them

    def on_train_begin(self, args, state, control, **_) -> None:
        self.begin()

    def on_step_begin(self, args, state, control, **_) -> None:
        self.begin_step()

    def on_step_end(self, args, state, control, **_) -> None:
        self.end_step()

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def contest(
    make: Callable[[Turns], Callable[[], Any]], steps: int, device: str, connection: Connection, log: Path
) -> None:
    """A contestant's process."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        turns = Turns(connection, steps, device)
        try:
            train = make(turns)
            connection.send("ready")
            train()
            turns.end()
        except BaseException:
            traceback.print_exc()
            raise


def take_turns(
    makers: Mapping[str, Callable[[Turns], Callable[[], Any]]], steps: int, logs: Path, device: str = "cpu"
) -> dict[str, dict]:
    """The figures of every contestant: seconds and cpu_seconds of the timed steps, peak_bytes of the tensors of the
    last step, grown_bytes of the process (on a GPU of what its allocator reserves) over training, losses of all steps.

    makers: name -> a function that takes the callback of a trainer and returns what trains `steps` steps.
    """
    running: dict[str, tuple[Connection, Path]] = {}
    for number, (name, make) in enumerate(makers.items()):
        connection, theirs = FORK.Pipe()
        log = logs / f"{number}.log"
        FORK.Process(target=contest, args=(make, steps, device, theirs, log), daemon=True).start()
        theirs.close()
        running[name] = connection, log
        _told(running[name])  # ready
    figures: dict[str, dict] = {name: {"seconds": [], "cpu_seconds": []} for name in running}
    names = list(running)
    for turn in range(steps):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            step = _told(running[name], "go")
            if 0 < turn < steps - 1:
                for key, value in step.items():
                    figures[name][key].append(value)
    for name, one in running.items():
        figures[name] |= _told(one)
    return figures


def _told(one: tuple[Connection, Path], word: str | None = None) -> Any:
    """What a contestant sends next, or answers to a word."""
    try:
        if word is not None:
            one[0].send(word)
        return one[0].recv()
    except (EOFError, BrokenPipeError):
        raise SystemExit(f"a contestant ended: {one[1].read_text(encoding='utf-8')[-3000:]}") from None


def ratio(figures: Mapping[str, dict], name: str, other: str, key: str = "seconds") -> float:
    """Median of the ratios within a turn."""
    return statistics.median(a / b for a, b in zip(figures[name][key], figures[other][key], strict=True))
