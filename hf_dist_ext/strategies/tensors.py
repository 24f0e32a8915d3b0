"""Tensors of which a process holds a part: a DTensor (FSDP2, tensor parallelism) or a weight that ZeRO-3 has split.

Nothing outside of this package asks a tensor how it is split. `gathered` makes whole ones, `put` writes a whole one
into the part that a process holds, `held_here` is that part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def num_elements(tensor: torch.Tensor) -> int:
    """Of the whole weight, also where ZeRO-3 holds a part of it."""
    return getattr(tensor, "ds_numel", tensor.numel())


def loss_parameters(loss: Any) -> list[nn.Parameter]:
    """Those of a loss that train, such as a temperature."""
    return [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []


def own_class(module: Any) -> Any:
    """Of a module; FSDP2 makes a class of its own of it, with a prefix."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


def is_split(tensor: torch.Tensor) -> bool:
    """Whether it lies on a mesh of processes."""
    return isinstance(tensor, DTensor)


def held_here(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds; a view of it, without a collective."""
    held = getattr(tensor, "ds_tensor", tensor)  # under ZeRO-3
    return held.to_local() if isinstance(held, DTensor) else held


def num_parts(tensor: torch.Tensor) -> int:
    """Over how many ranks its elements are dealt out."""
    parts = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            parts *= 1 if placement.is_replicate() else size
    return parts


def split_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Its gradient, of which this process holds the same part: that of word embeddings whose rows ranks split between
    them is whole on each in torch 2.13."""
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


@contextlib.contextmanager
def whole_under_zero(tensor: torch.Tensor) -> Iterator[None]:
    """While inside, a weight that ZeRO-3 holds in parts is whole on every rank."""
    if not hasattr(tensor, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        yield


@contextlib.contextmanager
def whole(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The whole tensor, without its graph, while inside. Every rank enters it."""
    with whole_under_zero(tensor):
        yield tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def gathered(tensors: Mapping[str, torch.Tensor], keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors on the CPU, one after the other (each may be a collective); yielded only where `keep`."""
    for name, tensor in tensors.items():
        with whole(tensor) as content:
            copy = content.cpu().clone().contiguous() if keep else None
            del content
        if keep:
            yield name, copy


def put(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Copy a whole tensor, or this rank's part of it; or one that is split in the same way."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and not isinstance(content, DTensor):
        # no rank sends: all of them read the same file
        content = content.to(tensor.device, tensor.dtype)
        content = distribute_tensor(content, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(content)


def empty_like(parameter: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of a global size, split as the parameter is when it has its shape."""
    if isinstance(parameter, DTensor) and tuple(size) == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(tuple(size), dtype=dtype, device="cpu" if len(size) == 0 else parameter.device)


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
