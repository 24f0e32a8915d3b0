"""A plan for people and programs: a table, sentences, JSON, a stacked bar per strategy as a PNG."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import GIB
from hf_dist_ext.planner.devices import CARDS
from hf_dist_ext.planner.memory import model_of
from hf_dist_ext.planner.pipelines import Staged
from hf_dist_ext.planner.plan import MOST_ROWS, Plan, changes_to_fit
from hf_dist_ext.planner.reasons import count_of, count_with, few, gib, in_json
from hf_dist_ext.planner.traffic import BANDWIDTH, speed

PARTS = ("weights", "master_weights", "gradients", "optimizer", "activations", "embeddings", "buffers", "framework")
MAIN_REASONS = 3
CUT_AT = 2.0  # devices' memories, where a picture's bars end
COLUMNS = ["masters" if part == "master_weights" else part for part in PARTS]


def print_plan(plan: Plan) -> None:
    """What to run, why in three sentences, the table, and what else is to be said."""
    print(f"{_title(plan)}\n")
    if plan.best is None:
        print("recommended: nothing that this machine and these presets can run")
    else:
        changes = in_json(plan.changes) or "nothing"
        print(f"recommended: {plan.best.strategy.name} (preset {plan.best.preset}). Set: {changes}")
        print(f"  run: {plan.command}")
        if plan.hardware.num_nodes > 1:
            print("  on every machine: N is its number from 0, ADDRESS that of machine 0, PORT one that is free there")
        print(f"  {_time(plan)}")
    for reason in plan.reasons[:MAIN_REASONS]:
        print(f"  - {reason}")
    print()
    _print_table(plan)
    print()
    for option in plan.options:
        if option.pipeline is not None and (option is plan.best or plan.work.pipeline_size > 1):
            print(pipeline_line(option.pipeline, option.strategy.name))
    for line in [*plan.reasons[MAIN_REASONS:], _sizes(plan)]:
        print(f"  - {line}")
    for note in [*plan.notes, _why_nots(plan), _assumptions(plan)]:
        if note:
            print(f"note: {note}")


def _title(plan: Plan) -> str:
    work, hardware, model = plan.work, plan.hardware, model_of(plan.work).whole
    trained = "all train" if model.trained == model.elements else f"{count_of(model.trained)} train"
    stage = f', stage "{plan.run.name}" of {len(plan.stages)}' if plan.stages else ""
    where = f" on {hardware.num_nodes} machines" if hardware.num_nodes > 1 else ""
    card = f" ({hardware.card})" if hardware.card else ""
    return (
        f"{work.config['model_type']}{stage}, {count_of(model.elements)} parameters, {trained}; "
        f"{count_with(hardware.num_devices, 'device')}{where} of {gib(hardware.memory_bytes)}{card}, "
        f"{hardware.interconnect}"
    )


def _print_table(plan: Plan) -> None:
    """GiB per device of every strategy, with what makes it fit."""
    from rich.console import Console
    from rich.table import Table

    offloads = any(option.shown.host for option in plan.options)
    headings = ["GiB per device", *COLUMNS, *["host"] * offloads, "total"]
    headings += ["fits", "chunk", "sent/step", "s/step", "changed"]
    rows = []
    for option in plan.options:
        shown = [*(getattr(option.shown, name) for name in PARTS), *[option.shown.host] * offloads, option.shown.total]
        rows.append([
            ("> " if option is plan.best else "  ") + option.strategy.name,
            *(f"{size / GIB:.2f}" for size in shown),
            "yes" if option.fits else "no" if option.fitted is None else "changed",
            str((option.fitted or option.given).rows_at_once),
            f"{option.sent.bytes / GIB:.2f}",
            "-" if option.fitted is None else seconds_of(option.seconds),
            in_json(changes_to_fit(plan, option)),
        ])  # fmt: skip
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        is_text = heading in (headings[0], "fits", "changed")
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()  # the terminal's width cuts columns; a file or a pipe gets all of them
    wide = console.is_terminal and console.width >= 190
    (console if wide else Console(width=240, highlight=False)).print(table)


def _sizes(plan: Plan) -> str:
    """The largest that fit, and what lands on the disk."""
    words = [f"A checkpoint takes {gib(plan.checkpoint_bytes)}."]
    if plan.most is not None:
        more = " or more" if plan.most.batch == MOST_ROWS else ""
        chunk = "" if plan.most.chunk_rows is None else f"a chunk of {plan.most.chunk_rows:,} rows, or "
        words.insert(0, f"The largest that fits beside the rest: {chunk}{plan.most.batch:,} rows{more} per device.")
    return " ".join(words)


def _why_nots(plan: Plan) -> str:
    """What can not be chosen, but for one device of several, which nobody asks about."""
    names: dict[str, list[str]] = {}
    for option in plan.options:
        if option.why_not and option.strategy.name != "single":
            names.setdefault(option.why_not, []).append(option.strategy.name)
    return "; ".join(f"{', '.join(of_why)} can not be chosen: {why}" for why, of_why in names.items())


def _assumptions(plan: Plan) -> str:
    hardware = plan.hardware
    between = f", {hardware.network / 1e9:.3g} GB/s between machines" if hardware.num_nodes > 1 else ""
    known = CARDS.get(hardware.card or "")
    source = f" (a share of the peak in the {known.source})" if known else ""
    source = " (measured or given)" if hardware.reached else source
    lengths = ", ".join(f"{one.name} {one.length}" for one in plan.work.columns)
    return (
        f"framework bytes, {speed(hardware, plan.work.compute_bytes) / 1e12:.3g} TFLOP/s{source} and "
        f"{BANDWIDTH[hardware.interconnect] / 1e9:.0f} GB/s{between} are assumed: seconds are for comparing. "
        f"Tokens of each row: {lengths}. {gib(hardware.memory_bytes - hardware.usable)} of each device stay free."
    )


def pipeline_line(found: Staged, name: str) -> str:
    """What the table has no columns for."""
    return (
        f"{name}, {found.pipeline.schedule}: layers {few(found.layers)}; at most {found.live_chunks(0)} of "
        f"{found.num_chunks} chunks held; waits {found.bubble_share:.1%}; "
        f"{gib(found.messages[1])} between stages, {gib(found.reduced)} of gradients"
    )


def _time(plan: Plan) -> str:
    time = plan.time
    words = (
        f"a step takes about {duration(time.seconds)}: {rounded(time.rows_per_second)} rows/s, "
        f"{rounded(time.tokens_per_second)} tokens/s"
    )
    if time.hours is not None:
        words += f"; the run about {duration(3600 * time.hours)}"
    if time.price is not None:
        words += f", {time.price:,.2f} at {plan.price_per_hour:g} per device and hour"
    return words


def rounded(number: float) -> str:
    """To three digits, without an exponent: 2,290; 13.4; 0.012."""
    digits = 2 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(0, digits)}f}"


def duration(seconds: float) -> str:
    for size, unit in ((2 * 86400, "days"), (3600, "hours"), (60, "minutes"), (1, "s")):
        if seconds >= size:
            return f"{rounded(seconds / min(size, 86400))} {unit}"
    return f"{rounded(1000 * seconds)} ms"


def seconds_of(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def to_json(plan: Plan) -> str:
    return json.dumps(plan.as_dict(), indent=2)


def write_png(plan: Plan, path: Path) -> None:
    """Memory by kind beside the device's, and seconds per step, a bar per strategy. Raises UsageError without
    matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot
    except ImportError:
        raise UsageError("--png needs matplotlib, which is not installed. Run: pip install matplotlib") from None
    options, memory = plan.options, plan.hardware.memory_bytes / GIB
    height = 0.45 * len(options) + 2.4
    figure, (axes, times) = pyplot.subplots(
        1, 2, figsize=(12, height), sharey=True, width_ratios=[3, 1], layout="constrained"
    )
    names = ["> " * (one is plan.best) + f"{one.strategy.name}, {gib(one.shown.total)}" for one in options]
    left = [0.0] * len(options)
    for part, label in zip(PARTS, COLUMNS, strict=True):
        sizes = [getattr(option.shown, part) / GIB for option in options]
        axes.barh(names, sizes, left=left, label=label)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(memory, color="black", linestyle="--", label=f"device memory: {memory:.1f} GiB")
    axes.axvline(plan.hardware.usable / GIB, color="grey", linestyle=":", label="of which a plan fills")
    axes.set_xlim(0, min(max(*left, memory), CUT_AT * memory))
    axes.set_xlabel("GiB per device, with the changes that make it fit")
    seconds = [0.0 if option.fitted is None else option.seconds for option in options]
    words = [" does not fit" if option.fitted is None else f" {seconds_of(option.seconds)} s" for option in options]
    times.bar_label(times.barh(names, seconds, color="lightgrey"), words, fontsize="small")
    times.set_xlabel("seconds per step")
    times.margins(x=0.3)
    axes.invert_yaxis()
    best = f"recommended: {plan.best.strategy.name}" if plan.best else "nothing fits"
    figure.suptitle(f"{_title(plan)}\n{best}", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), fontsize="small", ncols=5, loc="outside lower center")
    try:
        figure.savefig(path, bbox_inches="tight", dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--png {path} cannot be written: {error}. Give a .png in a folder that exists.") from None
    finally:
        pyplot.close(figure)
