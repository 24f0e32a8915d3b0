"""A transformers model as a backbone: built from a config or loaded, without the parts an embedding never uses.

(1) A dict such as {"model_type": "bert", "hidden_size": 128} becomes a config; a misspelt key is an error.
(2) The class is AutoModel, or the encoder alone of an encoder-decoder.
(3) There is no pooler: its parameters never get a gradient, which DDP takes for an error.
(4) Loaded weights are complete: transformers would print a table and go on with random ones.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import splitting

logger = logging.getLogger(__name__)
# of transformers' cached_file: no such file, no network, no access
KINDS = ("gated_repo", "missing_entries", "connection_errors")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")  # in any configuration of text
NOTHING_IS_RAISED = {f"_raise_exceptions_for_{kind}": False for kind in KINDS}


def build_backbone(
    config: PreTrainedConfig,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    distributed_config: Any = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Random weights from a config (`parse_config` makes one of a dict); `dtype` None is float32.

    `distributed_config`: transformers' DistributedConfig, to split the model over processes (tensor parallelism).
    `trust_remote_code`: a config that names code of its own may run it.
    """
    if distributed_config is not None:
        splitting.check_can_be_split(config, distributed_config.tp_size)
    options = _pooler_option(config) | ({"attn_implementation": attn_implementation} if attn_implementation else {})
    if trust_remote_code:
        options["trust_remote_code"] = True
    backbone = without_pooler(build_from_config(_auto_class(config), config, dtype, **options))  # (2)
    return backbone if distributed_config is None else splitting.split(backbone, distributed_config)


def build_from_config(model_class: Any, config: PreTrainedConfig, dtype: Any, **options) -> PreTrainedModel:
    """An AutoModel class's `from_config`; `dtype` None is float32."""
    try:
        return model_class.from_config(config, dtype=parse_dtype(dtype) or torch.float32, **options)
    except (ValueError, ImportError, AssertionError, KeyError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else one_line(error)
        raise UsageError(f"model_config cannot be built: {reason}") from error


def split_options(config: PreTrainedConfig, distributed_config: Any) -> dict[str, Any]:
    """Of `from_pretrained`, by which every process reads its own part of a model; none for one that stays whole."""
    if distributed_config is None:
        return {}
    splitting.check_can_be_split(config, distributed_config.tp_size)
    return {"distributed_config": distributed_config}


def warn_of_own_code(name: str | Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    if not trust_remote_code and "AutoModel" in (getattr(config, "auto_map", None) or {}):
        logger.warning(
            f"{name} comes with code of its own, and transformers' {config.model_type} is used in its place, "
            "since trust_remote_code is false: where the code does something else, such as attention in both "
            "directions, embeddings differ. Set trust_remote_code=true if you trust it."
        )


class StaticConfig(PreTrainedConfig):
    """Of a table of vectors without layers, which sentence-transformers calls StaticEmbedding; `initializer_range` 1.0
    is how it starts."""

    model_type = "static_embedding"
    vocab_size: int = 32000
    hidden_size: int = 256
    initializer_range: float = 1.0
    pad_token_id: int | None = None


AutoConfig.register(StaticConfig.model_type, StaticConfig, exist_ok=True)


def load_complete(model_class: Any, name_or_path: str | Path, **options) -> PreTrainedModel:
    """`model_class.from_pretrained` with every weight but a pooler's (4); `options` name a `dtype`."""
    options["dtype"] = parse_dtype(options["dtype"])
    with loading_errors(name_or_path):
        model, report = model_class.from_pretrained(name_or_path, output_loading_info=True, **options)
    check_complete(model, report["missing_keys"], name_or_path)
    return model


def check_complete(model: PreTrainedModel, missing_keys: Iterable[str], name_or_path: str | Path) -> None:
    """UsageError for weights that the files of a model lack, but for a pooler's."""
    missing = sorted(key for key in missing_keys if not key.startswith("pooler."))
    if missing:
        raise UsageError(
            f'model "{name_or_path}" lacks {len(missing)} weights of {type(model).__name__} ({shortened(missing)}), '
            "which would stay random. Use a complete checkpoint of that architecture, or model_config to train from "
            "scratch."
        )


@contextlib.contextmanager
def loading_errors(name: str | Path) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UsageError(f'model "{name}" cannot be loaded: {one_line(error)}') from error


def parse_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """(1) of a dict with "model_type" and that config's fields."""
    config = dict(config)
    model_type = config.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise UsageError(f'model_config has model_type="{model_type}".{_nearest(model_type, CONFIG_MAPPING)}')
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    for key in config.keys() - known:
        # The config class keeps any key. Some are read though they are no field (head_dim of Qwen3-MoE), so only what
        # looks like a slip of the pen is refused.
        if difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            raise UsageError(f'model_config has no field "{key}" for model_type "{model_type}".{_nearest(key, known)}')
        logger.warning('model_config: "%s" is no declared field of model_type "%s"; check its name', key, model_type)
    try:
        made = config_class(**config)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UsageError(f'model_config does not make a "{model_type}" config: {one_line(error)}') from error
    _refuse_sizes(config, made, "model_config")
    return made


def _refuse_sizes(given: Mapping[str, Any], config: PreTrainedConfig, where: str) -> None:
    """UsageError for a number below 1: a model of no layers builds and trains, others fail inside of torch."""
    for name in SIZES:
        for key in {name, config.attribute_map.get(name, name)} & given.keys():
            if isinstance(given[key], int) and given[key] < 1:
                raise UsageError(f"{where}: {key}={given[key]} must be at least 1.")
    for name in config.sub_configs:
        if isinstance(given.get(name), Mapping):
            _refuse_sizes(given[name], getattr(config, name), f"{where}: {name}")


def parse_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype | None:
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    parsed = getattr(torch, dtype, None)
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise UsageError(f'dtype="{dtype}" is no floating-point type. Choose float32, bfloat16, float16 or auto.')
    return parsed


def _auto_class(config: PreTrainedConfig) -> type:
    # A whole encoder-decoder asks for decoder inputs, which an embedding does not have. By class name, as the saved
    # config of a T5EncoderModel says is_encoder_decoder=False, with which AutoModel builds a T5Model all the same.
    text_class = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    is_encoder_alone = isinstance(text_class, type) and text_class.__name__.endswith("EncoderModel")
    return AutoModelForTextEncoding if is_encoder_alone else AutoModel


def _pooler_option(config: PreTrainedConfig) -> dict[str, bool]:
    model_class = MODEL_MAPPING.get(type(config), None) if _auto_class(config) is AutoModel else None
    return {"add_pooling_layer": False} if _can_omit_pooler(model_class) else {}


def _can_omit_pooler(model_class: type | None) -> bool:
    return isinstance(model_class, type) and "add_pooling_layer" in inspect.signature(model_class).parameters


@contextlib.contextmanager
def pooler_left_out(config: PreTrainedConfig) -> Iterator[dict[str, bool]]:
    """The option of `from_pretrained` for no pooler, if there is one. transformers prints a table of the weights that
    a model does not take; while inside, the pooler's are not in it."""
    kind, option = MODEL_MAPPING.get(type(config), None), _pooler_option(config)
    if not _can_omit_pooler(kind):
        yield option
        return
    before = kind._keys_to_ignore_on_load_unexpected
    kind._keys_to_ignore_on_load_unexpected = [*(before or ()), r"(^|\.)pooler\."]
    try:
        yield option
    finally:
        kind._keys_to_ignore_on_load_unexpected = before


def without_pooler(backbone: PreTrainedModel) -> PreTrainedModel:
    # (3) for classes without the option, and for remote code
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = None if _can_omit_pooler(type(backbone)) else _NoPooler()
    return backbone


class _NoPooler(nn.Module):
    """Stands where a model calls its pooler without asking whether it has one."""

    def forward(self, *args, **kwargs) -> None:
        return None


def _nearest(name: object, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f' Did you mean "{matches[0]}"?' if matches else " See the transformers documentation for the names."


def shortened(names: list[str], limit: int = 5) -> str:
    """The first names and how many more, for a message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
