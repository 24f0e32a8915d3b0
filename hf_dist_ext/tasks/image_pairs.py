"""Task "embedding" with pictures: pairs of a text and an image -> `TowerModel`, one tower or both trained.

(1) the towers: a dual encoder (CLIP, SigLIP) as its text and its image model, from a folder, the hub or a config
    (whose vocabulary is then the tokenizer's), or a folder that an earlier run wrote
(2) a column of pictures goes to the image tower, every other to the text tower
(3) SigLIP's text model reads a fixed position, so its texts always have the full width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig

from hf_dist_ext.data import glyphs
from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.engine.families import reads_fixed_width
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import load_complete, parse_config, parse_dtype
from hf_dist_ext.models.dual_encoders import DUAL_ENCODERS, IMAGE, TEXT
from hf_dist_ext.models.model_folder import first_module, read_json
from hf_dist_ext.models.router_folder import is_router
from hf_dist_ext.models.towers import TowerModel, load_tower
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.tasks.image_text import load_processor, with_vocabulary


def has_towers(config: RunConfig) -> bool:
    """Whether the run's model is one of towers."""
    if config.model_config is not None:
        return config.model_config.get("model_type") in DUAL_ENCODERS
    if _is_of_towers(config):
        return True
    try:
        return config_of(config).model_type in DUAL_ENCODERS
    except (OSError, ValueError, KeyError):  # EmbeddingModel's own loading says what is wrong
        return False


def refuse_sources(config: RunConfig) -> None:
    if has_towers(config):
        raise UsageError("datasets hold texts, and the model is a dual encoder. Train it on one dataset_name.")


def build_towers(run: Run, processor: Any, columns: list[str], image_columns: list[str]) -> TowerModel:
    """A `TowerModel` for the run's columns."""
    config = run.options
    for name in ("is_causal", "pooling", "projection_dim"):
        if name in run.given:
            raise UsageError(f"{name} is given, but a model of towers ends in its own vectors. Remove {name}.")
    if config.processing_kwargs is not None:
        raise UsageError(
            "processing_kwargs are options of a vision-language model, and this is a dual encoder. Remove them."
        )
    column_to_tower = {column: IMAGE if column in image_columns else TEXT for column in columns}  # (2)
    if config.model_config is None and _is_of_towers(config):
        folder, options = Path(config.model_name_or_path), _options(config)
        model = TowerModel.from_description(folder, lambda name, kind: load_tower(folder / name, kind, **options))
        model.column_to_tower = column_to_tower
        if "normalize" in run.given:  # else as the folder says
            model.normalize = config.normalize
        return model.train()
    if config.model_config is not None:
        dual = parse_config(with_vocabulary(config.model_config, processor))
    else:
        dual = config_of(config)
    towers = {name: _tower(config, dual, name) for name in (TEXT, IMAGE)}
    model = TowerModel(towers, column_to_tower, config.normalize)
    if config.model_config is None:
        own = read_json(Path(config.model_name_or_path, "config_sentence_transformers.json"), missing_is_empty=True)
        model.prompts, model.default_prompt_name = own.get("prompts") or {}, own.get("default_prompt_name")
    return model


def part_of(dual: PreTrainedConfig, name: str) -> tuple[Any, PreTrainedConfig]:
    """The class and the configuration of a dual encoder's tower."""
    model_class = getattr(transformers, dict(zip((TEXT, IMAGE), DUAL_ENCODERS[dual.model_type], strict=True))[name])
    part = dual.text_config if name == TEXT else dual.vision_config
    if "WithProjection" in model_class.__name__:
        part.projection_dim = dual.projection_dim
    return model_class, part


def _tower(config: RunConfig, dual: PreTrainedConfig, name: str) -> Any:
    model_class, part = part_of(dual, name)
    options = _options(config)
    if config.model_config is not None:
        return model_class._from_config(part, **options)
    revision = config.model_revision or "main"
    return load_complete(model_class, _place(config), config=part, revision=revision, **options)


def _options(config: RunConfig) -> dict[str, Any]:
    options = {"dtype": parse_dtype(config.dtype or "float32")}
    return options | ({"attn_implementation": config.attn_implementation} if config.attn_implementation else {})


def config_of(config: RunConfig) -> PreTrainedConfig:
    options = {"trust_remote_code": config.trust_remote_code, "revision": config.model_revision or "main"}
    return AutoConfig.from_pretrained(_place(config), **options)


def _is_of_towers(config: RunConfig) -> bool:
    return Path(config.model_name_or_path, "towers.json").is_file() and not is_router(config.model_name_or_path)


def _place(config: RunConfig) -> str:
    """The dual encoder's own folder: releases of sentence-transformers before 6 keep it in a folder below."""
    kind, folder = first_module(config.model_name_or_path)
    return str(folder) if kind else config.model_name_or_path


def pair_collator(
    model: TowerModel,
    processor: Any,
    columns: list[str],
    prompts: Mapping[str, str] | None = None,
    max_length: int | Mapping[str, int] | None = None,
    id_column: str | None = None,
) -> ContrastiveCollator:
    """Texts through the processor's tokenizer, pictures through its image processor."""
    text, multiple = getattr(model.towers[TEXT], "config", None), None
    tokenizer = getattr(processor, "tokenizer", processor)
    if reads_fixed_width(text):  # (3)
        width = text.max_position_embeddings
        if max_length not in (None, width):
            raise UsageError(f"max_length={max_length}: this text model reads texts of {width} tokens. Remove it.")
        max_length = multiple = width
    elif max_length is None and hasattr(text, "max_position_embeddings"):
        max_length = min(text.max_position_embeddings, tokenizer.model_max_length)
    return ContrastiveCollator(tokenizer, columns, prompts, max_length, id_column, multiple, processor=processor)


def load_pair_processor(config: RunConfig, names: Iterable[str] = ()) -> Any:
    """A tokenizer and an image processor: those that are named, the model's own, or for the built-in dataset one
    trained on `names` and one for its pictures."""
    if config.dataset_name == glyphs.NAME and not (config.tokenizer_name or config.model_name_or_path):
        return glyphs.build_processor(names, config.model_config.get("vision_config", {}).get("image_size"))
    named = config.tokenizer_name or config.model_config is not None or _place(config) == config.model_name_or_path
    processor = load_processor(config if named else replace(config, tokenizer_name=_place(config)))
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise UsageError(
            f'"{config.tokenizer_name or config.model_name_or_path}" has {type(processor).__name__}; pairs with '
            "pictures need a processor with a tokenizer and an image processor."
        )
    return processor
