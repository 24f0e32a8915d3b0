"""The pictures of a run beside its card: its losses, and the figures of its evaluations. Without matplotlib (extra
`plot`) there are none."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LOSS, METRICS = "loss.png", "metrics.png"
MARK = b"Written by hf_dist_ext"  # stands in every picture that a run draws
PANELS_IN_A_ROW = 3

Points = Sequence[tuple[int, float]]  # (step, value)


def panels_of(
    history: Iterable[Mapping[str, Any]], names: Iterable[str], sets: Iterable[str], keeps_best: bool
) -> dict[str, dict[str, Points]]:
    """Title of a panel -> name of a figure -> its points; a figure with one point makes no curve.

    Args:
        history: what a trainer logged, in order.
        names: of figures, without "eval_".
        sets: names of what is evaluated, which figures begin with; each is a panel of its own, and so is the loss.
        keeps_best: what is evaluated after training are the weights of an earlier step, so it is no point of a curve.
    """
    values: dict[str, dict[int, float]] = {}
    for line in history:
        if keeps_best and "train_runtime" in line:
            break
        for name in names:
            if f"eval_{name}" in line:
                values.setdefault(name, {})[line["step"]] = line[f"eval_{name}"]
    panels: dict[str, dict[str, Points]] = {}
    for name, of_step in values.items():
        title = max((one for one in sets if name.startswith(f"{one}_")), key=len, default="")
        short = name.removeprefix(f"{title}_")
        if short == "loss":
            title, short = f"{title or 'evaluation'} loss", title or short
        if len(of_step) > 1:
            panels.setdefault(title or "evaluation", {})[short] = sorted(of_step.items())
    return panels


def draw_losses(folder: Path, curves: Mapping[str, Points]) -> bool:
    """Write `loss.png` of name -> points. False where nothing can be drawn; an older picture is removed then."""
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not _can_draw(folder / LOSS, curves):
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axes.grid(alpha=0.3)
    if any(curves):
        axes.legend()
    figure.savefig(folder / LOSS, dpi=120, metadata={"Comment": MARK.decode()})
    return True


def draw_metrics(folder: Path, panels: Mapping[str, Mapping[str, Points]], best: Mapping[str, int | None]) -> bool:
    """Write `metrics.png`, as `draw_losses`.

    Args:
        panels: of `panels_of`, of all trainers of the run.
        best: panel -> the step whose weights the run kept as the best; None: it kept the last.
    """
    if not _can_draw(folder / METRICS, panels):
        return False
    from matplotlib.figure import Figure

    columns = min(len(panels), PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6, 4.2 * columns), 3.2 * rows), layout="constrained")
    colours = _colours(name for figures in panels.values() for name in figures)
    for number, (title, figures) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, number, xlabel="step", title=title)
        axes.locator_params(axis="x", integer=True)
        # the legend lists figures as the ends of their lines stand above each other
        by_end = sorted(figures.items(), key=lambda figure: -figure[1][-1][1])
        for name, points in by_end:
            look = {"linewidth": 1.6, "marker": "o", "markersize": 3, "color": colours[_kind(name)]}
            axes.plot(*zip(*points, strict=True), label=name, **look)
        if (step := best.get(title)) is not None:
            axes.axvline(step, color="0.4", linestyle=":", label=f"kept: step {step:,}")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=8)
    figure.savefig(folder / METRICS, dpi=120, metadata={"Comment": MARK.decode()})
    return True


def _kind(name: str) -> str:
    """cosine_mrr@10 and mrr@10 have one colour in all panels."""
    return name.rpartition("_")[2]


def _colours(names: Iterable[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    return dict(zip(dict.fromkeys(map(_kind, names)), cycle(colormaps["tab10"].colors), strict=False))


def _can_draw(picture: Path, curves: Mapping) -> bool:
    """False removes an older picture: it would be of another run. One that no run has drawn stays."""
    if picture.is_file() and MARK not in picture.read_bytes():
        logger.warning(
            f"{picture} is no picture of a run, so it stays, and none is drawn. Remove it to get this run's."
        )
        return False
    if curves and importlib.util.find_spec("matplotlib") is not None:
        return True
    picture.unlink(missing_ok=True)
    return False
