"""Resuming models whose folder names weights otherwise than memory does.

Trainer loads a checkpoint's file by the names of memory. transformers writes many architectures under older names
(LLaVA's `language_model.model.*` is `model.language_model.*` in memory), and Trainer then warns about missing keys and
goes on with the weights it has: random or base ones. Here such a folder is read the way from_pretrained reads it, and
must be complete.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from .modeling import EmbeddingModel, weights_from_folder
from .towers import TowerModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weights_in_memory_names(model: nn.Module, folder: str) -> dict[str, torch.Tensor] | None:
    """The weights of a folder under the model's own names; None when the file has these names already."""
    if isinstance(model, EmbeddingModel):
        return weights_from_folder(folder) if Path(folder, "modules.json").is_file() else None
    if isinstance(model, TowerModel):
        return TowerModel.from_pretrained(folder).state_dict() if Path(folder, "towers.json").is_file() else None
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return None
    names = _names_in(Path(folder))
    if names is None or names <= model.state_dict().keys():
        return None
    # float32 holds what any of the three precisions holds; loading casts back to each parameter's own.
    base = next(cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))
    return base.from_pretrained(folder, dtype=torch.float32, config=model.config).state_dict()


def _names_in(folder: Path) -> set[str] | None:
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        return None
    with safe_open(folder / SINGLE, "pt") as file:
        return set(file.keys())
