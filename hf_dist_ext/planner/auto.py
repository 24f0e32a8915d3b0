"""`accelerate_config: "auto"`: the planner's choice at launch, with this machine's devices; said and stored.

(1) without a GPU, or where the driver does not tell its memory, or where the model's size can not be read, devices are
    counted: one process on one, DDP on several; the reason says so
(2) else the planner chooses among the presets; what it can not make fit is started all the same, with a warning: its
    figures are bounds of long rows, and off by a tenth
(3) `plan.json` in output_dir holds the choice, the reasons and, where the planner ran, the whole plan
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import Hardware
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import device_memory_bytes, links
from hf_dist_ext.planner.plan import Plan
from hf_dist_ext.run.config import Run


@dataclass(frozen=True)
class Choice:
    preset: str
    reasons: list[str]
    plan: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


def choose(run: Run, devices: int) -> Choice:
    """The preset of a run on a machine with so many visible devices (0: the CPU)."""
    processes = run.options.num_processes or devices
    counted = "multi_gpu_ddp" if processes > 1 else "single_gpu"
    if devices == 0:  # (1)
        return Choice(
            counted, [f"no GPU is visible: {'DDP over gloo' if processes > 1 else 'one process'} on the CPU."]
        )
    memory = device_memory_bytes()
    if memory is None:
        return Choice(counted, [f"the driver does not tell the devices' memory: chosen by their number, {processes}."])
    try:
        plan = make_plan(run, Hardware(processes, memory, 1, links()))
    except UsageError as error:
        return Choice(
            counted, [f"chosen by the number of devices, {processes}, since the model was not read: {error}"]
        )
    return _of_plan(plan)


def _of_plan(plan: Plan) -> Choice:
    """(2)"""
    found = plan.as_dict()
    if plan.best is None:
        here = [option for option in plan.options if not option.why_not]
        least = min(here, key=lambda option: option.given.total)
        return Choice(least.preset, plan.reasons, found, [f"{least.preset} needs least and is started all the same."])
    warnings = []
    settings = {name: value for name, value in plan.changes.items() if name != "accelerate_config"}
    if not plan.best.fits:
        words = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in settings.items())
        warnings.append(f"as it stands the run may not fit. Set {words}.")
    return Choice(plan.best.preset, plan.reasons, found, warnings)


def store(choice: Choice, output_dir: str) -> None:
    """(3)"""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"preset": choice.preset, "reasons": choice.reasons, "warnings": choice.warnings, "plan": choice.plan}
    (folder / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
