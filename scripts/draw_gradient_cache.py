#!/usr/bin/env python
"""Draw the three passes of a step with the gradient cache, for docs/gradient-cache.md.

python scripts/draw_gradient_cache.py --output docs/images/gradient_cache.png
"""

from __future__ import annotations

import argparse

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

CHUNKS, ROWS = 4, 2  # of the drawn batch: chunks, and rows in each
INK, PAPER = "#22272b", "#ffffff"
ROW, GRAPH, CACHE = "#c9d8ea", "#f2b880", "#1b7f4b"  # a row of data, a forward whose graph is held, a cached vector
SIZE, DPI = (10.8, 3.4), 90  # inches, dots per inch
HEIGHT, GAP = 0.34, 0.14  # of a row, between chunks, in units of a panel


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True, metavar="FILE", help="a PNG file")
    arguments = parser.parse_args(argv)
    with plt.rc_context({"font.size": 10, "text.color": INK}):
        figure, panels = plt.subplots(1, 3, figsize=SIZE, layout="constrained", width_ratios=(5.4, 4.2, 7.4))
        for axes, draw in zip(panels, (draw_encode, draw_score, draw_replay), strict=True):
            axes.set_aspect("equal")
            axes.axis("off")
            draw(axes)
        figure.savefig(arguments.output, dpi=DPI, facecolor=PAPER, pil_kwargs={"optimize": True})
    print(arguments.output)


def tops() -> list[list[float]]:
    """Of each chunk, the upper edge of its rows."""
    step = ROWS * HEIGHT + GAP
    return [[4.0 - chunk * step - row * HEIGHT for row in range(ROWS)] for chunk in range(CHUNKS)]


def middle(chunk: list[float]) -> float:
    return chunk[0] - ROWS * HEIGHT / 2


def draw_rows(axes: Axes, left: float, width: float, color: str, only: int | None = None) -> None:
    """A box per row; `only`: the other chunks are pale."""
    for number, chunk in enumerate(tops()):
        for top in chunk:
            box = Rectangle((left, top - HEIGHT), width, HEIGHT * 0.86, facecolor=color, edgecolor=INK, linewidth=0.8)
            box.set_alpha(1.0 if only in (None, number) else 0.25)
            axes.add_patch(box)


def draw_model(axes: Axes, left: float, y: float, color: str) -> None:
    box = FancyBboxPatch((left, y - 0.24), 1.5, 0.48, boxstyle="round,pad=0.04", facecolor=color, edgecolor=INK)
    axes.add_patch(box)
    axes.text(left + 0.75, y, "model", ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.3})


def title(axes: Axes, words: str, below: str, width: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(-0.75, 4.95)
    axes.text(0, 4.6, words, fontsize=12, fontweight="bold")
    axes.text(0, 0.35, below, va="top", linespacing=1.35)


def draw_encode(axes: Axes) -> None:
    below = "One chunk after another. Embeddings\nare kept, activations are not."
    title(axes, "1  Encode without a graph", below, 5.4)
    draw_rows(axes, 0.1, 1.3, ROW)
    for chunk in tops():
        arrow(axes, (1.5, middle(chunk)), (1.95, middle(chunk)))
        draw_model(axes, 2.05, middle(chunk), PAPER)
        arrow(axes, (3.65, middle(chunk)), (4.1, middle(chunk)))
    draw_rows(axes, 4.2, 0.5, ROW)
    axes.text(0.75, 4.12, "batch", ha="center", va="bottom")
    axes.text(4.45, 4.12, "embeddings", ha="center", va="bottom")


def draw_score(axes: Axes) -> None:
    below = "The loss sees the whole batch. Its\nbackward stops at the embeddings:\none cached vector per row."
    title(axes, "2  Score", below, 4.2)
    draw_rows(axes, 0.1, 0.5, ROW)
    y = (tops()[0][0] + tops()[-1][-1] - HEIGHT) / 2
    loss = FancyBboxPatch((1.3, y - 0.5), 1.2, 1.0, boxstyle="round,pad=0.04", facecolor=GRAPH, edgecolor=INK)
    axes.add_patch(loss)
    axes.text(1.9, y, "loss", ha="center", va="center")
    arrow(axes, (0.7, y), (1.22, y))
    arrow(axes, (2.58, y), (3.1, y), CACHE)
    draw_rows(axes, 3.2, 0.5, CACHE)
    axes.text(3.45, 4.12, "cache", ha="center", va="bottom")


def draw_replay(axes: Axes) -> None:
    first = "One chunk after another, each with its cached"
    below = f"{first}\nvectors. The shares add up to the gradient\nof the whole batch."
    title(axes, "3  Encode again, with a graph", below, 7.4)
    now = 1  # the chunk that runs in the drawing
    draw_rows(axes, 0.1, 1.3, ROW, only=now)
    y = middle(tops()[now])
    arrow(axes, (1.5, y), (1.95, y))
    draw_model(axes, 2.05, y, GRAPH)
    arrow(axes, (3.65, y + 0.12), (4.1, y + 0.12))
    arrow(axes, (4.1, y - 0.12), (3.65, y - 0.12), CACHE)
    draw_rows(axes, 4.2, 0.5, CACHE, only=now)
    axes.text(4.85, y, "backward of the\ninner products", va="center")
    arrow(axes, (2.8, y - 0.32), (2.8, y - 0.85), CACHE)
    axes.text(2.8, y - 0.9, "gradient of\nthe weights\n+= its share", ha="center", va="top", linespacing=1.2)
    axes.text(2.8, 4.12, "activations of one chunk", ha="center", va="bottom")
    arrow(axes, (2.8, 4.1), (2.8, y + 0.34))


if __name__ == "__main__":
    main()
