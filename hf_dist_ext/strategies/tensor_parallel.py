"""Tensor parallelism under a loss over embeddings: a group of ranks holds the same rows and a part of every layer.

transformers has split the model (`splitting.py`): layers over the ranks of a group, which are consecutive, and what
that leaves over the groups with FSDP2. The loss and its gather see one rank per group. What is left to do:

(1) the style whose gradients go wrong with several backwards is taken out of transformers' hands
(2) once per update: gradients of norms inside attention are summed over a group, those FSDP2 does not own averaged
    over the groups; their norm is that of the whole model
(3) the ranks of a group must hold the same rows and draw the same random numbers
(4) whole weights for a folder that loads anywhere, and back; Trainer's refusal to save set aside

Letters: D a parameter split over a group (a DTensor), R one that every rank of a group has whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.strategies.rows import Rows
from hf_dist_ext.strategies.sharded import Sharded
from hf_dist_ext.strategies.splitting import PARTIAL
from hf_dist_ext.strategies.tensors import gathered, held_here

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TensorParallel(Sharded):
    """A model that transformers has split, over groups with FSDP2 too.

    Attributes:
        partial: modules whose parameters (R) have gradients of this rank's heads only.
    """

    comes_with_model = saves_by_name = syncs_replicated = True

    def __init__(self, model: nn.Module | None):
        """`model` None: one is still to be made."""
        super().__init__()
        self._has_checked_group = False
        if model is None:
            return
        backbone = next(m for m in model.modules() if "_device_mesh" in vars(m) and m._device_mesh is not None)
        self.whole, self.config = model, model.config.distributed_config
        self.group = backbone._mesh_manager.get_mesh("tp").get_group()
        self.rows = Rows(self.config.tp_size, peers=backbone._mesh_manager.get_mesh("fsdp").get_group())
        self.partial = _without_own_reduction(backbone)

    @property
    def split(self) -> str:
        groups = self.config.fsdp_size
        return f"tp {self.config.tp_size}" + (f" x fsdp {groups}" if groups > 1 else "")

    @property
    def name(self) -> str:
        return self.split

    # ---- setting up ----

    def constructing(self, args: Any) -> AbstractContextManager:
        """transformers 5.23 (trainer.py) refuses to save the optimizer of a split model, which it cannot write;
        checkpoints/trainable.py can, by name. Remove when the constructor takes such a model with
        save_only_model=False; tests/distributed/test_upstream.py tells."""
        return meanwhile(args, "save_only_model", True)

    def constructed(self, model: nn.Module) -> None:
        """What no mesh holds (a new projection) is the same on every rank, whatever they drew."""
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                dist.broadcast(parameter.data, src=0)

    def gather_for_metrics(self) -> Callable:
        return functools.partial(self.rows.gather_for_metrics, self.accelerator)

    # ---- (2) ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        own = [p for p in self.whole.parameters() if not isinstance(p, DTensor)]
        self.rows.average_gradients(chain(loss_parameters, own))
        parameters = [p for module in self.partial for p in module.parameters() if p.grad is not None]
        if not parameters:
            return
        gradients = [held_here(p.grad) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def clip(
        self, parameters: Iterable[nn.Parameter], loss_parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """The norm of all gradients, every element counted once; they are scaled down to `max_norm` (inf: not at all).

        torch's own cannot span meshes: D, R and what FSDP2 does not own lie on different ones. One all-reduce.
        """
        of_copies = defaultdict(list)  # on how many ranks an element lies -> gradients
        for parameter in chain(parameters, loss_parameters):
            if parameter.grad is not None:
                of_copies[_copies(parameter.grad)].append(held_here(parameter.grad))
        squares = [nn.utils.get_total_norm(gradients) ** 2 / copies for copies, gradients in of_copies.items()]
        if not squares:
            return torch.zeros(())
        total = torch.stack([square.to(squares[0]) for square in squares]).sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grads_with_norm_
        if max_norm != float("inf"):
            for gradients in of_copies.values():
                torch._foreach_mul_(gradients, factor)
        return norm

    # ---- (3) ----

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

    # ---- (4) ----

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        return dict(gathered(model.state_dict(), keep))

    def saving_whole(self, model: nn.Module) -> AbstractContextManager:
        """transformers would gather the weights again, on all ranks."""
        config = getattr(model, "config", None)
        is_split = getattr(config, "distributed_config", None) is not None
        return meanwhile(config, "distributed_config", None) if is_split else contextlib.nullcontext()

    @torch.no_grad()
    def load_whole(self, model: nn.Module, folder: str | Path) -> bool:
        """Every rank reads its own part only."""
        base = next(cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))
        # float32 holds what either half precision holds; copying casts back to each parameter's own.
        dtype = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()}, torch.float32)
        other = base.from_pretrained(folder, distributed_config=model.config.distributed_config, dtype=dtype)
        theirs = other.state_dict()
        for name, tensor in model.state_dict().items():
            if name not in theirs or theirs[name].shape != tensor.shape:
                raise UsageError(f"{folder} does not fit this model: {name!r}. Use the options it was saved with.")
            held_here(tensor).copy_(held_here(theirs[name]))
        return True


def _without_own_reduction(backbone: PreTrainedModel) -> list[nn.Module]:
    """(1) The modules of style PARTIAL, with the forward that sums their gradients by itself put back.

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


def _copies(gradient: torch.Tensor) -> int:
    """On how many ranks an element of it lies."""
    parts = 1
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            parts *= 1 if placement.is_replicate() else size
    return collectives.world_size() // parts


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
