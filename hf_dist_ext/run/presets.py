"""Accelerate presets: name or path -> YAML file, and what each is for.

A preset is a file of configs/accelerate; its first comment line is its description. In a wheel the folder travels as
hf_dist_ext/_configs (setup.py); a checkout and an editable install read it where it is.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.short_names import PRESET_SHORT_NAMES


def preset_folder() -> Path:
    """Where the shipped presets are."""
    in_wheel = Path(__file__).parents[1] / "_configs"
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[2] / "configs" / "accelerate"


def presets() -> dict[str, str]:
    """Name -> one line that says what the preset is for."""
    files = sorted(preset_folder().glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in files}


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
        near = difflib.get_close_matches(name, [*known, *PRESET_SHORT_NAMES], 1)
        hint = f' Closest: "{near[0]}".' if near else ""
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
