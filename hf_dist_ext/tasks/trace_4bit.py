"""A base in 4 bits as a trace runs it, without bitsandbytes: what its layers store, and what they keep.

`load_in_4bit` puts a layer of bitsandbytes in the place of every linear layer but those that transformers leaves as
they are (an output layer, weights that are tied, what a model keeps in float32). Such a layer unpacks its weight for
each product, keeps no copy of it for the backward, and no input either, since the weight has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module


class Linear4bit(nn.Linear):
    """Its weight has the shape of the numbers, and a byte for each that stands for 4 bits."""

    def __init__(self, in_features: int, out_features: int, bias: torch.Tensor | None, computes_in: torch.dtype):
        super().__init__(in_features, out_features, bias is not None)
        self.computes_in = computes_in
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=torch.uint8), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(torch.empty_like(bias, dtype=computes_in), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.to(self.computes_in)
        with saved_tensors_hooks(_itself, _itself):  # what is saved here is a weight that was unpacked
            product = functional.linear(rows, self.weight.to(self.computes_in), self.bias)
        return product.to(input.dtype)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_4_bits(backbone: Any, computes_in: torch.dtype) -> Any:
    """The backbone with such layers, all of it frozen. On the meta device."""
    kept = [*get_keys_to_not_convert(backbone), *(backbone._keep_in_fp32_modules or [])]
    for name, module in list(backbone.named_modules()):
        if type(module) not in (nn.Linear, Conv1D) or not should_convert_module(name, kept):
            continue
        sizes = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
        backbone.set_submodule(name, Linear4bit(*sizes, module.bias, computes_in))
    return backbone.requires_grad_(False)


def as_bitsandbytes_runs_adapters(model: nn.Module) -> None:
    """Under autocast peft's adapters over such layers take their input as it is; over others they make it float32."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
