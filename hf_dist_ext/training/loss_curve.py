"""The picture of a run's losses beside its card. Without matplotlib (extra `images`) there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "loss.png"


def draw(folder: Path, curves: Mapping[str, Sequence[tuple[int, float]]]) -> bool:
    """Write `loss.png` of name -> (step, loss). False where nothing can be drawn; an older picture is removed then."""
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves or importlib.util.find_spec("matplotlib") is None:
        (folder / NAME).unlink(missing_ok=True)
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axes.grid(alpha=0.3)
    if any(curves):
        axes.legend()
    figure.savefig(folder / NAME, dpi=120)
    return True
