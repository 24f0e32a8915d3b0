"""What this machine's devices are, asked of the driver and not of torch: memory and links, for the planner.

(1) memory: the least of the visible devices, from nvidia-smi or the kernel's files of AMD
(2) links: NVLink where the driver names one between two devices, else PCIe
"""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
from pathlib import Path

from hf_dist_ext.errors import UsageError
from hf_dist_ext.launch import count_devices
from hf_dist_ext.planner.catalog import GIB, Hardware

ASSUMED_GIB = 80.0  # where no device is at hand and none is named


def device_memory_bytes() -> float | None:
    """(1) None when no driver says."""
    listed = _ask("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    found = [float(one) * 2**20 for one in re.findall(r"^\s*(\d+)\s*$", listed, re.MULTILINE)]
    for path in glob.glob("/sys/class/drm/card*/device/mem_info_vram_total"):
        found.append(float(Path(path).read_text(encoding="utf-8")))
    return min(found, default=None)


def links() -> str:
    """(2)"""
    return "nvlink" if re.search(r"\bNV\d+\b", _ask("topo", "-m")) else "pcie"


def _ask(*words: str) -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def hardware_of(
    num_devices: int | None, memory_gib: float | None, num_nodes: int = 1, interconnect: str | None = None
) -> Hardware:
    """What is named, else what is here, else one device of 80 GiB. Raises UsageError for what cannot be."""
    if num_devices is None:
        num_devices = max(1, count_devices()) * max(1, num_nodes)
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise UsageError(
            f"{num_devices} devices on {num_nodes} machines: give a positive number that the machines share equally."
        )
    if memory_gib is not None and not memory_gib > 0:
        raise UsageError(f"--device_memory_gib {memory_gib} is not a positive number of GiB.")
    memory = memory_gib * GIB if memory_gib is not None else device_memory_bytes()
    links_here = interconnect or (links() if memory_gib is None else "nvlink")
    return Hardware(num_devices, memory or ASSUMED_GIB * GIB, num_nodes, links_here, memory is None)
