"""The README.md of a trained model's folder: what it was made from, what of it trained, on what, and how it is loaded.

A card that somebody wrote stays; peft's empty template does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dist_ext.run.config import Run

NAME = "README.md"
MARK = "<!-- Written by hf_dist_ext. Without this line a later run leaves the file as it is. -->"
_TEMPLATES = (MARK, "# Model Card for Model ID")  # peft's
_DATA = (
    "dataset_name",
    "datasets",
    "datasets_temperature",
    "dataset_config_name",
    "train_split",
    "columns",
    "max_train_samples",
)
_TRAINED = ("trainable_modules", "frozen_modules", "lora_r", "lora_alpha", "lora_target_modules")


def write(folder: Path, run: Run, report: Mapping[str, Any], to_load: Sequence[str]) -> None:
    """`report`: of scripts/train_hf.py; `to_load`: lines with "{folder}" in the place of the folder."""
    path = folder / NAME
    if path.exists() and not any(mark in path.read_text(encoding="utf-8") for mark in _TEMPLATES):
        return
    path.write_text(text(folder, run, report, to_load), encoding="utf-8")


def text(folder: Path, run: Run, report: Mapping[str, Any], to_load: Sequence[str]) -> str:
    given, base = run.flat(), run.options.model_name_or_path
    head = ["---", f"base_model: {json.dumps(base)}", "---"] if base and not Path(base).exists() else []
    made_from = f"`{base}`"
    if not base:
        made_from = f"a new `{run.options.model_config['model_type']}`, not pretrained (`model_config`)"
    lives = report.get("stages") or [report]
    lines = [
        *head,
        MARK,
        f"# {folder.resolve().name}",
        "",
        f"* Made from {made_from}.",
        *(f"* Trained: {_stage(life)}{life['trained_share']:.2%} of the parameters." for life in lives),
        *_fields("What trains", given, _TRAINED),
        *_fields("Data", given, _DATA),
        f"* Task: `{run.options.task}`. Processes: {report['world_size']}. Every setting of the run is in `run.json`, "
        "all logged figures are in `metrics.jsonl`.",
        *_metrics(lives),
        *_views(lives),
        "",
        "    " + "\n    ".join(line.format(folder=folder) for line in to_load),
        "",
    ]
    return "\n".join(lines)


def _stage(life: Mapping[str, Any]) -> str:
    return f"{life['name']}: " if "name" in life else ""


def _fields(what: str, given: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    fields = [f"`{name}` {json.dumps(given[name])}" for name in names if given.get(name) is not None]
    return [f"* {what}: {', '.join(fields)}."] if fields else []


def _metrics(lives: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        f"| {_stage(life)}{metric} | {_figure(life['before'].get(metric))} | {_figure(after)} |"
        for life in lives
        for metric, after in life["after"].items()
        if after is not None
    ]
    return ["", "| held out | before | after |", "|---|---|---|", *rows] if rows else []


def _views(lives: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for every set of dimensions and precisions that was evaluated."""
    tables: dict[tuple[str, ...], list[str]] = {}
    for life in lives:
        for figure, of_views in life.get("views", {}).items():
            head = f"| after training | {' | '.join(of_views)} |", f"|---|{'---|' * len(of_views)}"
            rows = tables.setdefault(tuple(of_views), ["", *head])
            rows.append(f"| {_stage(life)}{figure} | {' | '.join(map(_figure, of_views.values()))} |")
    return [row for rows in tables.values() for row in rows]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
