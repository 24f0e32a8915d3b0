"""Observers: what a step did and where its time goes, summed until it is logged, and every logged line in a file.
They never act.

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

import json
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_dist_ext.engine.gradient_cache import (
    BACKWARD,
    ENCODE,
    KEEP,
    REPLAY,
    SCORE,
    WHOLE_PASS,
    CachedStep,
    Phase,
)
from hf_dist_ext.strategies import collectives
from hf_dist_ext.training.running import Running

NAME = "metrics.jsonl"
PARTS = ("data", "encode", "loss", "replay", "last_backward", "optimizer")
OF_OWN_LOSS = ("data", "compute", "optimizer")
PASSES = "passes"  # of a pipeline's rank, waiting included
OF_PHASES = {WHOLE_PASS: PASSES, ENCODE: "encode", SCORE: "loss", KEEP: "replay", REPLAY: "replay", BACKWARD: "replay"}
WARM_UP_STEPS = 2


class StepMeter:
    """Sums what cached steps did since the last log. Host numbers come from the chunks, so adding costs no
    synchronisation; the loss's metrics stay on the device until they are read."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.last_tokens = (0, 0)
        self.largest_batch, self._steps_by_chunks = 0, Counter()  # of the whole run
        self._losses, self._before = None, torch.zeros(())  # Trainer's sum since the last log, and before an update
        self._since_log: Counter[bool] = Counter()  # updates, by whether they were skipped
        self._of_run: Counter[bool] = Counter()
        self._metrics_of_update: list[dict[str, torch.Tensor]] = []
        self._reset()

    def _reset(self) -> None:
        self._started = time.perf_counter()
        self._steps = self._chunks = self._kept = self._rows = self._real = self._computed = 0
        self._contrastive_batch = 0
        self._metrics: dict[str, torch.Tensor] = {}
        self._given: Counter[str] = Counter()  # steps that gave a metric

    def add(self, step: CachedStep, layout: Any, source: str | None = None) -> None:
        """`layout`: of the batch (training/sizes.py). `source`: the name of the batch's, where there are several
        (data/mixture.py); its loss is a metric then."""
        own_rows = sum(of_ranks[self.run.strategy.rows.index] for of_ranks in layout.counts.values())
        real, computed = layout.chunked.count_tokens()
        self.last_tokens = real if own_rows else 0, computed  # a stand-in for rows is computed, and nobody's
        self._real += self.last_tokens[0]
        self._computed += self.last_tokens[1]
        self._steps += 1
        self._chunks += step.num_chunks
        self._kept += min(layout.num_kept, step.num_chunks)
        self._rows += own_rows
        self._contrastive_batch = max(self._contrastive_batch, sum(next(iter(layout.counts.values()))))
        self.largest_batch = max(self.largest_batch, self._contrastive_batch)
        self._steps_by_chunks[step.num_chunks] += 1
        of_source = {} if source is None else {f"loss_{source}": step.loss}
        self._metrics_of_update.append(step.metrics | of_source)

    def end_update(self, losses: torch.Tensor, is_skipped: bool) -> None:
        """After the last backward of an update. `losses`: Trainer's sum, in which those of a skipped one must not
        count, nor do its metrics."""
        if losses is not self._losses:  # of a new run
            self._losses, self._before = losses, torch.zeros_like(losses)
            self._since_log, self._of_run = Counter(), Counter()
        if is_skipped:
            losses.copy_(self._before)
        else:
            self._before = losses.clone()
            for name, value in chain.from_iterable(metrics.items() for metrics in self._metrics_of_update):
                self._metrics[name] = self._metrics.get(name, 0) + value.detach().float()
                self._given[name] += 1
        self._metrics_of_update = []
        self._since_log[is_skipped] += 1
        self._of_run[is_skipped] += 1

    def correct(self, logs: dict[str, float]) -> None:
        """Trainer has divided its sum of losses by all updates; without one that counts there is no mean. Lines that
        somebody else logs stay as they are."""
        is_of_steps = "loss" in logs and "learning_rate" in logs
        of_trainer = ("loss", "learning_rate", self._since_log), ("train_loss", "train_runtime", self._of_run)
        for name, beside, updates in of_trainer:
            if not updates[True] or name not in logs or beside not in logs:
                continue
            if updates[False] == 0:
                del logs[name]
            else:
                logs[name] *= updates.total() / updates[False]
        if is_of_steps:
            self._since_log, self._before = Counter(), torch.zeros_like(self._before)

    def count_seen(self, kind: str | bool) -> int:
        """Tokens of all ranks' last batch. kind: "non_padding", or with padding. Every rank calls it."""
        real, computed = self.last_tokens
        own = real if kind == "non_padding" else computed
        return sum(seen for (seen,) in self.run.strategy.rows.one_of_each(collectives.exchange([own])))

    @property
    def usual_chunks(self) -> int:
        """Those of most of the run's steps: while "auto" measures there are other numbers."""
        return max(self._steps_by_chunks, key=self._steps_by_chunks.__getitem__, default=0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not counted as that of training steps, once also where one such block is in another."""
        already, began = self._started, time.perf_counter()
        yield
        self._started = already + time.perf_counter() - began

    def read(self, device: torch.device) -> dict[str, float]:
        """Means over the steps since the last read and over all ranks; then starts anew. Every rank must call it."""
        if self._steps == 0:
            return {}
        seconds = time.perf_counter() - self._started
        names = sorted(self._metrics)
        own = torch.tensor([self._rows / seconds, self._real / seconds, float(self._real), float(self._computed)])
        means = [self._metrics[name].to(device).reshape(1) / self._given[name] for name in names]
        total = torch.cat([own.float().to(device), *means])
        if collectives.world_size() > 1:
            torch.distributed.all_reduce(total)
        total[:4] /= self.run.strategy.rows.shared_by  # the sums, not the means
        rows_per_second, tokens_per_second, real, computed, *values = total.tolist()
        report = {
            "num_chunks": round(self._chunks / self._steps, 2),
            "tokens_per_chunk": round(self._computed / self._chunks, 1),
            "kept_graphs": round(self._kept / self._steps, 2),
            "contrastive_batch_size": self._contrastive_batch,
            "rows_per_second": round(rows_per_second, 2),
            "tokens_per_second": round(tokens_per_second, 1),
            "padding_share": round(1 - real / computed, 4) if computed else 0.0,
            **{name: value / collectives.world_size() for name, value in zip(names, values, strict=True)},
        }
        report |= memory_used(device)
        self._reset()
        return report


def memory_used(device: torch.device) -> dict[str, float]:
    """The most that was allocated so far, in GiB and as a share of the device's memory; nothing of a device that does
    not count it (the CPU, Apple's)."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return {}
    most, (_, whole) = module.max_memory_allocated(device), module.mem_get_info(device)
    return {"peak_memory_gib": round(most / 2**30, 3), "memory_share": round(most / whole, 4)}


class MetricsFile(TrainerCallback):
    """Appends every logged line to `metrics.jsonl` in the output folder, on the first process. A run that goes on from
    a checkpoint, or starts afresh, first takes out the lines of steps that it makes again."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = Path(args.output_dir, NAME)
        if not state.is_world_process_zero or state.is_hyper_param_search or not path.is_file():
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if state.global_step and _step_of(line) <= state.global_step]
        if kept != lines:
            path.with_name(f"_{NAME}").write_text("".join(kept), encoding="utf-8")
            os.replace(path.with_name(f"_{NAME}"), path)  # a kill leaves the old lines or the new ones

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **others: Any) -> None:
        if state.is_world_process_zero and logs:
            os.makedirs(args.output_dir, exist_ok=True)
            with open(Path(args.output_dir, NAME), "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _step_of(line: str) -> float:
    """Infinity for a line that a kill has cut short."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


# ---- time ----


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
        self._first = WARM_UP_STEPS

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._first = state.global_step + WARM_UP_STEPS  # of this start, which may be a resume

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._first and self.num_steps and self.profile is None:
            self.profile = torch.profiler.profile()
            self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.profile is not None and state.global_step == self._first + self.num_steps:
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
