"""What a report of an error needs to say of a machine: versions, devices, links. No torch here, so it works where that
is what fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import psutil

from hf_dist_ext.planner import devices
from hf_dist_ext.planner.catalog import GIB
from hf_dist_ext.run.fields import is_secret

PACKAGES = (
    "hf_dist_ext", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "safetensors",
    "huggingface_hub", "numpy", "sentence-transformers", "deepspeed", "bitsandbytes", "flash-attn",
)  # fmt: skip
SETTINGS = tuple("ACCELERATE_ CUDA_ GLOO_ HF_ HIP_ NCCL_ OMP_ ROCR_ SLURM_JOB_NUM TORCH".split())


def lines() -> list[str]:
    """`name: value`, a line each."""
    found = [f"{name}: {_version(name)}" for name in PACKAGES]
    has_threads = hasattr(os, "sched_getaffinity")
    threads = f" ({len(os.sched_getaffinity(0))} threads for this process)" if has_threads else ""
    found += [
        f"python: {sys.version.split()[0]}",
        f"system: {platform.platform()}",
        f"cores: {psutil.cpu_count(logical=False)}{threads}",
        f"memory: {psutil.virtual_memory().total / GIB:.1f} GiB",
        f"visible GPUs: {devices.count_devices()}",
    ]
    found += devices.described()
    settings = sorted(name for name in os.environ if name.startswith(SETTINGS))
    return [*found, *(f"{name}: {'***' if is_secret(name.lower()) else os.environ[name]}" for name in settings)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
