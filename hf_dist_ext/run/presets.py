"""Accelerate presets: name or path -> YAML file, what a preset shards and sends, and whether it runs on this machine.

A preset is a file of configs/accelerate; its first comment line is its description, and the comments below tell what
it shards, what it sends and when to use it. In a wheel the folder travels as hf_dist_ext/_configs (setup.py); a
checkout and an editable install read it where it is.
"""

from __future__ import annotations

import math
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from hf_dist_ext.errors import UsageError, closest
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.config import PRESET_SHORT_NAMES


def preset_folder() -> Path:
    """Where the shipped presets are."""
    in_wheel = Path(__file__).parents[1] / "_configs"
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[2] / "configs" / "accelerate"


def presets() -> dict[str, str]:
    """Name -> one line that says what the preset is for."""
    files = sorted(preset_folder().glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in files}


def explained(path: Path) -> list[str]:
    """The lines that a preset begins with, without their comment sign."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line[2:] for line in takewhile(lambda line: line.startswith("#"), lines)]


def find_preset(name_or_path: str) -> Path:
    """The YAML of a preset name, a short name, or a path."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json") or len(path.parts) > 1:
        if not path.is_file():
            raise UsageError(f'accelerate_config="{name_or_path}": no such file. Presets: {", ".join(presets())}.')
        return path
    known = presets()
    name = PRESET_SHORT_NAMES.get(name_or_path, name_or_path)
    if name not in known:
        hint = closest(name, [*known, *PRESET_SHORT_NAMES])
        raise UsageError(
            f'accelerate_config="{name_or_path}" is no preset.{hint} Presets: auto, {", ".join(known)}; '
            "or the path of an accelerate YAML."
        )
    return preset_folder() / f"{name}.yaml"


def is_shipped(path: Path) -> bool:
    """Whether a YAML is one of ours; its num_processes is then the fallback without devices, not a wish."""
    return path.resolve().parent == preset_folder().resolve()


def load_preset(path: Path) -> dict[str, Any]:
    """The content of an accelerate YAML (or JSON, which is YAML); its keys are accelerate's to judge."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give an accelerate YAML.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path} is not YAML{where}. Mend it there, or write one with: accelerate config") from None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise UsageError(f"{path} has no distributed_type. Give an accelerate YAML; hf-dist presets lists ours.")
    return content


def distributed_type(preset: dict[str, Any]) -> str:
    """accelerate's distributed_type in capitals; "NO" is one process, and YAML reads a bare NO as false."""
    return str(preset["distributed_type"]).upper().replace("FALSE", "NO")


def mesh_size(preset: dict[str, Any]) -> int:
    """Processes that the sizes of a parallelism_config multiply to; 1 without one."""
    sizes = (preset.get("parallelism_config") or {}).items()
    return math.prod(int(size) for name, size in sizes if name.endswith("_size"))


def runs_here(path: Path, devices: int) -> str:
    """Whether a preset runs on this machine with so many visible GPUs, and how or why not, in words."""
    preset = load_preset(path)
    kind, machines = distributed_type(preset), int(preset.get("num_machines") or 1)
    if kind == "DEEPSPEED" and (reason := deepspeed_install.why_unusable()):
        return f"no: {reason}"
    if machines > 1:
        return f"not alone: it is started on each of {machines} machines"
    if kind == "NO":
        return "yes, on one GPU" if devices else "yes, on the CPU"
    if preset.get("use_cpu"):
        return "yes, over gloo"
    if 0 < devices < (needed := mesh_size(preset)):
        return f"no: its mesh is of {needed} processes and {devices} GPU(s) are visible"
    return f"yes, on {devices} GPU(s)" if devices else "yes, slowly: no GPU is visible, on the CPU over gloo"
