"""What reads the rows of task "embedding": a tokenizer, or a processor of texts and pictures.

(1) the one that is named; else the model's own, which comes with it
(2) of a model that is built from model_config: for the built-in datasets one that is made here
(3) such a model takes the size of its vocabulary from it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION_LANGUAGE

from hf_dist_ext.data import glyphs
from hf_dist_ext.data.code_search import train_tokenizer
from hf_dist_ext.data.image_files import require_pillow
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import one_line, parse_config
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.sources import CODE_SEARCH
from hf_dist_ext.tasks.image_text import load_processor, with_vocabulary


def reader_of(config: RunConfig, has_pictures: bool, texts: Iterable[str]) -> Any:
    """None: the model's own. `texts`: of the data, for a tokenizer that is trained on them."""
    if config.model_config is None and config.tokenizer_name is None:  # (1)
        return None
    sees = has_pictures or embeds_pictures(config)
    if config.tokenizer_name is not None:
        if sees:
            processor = load_processor(config)
            if not hasattr(processor, "image_processor"):
                raise UsageError(
                    f"the model embeds pictures, and tokenizer_name={config.tokenizer_name!r} holds a tokenizer "
                    "without an image processor. Name a processor with both, or choose a model of text alone."
                )
            return processor
        try:
            return AutoTokenizer.from_pretrained(config.tokenizer_name, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(
                f"no tokenizer can be loaded from {config.tokenizer_name!r}: {one_line(error)}"
            ) from error
    if config.dataset_name == glyphs.NAME and sees:  # (2)
        return _of_glyphs(config.model_config, texts)
    if config.dataset_name == CODE_SEARCH and not sees:
        return train_tokenizer(texts)
    kind = "processor with tokenizer and image processor" if sees else "tokenizer"
    raise UsageError(f"a model built from model_config needs a {kind}: set tokenizer_name to a folder or hub id.")


def embeds_pictures(config: RunConfig) -> bool:
    """Whether the model of a model_config does, as a dual encoder or a vision-language model."""
    return config.model_config is not None and hasattr(parse_config(config.model_config), "vision_config")


def stand_in(model_config: dict[str, Any]) -> Any:
    """For a model of model_config that reads no row, but is counted: a reader of the right kind. None: of texts.

    It makes none of what the model itself needs, such as the tokens of a picture, and so serves every family.
    """
    if not hasattr(parse_config(model_config), "vision_config"):
        return None
    require_pillow()
    if model_config["model_type"] in VISION_LANGUAGE:
        return glyphs.build_chat_processor(("a",), patch_size=1)
    return glyphs.build_processor(("a",))


def _of_glyphs(model_config: dict[str, Any], texts: Iterable[str]) -> Any:
    vision, kind = parse_config(model_config).vision_config, model_config["model_type"]
    size = getattr(vision, "image_size", None)
    if kind not in VISION_LANGUAGE:
        return glyphs.build_processor(texts, size)
    if kind != "llava":
        raise UsageError(
            f'model_config has model_type "{kind}", and "{glyphs.NAME}" brings a processor for "llava" alone. Use '
            "that, or name a folder with a processor as tokenizer_name."
        )
    return glyphs.build_chat_processor(texts, vision.patch_size, size)


def config_for(config: RunConfig, reader: Any) -> dict[str, Any] | None:  # (3)
    if config.model_config is None:
        return None
    if hasattr(reader, "image_processor"):
        return with_vocabulary(config.model_config, reader)
    return {"vocab_size": len(reader), "pad_token_id": reader.pad_token_id} | config.model_config
