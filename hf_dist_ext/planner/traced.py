"""What a run's forwards keep and compute, as torch's own trace of them found it, and the model's configuration.

    work = traced(run)        # starts tasks/trace.py, which takes some seconds, or reads what it found before

What a trace finds depends on the model's configuration, the rows' lengths, precision, who trains, and versions: under
all of these together it is kept in the user's cache folder, so that another batch, chunk or machine is planned at
once. The configuration, with the defaults of its class, is kept beside it: importing transformers takes seconds too.
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
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.local_files import config_file, processor_file
from hf_dist_ext.planner.workload import Workload
from hf_dist_ext.run.config import Run

PACKAGES = ("torch", "transformers", "peft", "hf_dist_ext")
SETS_THE_TRACE = (  # fields of the run file that change it, beside the model's configuration and the columns
    "model_name_or_path", "model_revision", "trust_remote_code", "task", "pooling", "projection_dim",
    "attn_implementation", "trainable_modules", "frozen_modules", "use_lora", "lora_r", "lora_dropout",
    "lora_target_modules", "load_in_4bit",
)  # fmt: skip


def traced(run: Run) -> Workload:
    """The workload with what its forwards take. Raises UsageError where there is no configuration, or the model does
    not run without values."""
    work = workload_of(run, config_of(run))
    found = _kept(_trace_path(run, work)) or _count(run)[1]
    return replace(work, found=found, embedding_dim=found["embedding_dim"])


def config_of(run: Run) -> dict[str, Any]:
    """The complete configuration of the run's model, as `complete_config` of tasks/trace.py has it."""
    return _kept(_config_path(run)) or _count(run)[0]


def _count(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the trace, which are kept."""
    if sys.stderr.isatty():
        print("counting the model, which takes some seconds and is kept", file=sys.stderr)
    config, found = _trace(run)
    _keep(_config_path(run), config)
    _keep(_trace_path(run, workload_of(run, config)), found)
    return config, found


def _kept(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # torn, it is made again
        return None


def _keep(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(found), encoding="utf-8")
    whole.replace(path)


def _folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "hf_dist_ext" / "traces"


def _config_path(run: Run) -> Path:
    fields = run.options
    if fields.model_config is not None:
        return _path(fields.model_config)
    name, revision = fields.model_name_or_path, fields.model_revision
    files = [config_file(name, revision), processor_file(name, revision)]
    if fields.trust_remote_code:
        files += sorted(Path(name).glob("*.py"))
    return _path([path.read_text(encoding="utf-8") for path in files if path], name)


def _trace_path(run: Run, work: Workload) -> Path:
    given = {name: getattr(run.options, name, None) or run.given.get(name) for name in SETS_THE_TRACE}
    columns = [asdict(replace(one, rows=1)) for one in work.columns]
    names = ("load_bytes", "split_bytes", "autocast_bytes", "leaves_tokens", "mask_bytes", "packs")
    files = sorted(Path(str(given["model_name_or_path"])).glob("*.py")) if "auto_map" in work.config else []
    code = [path.read_text(encoding="utf-8") for path in files]
    return _path(work.config, given, columns, [getattr(work, name) for name in names], code)


def _path(*content: Any) -> Path:
    """Where is kept what depends on this content, on the code of the trace, and on versions."""
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    files = sorted(Path(__file__).parents[1].joinpath("tasks").glob("trace*.py"))
    code = [path.read_text(encoding="utf-8") for path in files]
    key = json.dumps([content, versions, code], sort_keys=True, default=str)
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _trace(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
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
