"""The weights of a checkpoint that holds all of them, in any of its forms, into the model in memory.

Trainer loads a checkpoint's file by the names of memory. transformers writes many architectures under older names
(LLaVA's `language_model.model.*` is `model.language_model.*` in memory), and Trainer then warns about missing keys and
goes on with the weights it has: random or base ones. Here such a folder is read the way from_pretrained reads it, and
nothing is taken unless all of it fits the model.

The classes of the model in memory read it. So a model that came with code of its own can be resumed, and code that
lies in a checkpoint is not run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from hf_dist_ext.checkpoints import safe_reading, sentence_model
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import adapters_of
from hf_dist_ext.models.backbones import shortened
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.tensors import put, whole

SHARDED_BY_FSDP = "pytorch_model_fsdp_0"  # what accelerate calls it


def load(model: nn.Module, folder: Path, trust: bool, strategy: Strategy) -> bool:
    """All weights of a checkpoint into a bare model, which may be sharded or split already. Every rank calls it.
    False: it holds adapters that peft reads."""
    safe_reading.check(folder, trust)
    is_own_folder = is_of_sentence_transformers(model) and (folder / "modules.json").is_file()
    if adapters_of(model) and not is_own_folder and list(folder.glob("**/adapter_model.*")):
        return False
    if (folder / SHARDED_BY_FSDP).is_dir():
        state = {"model": {name: value.clone() for name, value in model.state_dict().items()}}
        safe_reading.load(state, folder / SHARDED_BY_FSDP, trust)
        weights = state["model"]
    elif is_own_folder:
        weights = sentence_model.state_dict_of(model, folder, strategy.read_backbone)
    elif strategy.split:  # every rank reads its own part
        weights = _read(model, folder, strategy)
    else:
        weights = _of_files(folder)
        is_whole = isinstance(model, PreTrainedModel) and not adapters_of(model)
        if is_whole and not weights.keys() <= model.state_dict().keys():
            weights = _read(model, folder, strategy)
    if strategy.split:  # a folder holds adapters of all layers
        weights = {name: weights[name] for name in model.state_dict().keys() & weights.keys()}
    take(model, dict(sorted(weights.items())), folder)  # in one order on all ranks: `whole` is a collective
    return True


def _read(model: nn.Module, folder: Path, strategy: Strategy) -> dict[str, torch.Tensor]:
    # float32 holds what either half precision holds; copying casts back to each parameter's own.
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()}, torch.float32)
    return sentence_model.read(model, folder, dtype, strategy.read_backbone)


def _of_files(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    for path in [] if weights else sorted(folder.glob("pytorch_model*.bin")):
        weights |= torch.load(path, map_location="cpu", weights_only=True)
    if not weights:
        raise UsageError(f"{folder} holds no weights that are known here.")
    return weights


@torch.no_grad()
def take(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str | Path) -> None:
    """Whole tensors, or this rank's part of them; all or nothing: UsageError that names what does not fit."""
    own = model.state_dict(keep_vars=True)  # in which tied weights are one tensor
    given = {id(own[name]) for name in weights if name in own}
    not_saved = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    others = {name: own[name] for name in own if id(own[name]) in given or name in not_saved}
    refuse(source, "weights", differences(shapes(own), shapes(others | weights)))
    for name, content in weights.items():
        with whole(content) as tensor:
            put(own[name], tensor)


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def differences(own: Mapping[str, tuple], given: Mapping[str, tuple]) -> dict[str, list[str]]:
    """How given shapes differ from a model's own, by name: kind of difference -> words."""
    return {
        "missing": [name for name in own if name not in given],
        "surplus": [name for name in given if name not in own],
        "of another shape": [
            f"{name} {given[name]} instead of {own[name]}"
            for name in own
            if name in given and given[name] != own[name]
        ],
    }


def refuse(source: str | Path, what: str, found: Mapping[str, list[str]]) -> None:
    """UsageError where there are differences. `what`: of the run they are."""
    if words := [f"{len(names)} {kind}: {shortened(names)}" for kind, names in found.items() if names]:
        raise UsageError(
            f"{source} does not fit this run; {what} {'; '.join(words)}. Use the model, its options, and the "
            "trainable_modules or frozen_modules that it was saved with."
        )
