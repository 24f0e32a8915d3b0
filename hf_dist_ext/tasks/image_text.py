"""Task "image-text-to-text": conversations about pictures -> a vision-language model that answers.

(1) the processor that is named, the model's own, or for the built-in dataset one made here
(2) the model: loaded completely, or built from a config, whose vocabulary and image token are then the processor's
(3) the collator puts labels on the answers; evaluation may also generate answers and count the exact ones
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_dist_ext.data import digits
from hf_dist_ext.data.columns import columns_of
from hf_dist_ext.data.conversations import ConversationReader, load_conversations
from hf_dist_ext.data.fingerprint import seed_of_stream
from hf_dist_ext.data.image_files import require_pillow
from hf_dist_ext.data.image_text_collator import ImageTextCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import build_from_config, load_complete, one_line, parse_config
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.sources import columns_of_evaluation
from hf_dist_ext.tasks.adapters import add_adapters
from hf_dist_ext.tasks.generation import GeneratingTrainer, answer_accuracy
from hf_dist_ext.tasks.parts import Parts
from hf_dist_ext.training.arguments import DistTrainingArguments


def build(run: Run, args: DistTrainingArguments) -> Parts:
    config = run.options
    train_dataset, eval_dataset = load_conversations(
        config, max_bad_rows=args.max_bad_rows or 0, seed=seed_of_stream(args)
    )
    processor = load_processor(config)
    model = build_model(config, processor)
    reader = ConversationReader(config, columns_of(train_dataset), config.dataset_name)
    eval_reader = reader if eval_dataset is None else _eval_reader(config, columns_of(eval_dataset))
    generates = config.generate_max_new_tokens is not None
    args.remove_unused_columns = False  # the collator reads the dataset's own columns
    return Parts(
        model=add_adapters(model, config),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=ImageTextCollator(processor, reader, config.max_length),
        processing_class=processor,
        compute_metrics=answer_accuracy(processor.tokenizer) if generates else None,
        trainer_class=GeneratingTrainer,
        trainer_options={
            "eval_collator": ImageTextCollator(
                processor, eval_reader, config.max_length, for_evaluation=True, with_prompts=generates
            ),
            "max_new_tokens": config.generate_max_new_tokens,
        },
        metrics=("loss", "answer_accuracy") if generates else ("loss",),
    )


def _eval_reader(config: RunConfig, available: list[str]) -> ConversationReader:
    """Of rows whose columns another dataset may call otherwise than the training data do."""
    if config.eval_dataset_name is None:
        return ConversationReader(config, available, config.dataset_name)
    columns = columns_of_evaluation(config.columns, available)
    return ConversationReader(replace(config, columns=columns), available, config.eval_dataset_name)


def hints(run: Run) -> list[str]:
    # AutoModel finds the base of a folder of adapters.
    kind = "AutoModelForImageTextToText"
    return [f'load it:  from transformers import {kind}; model = {kind}.from_pretrained("{{folder}}")']


# (1) ---------------------------------------------------------------------------------------------------------------


def load_processor(config: RunConfig) -> Any:
    require_pillow()
    name = config.tokenizer_name or config.model_name_or_path
    if name is None:
        if config.dataset_name != digits.NAME:
            raise UsageError(
                "a model built from model_config needs a processor: set tokenizer_name to a folder or hub id that has "
                "tokenizer, image processor and chat template."
            )
        vision = (config.model_config or {}).get("vision_config", {})
        return digits.build_processor(vision.get("patch_size", 2), vision.get("image_size", 8))
    options = {"revision": config.model_revision} if name == config.model_name_or_path else {}
    try:
        return AutoProcessor.from_pretrained(name, trust_remote_code=config.trust_remote_code, **options)
    except (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
        hint = ""
        if importlib.util.find_spec("torchvision") is None:
            hint = " Processors with a video part need torchvision: pip install torchvision."
        raise UsageError(f'no processor can be loaded from "{name}": {one_line(error)}.{hint}') from error


# (2) ---------------------------------------------------------------------------------------------------------------


def build_model(config: RunConfig, processor: Any) -> PreTrainedModel:
    options = {} if config.attn_implementation is None else {"attn_implementation": config.attn_implementation}
    if config.model_config is not None:
        built = parse_config(with_vocabulary(config.model_config, processor))
        return build_from_config(AutoModelForImageTextToText, built, config.dtype, **options)
    options |= {"trust_remote_code": config.trust_remote_code, "revision": config.model_revision or "main"}
    options["dtype"] = config.dtype or torch.float32
    return load_complete(AutoModelForImageTextToText, config.model_name_or_path, **options)


def with_vocabulary(config: dict[str, Any], processor: Any) -> dict[str, Any]:
    """The config with the numbers that only the processor knows, where it does not give them itself."""
    tokenizer = processor.tokenizer
    text = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    kind, image = config.get("model_type"), {}
    if hasattr(processor, "image_token_id") and kind in CONFIG_MAPPING:
        known = {field.name for field in fields(CONFIG_MAPPING[kind])}
        image = {name: processor.image_token_id for name in ("image_token_id", "image_token_index") if name in known}
    return image | config | {"text_config": text | config.get("text_config", {})}
