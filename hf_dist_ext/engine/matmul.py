"""Matrix products of a loss in tiles: in its own precision, or of bfloat16 factors with sums in float32.

A bfloat16 factor has 8 bits, so a score of length-one vectors is off by about 1e-3; sums of scores, exponentials and
gradients stay in float32. A CUDA device multiplies such factors in its tensor cores and gives the float32 sums. torch
has no such product elsewhere: there the rounded factors are multiplied in float32, which gives the same numbers in
the time of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Matmul(NamedTuple):
    """In the dtype of whoever calls, or `in_bf16`."""

    in_bf16: bool = False

    def dtype(self, of_sums: torch.dtype) -> torch.dtype:
        """Of factors, where sums have `of_sums`."""
        return torch.bfloat16 if self.in_bf16 else of_sums

    def factor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype(tensor.dtype))

    def write(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """out = left @ right, of factors."""
        if not self.in_bf16:
            torch.mm(left, right, out=out)
        elif out.device.type == "cuda":
            torch.mm(left, right, out_dtype=torch.float32, out=out)
        else:
            torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)

    def add(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right. Left is rounded here, right is a factor."""
        if not self.in_bf16:
            total.addmm_(left, right)
        elif total.device.type == "cuda":
            total += torch.mm(left.bfloat16(), right, out_dtype=torch.float32)
        else:
            total.addmm_(left.bfloat16().to(total.dtype), right.to(total.dtype))
