"""The fields of a run file that say what FSDP shards, where it stays, and in which precision gradients are reduced.

They go over what the accelerate YAML says, into accelerate's FSDP plugin; NO_SHARD switches the FSDP of a preset off,
which leaves DDP: whole weights on every device. What has no meaning in the way the run was started is refused, with
the reason.

The names of FSDP1 keep their meaning: FULL_SHARD holds a layer's weights whole only while it runs, SHARD_GRAD_OP from
forward to backward, HYBRID_SHARD shards inside a group of processes (a machine) and keeps copies between groups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from hf_dist_ext import launched, policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import compatibility

FROZEN_PARTS = "frozen parts"  # what the preset multi_gpu_fsdp_frozen_replicated writes where accelerate takes a regex


def check(args: Any) -> None:
    """Rules between the fields. Raises UsageError."""
    if args.sharding_group_size is not None and args.sharding != "HYBRID_SHARD":
        raise UsageError(f'sharding_group_size={args.sharding_group_size} needs "sharding": "HYBRID_SHARD".')
    if args.sharding == "NO_SHARD" and (others := [n for n in policy.FSDP_FIELDS[1:] if getattr(args, n) is not None]):
        raise UsageError(f'sharding="NO_SHARD" leaves nothing for {others[0]} to act on. Keep one of them.')
    wanted = {"FULL_SHARD": "memory", "SHARD_GRAD_OP": "speed"}.get(args.sharding)
    if wanted and args.gradient_cache_fsdp not in ("auto", wanted):
        raise UsageError(
            f'sharding="{args.sharding}" is gradient_cache_fsdp="{wanted}" between the chunks of a step, but '
            f'"{args.gradient_cache_fsdp}" is given. Keep one.'
        )
    if wanted:
        args.gradient_cache_fsdp = wanted
    if args.frozen_parts_fsdp == "auto" and launched.fsdp_setting("ignored_modules", "") == FROZEN_PARTS:
        args.frozen_parts_fsdp = "replicate"  # as the preset multi_gpu_fsdp_frozen_replicated says


@contextlib.contextmanager
def without_fsdp(args: Any) -> Iterator[None]:
    """Around the making of an `Accelerator`: with NO_SHARD it sees no FSDP."""
    name = "ACCELERATE_USE_FSDP"
    before = os.environ.get(name)
    if getattr(args, "sharding", None) != "NO_SHARD" or before is None:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ[name] = before


def options(args: Any, plugin: Any) -> dict[str, Any]:
    """Arguments for `Accelerator`; `plugin` is the one Trainer made of its own fsdp fields, if it made one.

    Raises:
        UsageError: a knob that has no meaning here.
    """
    given = {name: getattr(args, name) for name in policy.FSDP_FIELDS if getattr(args, name) is not None}
    is_fsdp = plugin is not None or launched.uses_fsdp()
    if not is_fsdp:
        compatibility.refuse_without_fsdp(given, "DEEPSPEED" if launched.uses_deepspeed() else "MULTI_GPU")
    if not given or not is_fsdp:
        return {}
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = plugin or FullyShardedDataParallelPlugin()  # what the YAML says, which travels in the environment
    if plugin.fsdp_version != 2:
        shown = compatibility.shown(given)
        raise UsageError(f"{shown} needs FSDP version 2. Set fsdp_version: 2 in the accelerate YAML.")
    mesh = _mesh(args)
    if args.sharding is not None:
        plugin.reshard_after_forward = args.sharding != "SHARD_GRAD_OP"
    if args.cpu_offload is not None:
        # For whole checkpoints and for the YAML's offload accelerate makes a group that takes tensors of both devices.
        is_whole = launched.fsdp_setting("state_dict_type", "SHARDED_STATE_DICT") == "FULL_STATE_DICT"
        in_yaml = launched.fsdp_setting("offload_params", "false").lower() == "true"
        if args.cpu_offload and not (is_whole or in_yaml) and torch.accelerator.is_available():
            raise UsageError(
                "cpu_offload=true with sharded checkpoints needs fsdp_offload_params: true in the YAML, so that "
                'gradients on the CPU can be reduced. The preset "multi_gpu_fsdp_offload" has it.'
            )
        plugin.cpu_offload = args.cpu_offload
        plugin.set_cpu_offload()
    return {"fsdp_plugin": plugin} | mesh


def _mesh(args: Any) -> dict[str, Any]:
    """HYBRID_SHARD's groups as accelerate's parallelism_config, unless the YAML holds one already."""
    if args.sharding is None:
        return {}
    from accelerate import ParallelismConfig

    yaml_mesh = args.parallelism_config or (ParallelismConfig() if launched.uses_mesh() else None)
    copies, group = getattr(yaml_mesh, "dp_replicate_size", 1), args.sharding_group_size
    is_hybrid = args.sharding == "HYBRID_SHARD"
    if copies > 1 and not is_hybrid:
        raise UsageError(
            f'sharding="{args.sharding}" shards over all processes, the accelerate YAML\'s mesh over groups with '
            f"{copies} copies. Keep one of them."
        )
    if copies > 1 and group not in (None, yaml_mesh.dp_shard_size):
        raise UsageError(
            f"sharding_group_size={group}, but the mesh of the accelerate YAML has groups of "
            f"{yaml_mesh.dp_shard_size}. Leave one out."
        )
    if copies > 1 or not is_hybrid:
        return {}
    processes = launched.processes()
    group = group or launched.processes_here(processes)
    if processes % group or processes == group or group == 1:
        raise UsageError(
            f'sharding="HYBRID_SHARD" needs two or more groups of two or more: {processes} processes in groups of '
            f'{group} are none. Set "sharding_group_size", or use FULL_SHARD (one group) or NO_SHARD (groups of one).'
        )
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=processes // group, dp_shard_size=group)}
