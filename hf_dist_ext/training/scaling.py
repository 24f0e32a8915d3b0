"""How well several processes are used: a run's throughput against a stored one of a single process.

Rows and seconds are counted from the end of the first update to the end of the last: waiting for data counts,
evaluating and saving do not. `samples_per_second` over all processes goes into metrics.json; a run without our fields
has it with `scaling_baseline` only. That field names the metrics.json of a single process. It is read before the first
step, and a last line is logged with `scaling_efficiency` = (throughput of N processes / throughput of one) / N.

Equal work per process is what makes the figure mean anything, so another batch per device is warned about. With a loss
over embeddings the scores grow with N, which this counts as lost.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.running import Running

logger = logging.get_logger(__name__)


class Scaling(TrainerCallback):
    """`report` is empty until the end, and after a run of one update."""

    def __init__(self, run: Running):
        self.run = run
        self.report: dict[str, float] = {}
        self._since: float | None = None  # of an evaluation without training

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.report, self._batches, self._seconds, self._since = {}, 0, 0.0, None
        path, (own, _) = self.run.options.scaling_baseline, self.run.rows_of_micro_batch()
        self._baseline = None if path is None else read_baseline(path, self.run.stage, own)

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._batches += self._since is not None

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._since is None:  # the first update, which also warms up
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        else:
            self._batches += 1
            self._seconds += time.perf_counter() - self._since
        self._since = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._since is not None:
            self._since = time.perf_counter()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self._batches:
            return
        if torch.accelerator.is_available():
            began = time.perf_counter()
            torch.accelerator.synchronize()
            self._seconds += time.perf_counter() - began
        throughput = self._batches * self.run.rows_of_micro_batch()[1] / self._seconds
        self.report = {"samples_per_second": round(throughput, 3)}
        if self._baseline is not None:
            self.report["scaling_efficiency"] = round(throughput / self._baseline / args.world_size, 4)
            self.run.log(dict(self.report))


def read_baseline(path: str, stage: str | None, batch: int) -> float:
    """Samples per second of the single-process run that wrote this metrics.json; of its stage, where it had stages."""
    what = f'scaling_baseline="{path}"'
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} cannot be read: {error}. Give the metrics.json of a single-process run.") from None
    report = report if isinstance(report, dict) else {}
    report = next((of_stage for of_stage in report.get("stages", ()) if of_stage.get("name") == stage), report)
    throughput = report.get("samples_per_second")
    if not isinstance(throughput, int | float) or throughput <= 0:
        of_stage = f" for stage {stage!r}" if stage else ""
        raise UsageError(
            f"{what} holds no samples_per_second{of_stage}. Give the metrics.json of a run of two updates or more."
        )
    if report.get("world_size") != 1:
        raise UsageError(f"{what} is of {report.get('world_size')} processes. Give the metrics.json of a run of one.")
    if (theirs := report.get("per_device_train_batch_size")) != batch:
        logger.warning(
            f"scaling_efficiency compares {batch} rows per process with {theirs} in {path}: work per process differs, "
            "and so the figure is not of the processes alone."
        )
    return float(throughput)


def device_name(device: torch.device) -> str:
    """What the driver calls it; "cpu" for the CPU."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else name(device)
