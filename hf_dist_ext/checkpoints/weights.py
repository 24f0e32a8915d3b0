"""Resuming models whose folder names weights otherwise than memory does.

Trainer loads a checkpoint's file by the names of memory. transformers writes many architectures under older names
(LLaVA's `language_model.model.*` is `model.language_model.*` in memory), and Trainer then warns about missing keys and
goes on with the weights it has: random or base ones. Here such a folder is read the way from_pretrained reads it, and
must be complete.

The classes of the model in memory read it. So a model that came with code of its own can be resumed, and code that
lies in a checkpoint is not run.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from hf_dist_ext.checkpoints import sentence_model
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.models.weights import load_weights
from hf_dist_ext.strategies.tensors import own_class

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weights_in_memory_names(model: nn.Module, folder: str) -> dict[str, torch.Tensor] | None:
    """The weights of a folder under the model's own names; None when the file has these names already."""
    if is_of_sentence_transformers(model):
        return sentence_model.state_dict_of(model, folder) if Path(folder, "modules.json").is_file() else None
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return None
    names = _names_in(Path(folder))
    if names is None or names <= model.state_dict().keys():
        return None
    # float32 holds what any of the three precisions holds; loading casts back to each parameter's own.
    return own_class(model).from_pretrained(folder, dtype=torch.float32, config=model.config).state_dict()


def load_in_memory_names(model: nn.Module, folder: str) -> bool:
    """Load a bare model whose folder has key names of its own: Trainer's loading would match nothing and say so in a
    warning only. False where the names agree."""
    weights = weights_in_memory_names(model, folder)
    if weights is not None:
        load_weights(model, weights, source=folder)
    return weights is not None


def _names_in(folder: Path) -> set[str] | None:
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        return None
    with safe_open(folder / SINGLE, "pt") as file:
        return set(file.keys())
