"""How DDP sends gradients: compression hooks and bucket options that Trainer's arguments do not reach.

`options` puts the fields into accelerate's DDP arguments; what has no meaning in this run is refused. PowerSGD
remembers what it left out of every step, per process, and its low-rank factors: both are part of a checkpoint,
`ddp_comm_hook_<rank>.pt`, and are used again from the third step after a resume. `sparse.py` has the hooks that send
a part of the elements.

fp16 and bf16 halve what is sent and round it; PowerSGD (https://huggingface.co/papers/1905.13727) sends two factors of
the given rank per weight matrix after its warm-up steps. With a gradient cache a step reduces once, so a hook runs
once per step whatever the number of chunks.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

from hf_dist_ext import launched, policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import compatibility
from hf_dist_ext.strategies import sparse
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.collectives import world_size

logger = logging.get_logger(__name__)

REMEMBER = ("power_sgd", *sparse.HOOKS)  # what they did not send, for the next gradient
STATE = "ddp_comm_hook_{rank}.pt"
_PER_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class DDP(Strategy):
    """Everything but the phase that completes the step runs inside `no_sync`, its forward included: a forward outside
    of it arms DDP's reducer for the next backward. The backward that reduces must reach every trainable parameter."""

    can_redo = False

    def __init__(self) -> None:
        super().__init__()
        self.left_out: sparse.LeftOut | None = None
        self.power_sgd: Any = None  # its state
        self._with_hook: nn.Module | None = None  # the wrapper that sends a part of its gradients
        self._has_read = False

    @classmethod
    def runs(cls, accelerator: Any) -> bool:
        return accelerator.num_processes > 1 or "MULTI" in accelerator.distributed_type.value

    @property
    def name(self) -> str:
        return "ddp" if self.accelerator.num_processes > 1 else "none"

    def wrapped(self, model: nn.Module, args: Any, has_loss: bool) -> None:
        if not self._has_read:
            self._begin_hook(model, args)
        self._has_read = False

    def _begin_hook(self, model: nn.Module, args: Any) -> None:
        """When a training begins: before its checkpoint is read, without one as soon as the model is wrapped."""
        hook, wrapper = getattr(args, "ddp_comm_hook", None), wrapper_in(model)
        self.power_sgd = power_sgd_state(wrapper)
        if hook not in sparse.HOOKS or wrapper is None:
            return
        if wrapper is self._with_hook:  # a trainer that trains once more; DDP takes a hook only once
            self.left_out.begin()
            return
        ratio = args.ddp_compression_ratio or policy.SENT_SHARE
        self._with_hook, self.left_out = wrapper, sparse.LeftOut(wrapper.module, hook, ratio, args.seed)
        wrapper.register_comm_hook(self.left_out, sparse.hook)

    def drop_update(self, optimizer: Any, step: int) -> None:
        super().drop_update(optimizer, step)
        if self.left_out is not None:
            self.left_out.forget()
        if self.power_sgd is not None:  # what is not a number in it would be in all gradients from now on
            for name in _PER_BUCKET:
                getattr(self.power_sgd, name).clear()

    def start(self, model: nn.Module, *more: Any, **options: Any) -> None:
        super().start(model, *more, **options)
        self.wrapper = wrapper_in(model)
        self.waits_for_all = self.wrapper is not None

    def begin_step(self) -> None:
        # After its first reduction DDP orders its buckets anew, a broadcast, in the first forward with a graph
        # (torch 2.13, DistributedDataParallel._pre_forward). A rank whose rows make one chunk has that forward before
        # the gathers of the score, one with several chunks after them, and both would wait for ever.
        if self.wrapper is not None and self.wrapper.reducer._rebuild_buckets():
            self.wrapper._has_rebuilt_buckets = True

    def bare_to_try(self, model: nn.Module) -> nn.Module | None:
        # With torch_compile the wrapper is another class, and what is compiled holds other tensors.
        return model.module if isinstance(model, DistributedDataParallel) and world_size() > 1 else None

    def reducing(self) -> AbstractContextManager:
        return nullcontext() if self.wrapper is None or self.completes else self.wrapper.no_sync()

    def save(self, model: nn.Module, folder: Path, args: Any, writer: Any) -> None:
        """Every process writes its own: what was left out of its gradients is nobody else's."""
        if self.left_out is not None:
            content = self.left_out.content(args.world_size)
        elif self.power_sgd is not None:
            content = _content_of_power_sgd(self.power_sgd, args.world_size)
        else:
            return
        folder.mkdir(parents=True, exist_ok=True)
        writer.torch(content, folder / STATE.format(rank=args.process_index))

    def load(self, model: nn.Module, folder: str | None, args: Any) -> None:
        """Continue with what a checkpoint left out; with other processes, another hook or rank it starts anew."""
        self._begin_hook(model, args)
        self._has_read = True
        state = self.left_out or self.power_sgd
        if state is None or folder is None:
            return
        path = os.path.join(folder, STATE.format(rank=args.process_index))
        device = args.device if args.device.type != "cpu" else "cpu"  # torch.load knows no "cpu:0"
        misfit = f"no state of {args.ddp_comm_hook}"
        if os.path.isfile(path):
            content = torch.load(path, map_location=device, weights_only=True)
            read = _read_power_sgd if self.left_out is None else sparse.LeftOut.read
            misfit = read(state, content, args.world_size)
        if misfit and args.process_index == 0:
            logger.warning(f"{folder} holds {misfit}: what gradients left out is forgotten.")


def _content_of_power_sgd(state: Any, world_size: int) -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = state.rng.get_state()
    content = {name: dict(getattr(state, name)) for name in _PER_BUCKET}
    rng = [kind, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, cached]
    rank = state.matrix_approximation_rank
    return content | {"iter": state.iter, "rng": rng, "rank": rank, "world_size": world_size}


def _read_power_sgd(state: Any, content: dict[str, Any], world_size: int) -> str:
    """As `LeftOut.read`."""
    now, saved = (world_size, state.matrix_approximation_rank), (content["world_size"], content.get("rank"))
    if saved != now:
        return (
            f"PowerSGD's state of {saved[0]} processes and rank {saved[1]}, this run has {now[0]} and {now[1]}, and "
            "begins with its warm-up steps"
        )
    for name in _PER_BUCKET:
        setattr(state, name, content[name])
    # DDP orders its buckets anew after the first step of a process, and what was left out lies in the old order: the
    # next two steps send whole gradients, from the third on the state is used.
    state.iter = min(content["iter"], state.start_powerSGD_iter - 2)
    kind, keys, *others = content["rng"]
    state.rng.set_state((kind, keys.cpu().numpy().astype(numpy.uint32), *others))
    return ""


def wrapper_in(model: nn.Module) -> DistributedDataParallel | None:
    """torch.compile wraps what accelerate has wrapped already."""
    return next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)


def power_sgd_state(model: nn.Module | None) -> Any:
    """The hook's state inside DDP, None for other wrappers and hooks."""
    for hook in getattr(model, "_comm_hooks", []):
        if type(hook[1]).__name__ == "PowerSGDState":
            return hook[1]
    return None


def check(args: Any) -> None:
    """Rules between the fields. Raises UsageError."""
    hook = args.ddp_comm_hook
    if hook == "batched_power_sgd":
        # torch 2.13 hands two-dimensional factors to a function that asserts three (powerSGD_hook._orthogonalize).
        # Remove when tests/strategies/test_ddp.py says that it is mended.
        raise UsageError(
            'ddp_comm_hook="batched_power_sgd" stops with an AssertionError inside torch 2.13 at its first compressed '
            'step. Use "power_sgd".'
        )
    for name in ("ddp_power_sgd_rank", "ddp_power_sgd_warmup_steps"):
        if getattr(args, name) is not None and hook != "power_sgd":
            raise UsageError(f'{name}={getattr(args, name)} needs "ddp_comm_hook": "power_sgd".')
    if (ratio := args.ddp_compression_ratio) is not None:
        if hook not in sparse.HOOKS:
            raise UsageError(f'ddp_compression_ratio={ratio} needs "ddp_comm_hook": "top_k" or "random_k".')
        if not 0 < ratio <= 1:
            raise UsageError(f"ddp_compression_ratio={ratio} is the share of elements to be sent: above 0, at most 1.")


def options(args: Any, handlers: list[Any], has_loss: bool) -> None:
    """Put the fields into the DDP arguments that Trainer made.

    Raises:
        UsageError: an option without meaning in the way the run was started.
    """
    (ddp,) = [handler for handler in handlers if isinstance(handler, DistributedDataParallelKwargs)]
    if has_loss:
        # The backward that reduces reaches every trainable parameter (Strategy.reaching_all). DDP searches after the
        # last forward only, and there are several.
        ddp.find_unused_parameters = False
    given = {name: value for name in policy.DDP_FIELDS if (value := getattr(args, name, None))}
    if not given:
        return
    compatibility.refuse_without_ddp(given, _kind(args))
    if args.ddp_comm_hook == "bf16" and args.device.type == "cpu":
        raise UsageError('ddp_comm_hook="bf16" needs NCCL: torch refuses it over gloo. Use "fp16" without a GPU.')
    if args.ddp_comm_hook in REMEMBER and args.fp16:
        raise UsageError(
            f'ddp_comm_hook="{args.ddp_comm_hook}" adds what it did not send to the next gradient, and under fp16 '
            "that one has another loss scale. Use bf16, or another hook."
        )
    if args.ddp_comm_hook in sparse.HOOKS:
        if args.ddp_find_unused_parameters:
            raise UsageError(
                f'ddp_comm_hook="{args.ddp_comm_hook}" adds what it did not send to the next gradient, and DDP drops '
                "the gradient of a parameter that no process used. Remove ddp_find_unused_parameters, or use another "
                "hook."
            )
        ddp.find_unused_parameters = False
    ratio = args.ddp_compression_ratio or policy.SENT_SHARE
    if args.ddp_comm_hook == "top_k" and args.world_size * ratio >= 1 and args.process_index == 0:
        logger.warning(
            f'ddp_comm_hook="top_k" saves nothing here: {args.world_size} processes gather the elements of all with '
            f'their places, about {args.world_size * ratio:.2g} times what a whole reduction sends. Use "random_k", '
            f"which sends {ratio:.2g} of it whatever their number, or a ddp_compression_ratio below "
            f"{1 / args.world_size:.2g}."
        )
    if args.ddp_static_graph and has_loss and args.uses_gradient_cache:
        raise UsageError(
            "ddp_static_graph=true counts how often a step uses every parameter and expects it to stay the same; with "
            "a gradient cache that is the number of chunks, which follows the batch. Remove one of them."
        )
    ddp.gradient_as_bucket_view = bool(args.ddp_gradient_as_bucket_view)
    if args.ddp_comm_hook is not None and args.ddp_comm_hook not in sparse.HOOKS:
        from accelerate.utils import DDPCommunicationHookType

        ddp.comm_hook = DDPCommunicationHookType(args.ddp_comm_hook)
        if args.ddp_comm_hook == "power_sgd":
            ddp.comm_state_option = {
                "matrix_approximation_rank": args.ddp_power_sgd_rank or 1,
                "start_powerSGD_iter": args.ddp_power_sgd_warmup_steps or 1000,
            }


def _kind(args: Any) -> str:
    """How the run is spread, in the words of run/compatibility.py."""
    if args.fsdp or launched.uses_fsdp():
        return "MULTI_GPU" if args.sharding == "NO_SHARD" else "FSDP"
    if args.deepspeed or launched.uses_deepspeed():
        return "DEEPSPEED"
    if launched.mesh_size("tp") > 1:
        return "TP"
    return "MULTI_GPU" if args.world_size > 1 else "NO"
