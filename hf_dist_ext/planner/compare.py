"""A plan beside the run that it was for: `hf-dist plan --compare RUN_DIR` reads what the run wrote of itself.

`run.json` says what ran, `plan.json` which preset was chosen where the run left that open, and `measured.json` what a
step and the memory were. A run that has not ended yet has `metrics.jsonl`: rows per second, and on accelerators the
highest allocation.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import GIB, PIPELINE_PRESETS
from hf_dist_ext.planner.devices import CPU
from hf_dist_ext.planner.plan import Option, Plan
from hf_dist_ext.planner.report import duration, rounded
from hf_dist_ext.run import record

SHORT = 0.1  # seconds of a step in which starting kernels and reading data show


@dataclass(frozen=True)
class RunFigures:
    """Of a step and of the process that needs most memory. `seconds` or, in mid-run, `rows_per_second`: of all columns
    and processes, the median of the logged lines but the first, which has the start in it. `allocated`: bytes of an
    accelerator, `process`: of a CPU's process with all that it loaded; None where it is not counted."""

    seconds: float | None
    rows_per_second: float | None
    allocated: float | None
    process: float | None = None
    device: str | None = None
    processes: int | None = None


def run_file(folder: Path) -> Path:
    """Raises UsageError where no run was started."""
    path = folder / "run.json"
    if not path.is_file():
        raise UsageError(f"--compare {folder} holds no run.json. Give the output_dir of a run.")
    return path


def measured(folder: Path) -> RunFigures:
    path = folder / "measured.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        of_memory = [found["memory"].get(name) for name in ("allocated", "process")]
        return RunFigures(found["seconds_per_step"], None, *of_memory, found["device"], found["processes"])
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    rates = [line["rows_per_second"] for line in lines if "rows_per_second" in line]
    if not rates:
        raise UsageError(f"{path} has no line with rows_per_second yet. Let the run log once (logging_steps).")
    peaks = [line["peak_memory_gib"] * GIB for line in lines if "peak_memory_gib" in line]
    return RunFigures(None, statistics.median(rates[1:] or rates), max(peaks, default=None))


def compared(plan: Plan, folder: Path) -> dict[str, Any]:
    """Predicted and measured figures, as the run stood. Raises UsageError."""
    found, option = measured(folder), _option_of(plan, folder)
    work, needed = plan.work, option.bytes
    rows = sum(column.rows for column in work.columns) * work.accumulation * plan.hardware.num_devices
    # a step of the run has the rows that its devices share once
    seconds = found.seconds * option.given.turns if found.seconds else rows / (found.rows_per_second or 1)
    allocated = needed.total - needed.framework
    return {
        "strategy": option.strategy.name,
        "predicted": _figures(option.given.seconds, rows) | {"allocated": allocated},
        "measured": _figures(seconds, rows) | {"allocated": found.allocated, "process": found.process},
        # what a device's arithmetic would have to be, if a step did nothing else
        "arithmetic_per_second": option.given.traffic.arithmetic * option.given.turns / seconds,
        "is_mostly_overhead": seconds / option.given.turns < SHORT
        or (found.device == CPU and (found.processes or 1) > 1),
    }


def _figures(seconds: float, rows: float) -> dict[str, float]:
    return {"seconds_per_step": seconds, "rows_per_second": rows / seconds}


def _option_of(plan: Plan, folder: Path) -> Option:
    chosen = folder / "plan.json"
    preset = plan.run.options.accelerate_config
    path = folder / record.NAME
    is_launched = path.is_file() and record.STARTED_AS in json.loads(path.read_text(encoding="utf-8"))
    if preset in (None, "auto") and plan.work.pipeline_size > 1 and not is_launched:
        preset = PIPELINE_PRESETS[0]  # as launch.py starts it
    elif preset in (None, "auto"):
        if (is_launched or not chosen.is_file()) and plan.hardware.num_devices > 1:
            raise UsageError(
                f"{folder} was started by a launcher that its run.json does not name. Write accelerate_config into "
                "it, the preset that the run had."
            )
        preset = json.loads(chosen.read_text(encoding="utf-8"))["preset"] if chosen.is_file() else "single_gpu"
    of_preset = [option for option in plan.options if option.preset == preset]
    if plan.best in of_preset:
        return plan.best
    if not of_preset:
        names = ", ".join(dict.fromkeys(option.preset for option in plan.options))
        raise UsageError(
            f'{folder} ran with "{preset}", which is not planned on these devices ({names}). Give --num_devices and '
            "--num_nodes as they were."
        )
    return of_preset[0]


def lines_of(found: dict[str, Any]) -> list[str]:
    """For people."""
    predicted, seen = found["predicted"], found["measured"]

    def both(name: str, words: Callable[[float], str]) -> str:
        return f"{words(predicted[name])} / {words(seen[name])} ({predicted[name] / seen[name] - 1:+.0%})"

    memory = f"{_size(predicted['allocated'])} / not counted by the device of the run"
    if seen["allocated"] is not None:
        memory = f"{both('allocated', _size)}, without what torch does not allocate"
    elif seen["process"] is not None:
        libraries = f"{_size(seen['process'])} of the process with all of its libraries"
        memory = f"{_size(predicted['allocated'])} of tensors / {libraries}"
    lines = [
        f"{found['strategy']}, predicted beside measured:",
        f"  a step: {both('seconds_per_step', duration)}",
        f"  rows per second, of all columns: {both('rows_per_second', rounded)}",
        f"  memory: {memory}",
        f"  arithmetic of a device, as measured: {found['arithmetic_per_second'] / 1e12:.3g} TFLOP/s",
    ]
    if found["is_mostly_overhead"]:
        lines.append("  overheads outside of the model's arithmetic dominate such a step; a plan does not count them")
    return lines


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"
