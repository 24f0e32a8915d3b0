"""`hf-dist audit run.json`: what every process of an audit runs. The audit itself is audit/audit.py."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import Run
from hf_dist_ext.strategies.collectives import leave_together
from hf_dist_ext.tasks.parts import build_parts, check_available, make_arguments

# Fields under which nothing is evaluated, saved, reported or resumed.
QUIET: dict[str, Any] = {
    "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False,
    "early_stopping_patience": None, "report_to": [], "push_to_hub": False, "resume_from_checkpoint": None,
    "frozen_feature_cache": None, "disable_tqdm": True, "profile_steps": None, "scaling_baseline": None,
}  # fmt: skip


def folder_of_all(is_launched: bool) -> str:
    """In the place of the run's own folder: the same for all processes that one launcher has started here."""
    number = os.getppid() if is_launched else os.getpid()
    return str(Path(tempfile.gettempdir(), f"hf_dist_audit-{number}"))


def audit(run: Run, rows: int | None, reference: str, as_json: bool) -> None:
    """Ends the process with 1 where something is wrong."""
    if run.stages:
        raise UsageError(
            "an audit takes a run of one stage. Write each stage of this run file into a file of its own."
        )
    is_main = launched.rank() == 0
    logging.basicConfig(level=logging.WARNING if is_main else logging.ERROR, format="%(message)s")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        check_available(run)
        args = make_arguments(run)
        report = build_parts(run, args).make_trainer(args).audit(rows, reference)
        if is_main:
            print(report.as_json() if as_json else report)
        leave_together()
    finally:
        if is_main:
            shutil.rmtree(run.training["output_dir"], ignore_errors=True)
    if not report.is_right and is_main:
        sys.exit(1)
