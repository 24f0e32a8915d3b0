#!/usr/bin/env python
"""Draw README's two figures into one picture: a cached step beside others, and held-out retrieval during the main job.

    python scripts/train_hf.py --config configs/code_search.json
    python scripts/plot_readme.py --metrics outputs/code_search/metrics.jsonl --output docs/images/results.png

The bars are read from the first table of docs/benchmarks.md, so that picture and page can not differ.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

BENCHMARKS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BARS = {  # step of the page's table -> label
    "plain": "plain step",
    "sentence-transformers, cached, 256 tokens": "sentence-transformers,\ncached",
    "ours, 1,024 tokens per chunk": "hf_dist_ext,\ncached",
}
FIGURE = "mrr@10"
OURS, OTHERS, INK = "#1b7f4b", "#b8bec5", "#22272b"
SIZE, DPI = (9.6, 3.4), 100  # inches, dots per inch


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--metrics", required=True, metavar="FILE", help="metrics.jsonl of the main job")
    parser.add_argument("--output", required=True, metavar="FILE", help="a PNG file")
    arguments = parser.parse_args(argv)
    steps, figures = retrieval(Path(arguments.metrics))
    with plt.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}):
        figure, (left, right) = plt.subplots(1, 2, figsize=SIZE, layout="constrained")
        draw_bars(left, cached_steps(BENCHMARKS.read_text(encoding="utf-8")))
        draw_curve(right, steps, figures)
    figure.savefig(arguments.output, dpi=DPI, pil_kwargs={"optimize": True})
    print(f"{arguments.output}: {FIGURE} {figures[0]:.3f} before, {figures[-1]:.3f} after {steps[-1]} steps")


def cached_steps(page: str) -> dict[str, tuple[float, float]]:
    """Step -> (seconds, peak memory in MiB), of the first table of the page."""
    table = page.partition("pairs cut at 256 tokens:**")[2].strip().partition("\n\n")[0]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: (float(row[1]), float(re.sub(",", "", row[4]))) for row in rows}


def retrieval(path: Path) -> tuple[list[int], list[float]]:
    """Steps at which the run evaluated, and what it found, one per step."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["step"]: line[f"eval_{FIGURE}"] for line in lines if f"eval_{FIGURE}" in line}
    return list(found), list(found.values())


def draw_bars(axes: Axes, steps: dict[str, tuple[float, float]]) -> None:
    labels = list(BARS.values())
    seconds, memory = zip(*(steps[name] for name in BARS), strict=True)
    bars = axes.barh(labels, seconds, color=[OTHERS] * (len(labels) - 1) + [OURS], height=0.6)
    words = [f" {time:.2f} s, {mib:,.0f} MiB" for time, mib in zip(seconds, memory, strict=True)]
    axes.bar_label(bars, words, padding=2)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(seconds))
    axes.set_title("One step of 1,024 pairs, the same gradient", loc="left")
    axes.set_xlabel("seconds in one thread; beside them peak memory")
    axes.spines[["top", "right"]].set_visible(False)


def draw_curve(axes: Axes, steps: list[int], figures: list[float]) -> None:
    axes.plot(steps, figures, color=OURS, marker="o", linewidth=2)
    for place, offset in ((0, (8, -4)), (-1, (-8, 8))):  # points to the right and above
        axes.annotate(f"{figures[place]:.2f}", (steps[place], figures[place]), offset, textcoords="offset points")
    axes.set_ylim(0, 0.85)
    axes.set_title("Functions found by what they do, held out", loc="left")
    axes.set_xlabel("updates of 1,024 pairs, from scratch")
    axes.set_ylabel("MRR@10")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
