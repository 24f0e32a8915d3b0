"""What a run's forwards keep and compute, as torch's own trace of them found it.

    work = traced(run, work)        # starts tasks/trace.py, which takes some seconds, or reads what it found before

What a trace finds depends on the model's configuration, the rows' lengths, precision, who trains, and versions: under
all of these together it is kept in the user's cache folder, so that another batch, chunk or machine is planned at
once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.workload import Workload

PACKAGES = ("torch", "transformers", "peft", "hf_dist_ext")
SETS_THE_TRACE = (  # fields of the run file that change it, beside the model's configuration and the columns
    "model_name_or_path", "model_revision", "trust_remote_code", "task", "pooling", "projection_dim",
    "attn_implementation", "trainable_modules", "frozen_modules", "use_lora", "lora_r", "lora_dropout",
    "lora_target_modules", "load_in_4bit",
)  # fmt: skip


def traced(run: Any, work: Workload) -> Workload:
    """The workload with what its forwards take. Raises UsageError where the model does not run without values."""
    path = _folder() / f"{_key(run, work)}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # torn, it is made again
        if sys.stderr.isatty():
            print("counting the model, which takes some seconds and is kept", file=sys.stderr)
        found = _trace(run, work)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(found), encoding="utf-8")
        whole.replace(path)
    return replace(work, found=found, embedding_dim=found["embedding_dim"])


def _folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "hf_dist_ext" / "traces"


def _key(run: Any, work: Workload) -> str:
    given = {name: getattr(run.options, name, None) or run.given.get(name) for name in SETS_THE_TRACE}
    columns = [asdict(replace(one, rows=1, tokens=None)) for one in work.columns]
    names = ("load_bytes", "split_bytes", "autocast_bytes", "leaves_tokens", "token_dim", "mask_bytes", "packs")
    of_run = [getattr(work, name) for name in names]
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    files = sorted(Path(__file__).parents[1].joinpath("tasks").glob("trace*.py"))
    if "auto_map" in work.config:
        files += sorted(Path(str(given["model_name_or_path"])).glob("*.py"))
    code = [path.read_text(encoding="utf-8") for path in files]
    key = json.dumps([work.config, given, columns, of_run, versions, code], sort_keys=True, default=str)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _trace(run: Any, work: Workload) -> dict[str, Any]:
    """tasks/trace.py in a process of its own, on what the run resolved to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        path.write_text(json.dumps(run.given), encoding="utf-8")
        command = [sys.executable, "-m", "hf_dist_ext.tasks.trace", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UsageError(lines[-1].removeprefix("error: "))
    return json.loads(done.stdout.splitlines()[-1])
