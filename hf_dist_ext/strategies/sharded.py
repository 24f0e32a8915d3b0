"""A model whose layers are units of FSDP2, and which of their collectives run around a forward or backward.

"speed": weights are gathered once per step and gradients reduce-scattered once; "memory": every chunk gathers and
reduces, nothing is kept unsharded. HSDP under "memory": every chunk reduce-scatters inside its replica, and replicas
all-reduce once; with a tower per column they all-reduce every chunk, since torch 2.13 can add up partly reduced
gradients only when every backward reaches the same parameters of a unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.tensors import held_here, num_parts


class Sharded(Strategy):
    forwards_are_collective = True
    can_redo = False

    def start(
        self, model: nn.Module, mode: str, loss_parameters: Sequence[nn.Parameter], optimizer: Any, has_towers: bool
    ) -> None:
        super().start(model, mode, loss_parameters, optimizer, has_towers)
        self.root_unit = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
        if self.root_unit is None:  # tensor parallelism without groups to shard over
            return
        meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
        # The dimension along which tensor parallelism splits layers is none of FSDP's.
        dimensions = [[name for name in mesh.mesh_dim_names or range(mesh.ndim) if name != "tp"] for mesh in meshes]
        self.is_hsdp, self.has_towers = any(len(names) > 1 for names in dimensions), has_towers
        if mode == "auto":  # by what unsharded weights and gradients take
            needed = sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())
            mode = collectives.choose_mode(needed / self.rows.shared_by)
        self.mode = mode

    @torch.no_grad()
    def clip_parts(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """The norm of all gradients, every element counted once; they are scaled down to `max_norm` (inf: not at all).
        They may lie on several meshes and devices. One all-reduce."""
        of_copies = defaultdict(list)  # on how many ranks an element lies -> gradients
        for parameter in parameters:
            if parameter.grad is not None:
                of_copies[collectives.world_size() // num_parts(parameter.grad)].append(held_here(parameter.grad))
        return collectives.clip(of_copies, max_norm, self.accelerator.device)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        root, completes = self.root_unit, self.completes
        if root is None:
            yield
            return
        is_sharded_between = self.mode == "memory"
        root.set_requires_gradient_sync(completes or is_sharded_between)
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
            root.set_requires_gradient_sync(self.accelerator.sync_gradients)
            if self.is_hsdp:
                root.set_requires_all_reduce(self.accelerator.sync_gradients)
