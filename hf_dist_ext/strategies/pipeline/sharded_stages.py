"""FSDP2 inside the stages of a pipeline: a rank's layers are units, sharded over the copies of the pipeline.

FULL_SHARD: a layer's weights are whole only while a chunk runs through it, and gradients are reduced after every
backward, by FSDP2's own hooks. While a layer runs, the weights of the next one are gathered. The hooks know backwards
that are one piece: a schedule that computes the gradients of weights later would leave them out, without an error.

SHARD_GRAD_OP: weights are gathered at the first forward of an update and stay; gradients add up whole and are reduced
once, when the update's last backward is done. Between updates everything is sharded. It goes with every schedule, as
no hook has anything to do in between.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import splitting
from hf_dist_ext.strategies.mesh import COPIES, Mesh, Shape

# "sharding" of a run file -> whether a layer's weights are freed behind every chunk.
FREES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


def check(args: Any, shape: Shape, schedule: str) -> None:
    """UsageError for a field `sharding` that has no meaning in these pipelines, or would not be exact."""
    if args.sharding in (None, "NO_SHARD"):
        return
    given = f'sharding="{args.sharding}"'
    if args.sharding not in FREES:
        raise UsageError(
            f"{given} in a pipeline: stages are sharded over all copies of it. Choose one of {', '.join(FREES)}."
        )
    if shape.copies == 1:
        raise UsageError(
            f"{given} in a pipeline shards stages over its copies, and {shape.of_a_model} processes are one pipeline. "
            f"Start {2 * shape.of_a_model} or more, or leave it out."
        )
    if FREES[args.sharding] and schedule in policy.CUT_BACKWARDS:
        raise UsageError(
            f"{given} in a pipeline frees weights behind every backward, and pipeline_schedule={schedule!r} computes "
            'their gradients later. Use "SHARD_GRAD_OP", which frees them once per update, or 1f1b or '
            "interleaved_1f1b."
        )
    splitting.check_optimizer(args, f"{given} in a pipeline")


def of(sharding: str | None, stages: Iterable[Sequence[nn.Module]], mesh: Mesh) -> ShardedStages | None:
    """As the field `sharding` says; None: copies are whole."""
    return ShardedStages(stages, mesh.devices[COPIES], FREES[sharding]) if sharding in FREES else None


def _shardable(module: nn.Module) -> list[nn.Module]:
    """The module, or those inside it: FSDP2 gives a module a class of its own, which Python refuses for one of
    sentence-transformers, whose classes begin with ABC."""
    if isinstance(module, ABC) and not list(module.parameters(recurse=False)):
        return list(module.children())
    return [module]


def _units(modules: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Modules that have a parameter in common (word embeddings and head of a V's first and last stage) are one."""
    units: list[tuple[list[nn.Module], set[nn.Parameter]]] = []
    for module in modules:
        own = set(module.parameters())
        found, theirs = next((unit for unit in units if unit[1] & own), ([], set()))
        if not found:
            units.append((found, theirs))
        found.append(module)
        theirs |= own
    return [found for found, _ in units]


def _pairs_of_layers(stages: Iterable[Sequence[nn.Module]]) -> Iterator[tuple[Any, Any]]:
    """Layers that run one after the other in a stage. FSDP2 sees no order by itself, as what calls the layers is no
    unit: a layer's weights would be gathered when the layer before has ended."""
    for stage in stages:
        yield from (pair for pair in pairwise(stage) if type(pair[0]) is type(pair[1]))


class ShardedStages:
    """
    Args:
        stages: of each of this rank's stages the layers and what stands beside them, in the order in which they run:
            the units.
        mesh: of the copies, one dimension.
        frees: a layer's weights behind every chunk (FULL_SHARD).
    """

    def __init__(self, stages: Iterable[Sequence[nn.Module]], mesh: Any, frees: bool):
        self.frees = frees
        stages = [
            [one for module in stage for one in _shardable(module) if any(True for _ in one.parameters())]
            for stage in stages
        ]
        modules, following = [module for stage in stages for module in stage], list(_pairs_of_layers(stages))
        for unit in _units(modules):
            fully_shard(unit, mesh=mesh, reshard_after_forward=frees)
        # A root, which never runs, so that units share streams and buffers: the model itself runs only on the last
        # stage. FSDP2 would take the first unit that runs for a root of its own.
        self.root: Any = fully_shard(nn.Sequential(*modules), mesh=mesh)
        self.root._get_fsdp_state()._lazy_init()
        for layer, after in following:
            layer.set_modules_to_forward_prefetch([after])
            if any(p.requires_grad for p in layer.parameters()):  # else no backward may come to it
                after.set_modules_to_backward_prefetch([layer])
        self._reduces(frees)

    def _reduces(self, is_last: bool) -> None:
        """Whether a backward reduces gradients and frees weights."""
        self.root.set_requires_gradient_sync(is_last)
        self.root.set_reshard_after_backward(is_last)
        self.root.set_is_last_backward(is_last)

    def finish_update(self) -> None:
        """Behind its last backward: gradients are those of all copies, their mean, and sharded as the weights are."""
        if self.frees:
            return
        self._reduces(True)
        self.root._get_fsdp_state()._root_post_backward_final_callback()  # as torch's own pipelines end a step
        self._reduces(False)

    def free(self) -> None:
        """Behind an evaluation: weights are sharded again."""
        for unit in self.root.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
