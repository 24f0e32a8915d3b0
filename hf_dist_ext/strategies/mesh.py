"""The mesh of processes on which pipelines lie: copies of the model x its stages x parts of a layer.

The last dimension runs fastest: T consecutive ranks split the layers of a stage between them (tensor parallelism),
P x T consecutive ranks are a pipeline and hold the same rows, and every P x T-th rank has the same part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_dist_ext import launched
from hf_dist_ext.strategies.tensors import held_here, is_split

COPIES, STAGES, PARTS = "dp", "pp", "tp"


class Shape(NamedTuple):
    """Ranks along each dimension."""

    copies: int
    stages: int
    parts: int

    @property
    def of_a_model(self) -> int:
        """Consecutive ranks that hold one copy of the model, and the same rows."""
        return self.stages * self.parts

    def place(self, rank: int) -> Shape:
        """Of a rank, along each dimension."""
        return Shape(rank // self.of_a_model, rank // self.parts % self.stages, rank % self.parts)


def shape_of(args: Any) -> Shape:
    """What a run asks for: `pipeline_parallel_size`, and tensor parallelism as the launcher's YAML says."""
    stages, parts = args.pipeline_parallel_size or 1, launched.mesh_size(PARTS)
    return Shape(launched.processes() // (stages * parts), stages, parts)


class Mesh:
    """The groups of this rank, one per dimension with more than one rank.

    Attributes:
        shape: ranks along each dimension.
        place: this rank's.
        devices: the dimensions with more than one rank; its parts `devices["dp"]`, ... are what DTensors lie on.
    """

    def __init__(self, shape: Shape, device: torch.device, timeout: timedelta):
        """Every process calls it. `timeout`: how long the groups wait for a rank."""
        self.shape, self.place = shape, shape.place(dist.get_rank())
        sizes = {name: size for name, size in zip((COPIES, STAGES, PARTS), shape, strict=True) if size > 1}
        ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
        groups = []
        for axis in range(ranks.dim()):
            of_groups = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])
            groups.append(dist.new_subgroups_by_enumeration(of_groups.tolist(), timeout)[0])
        self.devices = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))

    def group(self, name: str) -> Any:
        """This rank's along a dimension; None where it is alone."""
        return self.devices.get_group(name) if name in self.devices.mesh_dim_names else None

    @torch.no_grad()
    def agree(self, parameters: Iterable[nn.Parameter]) -> None:
        """What ranks drew for themselves (a new projection) is the same wherever it lies. Parameters that ranks of a
        layer split between them are those of the first copy, others those of its first rank."""
        for parameter in parameters:
            if self.shape.parts > 1 and not is_split(parameter):
                dist.broadcast(parameter.data, group=self.group(PARTS), group_src=0)
            if self.shape.copies > 1:
                dist.broadcast(held_here(parameter.data), group=self.group(COPIES), group_src=0)

    def arrange(self, optimizer: torch.optim.Optimizer) -> None:
        """transformers 5.23 (trainer.py, create_optimizer) makes a group of the optimizer for every mesh on which
        parameters of a rank lie, and stages have parameters on different ones. Here: of all groups with the same
        options one for those that ranks of a layer split between them, and one for the others; they may be empty."""
        merged: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            same = next((parameters for found, parameters in merged if found == options), None)
            if same is None:
                merged.append((options, list(group["params"])))
            else:
                same += group["params"]
        optimizer.param_groups[:] = [
            options | {"params": [p for p in parameters if _is_on(p, PARTS) is are_parts]}
            for options, parameters in merged
            for are_parts in (True, False)
        ]


def _is_on(parameter: nn.Parameter, name: str) -> bool:
    return is_split(parameter) and name in parameter.device_mesh.mesh_dim_names


def make(args: Any) -> Mesh:
    """Every process calls it."""
    device = args.device  # with it come the processes' connections
    return Mesh(shape_of(args), device, timedelta(seconds=args.ddp_timeout))
