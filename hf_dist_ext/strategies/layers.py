"""Which classes of a model are its transformer layers, read off its own structure: what FSDP should shard one by one.

The lists that ship with the models (`_no_split_modules`), accelerate's default, cannot be used: some also name
embeddings and inner blocks (Bert, Roberta, XLM-R, ModernBert, SigLIP: "Invariant encountered"), others name nothing
(DistilBert, Deberta, MPNet: only the root and the word embeddings get sharded, silently).

(1) Walk the modules from the root. A stack is a ModuleList, or a Sequential of one class with two or more children.
(2) Its children are layers when they have parameters and parts of their own; a list of plain Linears is no stack.
(3) Never look inside a stack: experts, inner Sequentials and LoRA matrices belong to their layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def repeated_layer_classes(model: nn.Module, min_num_params: int = 0) -> list[str]:
    """Class names of the transformer layers of every tower of `model`, largest stack first; empty if there are none.

    A model with none is still sharded, as one unit. Call it before wrapping; PEFT wrappers are seen through.
    Classes whose largest layer has fewer than `min_num_params` parameters are left out.
    """
    parameter_counts: dict[str, int] = {}
    largest: dict[str, int] = {}
    for layer in _layers(model):
        name, count = type(layer).__name__, sum(p.numel() for p in layer.parameters())
        parameter_counts[name] = parameter_counts.get(name, 0) + count
        largest[name] = max(largest.get(name, 0), count)
    names = sorted(parameter_counts, key=lambda name: -parameter_counts[name])  # stable: ties keep the model's order
    return [name for name in names if largest[name] >= min_num_params]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    layers = _stacked_layers(module)  # (1) (2)
    if layers:
        yield from layers  # (3)
        return
    for child in module.children():
        yield from _layers(child)


def _stacked_layers(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return []
    children = list(container)
    if isinstance(container, nn.Sequential) and (len(children) < 2 or len({type(child) for child in children}) > 1):
        return []  # a head such as Linear -> GELU -> Linear, or a wrapper around one module
    return [child for child in children if list(child.children()) and list(child.parameters())]


def is_multiplied(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether autocast casts this parameter to half precision: the matrices of linear layers and convolutions. Vectors
    are too few to save on; a table's gradient is a sum over all tokens, which half precision rounds at every step."""
    return sum(size > 1 for size in parameter.shape) > 1 and "Embedding" not in type(module).__name__
