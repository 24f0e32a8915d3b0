"""Where a step's time goes, in every logged line, and a profiler's trace of a few steps.

Every part of a step is measured where it runs: on a CPU by the clock, on an accelerator by events in its stream, which
are added up once they have passed, so that measuring waits for nothing before a line is logged. A line holds the mean
seconds per optimizer step of this process since the line before. With `profile_steps` torch's profiler runs over so
many steps, after two that warm up, and writes one file per process.

data: waiting for batches. encode: the pass without a graph. loss: scores and their gradient, gathers included. replay:
forwards with a graph and their backwards. last_backward: the chunk that completes the step; its backward runs what is
left of the reduction, which DDP overlaps with it, so it has no time of its own. optimizer: clipping and the update.
passes: in a pipeline, all forwards and backwards of a step and what this process waits between them. compute: with a
model's own loss, all forwards and backwards of a step.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from hf_dist_ext.engine.gradient_cache import BACKWARD, ENCODE, KEEP, REPLAY, SCORE, WHOLE_PASS, Phase

PARTS = ("data", "encode", "loss", "replay", "last_backward", "optimizer")
OF_OWN_LOSS = ("data", "compute", "optimizer")
PASSES = "passes"  # of a pipeline's rank, waiting included
OF_PHASES = {WHOLE_PASS: PASSES, ENCODE: "encode", SCORE: "loss", KEEP: "replay", REPLAY: "replay", BACKWARD: "replay"}
WARM_UP_STEPS = 2


class StepClock(TrainerCallback):
    """Sums the seconds of every part since the last read. `parts` are those that a line holds; without any nothing is
    measured."""

    def __init__(self, device: torch.device):
        self.device = device
        self.parts: tuple[str, ...] = PARTS
        self._steps = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._spans: deque[tuple[str, Any, Any]] = deque()  # whose end the device may not have reached
        self._data_ended: Any = None
        self._optimizer_began: Any = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self.parts:
            yield
            return
        began = self._now()
        try:
            yield
        finally:
            self._spans.append((name, began, ended := self._now()))
            if name == "data":
                self._data_ended = ended

    def phase(self, phase: Phase) -> AbstractContextManager:
        """Around every part of a step with a loss over embeddings."""
        return self.part("last_backward" if phase.is_last else OF_PHASES[phase.kind])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._optimizer_began = self._now()
        if "compute" in self.parts and self._data_ended is not None:
            self._spans.append(("compute", self._data_ended, self._optimizer_began))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._spans.append(("optimizer", self._optimizer_began, self._now()))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._steps += 1
        self._add_up(waits=False)  # a run that logs nothing keeps no more than the device has queued

    def read(self) -> dict[str, float]:
        """Mean seconds of every part per step since the last read; starts anew."""
        if not self._steps:
            return {}
        self._add_up(waits=True)
        parts = [*self.parts, PASSES] if PASSES in self._sums else self.parts
        means = {f"seconds_{name}": round(self._sums[name] / self._steps, 5) for name in parts}
        self._sums.clear()
        self._steps = 0
        return means

    def _add_up(self, waits: bool) -> None:
        on_cpu = self.device.type == "cpu"
        while self._spans and (waits or on_cpu or self._spans[0][2].query()):
            name, began, ended = self._spans.popleft()
            self._sums[name] += self._seconds(began, ended)

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        if self.device.type == "cpu":
            return ended - began
        ended.synchronize()
        return began.elapsed_time(ended) / 1000


class Profiler(TrainerCallback):
    """Writes `profile_rank<r>.json` in the output folder, which chrome://tracing and Perfetto read."""

    def __init__(self, num_steps: int):
        self.num_steps = num_steps
        self.profile: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == WARM_UP_STEPS and self.profile is None:
            self.profile = torch.profiler.profile()
            self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.profile is not None and state.global_step == WARM_UP_STEPS + self.num_steps:
            self._write(args)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._write(args)  # a run that was shorter than asked

    def _write(self, args: Any) -> None:
        if self.profile is None or self.num_steps == 0:
            return
        self.profile.stop()
        os.makedirs(args.output_dir, exist_ok=True)
        self.profile.export_chrome_trace(os.path.join(args.output_dir, f"profile_rank{args.process_index}.json"))
        self.num_steps = 0
