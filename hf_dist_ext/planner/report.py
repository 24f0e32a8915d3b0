"""A plan for people and programs: a rich table, sentences, JSON, and a stacked bar per strategy as a PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import GIB
from hf_dist_ext.planner.pipelines import Facts
from hf_dist_ext.planner.plan import Option, Plan
from hf_dist_ext.planner.reasons import count_of, count_with, few, gib, in_json
from hf_dist_ext.planner.traffic import ARITHMETIC, BANDWIDTH

PARTS = ("weights", "master_weights", "gradients", "optimizer", "activations", "embeddings", "buffers", "framework")
COLUMNS = ["masters" if part == "master_weights" else part for part in PARTS]


def print_plan(plan: Plan) -> None:
    """The table, the recommendation and its reasons, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    work, hardware = plan.work, plan.hardware
    model = plan.as_dict()
    devices = count_with(hardware.num_devices, "device")
    stage = f', stage "{plan.run.name}" of {len(plan.stages)}' if plan.stages else ""
    where = f" on {hardware.num_nodes} machines" if hardware.num_nodes > 1 else ""
    title = (
        f"{model['model_type']}{stage}, {count_of(model['parameters'])} parameters, "
        f"{count_of(model['trained_parameters'])} train; {devices}{where} of {gib(hardware.memory_bytes)}, "
        f"{hardware.interconnect}. GiB per device."
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("strategy", *COLUMNS, "total", "fits", "spare", "sent/step", "collectives/step"):
        table.add_column(heading, justify="left" if heading in ("strategy", "fits", "collectives/step") else "right")
    for option in plan.options:
        cells = [f"{getattr(option.given, name) / GIB:.2f}" for name in PARTS]
        mark = "> " if option is plan.best else "  "
        table.add_row(
            mark + option.strategy.name,
            *cells,
            f"{option.given.total / GIB:.2f}",
            _fits(option),
            f"{option.headroom / GIB:.1f}",
            f"{option.traffic.bytes / GIB:.2f}",
            ", ".join(f"{count} {kind}" for kind, count in option.traffic.collectives.items()) or "-",
        )
    # the terminal's width cuts columns; a file or a pipe gets all of them
    wide = console if console.is_terminal and console.width >= 150 else Console(width=170, highlight=False)
    wide.print(table)
    print(_checkpointing(plan))
    for option in plan.options:
        if option.pipeline is not None:
            print(pipeline_line(option.pipeline, option.strategy.name))
    print()
    if plan.best is None:
        print("recommended: nothing that this machine and these presets can run")
    else:
        changes = in_json(plan.changes) or "nothing"
        print(f"recommended: {plan.best.strategy.name} (preset {plan.best.preset}). Set: {changes}")
    for reason in plan.reasons:
        print(f"  - {reason}")
    for why_not in dict.fromkeys(option.why_not for option in plan.options if option.why_not):
        names = ", ".join(option.strategy.name for option in plan.options if option.why_not == why_not)
        print(f"  - {names} can not be chosen: {why_not}.")
    for note in plan.notes:
        print(f"note: {note}")
    speed = ARITHMETIC[work.autocast_bytes or work.load_bytes]
    print(
        f"note: framework bytes, {speed / 1e12:.0f} TFLOP/s and {BANDWIDTH[hardware.interconnect] / 1e9:.0f} GB/s are "
        "assumed, they only rank strategies; rows are counted at max_length."
    )
    if plan.trace:
        print(trace_line(plan.trace))


def pipeline_line(found: Facts, name: str) -> str:
    """What the table has no columns for."""
    ranks = found.of_ranks
    return (
        f"{name}, {found.schedule}: layers {few(found.layers)}; chunks held per device "
        f"{few(rank.live_chunks for rank in ranks)} of {found.chunks}; GiB per device "
        f"{few(rank.needed.total / GIB for rank in ranks)}; waits {found.bubble_share:.1%}; "
        f"{gib(found.sent_between_stages)} between stages, {gib(found.reduced)} of gradients"
    )


def _fits(option: Option) -> str:
    if option.fits:
        return "yes"
    return "no" if option.settings is None else "changed"


def _checkpointing(plan: Plan) -> str:
    """One line: activations with and without checkpointing, by what computes."""
    names: dict[tuple[int, int], list[str]] = {}
    for option in plan.options:
        key = round(option.unchecked.activations), round(option.checkpointed.activations)
        names.setdefault(key, []).append(option.strategy.name)
    return "\n".join(
        f"activations without checkpointing {gib(plain)}, with {gib(checkpointed)}: {', '.join(of_key)}"
        for (plain, checkpointed), of_key in names.items()
    )


def trace_line(trace: dict[str, Any]) -> str:
    """What torch's own tracker found beside the closed form."""
    predicted, traced = trace["closed_form"], trace["traced"]
    words = [
        f"{name} {gib(predicted[name])} / {gib(traced[name])} ({predicted[name] / traced[name] - 1:+.0%})"
        for name in traced
        if traced[name] and name in predicted
    ]
    return "trace (closed form / FakeTensorMode, one device): " + ", ".join(words)


def to_json(plan: Plan) -> str:
    return json.dumps(plan.as_dict(), indent=2)


def write_png(plan: Plan, path: Path) -> None:
    """A stacked bar per strategy against the device's memory. Raises UsageError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot
    except ImportError:
        raise UsageError("--png needs matplotlib, which is not installed. Run: pip install matplotlib") from None
    figure, axes = pyplot.subplots(figsize=(10, 0.5 * len(plan.options) + 1.8))
    names = [option.strategy.name for option in plan.options]
    left = [0.0] * len(names)
    for part, label in zip(PARTS, COLUMNS, strict=True):
        widths = [getattr(option.given, part) / GIB for option in plan.options]
        axes.barh(names, widths, left=left, label=label)
        left = [one + width for one, width in zip(left, widths, strict=True)]
    axes.axvline(plan.hardware.memory_bytes / GIB, color="black", linestyle="--", label="device memory")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device, as the run stands")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18 - 0.6 / len(names)))
    best = f"recommended: {plan.best.strategy.name}" if plan.best else "nothing fits"
    axes.set_title(f"{plan.work.config['model_type']}, {plan.hardware.num_devices} devices; {best}")
    try:
        figure.savefig(path, bbox_inches="tight", dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--png {path} cannot be written: {error}. Give a .png in a folder that exists.") from None
    finally:
        pyplot.close(figure)
