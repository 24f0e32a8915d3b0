"""`hf-dist plan`: one plan, a table over several machines, or a plan beside the run that it was for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import compare
from hf_dist_ext.planner.catalog import Hardware
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import CPU, hardware_of, hardware_of_cpu
from hf_dist_ext.planner.plan import Plan
from hf_dist_ext.planner.report import grid_json, print_grid, print_plan, to_json, write_png
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.read import load_run


def main(arguments: Any, overrides: Sequence[str]) -> None:
    """`arguments`: those of the parser in cli.py; `overrides`: words that go over the run file. Raises UsageError."""
    if arguments.run is None and arguments.compare is None:
        raise UsageError("hf-dist plan needs a run file, or --compare with the output_dir of a run.")
    folder = Path(arguments.compare) if arguments.compare else None
    path = arguments.run if folder is None else arguments.run or str(compare.run_file(folder))
    run = load_run(["--config", path, *overrides])
    for name, values in (("num_rows", [arguments.num_rows]), ("price_per_hour", arguments.price_per_hour or [])):
        if wrong := [value for value in values if value is not None and not 0 < value < float("inf")]:
            raise UsageError(f"--{name} {wrong[0]} is not a positive number.")
    num_prices, named = len(arguments.price_per_hour or [None]), len(arguments.device or [None])
    if num_prices not in (1, named):
        words = f"{named} devices" if named > 1 else "one device"
        raise UsageError(f"--price_per_hour has {num_prices} prices for {words}. Give one for each.")
    if several(arguments.num_devices) or several(arguments.device):
        _print_grid(run, arguments, overrides)
        return
    seen = compare.measured(folder) if folder else None
    counts = arguments.num_devices or [seen.processes if seen and seen.processes else run.options.num_processes]
    of_run = [CPU] if seen and seen.device == CPU else [None]
    plan = _plan(
        run, arguments, overrides, counts[0], (arguments.device or of_run)[0], (arguments.price_per_hour or [None])[0]
    )
    if folder is not None:
        found = compare.compared(plan, folder)
        print(json.dumps(found, indent=2) if arguments.json else "\n".join(compare.lines_of(found)))
        return
    if arguments.png:  # first: who reads what is printed may stop early
        write_png(plan, Path(arguments.png))
    print(to_json(plan)) if arguments.json else print_plan(plan)


def several(given: Sequence[Any] | None) -> bool:
    return given is not None and len(given) > 1


def _plan(
    run: Run,
    arguments: Any,
    overrides: Sequence[str],
    num_devices: int | None,
    device: str | None,
    price: float | None,
) -> Plan:
    plan = make_plan(run, _hardware(run, arguments, num_devices, device))
    plan.num_rows, plan.price_per_hour, plan.overrides = arguments.num_rows, price, overrides
    return plan


def _hardware(run: Run, arguments: Any, num_devices: int | None, device: str | None) -> Hardware:
    if device == CPU:
        return hardware_of_cpu(run, num_devices, arguments.tflops)
    return hardware_of(
        num_devices,
        arguments.device_memory_gib,
        arguments.num_nodes,
        arguments.interconnect,
        device,
        arguments.host_memory_gib,
        arguments.network_gbps,
        arguments.tflops,
    )


def _print_grid(run: Run, arguments: Any, overrides: Sequence[str]) -> None:
    alone = {"--compare": arguments.compare, "--png": arguments.png}
    if wrong := [name for name, given in alone.items() if given]:
        raise UsageError(f"{wrong[0]} goes with one plan. Give one number of devices and one device.")
    devices, prices = arguments.device or [None], arguments.price_per_hour or [None]
    plans = [
        _plan(run, arguments, overrides, count, device, prices[i % len(prices)])
        for i, device in enumerate(devices)
        for count in arguments.num_devices or [run.options.num_processes]
    ]
    print(grid_json(plans)) if arguments.json else print_grid(plans)
