"""FSDP2, and HSDP with it: what accelerate's plugin and FSDP's units are told beside a run's own fields.

Under bf16 and fp16 units compute as autocast does under DDP: matrices are gathered in half precision, everything else
as it is stored, and gradients are added up and reduced in float32. Small frozen parts stay whole on every rank.
`fsdp_options.py` reads the fields, `sharded.py` says which collectives run in a step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.experimental import implicit_replication
from transformers.utils import logging

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.fsdp_options import FROZEN_PARTS
from hf_dist_ext.strategies.layers import is_multiplied, repeated_layer_classes
from hf_dist_ext.strategies.sharded import Sharded

logger = logging.get_logger(__name__)

REPLICATED_BYTES_ON_CPU = 4 * 2**30


class FSDP(Sharded):
    """FSDP1 passes through where nothing of ours trains."""

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
        return all(isinstance(root, Scalars) for root in self.plugin.ignored_modules or ())

    @property
    def saves_shards(self) -> bool:
        return "SHARDED" in str(self.plugin.state_dict_type)

    @property
    def loads_alone(self) -> bool:
        return self.plugin.fsdp_version == 2 and not self.plugin.cpu_ram_efficient_loading

    @property
    def optimizer_file(self) -> str:  # accelerate's names
        return "optimizer.bin" if "FULL" in str(self.plugin.state_dict_type) else "optimizer_0"

    def place(
        self, model: nn.Module | None, args: Any, has_loss: bool, frozen_roots: Sequence[nn.Module] | None
    ) -> None:
        plugin = self.plugin
        if (has_loss or frozen_roots is not None) and plugin.fsdp_version != 2:
            raise UsageError(
                f"the accelerate configuration asks for FSDP version {plugin.fsdp_version}, and a loss over "
                "embeddings, trainable_modules and frozen_modules are exact with version 2 only. Set fsdp_version: 2 "
                "in the YAML (the launcher's own default is 1), or use multi_gpu_fsdp."
            )
        if model is None:
            return
        if hasattr(model, "transformers_model"):
            # accelerate 1.15 shards input embeddings and the last norm apart (fsdp_utils.py). Of a SentenceTransformer
            # it would take the module Normalize for that norm, which torch can not make one of its own class. A static
            # model has none, and a dual encoder names no input embeddings.
            model.base_model_prefix = "transformers_model"  # type: ignore[assignment]
            if (backbone := model.transformers_model) is not None:
                with contextlib.suppress(NotImplementedError):
                    backbone.get_input_embeddings()  # type: ignore[operator]
                    model.get_input_embeddings = backbone.get_input_embeddings  # type: ignore[union-attr]
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.accelerator.is_available():
            # Pinned memory is for a device to read from; where there is none, torch raises.
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        min_num_params = getattr(args, "min_num_params", None) or 0
        if plugin.transformer_cls_names_to_wrap is None or min_num_params:
            # accelerate's own choice crashes for many encoders or shards almost nothing (strategies/layers.py says
            # which). Empty: one unit.
            plugin.transformer_cls_names_to_wrap = repeated_layer_classes(model, min_num_params)
        if hasattr(args, "reduce_dtype") and plugin.fsdp_version == 2:
            self._set_precision(model, args.reduce_dtype, has_loss)
        if frozen_roots is not None:
            check_names(plugin)
        replicate_frozen_parts(plugin, frozen_roots, getattr(args, "frozen_parts_fsdp", "auto"))
        if plugin.fsdp_version == 2:
            keep_scalars_whole(plugin, model, self.accelerator.device)
        for root in () if isinstance(plugin.ignored_modules, str) else plugin.ignored_modules or ():
            # Nobody else does: torch moves what it shards, accelerate 1.15 modules that a regex names, and Trainer
            # leaves a model under FSDP where it was loaded.
            root.to(self.accelerator.device)

    def _set_precision(self, model: nn.Module, reduce_dtype: str | None, computes_as_autocast: bool) -> None:
        """In which precision units compute, and gradients are added up over backwards and reduced.

        accelerate 1.15 (FullyShardedDataParallelPlugin.set_mixed_precision) casts inputs, weights, outputs and
        gradients of every unit to half precision, and runs no autocast. `computes_as_autocast`: the caller runs the
        forward under autocast, so that what DDP keeps in float32 is float32 here too.
        """
        policy = self.plugin.mixed_precision_policy or MixedPrecisionPolicy()
        dtype = getattr(torch, reduce_dtype) if reduce_dtype else policy.reduce_dtype
        if computes_as_autocast:
            param_dtype = policy.param_dtype if self.accelerator.native_amp else None
            policy = replace(policy, param_dtype=param_dtype, output_dtype=None, cast_forward_inputs=False)
            is_half = any(p.requires_grad and p.dtype.itemsize < 4 for p in model.parameters())
            if reduce_dtype is None:
                dtype = torch.float32 if param_dtype or is_half else None
        self.plugin.mixed_precision_policy = replace(policy, reduce_dtype=dtype)

    def start(
        self, model: nn.Module, mode: str, loss_parameters: Sequence[nn.Parameter], optimizer: Any, has_towers: bool
    ) -> None:
        super().start(model, mode, loss_parameters, optimizer, has_towers)
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and any(p.numel() > 1 for p in loss_parameters):
            # torch 2.13 divides all gradients of an optimizer in one call, and takes plain ones beside sharded ones
            # only where they are a single number each. Remove when it takes all; tests/strategies/test_fsdp.py tells.
            scaler._unscale_grads_ = _beside_plain_ones(scaler._unscale_grads_)

    def clip(
        self, parameters: Iterable[nn.Parameter], loss_parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor | None:
        """accelerate 1.15 (_clip_grad_norm_dtensor_aware) stacks the norm of shards, which is on the CPU under
        cpu_offload, and that of the loss's parameters, which are on the device: torch refuses that. Remove when it
        brings them to one device; tests/strategies/test_fsdp.py tells."""
        if not loss_parameters or not isinstance(self.plugin.cpu_offload, CPUOffloadPolicy):
            return super().clip(parameters, loss_parameters, max_norm)
        self.accelerator.unscale_gradients()
        return self.clip_parts(chain(parameters, loss_parameters), max_norm)

    def wrapped(self, model: nn.Module, args: Any, has_loss: bool) -> None:
        keep_dropout_of_checkpointed_layers(model)
        if has_loss:
            set_precision_of_parameters(model)

    def save_optimizer(self, model: nn.Module, optimizer: Any, folder: Path, keep: bool, writer: Any) -> bool:
        """In the files of accelerate 1.15 (fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer), which reads them.
        FSDP1 is left to it. Whole weights are in the checkpoint already, as `save_pretrained` writes them."""
        if self.plugin.fsdp_version != 2:
            return False
        options = StateDictOptions(full_state_dict=not self.saves_shards, cpu_offload=True)

        def save(name: str, kind: str, state: dict[str, Any]) -> None:
            if self.saves_shards:
                writer.shards({kind: state}, folder / f"{name}_0")
            elif self.accelerator.is_main_process:
                writer.torch(state, folder / f"{name}.bin")

        if self.saves_shards or hasattr(model, "get_base_model"):
            save("pytorch_model_fsdp", "model", _weights(model, options))
        save("optimizer", "optimizer", get_optimizer_state_dict(model, optimizer, options=options))
        return True

    def converts(self, folder: Path) -> bool:
        return getattr(self.plugin, "fsdp_version", 1) == 2 and super().converts(folder)

    def holds_own_format(self, folder: Path) -> bool:
        return self.plugin.fsdp_version != 2 or any(folder.glob("pytorch_model_fsdp*"))

    def has_no_optimizer_state(self, folder: str | Path) -> bool:
        """Plain SGD has none: torch 2.13 fails to load it ("Expected device to be set" in
        torch/distributed/checkpoint/state_dict.py). Remove when torch loads it."""
        file = Path(folder, "optimizer.bin")
        return file.is_file() and not torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state"]


def _beside_plain_ones(unscale: Any) -> Any:
    def with_plain_ones(*given: Any) -> Any:
        with implicit_replication():
            return unscale(*given)

    return with_plain_ones


def _weights(model: nn.Module, options: StateDictOptions) -> dict[str, Any]:
    """Of a model with adapters these alone."""
    if not hasattr(model, "get_base_model"):
        return get_model_state_dict(model, options=options)
    if options.full_state_dict:
        return get_model_state_dict(model, options=replace(options, ignore_frozen_params=True))
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=model.active_adapter)


def check_names(plugin: Any) -> None:
    """For runs with frozen parts, whose names decide what trains and what is saved."""
    if plugin.activation_checkpointing:
        raise UsageError(
            "fsdp_activation_checkpointing wraps layers, and the names by which this run trains and saves a part of "
            'the model are then others. Set "gradient_checkpointing": true in the run file, and '
            "fsdp_activation_checkpointing: false in the accelerate YAML."
        )


def replicate_frozen_parts(plugin: Any, roots: Sequence[nn.Module] | None, choice: str) -> None:
    """Let FSDP2 leave frozen parts alone, whole on every rank, when asked for or when they are small. `roots`: the
    largest modules of which nothing trains; None when nothing is frozen by name."""
    if plugin.ignored_modules == FROZEN_PARTS or not isinstance(plugin.ignored_modules, str):
        # The preset's two words, which accelerate would take for a regex, or the roots of a model before this one.
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


class Scalars(nn.ParameterList):
    """Parameters without dimensions. accelerate's plugin takes modules alone as what FSDP leaves alone."""


def keep_scalars_whole(plugin: Any, model: nn.Module, device: torch.device) -> None:
    """FSDP2 can not shard a parameter without dimensions, such as the `logit_scale` of CLIP, on which no embedding
    depends and which is therefore frozen: every rank has it whole. Of one that trains torch's own error says what to
    do."""
    found = {
        f"{path}.{name}" if path else name: parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 0 and not parameter.requires_grad
    }
    if not found:
        return
    lines = {
        "fsdp_cpu_ram_efficient_loading: true": plugin.cpu_ram_efficient_loading,  # see replicate_frozen_parts
        f"fsdp_ignored_modules: {plugin.ignored_modules}": isinstance(plugin.ignored_modules, str),
    }
    if refused := next((line for line, is_given in lines.items() if is_given), None):
        raise UsageError(
            f"{refused} in the accelerate YAML does not go with {type(model).__name__}: FSDP2 can not shard its "
            f'parameter "{next(iter(found))}", a single number, and has to leave it alone. Remove the line, or write '
            "false."
        )
    for name, parameter in found.items():
        path, _, own = name.rpartition(".")
        found[name] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
        model.get_submodule(path).register_parameter(own, found[name])
    plugin.ignored_modules = [*(plugin.ignored_modules or ()), Scalars(found.values())]


def _replicated_limit() -> int:
    """By the smallest device: ranks that chose differently would have other units, and wait for each other."""
    if not torch.accelerator.is_available():
        return REPLICATED_BYTES_ON_CPU
    device = torch.accelerator.current_accelerator()
    total = torch.get_device_module(device).mem_get_info()[1]
    return int(policy.KEPT_WHOLE_SHARE * collectives.smallest(total))


def keep_dropout_of_checkpointed_layers(model: nn.Module) -> None:
    """In the layers that FSDP checkpoints by itself: the recomputed forward draws the first one's dropout masks.

    accelerate 1.15 (fsdp2_apply_ac) wraps them with preserve_rng_state=False, and the gradients are then not those of
    the loss. Remove when it does not; tests/test_silent_failures.py tells.
    """
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn = functools.partial(module.checkpoint_fn, preserve_rng_state=True)


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
