"""`hf-dist plan`: the plan of a run file on one machine, or on several alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import CPU, hardware_of, hardware_of_cpu
from hf_dist_ext.planner.report import print_plan, to_json, write_png
from hf_dist_ext.run.read import load_run


def main(arguments: Any, overrides: Sequence[str]) -> None:
    """`arguments`: those of the parser in cli.py; `overrides`: words that go over the run file. Raises UsageError."""
    run = load_run(["--config", arguments.run, *overrides])
    for name in ("num_rows", "price_per_hour"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} {value} is not a positive number.")
    count = run.options.num_processes if arguments.num_devices is None else arguments.num_devices
    if arguments.device == CPU:
        hardware = hardware_of_cpu(run, count, arguments.tflops)
    else:
        hardware = hardware_of(
            count,
            arguments.device_memory_gib,
            arguments.num_nodes,
            arguments.interconnect,
            arguments.device,
            arguments.host_memory_gib,
            arguments.network_gbps,
            arguments.tflops,
        )
    plan = make_plan(run, hardware)
    plan.num_rows, plan.price_per_hour, plan.overrides = arguments.num_rows, arguments.price_per_hour, overrides
    if arguments.png:  # first: who reads what is printed may stop early
        write_png(plan, Path(arguments.png))
    print(to_json(plan)) if arguments.json else print_plan(plan)
