"""This machine's CPU as a device: `hf-dist plan --device cpu`.

Its memory is the system's, which the processes of the run share. Its arithmetic is measured in place: tasks/speed.py
runs a layer of the model's sizes for a second.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import Hardware
from hf_dist_ext.planner.traced import config_of
from hf_dist_ext.run.config import Run

NAME = "cpu"
TOKENS = 4096  # of the measured layer's rows: enough to be busy, few enough for a second


def hardware_of_cpu(run: Run, num_processes: int | None, tflops: float | None = None) -> Hardware:
    """`tflops`: of a process, where it is known. Raises UsageError."""
    processes = num_processes or 1
    if processes < 1:
        raise UsageError(f"{processes} processes: give a positive number.")
    memory = psutil.virtual_memory().total
    speed = tflops * 1e12 if tflops else measured(run) / processes
    return Hardware(
        processes, memory / processes, interconnect="ethernet", given_host_bytes=memory, card=NAME, reached=speed
    )


def measured(run: Run) -> float:
    """Floating-point operations per second of a layer like the run's, on all threads of a process."""
    run = run.stages[0] if run.stages else run
    fields = run.options
    command = [sys.executable, "-m", "hf_dist_ext.tasks.speed"]
    for name, value in _layer(config_of(run), fields.max_length).items():
        command += [f"--{name}", str(value)]
    if run.given.get("bf16") or run.given.get("fp16"):
        command.append("--half")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"the CPU's arithmetic could not be measured: {done.stderr.strip()[-300:]}. Give --tflops.")
    return float(done.stdout)


def _layer(config: Mapping[str, Any], max_length: Any) -> dict[str, float]:
    text = config.get("text_config") or config
    width, heads = text.get("hidden_size") or 512, text.get("num_attention_heads") or 8
    lengths = max_length.values() if isinstance(max_length, dict) else [max_length or 128]
    length = min(max(lengths), text.get("max_position_embeddings") or max(lengths))
    heads = heads if width % heads == 0 else 1
    inner = text.get("intermediate_size") or 4 * width
    sizes = {"width": width, "inner": inner, "heads": heads, "length": length, "rows": max(1, TOKENS // length)}
    return sizes | {"dropout": text.get("attention_probs_dropout_prob") or text.get("attention_dropout") or 0.0}
