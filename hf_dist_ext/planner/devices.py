"""What a plan's devices are: those here, asked of the driver and not of torch; cards by name; this machine's CPU.

The memory is the least of the visible devices', from nvidia-smi or the kernel's files of AMD. The links are NVLink
where the driver names one between two devices, else PCIe. The CPU's memory is shared by the processes of the run, and
its arithmetic is measured in place: tasks/speed.py runs a layer of the model's sizes for a second.

Of cards, memory as the driver shows it, peak arithmetic and links, from their makers' data sheets: `half` counts dense
bfloat16 products of the matrix units that are added up in float32 (float16 where a card has no bfloat16), `single`
float32 without TF32, which torch leaves off; both per second, a multiply-add as two. Data sheets mostly give products
of sparse matrices, twice as many. Runs reach a share of a peak: HALF_REACHED and SINGLE_REACHED are assumptions, so
times are good for comparing, and for orders of magnitude. `memory_mib` is what nvidia-smi shows with ECC as the cards
are delivered; of the V100 it is the data sheet's 32 GiB.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import GIB, NETWORK, PER_NODE, Hardware
from hf_dist_ext.planner.traced import config_of
from hf_dist_ext.run.config import Run

ASSUMED_GIB = 80.0  # where no device is at hand and none is named
NVLINK_GIB = 40.0
HALF_REACHED, SINGLE_REACHED = 0.4, 0.7
CPU = "cpu"
TOKENS = 4096  # of the CPU's measured layer's rows: enough to be busy, few enough for a second


# ---- cards by name ----


@dataclass(frozen=True)
class Card:
    memory_mib: int
    half: float
    single: float
    interconnect: str
    source: str  # of `half` and `single`
    has_bf16: bool = True

    @property
    def memory_gib(self) -> float:
        return self.memory_mib / 1024

    def speed(self, item: int) -> float:
        """Operations per second of a run that computes with so many bytes per element."""
        return self.half * HALF_REACHED if item < 4 else self.single * SINGLE_REACHED


AMPERE = "NVIDIA Ampere GA102 architecture white paper"
ADA = "NVIDIA Ada architecture white paper"
BLACKWELL = "NVIDIA Blackwell architecture technical brief, HGX B200 at 1,000 W"
CARDS = {  # the first one counts whose words are all in a driver's name: H100 and PCIe, A100 and 80GB
    "b200": Card(183359, 2250e12, 80e12, "nvlink", BLACKWELL),
    "h200": Card(143771, 989e12, 67e12, "nvlink", "NVIDIA H200 data sheet, SXM"),
    "h100-pcie": Card(81559, 756e12, 51e12, "pcie", "NVIDIA H100 data sheet, PCIe"),
    "h100": Card(81559, 989e12, 67e12, "nvlink", "NVIDIA H100 data sheet, SXM"),
    "a100-80": Card(81920, 312e12, 19.5e12, "nvlink", "NVIDIA A100 data sheet"),
    "a100-40": Card(40960, 312e12, 19.5e12, "nvlink", "NVIDIA A100 data sheet"),
    "l40s": Card(46068, 362e12, 91.6e12, "pcie", "NVIDIA L40S data sheet"),
    "l4": Card(23034, 121e12, 30.3e12, "pcie", "NVIDIA L4 data sheet"),
    "a10": Card(23028, 125e12, 31.2e12, "pcie", "NVIDIA A10 data sheet"),
    "4090": Card(24564, 165.2e12, 82.6e12, "pcie", ADA),
    "3090": Card(24576, 71e12, 35.6e12, "pcie", AMPERE),
    "v100-32": Card(32768, 125e12, 15.7e12, "nvlink", "NVIDIA V100 data sheet, SXM2", has_bf16=False),
    "t4": Card(15360, 65e12, 8.1e12, "pcie", "NVIDIA T4 data sheet", has_bf16=False),
}


def card_named(name: str) -> Card:
    if name not in CARDS:
        raise UsageError(
            f"--device {name} is not known. Choose one of {', '.join(CARDS)}, or give --device_memory_gib."
        )
    return CARDS[name]


def card_of(driver_name: str) -> str | None:
    """The card that a driver calls so, such as "NVIDIA A100-SXM4-80GB"; None for others."""
    found = set(re.split(r"[\s-]+", driver_name.strip().upper()))
    for name in CARDS:
        first, *more = name.upper().split("-")
        if found.issuperset([first, *(f"{word}GB" if word.isdigit() else word for word in more)]):
            return name
    return None


# ---- what is here ----


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


def card_here() -> str | None:
    return card_of(_ask("--query-gpu=name", "--format=csv,noheader"))


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
    card = card_here() if is_here else device
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


# ---- the CPU ----


def hardware_of_cpu(run: Run, num_processes: int | None, tflops: float | None = None) -> Hardware:
    """`tflops`: of a process, where it is known. Raises UsageError."""
    processes = num_processes or 1
    if processes < 1:
        raise UsageError(f"{processes} processes: give a positive number.")
    memory = psutil.virtual_memory().total
    speed = tflops * 1e12 if tflops else measured_cpu(run) / processes
    return Hardware(
        processes, memory / processes, interconnect="ethernet", given_host_bytes=memory, card=CPU, reached=speed
    )


def measured_cpu(run: Run) -> float:
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
