"""What a preset shards, what travels, when to use it, and whether this machine can run it: `hf-dist presets`.

(1) a table, one entry per shipped preset; a YAML of the user's own has no entry
(2) `runs_here`: one line from the YAML and the devices that are visible
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.presets import load_preset


class Notes(NamedTuple):
    sharded: str
    travels: str  # per optimizer step, with a gradient cache
    use: str


_LOSS = "embeddings to every process and their gradients back"
_GATHERS = "every layer's weights and gradients, once per step or once per chunk (gradient_cache_fsdp)"
# (1) ---------------------------------------------------------------------------------------------------------------
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

# (2) ---------------------------------------------------------------------------------------------------------------


def runs_here(path: Path, devices: int) -> tuple[bool, str]:
    """Whether a preset runs on this machine with so many visible GPUs, and how or why not."""
    preset = load_preset(path)
    kind = str(preset["distributed_type"]).upper().replace("FALSE", "NO")
    offloads_to = (preset.get("deepspeed_config") or {}).get("offload_optimizer_device")
    if kind == "DEEPSPEED" and (reason := deepspeed_install.why_unusable(offloads_to)):
        return False, f"no: {reason}"
    machines = int(preset.get("num_machines") or 1)
    if machines > 1:
        return False, f"not alone: it is started on each of {machines} machines"
    if kind == "NO":
        return True, "yes, on one GPU" if devices else "yes, on the CPU"
    if preset.get("use_cpu"):
        return True, "yes, over gloo"
    sizes = (preset.get("parallelism_config") or {}).items()
    needed = math.prod(int(size) for name, size in sizes if name.endswith("_size"))
    if 0 < devices < needed:
        return False, f"no: its mesh is of {needed} processes and {devices} GPU(s) are visible"
    return True, f"yes, on {devices} GPU(s)" if devices else "yes, slowly: no GPU is visible, on the CPU over gloo"
