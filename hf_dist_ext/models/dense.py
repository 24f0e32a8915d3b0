"""What a pooled vector goes through before it is normalized: linear maps, as in sentence-transformers' Dense.

    vector -> activation(vector W^T + b)  [+ vector, or + vector R^T where the widths differ]

One map keeps the names of a linear layer (`projection.weight`); of several each has its number in front
(`projection.0.weight`). The folder of a Dense module calls the same weights `linear.weight`, and the others as here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist_ext.errors import UsageError

IDENTITY = "torch.nn.modules.linear.Identity"
TANH = "torch.nn.modules.activation.Tanh"  # of a Dense folder that names none


@dataclass(frozen=True)
class DenseLayer:
    """What a Dense module is beside its weights; `activation` is the full name of a class of torch."""

    in_features: int
    out_features: int
    bias: bool = False
    activation: str = IDENTITY
    use_residual: bool = False

    @property
    def is_linear(self) -> bool:
        return self.activation == IDENTITY and not self.use_residual


class Dense(nn.Linear):
    """(B, in_features) -> (B, out_features)."""

    def __init__(self, layer: DenseLayer, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__(layer.in_features, layer.out_features, layer.bias, device, dtype)
        self.layer = layer
        self.activation_function = _activation(layer.activation).to(device=device, dtype=dtype)
        self.residual = None
        if layer.use_residual and layer.in_features != layer.out_features:
            self.residual = nn.Linear(layer.in_features, layer.out_features, False, device, dtype)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        mapped = self.activation_function(super().forward(vectors))
        if not self.layer.use_residual:
            return mapped
        return mapped + (vectors if self.residual is None else self.residual(vectors))


def build(layers: Sequence[DenseLayer], device: torch.device, dtype: torch.dtype) -> Dense | nn.Sequential | None:
    """None for no layers. Each takes what the one before it gives."""
    made = [Dense(layer, device, dtype) for layer in layers]
    for one, following in zip(layers, layers[1:], strict=False):
        if one.out_features != following.in_features:
            raise UsageError(
                f"A Dense module gives {one.out_features} dimensions and the next one takes {following.in_features}."
            )
    return nn.Sequential(*made) if len(made) > 1 else made[0] if made else None


def layers_of(projection: nn.Module | None) -> list[DenseLayer]:
    """Of what `build` made."""
    if projection is None:
        return []
    return [module.layer for module in projection.modules() if isinstance(module, Dense)]


def parse(layers: Sequence[DenseLayer | Mapping[str, Any]]) -> list[DenseLayer]:
    """Layers as they are, or as a manifest holds them."""
    return [layer if isinstance(layer, DenseLayer) else DenseLayer(**layer) for layer in layers]


def _activation(name: str) -> nn.Module:
    """As sentence-transformers does: a class of torch, made without arguments. No other code is imported."""
    module_name, _, class_name = name.rpartition(".")
    kind = None
    if module_name.startswith("torch.nn"):
        with contextlib.suppress(ImportError):
            kind = getattr(importlib.import_module(module_name), class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(
            f'A Dense module has the activation "{name}", which is no module of torch.nn. Code that comes with a '
            "folder is not run here."
        )
    return kind()
