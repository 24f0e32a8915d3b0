"""The model that a run ends with, its best step, and its figures in tables.

It is written into a new folder in output_dir, and moved up once it is whole. One that a full disk cuts short goes, and
the run ends with an error that names the newest complete checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_dist_ext.checkpoints import commit, manifest
from hf_dist_ext.checkpoints.facts import base_model
from hf_dist_ext.checkpoints.manifest import step_of
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies.consensus import together

UNFINISHED = "_model.unfinished"
GENERATED = "generated_from_trainer"  # a tag of the cards of sentence-transformers, of ours, and of Trainer's drafts
_DRAFTS = (GENERATED, "# Model Card for Model ID")  # the last is peft's


def save(save_model: Callable[[str], None], model: nn.Module, args: Any) -> None:
    """Call `save_model` on a folder; every rank calls it. RunError when the model is not in output_dir afterwards."""
    folder, base = Path(args.output_dir), base_model(model)
    fresh, is_whole = folder / UNFINISHED, False

    def clear() -> None:
        if args.should_save:
            shutil.rmtree(fresh, ignore_errors=True)

    def attempt() -> bool:
        try:
            save_model(str(fresh))
            return True
        except Exception as error:
            if not commit.is_full_disk(error, folder):
                raise
            return False

    together(clear)  # what a killed process has left there is of no model
    try:
        is_whole = all(together(attempt))
        if is_whole and args.should_save:
            _move_up(fresh, folder, base)
    finally:
        clear()
    together(lambda: None)
    if not is_whole:
        raise RunError(
            f"the disk of {folder} is full, so the trained model was not written. {commit.newest(folder)} Free space, "
            "then resume."
        )


def _move_up(fresh: Path, folder: Path, base: str | None) -> None:
    with commit.replacing_model(folder, base):
        for name in [*manifest.files_in(fresh), manifest.MANIFEST]:
            stays = name == "README.md" and is_by_hand(folder / name)
            if (fresh / name).is_file() and not stays:  # a manifest is last, and only of a part that was trained
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(fresh / name, folder / name)


def best_of(args: Any, state: Any) -> dict[str, Any]:
    """The step whose weights a run ends with because its figure was the best: {"step", "figure", "value"}. Empty where
    it ends with the weights of the last step. `args`, `state`: of a trainer that has trained."""
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return {}
    figure = args.metric_for_best_model.removeprefix("eval_")
    step = step_of(Path(state.best_model_checkpoint))
    if step == state.best_global_step:
        return {"step": step, "figure": figure, "value": state.best_metric}
    # a later step was better, but was not saved
    values = [line.get(f"eval_{figure}") for line in state.log_history if line["step"] == step]
    return {"step": step, "figure": figure, "value": next(value for value in values if value is not None)}


def kept_lines(report: Mapping[str, Any]) -> list[str]:
    """What a report says of it, in words."""
    if not (best := report.get("best")):
        return []
    stage = f"{report['name']}: " if "name" in report else ""
    return [f"{stage}kept the weights of step {best['step']:,}, the best {best['figure']} ({best['value']:.4g})"]


def figures_of(report: Mapping[str, Any]) -> list[list[str]]:
    """Rows of name, before and after training, of all stages."""
    rows = []
    for life in report.get("stages") or [report]:
        begin = f"{life['name']}: " if "name" in life else ""
        for name, after in life["after"].items():
            if after is not None:
                before = life["before"].get(name)
                rows.append([begin + name, "" if before is None else f"{before:.4f}", f"{after:.4f}"])
    return rows


def is_by_hand(card: Path) -> bool:
    """Whether somebody has written or edited a README.md; a run replaces its own and drafts."""
    if not card.is_file():
        return False
    content = card.read_text(encoding="utf-8", errors="replace")
    return not any(mark in content for mark in _DRAFTS)
