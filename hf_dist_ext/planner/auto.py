"""`accelerate_config: "auto"`: the planner's choice at launch, with this machine's devices; said and stored.

Without a GPU, or where the driver does not tell its memory, or where the model's size can not be read, devices are
counted: one process on one, DDP on several. Else the planner chooses among the presets; what it can not make fit is
started all the same, with a warning: its figures are bounds of long rows, and off by a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import PIPELINE_PRESETS, Hardware
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import card_here, device_memory_bytes, links
from hf_dist_ext.planner.plan import Plan
from hf_dist_ext.planner.reasons import in_json
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.presets import presets


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
    if devices == 0:
        how = "DDP over gloo" if processes > 1 else "one process"
        return Choice(counted, [f"no GPU is visible: {how} on the CPU."])
    memory = device_memory_bytes()
    if memory is None:
        return Choice(counted, [f"the driver does not tell the devices' memory: chosen by their number, {processes}."])
    try:
        # Only the run file can ask for a pipeline: its devices share rows, so another batch would be trained.
        uncut = presets().keys() - set(PIPELINE_PRESETS)
        if deepspeed_install.why_unusable():
            uncut -= {name for name in uncut if name.startswith("deepspeed")}
        plan = make_plan(run, Hardware(processes, memory, 1, links(), card=card_here()), uncut, may_halve_frozen=False)
    except UsageError as error:
        why = f"chosen by the number of devices, {processes}, since the model was not read: {error}"
        return Choice(counted, [why])
    return _of_plan(plan)


def _of_plan(plan: Plan) -> Choice:
    if plan.best is None:  # where every preset is refused, that of one process says why when it starts
        here = [option for option in plan.options if not option.why_not] or plan.options[:1]
        preset = min(here, key=lambda option: option.bytes.total).preset
        warnings = [f"{preset} needs least and is started all the same."]
    else:
        preset, settings = plan.best.preset, {**plan.changes}
        settings.pop("accelerate_config", None)
        warnings = [] if plan.best.fits else [f"as it stands the run may not fit. Set {in_json(settings)}."]
    return Choice(preset, plan.reasons, plan.as_dict(), warnings)
