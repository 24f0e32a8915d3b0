"""What this machine's devices are, asked of the driver and not of torch: how many are visible, their memory and links.

The memory is the least of the visible devices', from nvidia-smi or the kernel's files of AMD. The links are NVLink
where the driver names one between two devices, else PCIe.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.cards import card_named, card_of
from hf_dist_ext.planner.catalog import GIB, NETWORK, PER_NODE, Hardware

ASSUMED_GIB = 80.0  # where no device is at hand and none is named
NVLINK_GIB = 40.0


def count_devices() -> int:
    """Visible GPUs, asked of the driver and not of torch, which takes seconds to import."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return 0  # this torch could not use them
    nvidia = len(re.findall(r"^GPU \d+:", _ask("-L"), re.MULTILINE)) or len(glob.glob("/dev/nvidia[0-9]*"))
    if nvidia:
        return _count_visible(nvidia, os.environ.get("CUDA_VISIBLE_DEVICES"))
    nodes = map(Path, glob.glob("/sys/class/kfd/kfd/topology/nodes/*/properties"))  # with compute units one is a GPU
    amd = sum(bool(re.search(r"^simd_count [1-9]", node.read_text(encoding="utf-8"), re.MULTILINE)) for node in nodes)
    masks = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return _count_visible(amd, next((os.environ[name] for name in masks if name in os.environ), None))


def _count_visible(installed: int, mask: str | None) -> int:
    """How many of the installed devices a mask such as "0,2" shows. As in CUDA, a wrong entry hides what follows."""
    if mask is None:
        return installed
    count = 0
    for entry in mask.split(","):
        entry = entry.strip()
        if not entry or (entry.lstrip("-").isdigit() and not 0 <= int(entry) < installed):
            break
        count += 1
    return min(count, installed) if "MIG" not in mask else count


def device_memory_bytes() -> float | None:
    """None when no driver says."""
    listed = _ask("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes = [float(mib) * 2**20 for mib in re.findall(r"^\s*(\d+)\s*$", listed, re.MULTILINE)]
    amd = glob.glob("/sys/class/drm/card*/device/mem_info_vram_total")
    return min([*sizes, *(float(Path(path).read_text(encoding="utf-8")) for path in amd)], default=None)


def links() -> str:
    return "nvlink" if re.search(r"\bNV\d+\b", _ask("topo", "-m")) else "pcie"


def described() -> list[str]:
    """Names, memory and driver of the installed NVIDIA devices, and the links between them, as the driver says."""
    listed = _ask("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")
    topology = _ask("topo", "-m") if listed else ""
    return [f"GPU {line}" for line in listed.splitlines()] + topology.splitlines()


def _ask(*words: str) -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def hardware_of(
    num_devices: int | None,
    memory_gib: float | None,
    num_nodes: int | None = None,
    interconnect: str | None = None,
    device: str | None = None,
    host_memory_gib: float | None = None,
    network_gbps: float | None = None,
    tflops: float | None = None,
) -> Hardware:
    """What is named, else what is here, else one device of 80 GiB. Raises UsageError for what cannot be."""
    if num_devices is None:
        num_devices = max(1, count_devices()) * max(1, num_nodes or 1)
    is_several = num_nodes is None and num_devices > PER_NODE and num_devices % PER_NODE == 0
    nodes_are_assumed = is_several and num_devices > count_devices()
    num_nodes = num_nodes if num_nodes is not None else num_devices // PER_NODE if nodes_are_assumed else 1
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise UsageError(
            f"{num_devices} devices on {num_nodes} machines: give a positive number that the machines share equally."
        )
    given = {
        "device_memory_gib": (memory_gib, "GiB"),
        "host_memory_gib": (host_memory_gib, "GiB"),
        "network_gbps": (network_gbps, "Gbit/s"),
        "tflops": (tflops, "TFLOP/s"),
    }
    for name, (value, unit) in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} {value} is not a positive number of {unit}.")
    is_here = memory_gib is None and device is None
    card = card_of(_ask("--query-gpu=name", "--format=csv,noheader")) if is_here else device
    profile = card_named(card) if card else None
    if memory_gib is None and device is not None and profile is not None:
        memory_gib = profile.memory_gib
    memory = memory_gib * GIB if memory_gib is not None else device_memory_bytes()
    if interconnect is None:
        # cards of less memory mostly have no NVLink
        usual = profile.interconnect if profile else "nvlink" if (memory_gib or ASSUMED_GIB) >= NVLINK_GIB else "pcie"
        interconnect = links() if is_here and memory is not None else usual
    return Hardware(
        num_devices,
        memory or ASSUMED_GIB * GIB,
        num_nodes,
        interconnect,
        memory is None,
        nodes_are_assumed,
        host_memory_gib and host_memory_gib * GIB,
        network_gbps * 1e9 / 8 if network_gbps else NETWORK,
        card,
        tflops * 1e12 if tflops else None,
    )
