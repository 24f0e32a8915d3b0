"""Tensor parallelism under a loss over embeddings: a group of ranks holds the same rows and a part of every layer.

transformers splits the model (`DistributedConfig`): layers over the ranks of a group, which are consecutive, and what
that leaves over the groups with FSDP2. The loss and its gather see one rank per group. What is left to do:

(1) what can be split, said before anything is loaded
(2) a split model: its groups, and the style whose gradients go wrong with several backwards taken out of its hands
(3) once per update: gradients of norms inside attention are summed over a group, those FSDP2 does not own averaged
    over the groups; their norm is that of the whole model
(4) the ranks of a group must hold the same rows and draw the same random numbers
(5) whole weights for a folder that loads anywhere, and back; Trainer's refusal to save set aside

Letters: D a parameter split over a group (a DTensor), R one that every rank of a group has whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.fsdp import Units
from hf_dist_ext.strategies.rows import Rows
from hf_dist_ext.strategies.tensors import gathered, held_here

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

# Styles of a plan that were measured to be exact; the others are for mixtures of experts and fused weights.
EXACT_STYLES = {"colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce"}
PARTIAL = "replicated_with_grad_allreduce"
OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "sgd"}  # whose state is split as the parameter is

# ---- (1) ----


def launched_config() -> DistributedConfig | None:
    """What the launcher's YAML asks for: groups of its `tp_size`, FSDP2 over as many groups as its processes make."""
    size, processes = launched.mesh_size("tp"), launched.processes()
    if size == 1:
        return None
    if processes % size:
        raise UsageError(
            f"{processes} processes do not make groups of {size} (parallelism_config_tp_size). Start a multiple of "
            f"{size}."
        )
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=size, fsdp_size=processes // size)


def is_supported() -> bool:
    """transformers 5.20 splits models too, without the plan that (2) reads; 5.23 is what was measured to be exact.
    Remove when the minimum is 5.23."""
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "_expand_parallel_plan")


def check_is_supported() -> None:
    if not is_supported():
        raise UsageError(
            "tensor parallelism needs transformers 5.23 or newer, on Python 3.11. Update it, or use multi_gpu_fsdp."
        )


def check_can_be_split(config: Any, size: int) -> None:
    """Of a model's config, before its weights are read. Raises UsageError."""
    check_is_supported()
    name, text = config.model_type, config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise UsageError(
            f'transformers has no tensor-parallel plan for "{name}": it has them for decoders such as llama and '
            "qwen3. Use multi_gpu_fsdp."
        )
    if unknown := set(config.base_model_tp_plan.values()) - EXACT_STYLES:
        raise UsageError(
            f'the tensor-parallel plan of "{name}" uses {", ".join(sorted(unknown))}, which was not measured to be '
            "exact with several backwards per step. Use multi_gpu_fsdp."
        )
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None) or text.num_attention_heads
        if heads % size:
            raise UsageError(
                f'{field}={heads} of "{name}" can not be dealt to groups of {size} processes. Use a tp_size that '
                "divides it, or multi_gpu_fsdp."
            )


def split(model: PreTrainedModel, config: DistributedConfig) -> PreTrainedModel:
    """A model that is whole and the same on every rank, as `from_pretrained(distributed_config=config)` splits it."""
    config, device, meshes = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model.to(device or "cpu"), config, meshes)


def check_layout(model: nn.Module, found: nn.Module, asked: int) -> None:
    """Of `model`, of which transformers has split the part `found`. Raises UsageError."""
    check_is_supported()
    config = found.config.distributed_config
    if found is not model and not getattr(model, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            f"{type(found).__name__} was split (distributed_config) inside {type(model).__name__}, which does not say "
            "so to Trainer. Use EmbeddingModel, or multi_gpu_fsdp."
        )
    others = [n for n in ("pp_size", "ep_size", "dp_replicate_size") if getattr(config, n) > 1]
    if others or config.tp_size == 1:
        what = f"{others[0]}={getattr(config, others[0])}" if others else "tp_size=1"
        raise UsageError(
            f"{type(found).__name__} was split with {what}: a loss over embeddings is exact with tp_size above 1, "
            "alone or with fsdp_size. Use multi_gpu_tp, multi_gpu_fsdp or multi_gpu_hsdp."
        )
    if asked not in (1, config.tp_size):
        raise UsageError(
            f"tp_size={asked} in the parallelism_config, but {type(found).__name__} was split with "
            f"tp_size={config.tp_size}. Make them equal."
        )
    check_can_be_split(found.config, config.tp_size)


def check_rest(model: nn.Module, args: Any) -> None:
    """UsageError for what was not made exact under it."""
    is_partly_frozen = any(getattr(args, f"{kind}_modules", None) is not None for kind in ("trainable", "frozen"))
    if args.bf16 and is_partly_frozen and any(p.dtype.itemsize < 4 for p in model.parameters()):
        raise UsageError(
            "tensor parallelism with frozen parts and bf16=true needs weights in float32: what trains can not be made "
            "so once it is split. Load the model with dtype=float32."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    refused = {
        "adapters (use_lora)": any(hasattr(module, "peft_config") for module in model.modules()),
        "fp16=true": args.fp16,
        "torch_compile=true": args.torch_compile,
        "frozen_feature_cache": getattr(args, "frozen_feature_cache", None) is not None,
        "save_async=true": args.save_async,
        "DeepSpeed": bool(args.deepspeed) or launched.uses_deepspeed(),
        "FSDP of accelerate": bool(args.fsdp) or launched.uses_fsdp(),
        f"optim={optimizer}": optimizer not in OPTIMIZERS,
    }
    refused |= {
        f"{name}={getattr(args, name)!r}": getattr(args, name, None) is not None
        for name in ("ddp_comm_hook", "sharding")
    }
    if found := [what for what, is_given in refused.items() if is_given]:
        remedies = {"fp16=true": "Use bf16.", f"optim={optimizer}": f"Use one of {', '.join(sorted(OPTIMIZERS))}."}
        remedy = remedies.get(found[0], "Leave it out, or use multi_gpu_fsdp.")
        raise UsageError(f"tensor parallelism does not go with {found[0]}: it was not made exact there. {remedy}")


# ---- (2) ----


class TensorParallel(Strategy):
    """A model that transformers has split, over groups with FSDP2 too.

    Attributes:
        partial: modules whose parameters (R) have gradients of this rank's heads only.
    """

    comes_with_model = forwards_are_collective = saves_by_name = syncs_replicated = True
    can_redo = False

    def __init__(self, model: nn.Module | None):
        """`model` None: one is still to be made."""
        super().__init__()
        self._has_checked_group = False
        if model is None:
            return
        backbone = next(m for m in model.modules() if "_device_mesh" in vars(m) and m._device_mesh is not None)
        self.whole, self.config = model, model.config.distributed_config
        self.group = backbone._mesh_manager.get_mesh("tp").get_group()
        peers = backbone._mesh_manager.get_mesh("fsdp").get_group()
        self.partial = _without_own_reduction(backbone)
        self.rows = Rows(self.config.tp_size, peers)

    @property
    def split(self) -> str:
        groups = self.config.fsdp_size
        return f"tp {self.config.tp_size}" + (f" x fsdp {groups}" if groups > 1 else "")

    @property
    def name(self) -> str:
        return self.split

    # ---- setting up ----

    def constructing(self, args: Any) -> AbstractContextManager:
        return saving_allowed(args)

    def constructed(self, model: nn.Module) -> None:
        copy_from_first(model)

    def gather_for_metrics(self) -> Callable:
        return functools.partial(gather_for_metrics, self.accelerator, self.rows)

    # ---- a step ----

    def start(self, model: nn.Module, mode: str, *more: Any, has_towers: bool = False) -> None:
        super().start(model, mode, *more, has_towers)
        self.units = Units(model, mode, has_towers, self.rows.shared_by)

    def reducing(self) -> AbstractContextManager:
        return self.units.reducing(self.completes, self.accelerator)

    # ---- (3) ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        super().finish_update(loss_parameters)
        self.complete_gradients()

    def clip(
        self, parameters: Iterable[nn.Parameter], loss_parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        return clip_gradients(chain(parameters, loss_parameters), max_norm)

    def complete_gradients(self) -> None:
        """Call once per update, behind its last backward."""
        self.rows.average_gradients(p for p in self.whole.parameters() if not isinstance(p, DTensor))
        parameters = [p for module in self.partial for p in module.parameters() if p.grad is not None]
        if not parameters:
            return
        own = [held_here(p.grad) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat, group=self.group)
        for gradient, part in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view_as(gradient))

    # ---- (4) ----

    def check_batch(self, batch: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device) -> None:
        """In a run's first step. Raises UsageError on every rank."""
        if self._has_checked_group:
            return
        rows = b"".join(
            tensor.detach().float().cpu().numpy().tobytes()
            for features in batch.values()
            for tensor in features.values()
            if isinstance(tensor, torch.Tensor)
        )
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        random = b"".join(state.numpy().tobytes() for state in states)
        everyone = collectives.exchange([_number(rows), _number(random)], device)
        size = self.rows.shared_by
        groups = [everyone[start : start + size] for start in range(0, len(everyone), size)]
        for i, what in enumerate(("hold other rows", "draw other random numbers")):
            if any(len({of_rank[i] for of_rank in group}) > 1 for group in groups):
                raise UsageError(
                    f"tensor parallelism: ranks of a group of {size} {what} than each other. Let the order of rows "
                    "and what is drawn depend on the group, not on the rank: rank // tp_size."
                )
        self._has_checked_group = True

    # ---- (5) ----

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        return dict(gathered(model.state_dict(), keep))

    def saving_whole(self, model: nn.Module) -> AbstractContextManager:
        return saved_as_whole(model)

    def load_whole(self, model: nn.Module, folder: str | Path) -> bool:
        load_weights(model, folder)
        return True


def _without_own_reduction(backbone: PreTrainedModel) -> list[nn.Module]:
    """The modules of style PARTIAL, with the forward that sums their gradients by itself put back.

    transformers 5.23 (distributed/tensor_parallel.py, ReplicatedWithGradAllReduce) sums `.grad` over the group after
    every backward, and with it what earlier backwards of the step have left there: chunks and micro-batches are
    counted again. Remove this and `partial` when it sums the new gradient only; tests/distributed/test_upstream.py
    tells.
    """
    modules, plan = dict(backbone.named_modules()), backbone._expand_parallel_plan(backbone.tp_plan)
    partial = [modules[name] for name, style in plan.items() if style == PARTIAL and name in modules]
    for module in partial:
        vars(module).pop("forward", None)  # its class's own; the style's was set on the instance
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters()):
            raise UsageError(
                f"{type(backbone).__name__} has run with gradients since it was split, which leaves hooks that "
                "reduce them wrongly. Give it to DistTrainer before."
            )
    return partial


def find_split(model: Any) -> Any:
    """The module that transformers has split; None."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((m for m in modules if vars(m).get("_is_distributed_loading_by_transformers")), None)


# ---- (3) ----


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """The norm of all gradients, every element counted once; they are scaled down to `max_norm` (inf: not at all).

    torch's own cannot span meshes: D, R and what FSDP2 does not own lie on different ones. One all-reduce.
    """
    of_copies = defaultdict(list)  # on how many ranks an element lies -> gradients
    for parameter in parameters:
        if parameter.grad is not None:
            of_copies[_copies(parameter.grad)].append(held_here(parameter.grad))
    squares = [nn.utils.get_total_norm(those) ** 2 / copies for copies, those in of_copies.items()]
    if not squares:
        return torch.zeros(())
    total = torch.stack([one.to(squares[0]) for one in squares]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grads_with_norm_
    if max_norm != float("inf"):
        for those in of_copies.values():
            torch._foreach_mul_(those, factor)
    return norm


def _copies(gradient: torch.Tensor) -> int:
    parts = 1
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            parts *= 1 if placement.is_replicate() else size
    return collectives.world_size() // parts


def copy_from_first(model: nn.Module) -> None:
    """What no mesh holds (a new projection) is the same on every rank, whatever they drew."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, src=0)


# ---- evaluation ----


def gather_for_metrics(accelerator: Any, rows: Rows, data: Any, use_gather_object: bool = False) -> Any:
    """`Accelerator.gather_for_metrics` with one rank per group: accelerate 1.15 gathers all, and so counts rows once
    per rank of a group."""
    from accelerate.utils import gather, gather_object, recursively_apply

    if use_gather_object:
        return rows.one_of_each(gather_object([data]))
    state, ranks = accelerator.gradient_state, collectives.world_size()

    def each_once(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.unflatten(0, (ranks, -1))[:: rows.shared_by].flatten(0, 1)
        return tensor[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else tensor

    return recursively_apply(each_once, gather(data))


# ---- (5) ----


@contextlib.contextmanager
def saving_allowed(args: Any) -> Iterator[None]:
    """Around Trainer's constructor, which refuses to save the optimizer of a split model.

    transformers 5.23 (trainer.py) cannot write it; checkpoints/trainable.py can, by name. Remove when the constructor
    takes such a model with save_only_model=False; tests/distributed/test_upstream.py tells.
    """
    before = args.save_only_model
    args.save_only_model = True
    try:
        yield
    finally:
        args.save_only_model = before


@contextlib.contextmanager
def saved_as_whole(model: nn.Module) -> Iterator[None]:
    """While `save_pretrained` writes whole weights on one rank: transformers would gather them again, on all ranks."""
    config = getattr(model, "config", None)
    before = getattr(config, "distributed_config", None)
    if before is None:
        yield
        return
    config.distributed_config = None
    try:
        yield
    finally:
        config.distributed_config = before


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Those of a whole folder, of which every rank reads its own part only."""
    base = next(cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))
    # float32 holds what either half precision holds; copying casts back to each parameter's own.
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()}, torch.float32)
    other = base.from_pretrained(folder, distributed_config=model.config.distributed_config, dtype=dtype)
    theirs = other.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in theirs or theirs[name].shape != tensor.shape:
            raise UsageError(f"{folder} does not fit this model: {name!r}. Use the options it was saved with.")
        held_here(tensor).copy_(held_here(theirs[name]))


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
