"""Scale knobs of the run file: what FSDP shards, where it stays, and in which precision gradients are reduced.

(1) `without_fsdp`: NO_SHARD switches the FSDP of a preset off, which leaves DDP: whole weights on every device
(2) `options`: the others go over what the accelerate YAML says, into accelerate's FSDP plugin
(3) under bf16 and fp16 units compute as autocast does under DDP: matrices are gathered in half precision, everything
    else as it is stored, and gradients are added up and reduced in float32
(4) what has no meaning in the way the run was started is refused, with the reason

The names of FSDP1 keep their meaning: FULL_SHARD holds a layer's weights whole only while it runs, SHARD_GRAD_OP from
forward to backward, HYBRID_SHARD shards inside a group of processes (a machine) and keeps copies between groups.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from transformers.utils import logging

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.collectives import choose_mode
from hf_dist_ext.strategies.layers import is_multiplied, repeated_layer_classes

logger = logging.get_logger(__name__)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
KNOBS = ("sharding", "sharding_group_size", "cpu_offload", "min_num_params", "reduce_dtype")
FROZEN_PARTS = "frozen parts"  # what the preset multi_gpu_fsdp_frozen_replicated writes where accelerate takes a regex

REPLICATED_SHARE = 0.25  # of a device's free memory, that replicated frozen weights may take
REPLICATED_BYTES_ON_CPU = 4 * 2**30


class FSDP(Strategy):
    """FSDP2, HSDP with it. FSDP1 passes through where nothing of ours trains."""

    forwards_are_collective = True
    can_redo = False
    reads_own_format = True

    @classmethod
    def runs(cls, accelerator: Any) -> bool:
        return getattr(accelerator.state, "fsdp_plugin", None) is not None

    @property
    def plugin(self) -> Any:
        return self.accelerator.state.fsdp_plugin

    @property
    def name(self) -> str:
        return f"fsdp {self.plugin.state_dict_type.name}"

    @property
    def keeps_float32(self) -> bool:
        return self.accelerator.mixed_precision != "no"

    @property
    def frozen_forwards_are_collective(self) -> bool:
        return self.plugin.ignored_modules is None

    @property
    def saves_shards(self) -> bool:
        return "SHARDED" in str(self.plugin.state_dict_type)

    def place(
        self, model: nn.Module | None, args: Any, has_loss: bool, frozen_roots: Sequence[nn.Module] | None
    ) -> None:
        has_own_arguments = hasattr(args, "reduce_dtype")
        if has_loss or frozen_roots is not None:
            check_version(self.plugin)
        if model is None:
            return
        without_pinning(self.plugin)
        _name_layers(self.plugin, model, getattr(args, "min_num_params", None) or 0)
        if has_own_arguments:
            set_precision(self.accelerator, model, args, has_loss)
        if frozen_roots is not None:
            check_names(self.plugin)
        replicate_frozen_parts(self.plugin, frozen_roots, getattr(args, "frozen_parts_fsdp", "auto"))

    def wrapped(self, model: nn.Module, has_loss: bool) -> None:
        replay_dropout(model)
        if has_loss:
            set_precision_of_parameters(model)

    def start(self, model: nn.Module, mode: str, *more: Any, has_towers: bool = False) -> None:
        super().start(model, mode, *more, has_towers)
        self.units = Units(model, mode, has_towers)

    def reducing(self) -> AbstractContextManager:
        return self.units.reducing(self.completes, self.accelerator)

    def save_optimizer(self, model: nn.Module, optimizer: Any, folder: Path, keep: bool, writer: Any) -> bool:
        """In the files of accelerate 1.15 (fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer), which reads them.
        FSDP1 is left to it."""
        if self.plugin.fsdp_version != 2:
            return False
        options = StateDictOptions(full_state_dict=not self.saves_shards, cpu_offload=True)

        def save(name: str, kind: str, state: dict[str, Any]) -> None:
            if self.saves_shards:
                writer.shards({kind: state}, folder / f"{name}_0")
            elif self.accelerator.is_main_process:
                writer.torch(state, folder / f"{name}.bin")

        save("pytorch_model_fsdp", "model", _weights(model, options))
        save("optimizer", "optimizer", get_optimizer_state_dict(model, optimizer, options=options))
        return True

    def has_no_optimizer_state(self, folder: str | Path) -> bool:
        """Plain SGD has none: torch 2.13 fails to load it ("Expected device to be set" in
        torch/distributed/checkpoint/state_dict.py). Remove when torch loads it."""
        file = Path(folder, "optimizer.bin")
        return file.is_file() and not torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state"]


def _weights(model: nn.Module, options: StateDictOptions) -> dict[str, Any]:
    """Of a model with adapters these alone."""
    if not hasattr(model, "get_base_model"):
        return get_model_state_dict(model, options=options)
    if options.full_state_dict:
        return get_model_state_dict(model, options=replace(options, ignore_frozen_params=True))
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=model.active_adapter)


class Units:
    """Which collectives of a model's FSDP2 units run around a forward or backward.

    "speed": weights are gathered once per step and gradients reduce-scattered once; "memory": every chunk gathers and
    reduces, nothing is kept unsharded. HSDP: every chunk reduce-scatters inside its replica, so gradients stay
    sharded, and replicas all-reduce once; with a tower per column they all-reduce every chunk, since torch 2.13 can
    add up partly reduced gradients only when every backward reaches the same parameters of a unit.
    """

    def __init__(self, model: nn.Module, mode: str, has_towers: bool, shared_by: int = 1):
        """`shared_by`: ranks over which layers are split beside."""
        self.root = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
        if self.root is None:  # tensor parallelism without groups to shard over
            return
        meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
        # The dimension along which tensor parallelism splits layers is none of FSDP's.
        copies = [[name for name in mesh.mesh_dim_names or range(mesh.ndim) if name != "tp"] for mesh in meshes]
        self.is_hsdp, self.has_towers = any(len(names) > 1 for names in copies), has_towers
        self.mode = _mode_that_fits(model, shared_by) if mode == "auto" else mode

    def reducing(self, completes: bool, accelerator: Any) -> AbstractContextManager:
        return nullcontext() if self.root is None else self._reducing(completes, accelerator)

    @contextlib.contextmanager
    def _reducing(self, completes: bool, accelerator: Any) -> Iterator[None]:
        root, is_sharded_between = self.root, self.mode == "memory"
        root.set_requires_gradient_sync(completes or is_sharded_between or self.is_hsdp)
        if self.is_hsdp:
            root.set_requires_all_reduce(completes or self.has_towers)
        if not is_sharded_between:
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(completes)
        root.set_is_last_backward(completes or is_sharded_between)
        try:
            yield
        finally:
            root.set_is_last_backward(True)
            # Trainer's own no_sync sets this to True when it ends, so the outer state is what this step was part of.
            root.set_requires_gradient_sync(accelerator.sync_gradients)
            if self.is_hsdp:
                root.set_requires_all_reduce(accelerator.sync_gradients)


def _mode_that_fits(model: nn.Module, shared_by: int) -> str:
    """By what unsharded weights and gradients take."""
    needed = sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())
    return choose_mode(needed / shared_by)


def _name_layers(plugin: Any, model: nn.Module, min_num_params: int) -> None:
    """accelerate's own choice crashes for many encoders or shards almost nothing (strategies/layers.py says which)."""
    if plugin.transformer_cls_names_to_wrap is None or min_num_params:
        # Empty: one unit, not accelerate's guess.
        plugin.transformer_cls_names_to_wrap = repeated_layer_classes(model, min_num_params)


def replicate_frozen_parts(plugin: Any, roots: Sequence[nn.Module] | None, choice: str) -> None:
    """Let FSDP2 leave frozen parts alone, whole on every rank, when asked for or when they are small. `roots`: the
    largest modules of which nothing trains; None when nothing is frozen by name."""
    if plugin.ignored_modules == FROZEN_PARTS:  # the preset's two words; accelerate would take them for a regex
        plugin.ignored_modules = None
    if roots is None:
        if choice == "replicate":
            logger.warning("frozen_parts_fsdp='replicate': nothing is frozen by name, so FSDP shards everything.")
        return
    if getattr(plugin, "fsdp_version", 1) != 2 or plugin.ignored_modules is not None:
        return
    frozen_bytes = sum(p.numel() * p.element_size() for root in roots for p in root.parameters())
    limit = _replicated_limit()
    fits = frozen_bytes <= limit
    if plugin.cpu_ram_efficient_loading and (choice == "replicate" or fits):
        # The other ranks' copies would stay empty: accelerate 1.15 fills sharded parameters only.
        message = "replicating frozen parts needs fsdp_cpu_ram_efficient_loading: false in the accelerate YAML"
        if choice == "replicate":
            raise UsageError(f"frozen_parts_fsdp='replicate': {message}.")
        logger.info(f"FSDP: frozen parts are sharded; {message}.")
        return
    if choice == "replicate" or (choice == "auto" and fits):
        plugin.ignored_modules = roots
    done, why = (
        ("replicated", "no collective for them") if plugin.ignored_modules else ("sharded", "they are gathered")
    )
    logger.info(
        f"FSDP: frozen parts ({frozen_bytes / 2**30:.2f} GiB) are {done}: {why}. frozen_parts_fsdp={choice!r}, "
        f"replicated up to {limit / 2**30:.1f} GiB when 'auto'."
    )


def _replicated_limit() -> int:
    if not torch.accelerator.is_available():
        return REPLICATED_BYTES_ON_CPU
    device = torch.accelerator.current_accelerator()
    total = torch.get_device_module(device).mem_get_info()[1]  # the same on every rank, unlike what is free
    return int(REPLICATED_SHARE * total)


# (1) ---------------------------------------------------------------------------------------------------------------


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


# (2) ---------------------------------------------------------------------------------------------------------------


def options(args: Any, plugin: Any) -> dict[str, Any]:
    """Arguments for `Accelerator`; `plugin` is the one Trainer made of its own fsdp fields, if it made one.

    Raises:
        UsageError: a knob that has no meaning here.
    """
    given = {name: getattr(args, name) for name in KNOBS if getattr(args, name) is not None}
    is_fsdp = plugin is not None or launched.uses_fsdp()
    if not given or not is_fsdp:
        _refuse_without_fsdp(given)
        return {}
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = plugin or FullyShardedDataParallelPlugin()  # what the YAML says, which travels in the environment
    if plugin.fsdp_version != 2:
        raise UsageError(f"{_shown(given)} needs FSDP version 2. Set fsdp_version: 2 in the accelerate YAML.")
    found: dict[str, Any] = {"fsdp_plugin": plugin} | _mesh(args)
    if args.sharding is not None:
        plugin.reshard_after_forward = args.sharding != "SHARD_GRAD_OP"
    if args.cpu_offload is not None:
        _check_backend(args.cpu_offload)
        plugin.cpu_offload = args.cpu_offload
        plugin.set_cpu_offload()
    return found


def check_version(plugin: Any) -> None:
    if plugin.fsdp_version != 2:
        raise UsageError(
            f"the accelerate configuration asks for FSDP version {plugin.fsdp_version}, and a loss over embeddings, "
            "trainable_modules and frozen_modules are exact with version 2 only. Set fsdp_version: 2 in the YAML "
            "(the launcher's own default is 1), or use multi_gpu_fsdp."
        )


def without_pinning(plugin: Any) -> None:
    """Offloading pins its memory for a device to read from; where there is none, torch raises."""
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.accelerator.is_available():
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


def check_names(plugin: Any) -> None:
    """For runs with frozen parts, whose names decide what trains and what is saved."""
    if plugin.activation_checkpointing:
        raise UsageError(
            "fsdp_activation_checkpointing wraps layers, and the names by which this run trains and saves a part of "
            'the model are then others. Set "use_gradient_checkpointing": true in the run file, and '
            "fsdp_activation_checkpointing: false in the accelerate YAML."
        )


def replay_dropout(model: nn.Module) -> None:
    """In the layers that FSDP checkpoints by itself: the recomputed forward draws the first one's dropout masks.

    accelerate 1.15 (fsdp2_apply_ac) wraps them with preserve_rng_state=False, and the gradients are then not those of
    the loss. Remove when it does not; tests/test_silent_failures.py tells.
    """
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn = functools.partial(module.checkpoint_fn, preserve_rng_state=True)


def _check_backend(offloads: bool) -> None:
    # accelerate lets the process group take tensors of both devices for whole checkpoints and for the YAML's offload.
    is_whole = launched.fsdp_setting("state_dict_type", "SHARDED_STATE_DICT") == "FULL_STATE_DICT"
    in_yaml = launched.fsdp_setting("offload_params", "false").lower() == "true"
    if offloads and not (is_whole or in_yaml) and torch.accelerator.is_available():
        raise UsageError(
            "cpu_offload=true with sharded checkpoints needs fsdp_offload_params: true in the YAML, so that "
            'gradients on the CPU can be reduced. The preset "multi_gpu_fsdp_offload" has it.'
        )


def _mesh(args: Any) -> dict[str, Any]:
    """HYBRID_SHARD's groups as accelerate's parallelism_config, unless the YAML holds one already."""
    from accelerate import ParallelismConfig

    in_yaml = launched.uses_mesh()
    yaml_mesh, group = args.parallelism_config or (ParallelismConfig() if in_yaml else None), args.sharding_group_size
    copies = getattr(yaml_mesh, "dp_replicate_size", 1)
    if args.sharding is None:
        return {}
    if args.sharding != "HYBRID_SHARD":
        if copies > 1:
            raise UsageError(
                f'sharding="{args.sharding}" shards over all processes, the accelerate YAML\'s mesh over groups with '
                f"{copies} copies. Keep one of them."
            )
        return {}
    processes = launched.processes()
    if copies > 1:
        if group not in (None, yaml_mesh.dp_shard_size):
            raise UsageError(
                f"sharding_group_size={group}, but the mesh of the accelerate YAML has groups of "
                f"{yaml_mesh.dp_shard_size}. Leave one out."
            )
        return {}
    group = group or launched.processes_here(processes)
    if processes % group or processes == group or group == 1:
        raise UsageError(
            f'sharding="HYBRID_SHARD" needs two or more groups of two or more: {processes} processes in groups of '
            f'{group} are none. Set "sharding_group_size", or use FULL_SHARD (one group) or NO_SHARD (groups of one).'
        )
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=processes // group, dp_shard_size=group)}


# (3) ---------------------------------------------------------------------------------------------------------------


def set_precision(accelerator: Any, model: nn.Module, args: Any, computes_as_autocast: bool) -> None:
    """In which precision units compute, and gradients are added up over backwards and reduced.

    accelerate 1.15 (FullyShardedDataParallelPlugin.set_mixed_precision) casts inputs, weights, outputs and gradients
    of every unit to half precision, and runs no autocast. `computes_as_autocast`: the caller runs the forward under
    autocast, so that what DDP keeps in float32 is float32 here too.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        return
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else policy.reduce_dtype
    if computes_as_autocast:
        param_dtype = policy.param_dtype if accelerator.native_amp else None
        policy = replace(policy, param_dtype=param_dtype, output_dtype=None, cast_forward_inputs=False)
        is_half = any(p.requires_grad and p.dtype.itemsize < 4 for p in model.parameters())
        if args.reduce_dtype is None:
            reduce_dtype = torch.float32 if param_dtype or is_half else None
    plugin.mixed_precision_policy = replace(policy, reduce_dtype=reduce_dtype)


def set_precision_of_parameters(model: nn.Module) -> None:
    """Before the first forward: only matrices are gathered in half precision, and every gradient is `reduce_dtype`.
    Every rank calls it.

    torch 2.13 has one policy per unit (_fsdp_param_group.py, _init_mp_dtypes). Remove when the minimum has one per
    parameter (PyTorch pull request 196626).
    """
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        state = unit._get_fsdp_state()
        # torch 2.11 has one group or None under the older name. Remove when the minimum is 2.13.
        groups = filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        for parameter in parameters:
            is_cast = is_multiplied(parameter._module_info.module, parameter.sharded_param)
            policy = MixedPrecisionPolicy(parameter.mp_policy.param_dtype if is_cast else None)
            parameter.init_dtype_attrs = functools.partial(_init_dtypes, parameter, policy)
        unit.unshard()
        for parameter in parameters:
            if parameter.sharded_param.requires_grad and (dtype := parameter.mp_policy.reduce_dtype):
                parameter.unsharded_param.grad_dtype = dtype  # added up and reduced in the dtype that gradients have
        unit.reshard()


def _init_dtypes(parameter: Any, policy: MixedPrecisionPolicy, policy_of_unit: MixedPrecisionPolicy) -> None:
    type(parameter).init_dtype_attrs(parameter, policy)


# (4) ---------------------------------------------------------------------------------------------------------------


def _refuse_without_fsdp(given: dict[str, Any]) -> None:
    if given.get("sharding") == "NO_SHARD":
        given = {name: value for name, value in given.items() if name != "sharding"}
    if not given:
        return
    hint = ' For DDP there is "ddp_comm_hook".' if "reduce_dtype" in given else ""
    if launched.uses_deepspeed():
        hint = " DeepSpeed's own knobs are in its preset."
    raise UsageError(
        f'{_shown(given)} has no meaning without FSDP, and this run does not shard. Set "accelerate_config": '
        f'"multi_gpu_fsdp", or leave it out.{hint}'
    )


def _shown(given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def check(args: Any) -> None:
    """Rules between the fields. Raises UsageError."""
    if args.sharding is not None and args.sharding not in STRATEGIES:
        raise UsageError(f"sharding={args.sharding!r}: choose one of {', '.join(STRATEGIES)}, or null.")
    if args.sharding_group_size is not None and args.sharding != "HYBRID_SHARD":
        raise UsageError(f'sharding_group_size={args.sharding_group_size} needs "sharding": "HYBRID_SHARD".')
    if args.sharding == "NO_SHARD" and (others := [n for n in KNOBS[1:] if getattr(args, n) is not None]):
        raise UsageError(f'sharding="NO_SHARD" leaves nothing for {others[0]} to act on. Keep one of them.')
    if args.reduce_dtype not in (None, "float32", "bfloat16", "float16"):
        raise UsageError(f"reduce_dtype={args.reduce_dtype!r}: choose float32, bfloat16 or float16, or null.")
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
