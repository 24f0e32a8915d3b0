"""A loss whose gradient is made together with it: what the losses in tiles share with autograd.

The gradient is made during the forward pass: by hand (`with_gradients`), or by autograd one tile after another
(`sum_of_tiles`). Backward only multiplies it by what arrives from above, so there is no graph over tiles, and no
gradient of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# (tensors..., needs=[whether each needs a gradient]) -> loss (scalar), metrics, a gradient or None for each tensor
LossAndGradients = Callable[..., tuple[Tensor, Tensor, Sequence[Tensor | None]]]


def with_gradients(name: str, loss_and_gradients: LossAndGradients, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and detached metrics. Gradients have their tensors' dtypes; autocast is off inside.

    name: of the loss, for the RuntimeError of a second derivative.
    """
    return _ByHand.apply(name, loss_and_gradients, torch.is_grad_enabled(), *tensors)


def sum_of_tiles(name: str, tiles: Callable[..., Iterator[Tensor]], *parts: Tensor | Sequence[Tensor]) -> Tensor:
    """The sum of the scalars that `tiles(*parts)` yields. Each one goes through its own backward as soon as it is
    there, which frees its graph.

    parts: tensors, and tensors that are split. A slice of one would have a gradient of its whole size in every tile.
    """
    given, structure = tree_flatten(parts)

    def loss_and_gradients(*tensors: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        leaves = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(tensors, needs, strict=True)]
        loss = tensors[0].new_zeros(())
        with torch.set_grad_enabled(any(needs)):
            for term in tiles(*tree_unflatten(leaves, structure)):
                loss += term.detach()
                if term.requires_grad:
                    term.backward()
        return loss, loss.new_zeros(0), [leaf.grad for leaf in leaves]

    return with_gradients(name, loss_and_gradients, *given)[0]


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name: str, loss_and_gradients: LossAndGradients, is_grad_enabled: bool, *tensors: Tensor):
        needs = [is_grad_enabled and needed for needed in ctx.needs_input_grad[3:]]
        with torch.autocast(tensors[0].device.type, enabled=False):
            loss, metrics, gradients = loss_and_gradients(*tensors, needs=needs)
        ctx.save_for_backward(*(one if needed else None for one, needed in zip(gradients, needs, strict=True)))
        ctx.name, ctx.dtypes = name, [tensor.dtype for tensor in tensors]
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: Tensor):
        if torch.is_grad_enabled():  # not once_differentiable: it lets a second derivative be zero in silence
            raise RuntimeError(
                f"{ctx.name} computes its gradient by hand and cannot differentiate it again. "
                "Call backward without create_graph=True."
            )
        # Multiply, then round: under a loss scale the product is within fp16's range, the gradient alone may not be.
        scaled = (
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (None, None, None, *scaled)
