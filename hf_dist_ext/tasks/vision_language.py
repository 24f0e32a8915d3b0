"""Task "embedding" with a vision-language model: one backbone embeds texts, pictures and both, as chat messages.

(1) which models: those with a text and a vision part whose processor has a chat template. A folder that
    sentence-transformers has written decides by itself whether it reads messages
(2) the processor: the one that is named, the model's own, or for the built-in dataset one made here
(3) the folder at the end says how rows are read, in the words of sentence-transformers 6
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION_LANGUAGE
from transformers.utils import logging

from hf_dist_ext.data import glyphs
from hf_dist_ext.data.vision_language_collator import VisionLanguageCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapter_folder import CONFIG, base_of
from hf_dist_ext.models.model_folder import read_model_folder, reads_messages, resolve_folder
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks.image_pairs import config_of
from hf_dist_ext.tasks.image_text import load_processor

logger = logging.get_logger(__name__)

FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
READS = {  # (3)
    "transformer_task": "feature-extraction",
    "modality_config": {"text": FORWARD, "image": FORWARD, "message": {**FORWARD, "format": "structured"}},
    "module_output_name": "token_embeddings",
}


def is_vision_language(config: RunConfig) -> bool:  # (1)
    if config.model_config is not None:
        return config.model_config.get("model_type") in VISION_LANGUAGE and "vision_config" in config.model_config
    try:
        found = config_of(_with_base(config))
    except (OSError, ValueError, KeyError):  # EmbeddingModel's own loading says what is wrong
        return False
    return found.model_type in VISION_LANGUAGE and hasattr(found, "vision_config")


def _with_base(config: RunConfig) -> RunConfig:
    """Adapters lie apart from their base, whose configuration counts."""
    folder = Path(config.model_name_or_path)
    if not (folder / CONFIG).is_file():
        return config
    base, revision = base_of(folder)
    return dataclasses.replace(config, model_name_or_path=base, model_revision=revision)


def chat_processor(config: RunConfig, has_pictures: bool, texts: Iterable[str]) -> Any:  # (2)
    """None where the run's rows are texts that go to the tokenizer as they are.

    Args:
        has_pictures: in a column of the dataset.
        texts: of the built-in dataset, for its tokenizer.
    """
    if not is_vision_language(config):
        return None
    if config.dataset_name == glyphs.NAME and not (config.tokenizer_name or config.model_name_or_path):
        vision, kind = config.model_config["vision_config"], config.model_config["model_type"]
        if kind != "llava":
            raise UsageError(
                f'model_config has model_type "{kind}", and "{glyphs.NAME}" brings a processor for "llava" alone. Use '
                "that, or name a folder with a processor as tokenizer_name."
            )
        return glyphs.build_chat_processor(texts, vision["patch_size"], vision.get("image_size"))
    if config.model_name_or_path is not None:
        folder = read_model_folder(resolve_folder(config.model_name_or_path, config.model_revision))
        if not folder.is_plain and not reads_messages(folder.messages):
            if has_pictures:
                raise UsageError(
                    f"{config.model_name_or_path} embeds texts alone, as its sentence_bert_config.json says, and the "
                    "data hold pictures. Start from a model that reads messages, or from the plain backbone."
                )
            return None
    processor = load_processor(config)
    has_template = hasattr(processor, "image_processor") and getattr(processor, "chat_template", None)
    if not has_template and not has_pictures:
        logger.warning("the processor has no chat template, so texts go to the tokenizer as they are.")
        return None
    return processor  # without a template the collator refuses it


def collators(processor: Any, options: Mapping[str, Any] | None) -> partial:
    """What makes a collator, of a tokenizer and the arguments of ContrastiveCollator that follow."""
    return partial(VisionLanguageCollator, processor=processor, processing_kwargs=options)


def messages_of(kept: Mapping[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:  # (3)
    """How the folder says that rows are read. `kept`: of the folder that the run starts from."""
    return {**READS, **kept} | ({"processing_kwargs": dict(options)} if options else {})
