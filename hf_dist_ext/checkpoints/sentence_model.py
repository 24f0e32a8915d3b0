"""Folders of a model of sentence-transformers: its own `save_pretrained` writes them, its own loading reads them.

Text Embeddings Inference (July 2026) cannot parse what release 6 writes, vLLM pooled it wrongly until August 2026, and
older releases stop at keys that they do not know. Where release 6 reads two spellings, `for_older_readers` gives the
older one.

`save_pretrained` takes the weights from the live model, which may be split over processes, or changed while a thread
writes. So an empty copy of the model is made before anything wraps it, and whole weights go into that copy.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import PREFIX, WEIGHTS, adapters_of, remove_from
from hf_dist_ext.models.backbones import check_complete, pooler_left_out, without_pooler
from hf_dist_ext.models.folders import read_json
from hf_dist_ext.strategies.tensors import own_class

Read = Callable[..., Any]  # as `Strategy.read_backbone`

# a mode of Pooling -> the boolean that names it in the older layout
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def empty_copy(model: Any, has_hooks: bool = False) -> Any:
    """The model without its weights: parameters and buffers are on the meta device. Call it before wrapping.
    `has_hooks`: whoever split the model over processes has put hooks into its backbone, which the copy lacks."""
    kept = {id(p): nn.Parameter(_on_meta(p), p.requires_grad) for p in model.parameters()}
    kept |= {id(buffer): _on_meta(buffer) for buffer in model.buffers()}
    kept |= {id(one): one for one in _shared(model)}
    inside = model.transformers_model
    if inside is not None and (has_hooks or any(map(is_sharded, inside.modules()))):
        kept[id(inside)] = _made_anew(inside)
    of_backbone = set() if inside is None else set(inside.modules())
    for module in set(filter(is_sharded, model.modules())) - of_backbone:  # those of a pipeline's last stage
        kept[id(module)] = _without_hooks(module, kept)
    return copy.deepcopy(model, kept)


def _shared(model: Any) -> list[Any]:
    """What a copy has in common with its model: the card, which knows its trainer, and handles of hooks, such as
    transformers' of gradient checkpointing. A handle can not be copied when a pipeline has replaced its module."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    candidates = [one for value in attributes for one in (value if isinstance(value, list) else [value])]
    return [model.model_card_data, *[one for one in candidates if isinstance(one, RemovableHandle)]]


def _made_anew(inside: Any) -> nn.Module:
    """Of a model that transformers has sharded while it read it, which torch does not copy."""
    config = copy.deepcopy(inside.config)
    with torch.device("meta"):
        made = without_pooler(own_class(inside)._from_config(config))
        for name, adapter in adapters_of(inside).items():
            made.add_adapter(adapter, name)
    return made


def _without_hooks(module: nn.Module, kept: dict[int, Any]) -> nn.Module:
    """A copy of a module that FSDP2 has taken apart, of the class that it was of before."""
    made = own_class(module).__new__(own_class(module))
    for name, value in vars(module).items():
        if not str(name).startswith("__composable_api"):  # FSDP2's state (torch 2.13, _composable/contract.py)
            vars(made)[name] = type(value)() if "_hooks" in name else copy.deepcopy(value, kept)
    return made


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def whole_copy(model: Any, weights: Mapping[str, torch.Tensor]) -> Any:
    """Of a model that is split over processes, as one process would have it. `weights`: the whole state dict."""
    made = empty_copy(model, has_hooks=True)
    made.load_state_dict(weights, assign=True)
    own = dict(model.named_buffers())
    for name, buffer in list(made.named_buffers()):  # tables that are in no state dict
        if buffer.is_meta:
            path, _, last = name.rpartition(".")
            made.get_submodule(path).register_buffer(last, own[name].detach().clone(), persistent=False)
    return made


def save(empty: Any, weights: Mapping[str, torch.Tensor], folder: str | Path, merged: bool = False) -> None:
    """`empty`: of `empty_copy`; `weights`: the model's state dict, with `merged` without its adapters. The card is
    written by who knows the run."""
    kept = (*empty.parameters(), *empty.buffers(), *_shared(empty))
    filled = copy.deepcopy(empty, {id(one): one for one in kept})
    if merged:
        remove_from(filled.transformers_model)
    alone = {name: tensor if is_alone(tensor) else tensor.clone() for name, tensor in weights.items()}
    filled.load_state_dict(alone, assign=True)
    write(filled, folder)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether it fills its storage. safetensors writes no others: DeepSpeed's weights are parts of one long tensor."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def write(model: Any, folder: str | Path) -> None:
    """A whole model's folder, without a card."""
    model.save_pretrained(str(folder), create_model_card=False)
    for_older_readers(folder)


def for_older_readers(folder: str | Path) -> None:
    """Rewrite the configurations of a SentenceTransformer's modules as its older releases and servers read them. What
    only release 6 can say stays as it is: token vectors, routers, chat messages, pictures."""
    folder = Path(folder)
    about = read_json(folder / "config_sentence_transformers.json", missing_is_empty=True)
    if about.get("model_type") != "SentenceTransformer":
        return
    modules = read_json(folder / "modules.json")
    for module in modules:
        package, _, kind = module["type"].rpartition(".")
        if not package.startswith("sentence_transformers.") or kind not in OLDER:
            continue
        path = folder / module["path"] / ("sentence_bert_config.json" if kind == "Transformer" else "config.json")
        config = read_json(path, missing_is_empty=True)
        _write(path, OLDER[kind](config, path.parent))
        module["type"] = f"sentence_transformers.models.{kind}"
    _write(folder / "modules.json", modules)


def _older_transformer(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    if all(config.get(key, value) == value for key, value in READS_TEXT.items()):
        config = {key: value for key, value in config.items() if key not in READS_TEXT}
    length = read_json(folder / "tokenizer_config.json", missing_is_empty=True).get("model_max_length", NO_LIMIT)
    return ({"max_seq_length": length} if length < NO_LIMIT else {}) | {"do_lower_case": False} | config


def _older_pooling(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    mode, width = config["pooling_mode"], config["embedding_dimension"]
    modes = mode if isinstance(mode, list) else [mode]
    flags = {flag: name in modes for name, flag in POOLING_FLAGS.items()}
    # Flags say which vectors are put together, in their own order; servers know no list.
    is_said_by_flags = len(modes) > 1 and modes == [name for name in POOLING_FLAGS if name in modes]
    older = {"word_embedding_dimension": width, **flags, "include_prompt": config.get("include_prompt", True)}
    return older if is_said_by_flags else older | {"pooling_mode": mode}


def _older_dense(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {key: value for key, value in config.items() if DENSE_DEFAULTS.get(key) != value}


NO_LIMIT = 1_000_000  # a tokenizer without a limit says 1e30
READS_TEXT = {  # what release 6 takes for granted where the keys are missing
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
DENSE_DEFAULTS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
OLDER = {
    "Transformer": _older_transformer,
    "Pooling": _older_pooling,
    "Dense": _older_dense,
    "Normalize": _older_dense,
}


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def state_dict_of(model: Any, folder: Path, read_class: Read) -> dict[str, torch.Tensor]:
    """The weights of a folder that `save` wrote, under the model's own names. The classes of the model in memory read
    it, so code that lies in the folder is not run. The base of adapters is in no checkpoint, and stays the model's.
    `read_class`: of a class and a folder a model of transformers, or a part of one."""
    found: dict[str, torch.Tensor] = {}
    saved, own = read_json(folder / "modules.json"), list(model.named_children())
    if len(saved) != len(own):
        counts = f"{len(saved)} modules instead of {len(own)}"
        raise UsageError(f"{folder} does not fit this model: {counts}. Use the options it was saved with.")
    with _keeps_float64(model) as dtype:
        for (name, module), one in zip(own, saved, strict=True):
            for prefix, part, place in _parts(name, module, folder / one["path"]):
                weights = _weights_of(part, place, dtype, read_class)
                found |= {f"{prefix}.{key}": value for key, value in weights.items()}
    return found


def _parts(name: str, module: Any, place: Path) -> Iterator[tuple[str, Any, Path]]:
    """A module, or those of each of its routes: (name in the model, module, where it lies)."""
    if own_class(module).__name__ != "Router":
        yield name, module, place
        return
    for route, lie in read_json(place / module.config_file_name)["structure"].items():
        for number, (part, below) in enumerate(zip(module.sub_modules[route], lie, strict=True)):
            yield from _parts(f"{name}.sub_modules.{route}.{number}", part, place / below)


def _weights_of(module: Any, place: Path, dtype: torch.dtype, read_class: Read) -> dict[str, torch.Tensor]:
    own = module.state_dict()
    if not own:
        return {}
    if adapters_of(inside := getattr(module, "model", None)):
        # at the root lies the active one, or that of a PeftModel which is called "default"
        (active,) = inside.active_adapters() if isinstance(inside, PreTrainedModel) else ["default"]
        return _with_adapters(own, place, inside, active)
    if not all(key.startswith("model.") for key in own) or not isinstance(inside, PreTrainedModel):
        kind = own_class(module)
        takes_folder_below = "subfolder" in inspect.signature(kind.load).parameters
        loaded = kind.load(str(place), **({"subfolder": ""} if takes_folder_below else {}))
        return loaded.state_dict()
    has_pooler = any(key.startswith("model.pooler.") for key in own)
    with nullcontext({}) if has_pooler else pooler_left_out(module.model.config) as without:
        weights = read(module.model, place, dtype, read_class, **without)
    found = {f"model.{key}": value for key, value in weights.items()}
    # a model of a run file lacks a pooler that no embedding depends on (models/from_run.py)
    return {key: value for key, value in found.items() if key in own or ".pooler." not in key}


def read(model: Any, folder: Path, dtype: torch.dtype, read_class: Read, **options: Any) -> dict[str, torch.Tensor]:
    """The weights that a folder holds of a model of transformers, as its own class reads them; all or an error."""
    options |= {"dtype": dtype, "config": model.config, "output_loading_info": True}
    loaded, report = read_class(own_class(model), folder, **options)
    check_complete(loaded, report["missing_keys"], folder)
    return loaded.state_dict()


def _with_adapters(own: Mapping[str, torch.Tensor], place: Path, inside: Any, adapter: str) -> dict[str, torch.Tensor]:
    """Adapters are read as they are, since transformers rounds them to the precision of their base. peft says what it
    calls each weight in a file, which every kind of adapter does in its own way."""
    from peft import get_peft_model_state_dict

    if not (place / WEIGHTS).is_file():
        raise UsageError(
            f"{place} holds no adapters, and this run trains some. Resume it without them, or start a run with "
            f'model_name_or_path="{place}".'
        )
    names = list(own)
    numbers = {name.removeprefix("model."): torch.tensor(number) for number, name in enumerate(names)}
    in_file = get_peft_model_state_dict(inside, numbers, adapter_name=adapter)
    named = {key.removeprefix(PREFIX): names[int(number)] for key, number in in_file.items()}
    found = {name: own[name] for name in own.keys() - {*named.values()}}
    for key, value in load_file(place / WEIGHTS).items():
        plain = key.removeprefix(PREFIX)
        found[named.get(plain, f"model.{plain}")] = value
    return found


@contextmanager
def _keeps_float64(model: nn.Module) -> Iterator[torch.dtype]:
    """A Dense module is made in torch's default precision before it reads its file, whose float64 it would round.
    Gives the precision that holds all of the model's."""
    before, has_float64 = torch.get_default_dtype(), any(p.dtype == torch.float64 for p in model.parameters())
    torch.set_default_dtype(torch.float64 if has_float64 else before)
    try:
        yield torch.float64 if has_float64 else torch.float32
    finally:
        torch.set_default_dtype(before)


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 has taken its weights apart."""
    return type(model) is not own_class(model)
