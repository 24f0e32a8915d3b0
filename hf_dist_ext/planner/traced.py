"""A run of a model that planner/architectures.py does not know, as torch's trace of its forward found it.

    work = traced(run, work)        # starts tasks/trace.py, which takes some seconds, or reads what it found before

What a trace finds depends on the model's configuration, the rows' lengths, precision, who trains, and versions: under
all of these together it is kept in the user's cache folder, so that another batch, chunk or machine is planned at
once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.memory import Settings, held, model_of
from hf_dist_ext.planner.tape import Layer, Parameter, Tape
from hf_dist_ext.planner.workload import Cast, Column, Workload

PACKAGES = ("torch", "transformers", "peft", "hf_dist_ext")
SETS_THE_TRACE = (  # fields of the run file that change it, beside the model's configuration and the columns
    "model_name_or_path", "model_revision", "trust_remote_code", "task", "pooling", "projection_dim", "dtype", "bf16",
    "fp16", "attn_implementation", "trainable_modules", "frozen_modules", "use_lora", "lora_r", "lora_dropout",
    "lora_target_modules",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TracedWorkload(Workload):
    """`found`: what tasks/trace.py printed."""

    found: Mapping[str, Any] = field(default_factory=dict)

    @functools.cache  # noqa: B019, a plan's few workloads live as long as the plan
    def tape(self, column: Column, cast: Cast = "nothing", tensor_parallel: int = 1, rows: float = 1) -> Tape:
        of_column = self.found["columns"][column.name]
        parts = of_column.get(cast) or of_column["nothing"]  # without autocast nothing is cast
        before, *layers, after = (Layer(**one) for one in (parts["before"], *parts["layers"], parts["after"]))
        tape = Tape(parameters={name: Parameter(*one) for name, one in self.found["parameters"].items()})
        tape.before, tape.layers, tape.after = before, layers, after
        return tape


def traced(run: Any, work: Workload) -> TracedWorkload:
    """Raises UsageError where the model does not run without values."""
    path = _kept_at(run, work)
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    else:
        found = _trace(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(found), encoding="utf-8")
        whole.replace(path)
    of_run = {one.name: getattr(work, one.name) for one in fields(work)}
    return TracedWorkload(**of_run | {"embedding_dim": found["embedding_dim"]}, found=found)


def _kept_at(run: Any, work: Workload) -> Path:
    given = {name: getattr(run.options, name, None) or run.given.get(name) for name in SETS_THE_TRACE}
    columns = [asdict(replace(one, rows=1)) for one in work.columns]
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    code = Path(__file__).parents[1].joinpath("tasks", "trace.py").read_text(encoding="utf-8")
    key = json.dumps([work.config, given, columns, versions, code], sort_keys=True, default=str)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "hf_dist_ext" / "traces" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _trace(run: Any) -> dict[str, Any]:
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


def beside(run: Any, work: Workload) -> dict[str, dict[str, float]]:
    """Arithmetic and trace of one run on one device, at its own chunk."""
    return {"closed_form": _sums(work), "traced": _sums(traced(run, work))}


def _sums(work: Workload) -> dict[str, float]:
    settings = Settings(is_checkpointed=work.is_checkpointed)
    whole, of_chunk = model_of(work).whole, held(work, settings)
    found = {
        "parameters": whole.frozen_stored + whole.trained_stored,
        "gradients": whole.trained_stored,
        "optimizer": whole.optimizer,
        "activations": of_chunk.activations + of_chunk.casts,
    }
    return found | {"total": sum(found.values())}
