"""What a run's folder holds before any rank exists: another run, checkpoints, whole ones and torn ones.

Here the checkpoint to resume is found: the newest complete one, or the one that is named; there is never a silent
fresh start. Sizes are checked, which is instant; the ranks share the hashes later (checkpoints/resume.py). The output
folder is checked too: no run writes into another's unless it continues or replaces it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from hf_dist_ext import launched
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.errors import UsageError

OF_THE_LOSS = ("loss.safetensors", "loss_optimizer.pt")  # its own parameters, beside the model's

# ---- the checkpoint to resume ----


def decides_here() -> bool:
    """Whether this process looks into the folder for all: the launcher, a process alone, rank 0. What it decides the
    other ranks are told (checkpoints/resume.py), who may not see the folder as it does."""
    return launched.rank() == 0


def missing_from_checkpoint(folder: Path) -> list[str]:
    """What resuming needs and a checkpoint lacks. The Trainer itself goes on without some of it and says nothing."""

    def has(*patterns: str) -> bool:
        paths = (path for pattern in patterns for path in folder.glob(pattern) if path.name not in OF_THE_LOSS)
        return any(path.is_dir() or path.stat().st_size > 0 for path in paths)

    # global_step*: DeepSpeed keeps weights, optimizer and scheduler in one folder; *_0, trainable: sharded by FSDP
    weights = (
        "*.safetensors",
        "*/model*.safetensors",
        "pytorch_model*.bin",
        "adapter_model.bin",
        "pytorch_model_fsdp_0",
        "global_step*",
        "trainable",
    )
    is_there = {
        "weights": has(*weights),
        "trainer_state.json": has("trainer_state.json"),
        "optimizer state": has("*optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*"),
        "scheduler.pt": has("scheduler.pt", "global_step*"),
        "rng_state": has("rng_state*.pth"),
    }
    missing = [f"{name} is missing" for name in is_there if not is_there[name]]
    for index in folder.glob("*.index.json"):
        with contextlib.suppress(ValueError, AttributeError):
            shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
            missing += sorted(f"{shard} is missing" for shard in shards if not has(shard))
    return missing


def checkpoint_to_resume(
    asked: bool | str | None, output_dir: Path, passed_over: dict[Path, str] | None = None
) -> Path | None:
    """The folder that `resume_from_checkpoint` means: true is the newest complete one of output_dir, false or null is
    none. `passed_over` takes the newer ones and why they are no complete checkpoints; those it holds are skipped."""
    if asked is None or asked is False:
        return None
    passed_over = {} if passed_over is None else passed_over
    if asked is not True:
        return _named(Path(asked), output_dir)
    history = manifest.History(output_dir)
    if not history.paths:
        raise UsageError(  # begins as Trainer's, as the next one: programs look for these words and start afresh
            f"No valid checkpoint found in output directory ({output_dir}): it holds no checkpoint-N folder. "
            "Remove resume_from_checkpoint to start afresh, or give the checkpoint's path."
        )
    for checkpoint in reversed(history.paths):
        if checkpoint in passed_over:
            continue
        if not (reason := history.why_passed_over(checkpoint)):
            return checkpoint
        passed_over[checkpoint] = reason
    # What was not committed may still be whole: the stock Trainer's. It is for the user to say so, as it is for those
    # of an earlier run.
    whole = [path for path in history.paths if not missing_from_checkpoint(path) and _may_be_meant(history, path)]
    hint = f"Give --resume_from_checkpoint {whole[-1]} to use that one as it is." if whole else "Start afresh."
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in passed_over.items())
    raise UsageError(f"{output_dir} holds no complete checkpoint ({reasons}). {hint}")


def _may_be_meant(history: manifest.History, checkpoint: Path) -> bool:
    if history.manifests[checkpoint] is None:
        return not manifest.is_unfinished(checkpoint)
    return history.is_of_earlier_run(checkpoint) and not manifest.why_incomplete(checkpoint)


def _named(checkpoint: Path, output_dir: Path) -> Path:
    if not checkpoint.is_dir():
        earlier = manifest.checkpoints_in(output_dir)
        hint = f"Newest in output_dir: {earlier[-1]}" if earlier else "Give the path of a checkpoint-N folder."
        raise UsageError(f"Can't find a valid checkpoint at {checkpoint}: no such folder. {hint}")
    is_ours = any((checkpoint / name).is_file() for name in (manifest.MANIFEST, manifest.UNFINISHED))
    if broken := manifest.why_incomplete(checkpoint) if is_ours else ", ".join(missing_from_checkpoint(checkpoint)):
        raise UsageError(f"{checkpoint} is incomplete: {broken}. {another(checkpoint, output_dir)}")
    return checkpoint


def another(checkpoint: Path, output_dir: Path) -> str:
    """What to do instead of resuming a checkpoint that is not whole."""
    history = manifest.History(output_dir)
    whole = [path for path in history.paths if path != checkpoint and not history.why_passed_over(path)]
    return f"Newest that is complete: {whole[-1]}" if whole else "Remove resume_from_checkpoint to start afresh."


def resume_or_start(training: dict[str, Any]) -> bool | None:
    """What `resume_from_checkpoint: "auto"` means here: true, or null when output_dir holds nothing to resume.

    A job that was killed during its first save has left torn folders: it starts afresh over them. So does one that
    was killed before it, over the checkpoints of the run that it replaces.
    """
    history = manifest.History(training["output_dir"])
    for path in history.paths:
        # A folder with a manifest was whole: what it lacks was left out or deleted, and nobody said to start afresh.
        is_whole = history.manifests[path] or not (manifest.is_unfinished(path) or missing_from_checkpoint(path))
        if is_whole and not history.is_of_earlier_run(path):
            return True
    if history.paths:
        training["overwrite_output_dir"] = True
    return None


# ---- the output folder ----

_MARKS = (
    "checkpoint-*",
    "stage_*",
    "metrics.json",
    "trainer_state.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model*",
)


def require_new(option: str, folder: Path) -> None:
    """UsageError where a command would write its folder over something."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder} is a file. Give a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{option} {folder} is not empty. Give a new folder.")


def check_output_dir(training: dict[str, Any]) -> None:
    """Raises UsageError when output_dir holds another run. launch.py calls it before any rank can write there."""
    folder = Path(training["output_dir"])
    resumed = training.get("resume_from_checkpoint")
    # true means a checkpoint of this folder, and load_run has found one
    continues = resumed is True or (resumed is not None and folder.resolve() in Path(resumed).resolve().parents)
    marks = sorted(path.name for mark in _MARKS for path in folder.glob(mark))
    if not marks or continues or training.get("overwrite_output_dir"):
        return
    elsewhere = ", and the checkpoint to resume is not in it" if resumed else ""
    has_checkpoints = any(folder.glob("checkpoint-*")) or any(folder.glob("stage_*"))
    resume = "" if resumed or not has_checkpoints else "--resume_from_checkpoint to continue it, "
    newest = [path.name for path in manifest.checkpoints_in(folder)[-1:]] or marks
    raise UsageError(
        f"output_dir={folder} holds another run ({newest[0]}){elsewhere}. Give {resume}--overwrite_output_dir to "
        "train into it anyway, or another --output_dir."
    )
