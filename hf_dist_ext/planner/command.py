"""`hf-dist plan`: one plan, a table over several machines, or a plan beside the run that it was for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import compare
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import CPU, hardware_of, hardware_of_cpu
from hf_dist_ext.planner.plan import Plan
from hf_dist_ext.planner.report import grid_json, print_grid, print_plan, to_json, write_png
from hf_dist_ext.run.read import load_run


def main(arguments: Any, overrides: Sequence[str]) -> None:
    """`arguments`: those of the parser in cli.py; `overrides`: words that go over the run file. Raises UsageError."""
    if arguments.run is None and arguments.compare is None:
        raise UsageError("hf-dist plan needs a run file, or --compare with the output_dir of a run.")
    folder = Path(arguments.compare) if arguments.compare else None
    run = load_run(["--config", arguments.run or str(compare.run_file(Path(arguments.compare))), *overrides])
    prices, counts = arguments.price_per_hour or [None], arguments.num_devices
    for name, values in (("num_rows", [arguments.num_rows]), ("price_per_hour", prices)):
        if wrong := [value for value in values if value is not None and not 0 < value < float("inf")]:
            raise UsageError(f"--{name} {wrong[0]} is not a positive number.")
    named = len(arguments.device or [None])
    if len(prices) not in (1, named):
        words = f"{named} devices" if named > 1 else "one device"
        raise UsageError(f"--price_per_hour has {len(prices)} prices for {words}. Give one for each.")

    def plan(count: int | None, device: str | None, price: float | None) -> Plan:
        if device == CPU:
            hardware = hardware_of_cpu(run, count, arguments.tflops)
        else:
            hardware = hardware_of(
                count,
                arguments.device_memory_gib,
                arguments.num_nodes,
                arguments.interconnect,
                device,
                arguments.host_memory_gib,
                arguments.network_gbps,
                arguments.tflops,
            )
        found = make_plan(run, hardware)
        found.num_rows, found.price_per_hour, found.overrides = arguments.num_rows, price, overrides
        return found

    if named > 1 or len(counts or []) > 1:
        alone = {"--compare": folder, "--png": arguments.png}
        if wrong := [name for name, given in alone.items() if given]:
            raise UsageError(f"{wrong[0]} goes with one plan. Give one number of devices and one device.")
        devices, counts = arguments.device or [None], counts or [run.options.num_processes]
        plans = [plan(n, device, prices[i % len(prices)]) for i, device in enumerate(devices) for n in counts]
        print(grid_json(plans)) if arguments.json else print_grid(plans)
        return
    seen = compare.measured(folder) if folder else None
    counts = counts or [seen.processes if seen and seen.processes else run.options.num_processes]
    of_run = [CPU] if seen and seen.device == CPU else [None]
    one = plan(counts[0], (arguments.device or of_run)[0], prices[0])
    if folder is not None:
        found = compare.compared(one, folder)
        print(json.dumps(found, indent=2) if arguments.json else "\n".join(compare.lines_of(found)))
        return
    if arguments.png:  # first: who reads what is printed may stop early
        write_png(one, Path(arguments.png))
    print(to_json(one)) if arguments.json else print_plan(one)
