"""The model that a run ends with, also where the disk of its folder has become full.

(1) it is written into a new folder in output_dir, and moved up once it is whole; one that a full disk cuts short goes
(2) then it goes to the first other disk with room for it: the working directory's, the home's, that of temporary files
(3) where there is none, the newest complete checkpoint stays

The run ends with an error in the cases (2) and (3), which says where the model is: nobody finds it in output_dir.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hf_dist_ext.checkpoints import commit, manifest
from hf_dist_ext.checkpoints.facts import base_model
from hf_dist_ext.checkpoints.manifest import step_of
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies.consensus import together
from hf_dist_ext.strategies.tensors import num_elements

UNFINISHED = "_model.unfinished"
GENERATED = "generated_from_trainer"  # a tag of the cards of sentence-transformers, of ours, and of Trainer's drafts
_DRAFTS = (GENERATED, "# Model Card for Model ID")  # the last is peft's


def save(save_model: Callable[[str], None], model: nn.Module, args: Any) -> None:
    """Call `save_model` on a folder; every rank calls it. RunError when the model is not in output_dir afterwards."""
    output_dir = Path(args.output_dir)
    write = partial(_is_written, save_model, base_model(model), args.should_save)
    if write(output_dir):  # (1)
        return
    args.push_to_hub = False  # a push takes what lies in output_dir
    for base in (os.getcwd, Path.home, tempfile.gettempdir):  # (2)
        find = partial(_folder_with_room, model, output_dir, base)
        folder = together(find if args.should_save else lambda: None)[0]
        if folder is not None and write(folder):
            raise RunError(
                f"the disk of {output_dir} is full, so the trained model was written to {folder}. Free space and move "
                "it to where you want it."
            )
    raise RunError(  # (3)
        f"the disk of {output_dir} is full and no other one has room, so the trained model was not written. "
        f"{commit.newest(output_dir)} Free space, then resume."
    )


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


def _is_written(save_model: Callable[[str], None], base: str | None, should_save: bool, folder: Path) -> bool:
    """Into a folder of its own first: what a full disk cuts short goes with it, and no file of anybody else's."""
    fresh = folder / UNFINISHED

    def begin() -> None:
        if should_save:  # what a killed process has left there is of no model
            shutil.rmtree(fresh, ignore_errors=True)

    def attempt() -> bool:
        try:
            save_model(str(fresh))
            return True
        except Exception as error:
            if not commit.is_full_disk(error, folder):
                raise
            return False

    def end(is_whole: bool) -> None:
        with commit.replacing_model(folder, base, should_save and is_whole):
            for name in [*manifest.files_in(fresh), manifest.MANIFEST] if should_save and is_whole else ():
                stays = name == "README.md" and is_by_hand(folder / name)
                if (fresh / name).is_file() and not stays:  # a manifest is last, and only of a part that was trained
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(fresh / name, folder / name)
        if should_save:
            shutil.rmtree(fresh, ignore_errors=True)

    is_whole = False
    together(begin)
    try:
        is_whole = all(together(attempt))
    finally:
        end(is_whole)
    together(lambda: None)
    return is_whole


def _folder_with_room(model: nn.Module, output_dir: Path, find_base: Callable[[], str | Path]) -> Path | None:
    base = find_base()
    with contextlib.suppress(OSError):
        needed = sum(num_elements(p) * p.element_size() for p in model.parameters())
        if os.stat(base).st_dev != os.stat(output_dir).st_dev and shutil.disk_usage(base).free > commit.SPARE * needed:
            return Path(tempfile.mkdtemp(prefix=f"{output_dir.resolve().name}-", dir=base))
    return None
