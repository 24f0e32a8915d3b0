"""Observers: what a step did, summed until it is logged, and every logged line in a file. They never act."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import CachedStep
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.rows import Rows

NAME = "metrics.jsonl"


class StepMeter:
    """Sums what cached steps did since the last log. Host numbers come from the chunks, so adding costs no
    synchronisation; the loss's metrics stay on the device until they are read."""

    def __init__(self, rows: Callable[[], Rows]) -> None:
        self.rows = rows  # those of the run's strategy now
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

    def add(
        self,
        step: CachedStep,
        chunked: ChunkedBatch,
        counts: dict[str, list[int]],
        num_kept: int,
        source: str | None = None,
    ) -> None:
        """`num_kept`: graphs that were kept at most. `source`: the name of the batch's, where there are several
        (data/mixture.py); its loss is a metric then."""
        own_rows = sum(of_ranks[self.rows().index] for of_ranks in counts.values())
        real, computed = chunked.count_tokens()
        self.last_tokens = real if own_rows else 0, computed  # a stand-in for rows is computed, and nobody's
        self._real += self.last_tokens[0]
        self._computed += self.last_tokens[1]
        self._steps += 1
        self._chunks += step.num_chunks
        self._kept += min(num_kept, step.num_chunks)
        self._rows += own_rows
        self._contrastive_batch = max(self._contrastive_batch, sum(next(iter(counts.values()))))
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
        return sum(seen for (seen,) in self.rows().one_of_each(collectives.exchange([own])))

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
        total[:4] /= self.rows().shared_by  # the sums, not the means
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
