"""Fields that one way of spreading a run reads: refused where another one runs, before any process starts and in each.

`kind` is accelerate's distributed_type in capitals ("NO" is one process), or "TP" for tensor parallelism. FSDP that
sharding="NO_SHARD" switches off is "MULTI_GPU". No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError

REDUCES_ITSELF = {
    "FSDP": 'FSDP, which scatters gradients itself; its precision is "reduce_dtype"',
    "DEEPSPEED": "DeepSpeed, which reduces gradients itself",
    "TP": "tensor parallelism, which reduces gradients itself",
    "NO": "one process, which sends no gradients",
}


def refuse_without_fsdp(training: Mapping[str, Any], kind: str) -> None:
    """UsageError for a field of FSDP_FIELDS, which FSDP alone reads. `training`: Trainer's fields and ours."""
    given = {name: training[name] for name in policy.FSDP_FIELDS if training.get(name) is not None}
    if given.get("sharding") == "NO_SHARD":
        del given["sharding"]
    if kind == "FSDP" or not given:
        return
    hint = ' For DDP there is "ddp_comm_hook".' if "reduce_dtype" in given else ""
    if kind == "DEEPSPEED":
        hint = " DeepSpeed's own knobs are in its preset."
    raise UsageError(
        f'{shown(given)} has no meaning without FSDP, and this run does not shard. Set "accelerate_config": '
        f'"multi_gpu_fsdp", or leave it out.{hint}'
    )


def refuse_without_ddp(training: Mapping[str, Any], kind: str) -> None:
    """UsageError for a field of DDP_FIELDS, which DDP alone reads."""
    given = [name for name in policy.DDP_FIELDS if training.get(name)]
    if given and kind in REDUCES_ITSELF:
        name, value = given[0], training[given[0]]
        text = "true" if value is True else f'"{value}"'
        runs = REDUCES_ITSELF[kind]
        raise UsageError(f"{name}={text} has no meaning here: the run is {runs}. Remove it, or use multi_gpu_ddp.")


def shown(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())
