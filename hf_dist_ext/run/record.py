"""`run.json` in output_dir: what a run was started with, and how `hf-dist resume` starts it again.

It is written when training begins, so that a run which ended early has it too. Relative paths in it count from the
folder that the run was started in, which is noted beside them; secrets are masked.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from hf_dist_ext import launched
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.folder import resume_or_start
from hf_dist_ext.errors import LIKENESS, UsageError
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.fields import is_secret
from hf_dist_ext.run.files import read_fields

NAME, STARTED_IN, STARTED_AS = "run.json", "_started_in", "_started_as"
PRESETS = {"none": "single_gpu", "ddp": "multi_gpu_ddp"}  # of what a manifest calls sharding
PLAN = "HF_DIST_PLAN"  # environment: from a launcher to its processes


def hand_on(choice: dict[str, Any]) -> None:
    """The preset that was chosen, and why, to the process that writes: none does before the start is accepted."""
    os.environ[PLAN] = json.dumps(choice, indent=2)


def write(run: Run) -> None:
    """`run.json`, and `plan.json` where a preset was chosen."""
    folder = Path(run.training["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    started = {STARTED_IN: os.getcwd()}
    if run.is_launched:
        processes = launched.processes()
        started[STARTED_AS] = {"processes": processes, "of_a_machine": launched.processes_here(processes)}
    content = json.dumps(started | run.flat(), indent=2, ensure_ascii=False)
    (folder / f"_{NAME}").write_text(content + "\n", encoding="utf-8")
    os.replace(folder / f"_{NAME}", folder / NAME)  # whole whenever it is there
    if choice := os.environ.pop(PLAN, None):
        (folder / "plan.json").write_text(choice + "\n", encoding="utf-8")


def resume(folder: Path, overrides: list[str]) -> list[str]:
    """The words of a command line that goes on with the run of an output_dir, from any folder and wherever output_dir
    was moved. The process then is in the folder that the run was started in. Raises UsageError."""
    path = folder.resolve() / NAME
    if not folder.is_dir():
        beside = os.listdir(folder.parent) if folder.parent.is_dir() else []
        nearest = difflib.get_close_matches(folder.name, beside, 1, LIKENESS)
        hint = f" Closest: {folder.parent / nearest[0]}." if nearest else ""
        raise UsageError(f"{folder} does not exist. Give the output_dir of a run that has begun.{hint}")
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no {NAME}, so it is no output_dir of a run file. Give the run file: hf-dist train "
            "RUN.json --resume_from_checkpoint auto"
        )
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in overrides if word.startswith("--")}
    fields = read_fields(path)
    if secret := [name for name, value in fields.items() if is_secret(name) and value and name not in given]:
        raise UsageError(f"{secret[0]} is a secret, so {path} does not hold it. Give it again: --{secret[0]} VALUE")
    started = json.loads(path.read_text(encoding="utf-8"))
    as_started = {}
    if STARTED_AS in started and not {"accelerate_config", "num_processes"} & given:
        as_started = _as_started(path, fields.get("accelerate_config"), **started[STARTED_AS])
    started_in = started.get(STARTED_IN)
    if started_in is not None:
        if not Path(started_in).is_dir():
            raise UsageError(
                f"the run of {folder} was started in {started_in}, which is gone, and its relative paths count from "
                f"there. Go where they are right and give: hf-dist train {path} --output_dir {path.parent} "
                "--resume_from_checkpoint auto"
            )
        os.chdir(started_in)
    words = ["--config", str(path)]
    checkpoint = "auto"
    if not fields.get("stages") and not resume_or_start({"output_dir": str(path.parent)}):
        given_one = fields.get("resume_from_checkpoint")  # it ended before its first own one
        checkpoint = given_one if isinstance(given_one, str) else "auto"  # true: one of its folder
        chosen = {"resume_from_checkpoint", "overwrite_output_dir", "output_dir"} & given
        if (path.parent / "metrics.json").is_file() and not chosen:
            raise UsageError(
                f"the run of {path.parent} has ended, and no checkpoint of it is there to go on from. Start a run "
                "with another output_dir from its model: model_name_or_path is that folder then."
            )
    more = {"output_dir": str(path.parent), "resume_from_checkpoint": checkpoint} | as_started
    for name, value in more.items():
        words += [] if name in given else [f"--{name}", value]
    return [*words, *overrides]


def _as_started(path: Path, preset: str | None, processes: int, of_a_machine: int) -> dict[str, str]:
    """The fields with which a run goes on as its own launcher had started it. UsageError where none say it."""
    history = manifest.History(path.parent)
    found = [content for one in history.paths if (content := history.manifests[one])]
    sharding = found[-1].get("sharding") if found else None
    preset = PRESETS.get("none" if processes == 1 else sharding) if preset in (None, "auto") else preset
    if preset is None or of_a_machine != processes:
        raise UsageError(
            f"the run of {path.parent} was started by a launcher of yours as {processes} processes"
            f"{f' ({sharding})' if sharding else ''}. Go on the same way: accelerate launch --config_file YAML "
            f"--num_processes {processes} --module hf_dist_ext.train --config {path} --output_dir {path.parent} "
            "--resume_from_checkpoint auto. Or give --accelerate_config and --num_processes."
        )
    return {"accelerate_config": preset, "num_processes": str(processes)}
