"""Accelerate presets: name or path -> YAML file, what a preset shards and sends, and whether it runs on this machine.

A preset is a file of configs/accelerate; its first comment line is its description, and `NOTES` tells more about each
shipped preset. In a wheel the folder travels as hf_dist_ext/_configs (setup.py); a checkout and an editable install
read it where it is.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.short_names import PRESET_SHORT_NAMES


class Notes(NamedTuple):
    sharded: str
    travels: str  # per optimizer step, with a gradient cache
    use: str


_LOSS = "embeddings to every process (and, where they are gathered, their gradients back)"
_GATHERS = "every layer's weights and gradients, once per step or once per chunk (gradient_cache_fsdp)"
NOTES = {
    "single_gpu": Notes("nothing", "nothing", "The model, its optimizer state and a chunk fit one device."),
    "cpu": Notes("nothing", f"gradients once; {_LOSS}", "To try a run of several processes without a GPU."),
    "multi_gpu_ddp": Notes(
        "nothing",
        f"gradients once, whatever the chunks; {_LOSS}",
        "Everything fits one device: the fastest.",
    ),
    "multi_gpu_fsdp": Notes(
        "weights, gradients, optimizer state", f"{_GATHERS}; {_LOSS}", "It does not fit one device, or only just."
    ),
    "multi_gpu_fsdp_offload": Notes(
        "weights, gradients, optimizer state, on the CPU",
        f"{_GATHERS}, and between CPU and GPU; {_LOSS}",
        "It does not fit all GPUs together. Slow: the optimizer steps on the CPU.",
    ),
    "multi_gpu_fsdp_frozen_replicated": Notes(
        "what trains; frozen parts are whole everywhere",
        f"weights and gradients of what trains; {_LOSS}",
        "Most of the model is frozen and fits one device beside a chunk.",
    ),
    "multi_gpu_hsdp": Notes(
        "weights, gradients, optimizer state, over the GPUs of a group",
        f"inside a group what FSDP sends; between groups one shard of the gradients; {_LOSS}",
        "It does not fit one device, and links between machines are much slower than inside.",
    ),
    "multi_gpu_tp": Notes(
        "every layer over the GPUs of a group; over the groups weights, gradients, optimizer state",
        "inside a group the activations of every layer, in every chunk; between groups what FSDP sends; "
        "embeddings to every group and their gradients back",
        "A decoder whose layers or activations are too large for one device, on links as fast as inside a machine. "
        "GPUs of a group share rows, so FSDP is quicker where it fits.",
    ),
    "multi_gpu_pp": Notes(
        "layers over the processes of a pipeline; pipelines are copies",
        "between neighbours what a layer gives and its gradient, in every chunk; between pipelines gradients once; "
        "embeddings between the pipelines' last processes and their gradients back",
        "Layers do not fit one device, on links too slow for FSDP. The run file says how many processes make a "
        "pipeline (pipeline_parallel_size); these share rows, and some of their time they wait for each other.",
    ),
    "multi_gpu_3d": Notes(
        "layers over the groups of a pipeline, every layer over the GPUs of a group; pipelines are copies, or shard "
        "their weights (sharding)",
        "inside a group the activations of every layer, in every chunk; between neighbours what a layer gives and its "
        "gradient; between pipelines gradients once, or what FSDP sends; embeddings between the pipelines' last "
        "groups and their gradients back",
        "A decoder of which not even one machine holds all layers: groups on fast links, stages over slow ones. The "
        "run file says how many groups make a pipeline (pipeline_parallel_size); all its GPUs share rows.",
    ),
    "deepspeed_zero1": Notes(
        "optimizer state",
        f"gradients once; updated weights once; {_LOSS}",
        "It fits but for AdamW's state.",
    ),
    "deepspeed_zero2": Notes(
        "gradients, optimizer state",
        f"gradients once, or of every chunk (gradient_cache_fsdp); updated weights once; {_LOSS}",
        "It fits but for gradients and AdamW's state.",
    ),
    "deepspeed_zero3": Notes(
        "weights, gradients, optimizer state",
        f"every layer's weights in every chunk, gradients once or in every chunk (gradient_cache_fsdp); {_LOSS}",
        "It does not fit one device, and your configurations are DeepSpeed's; else multi_gpu_fsdp.",
    ),
    "deepspeed_zero3_offload": Notes(
        "weights, gradients, optimizer state, on the CPU",
        f"as deepspeed_zero3, and between CPU and GPU; {_LOSS}",
        "It does not fit all GPUs together. Slow: the optimizer steps on the CPU.",
    ),
    "multi_node_ddp": Notes(
        "nothing", f"gradients once, over the network; {_LOSS}", "Everything fits one device, on several machines."
    ),
    "multi_node_hsdp": Notes(
        "weights, gradients, optimizer state, over the GPUs of a machine",
        f"inside a machine what FSDP sends; over the network one shard of the gradients; {_LOSS}",
        "It does not fit one device, on several machines.",
    ),
}


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


def kind_of(preset: dict[str, Any]) -> str:
    """accelerate's distributed_type in capitals; "NO" is one process, and YAML reads a bare NO as false."""
    return str(preset["distributed_type"]).upper().replace("FALSE", "NO")


def mesh_size(preset: dict[str, Any]) -> int:
    """Processes that the sizes of a parallelism_config multiply to; 1 without one."""
    sizes = (preset.get("parallelism_config") or {}).items()
    return math.prod(int(size) for name, size in sizes if name.endswith("_size"))


def runs_here(path: Path, devices: int) -> str:
    """Whether a preset runs on this machine with so many visible GPUs, and how or why not, in words."""
    preset = load_preset(path)
    kind, machines = kind_of(preset), int(preset.get("num_machines") or 1)
    offloads_to = (preset.get("deepspeed_config") or {}).get("offload_optimizer_device")
    if kind == "DEEPSPEED" and (reason := deepspeed_install.why_unusable(offloads_to)):
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
