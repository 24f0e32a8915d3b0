"""What a launcher (torchrun, accelerate's) tells the processes that it starts, in environment variables.

Every other file asks here, but for `launch.py`, which starts a launcher. An accelerate YAML travels in these variables
too. It needs the standard library only, since what runs before torch is imported asks too.
"""

from __future__ import annotations

import os


def rank() -> int:
    """0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """Processes of this run; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def by_torchrun() -> bool:
    """Whether torchrun (which is inside of accelerate's launcher) started this process and watches it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processes_here(default: int) -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def uses_cpu() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")


def uses_fsdp() -> bool:
    return _is_on("ACCELERATE_USE_FSDP")


def uses_deepspeed() -> bool:
    return _is_on("ACCELERATE_USE_DEEPSPEED")


def compiles() -> bool:
    """Whether an accelerate configuration has models compiled."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


def uses_mesh() -> bool:
    """Whether processes lie on a mesh of several dimensions."""
    return _is_on("ACCELERATE_USE_PARALLELISM_CONFIG")


def mesh_size(dimension: str) -> int:
    """Of one dimension of the mesh: "tp" is how many consecutive ranks shall split every layer. 1: there is none."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{dimension.upper()}_SIZE", "1")) if uses_mesh() else 1


def fsdp_setting(name: str, default: str) -> str:
    """What the YAML says of FSDP beside whether it runs: "version", "state_dict_type"."""
    return os.environ.get(f"FSDP_{name.upper()}", default)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"
