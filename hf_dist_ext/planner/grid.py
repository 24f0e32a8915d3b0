"""Plans of one run for several machines as one table: the best strategy of each, what it takes, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hf_dist_ext.planner.catalog import GIB
from hf_dist_ext.planner.plan import Plan
from hf_dist_ext.planner.reasons import count_of, in_json
from hf_dist_ext.planner.report import duration, rounded, seconds_of


def print_grid(plans: Sequence[Plan]) -> None:
    from rich.console import Console
    from rich.table import Table

    work = plans[0].work
    rows = f"{work.batch:,} rows per device and step"
    print(f"{work.config['model_type']}, {count_of(plans[0].parameters)} parameters; {rows}\n")
    has_time = any(plan.best and plan.time.hours is not None for plan in plans)
    has_price = any(plan.best and plan.time.price is not None for plan in plans)
    headings = ["device", "devices", "strategy", "GiB", "of", "s/step", "rows/s"]
    headings += ["run"] * has_time + ["price"] * has_price + ["", "set"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("device", "strategy", "", "set", "run") else "right")
    marks = _marks(plans)
    for plan, mark in zip(plans, marks, strict=True):
        table.add_row(*_row(plan, has_time, has_price), mark, _set(plan))
    Console(width=200, highlight=False).print(table)
    print("\nAs many rows on each device whatever their number: more devices make larger batches, and fewer steps.")
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        print(f"note: {note}")


def _row(plan: Plan, has_time: bool, has_price: bool) -> list[str]:
    hardware, best = plan.hardware, plan.best
    machine = [hardware.card or "-", str(hardware.num_devices)]
    memory = f"{hardware.memory_bytes / GIB:.1f}"
    if best is None:
        least = min(option.least.total for option in plan.options if not option.strategy.offloads)
        return [*machine, "nothing fits", f"{least / GIB:.1f}", memory, *["-"] * (2 + has_time + has_price)]
    time = plan.time
    row = [*machine, best.strategy.name, f"{best.shown.total / GIB:.1f}", memory]
    row += [seconds_of(time.seconds), rounded(time.rows_per_second)]
    row += ["-" if time.hours is None else duration(3600 * time.hours)] * has_time
    return row + ["-" if time.price is None else f"{time.price:,.2f}"] * has_price


def _set(plan: Plan) -> str:
    if plan.best is None:
        return f"{plan.enough.hardware.num_devices} would do" if plan.enough else ""
    return in_json({name: value for name, value in plan.changes.items() if name != "accelerate_config"})


def _marks(plans: Sequence[Plan]) -> list[str]:
    """The quickest run and the cheapest one."""
    possible = [plan for plan in plans if plan.best is not None]
    quickest = max(possible, key=lambda plan: plan.time.rows_per_second, default=None)
    priced = [plan for plan in possible if plan.time.price is not None]
    cheapest = min(priced, key=lambda plan: plan.time.price or 0.0, default=None)
    words = [(quickest, "quickest"), (cheapest, "cheapest")]
    return [", ".join(word for plan, word in words if plan is one) for one in plans]


def to_json(plans: Sequence[Plan]) -> str:
    """Of every plan what it is for and what it recommends."""
    kept = ("model_type", "hardware", "recommended", "enough_devices", "notes")
    contents = [plan.as_dict() for plan in plans]
    for content, plan in zip(contents, plans, strict=True):
        content["bytes"] = plan.best and plan.best.shown.as_dict()
    return json.dumps([{name: content[name] for name in (*kept, "bytes")} for content in contents], indent=2)
