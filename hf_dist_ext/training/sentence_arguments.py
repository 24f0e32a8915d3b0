"""The fields that `DistTrainingArguments` shares with the arguments of sentence-transformers, and their rules."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from hf_dist_ext.data.order import BATCH_SAMPLERS, MULTI_DATASET_BATCH_SAMPLERS
from hf_dist_ext.errors import UsageError

OF_THE_MODEL = ("prompts", "router_mapping", "max_length")  # which a SentenceTransformer alone reads
AS_JSON = (
    *OF_THE_MODEL,
    "learning_rate_mapping",
)  # which HfArgumentParser hands over as text, a type with `str` alone


def check(args: Any) -> None:
    """Rules of the fields, which are given the form that the rest reads: JSON as what it says, names of samplers as
    text, warmup_ratio as warmup_steps. Raises UsageError."""
    for name in AS_JSON:
        value = getattr(args, name)
        if isinstance(value, str) and (name != "prompts" or value.startswith("{")):
            setattr(args, name, _read(name, value))
    for name, names in (
        ("batch_sampler", BATCH_SAMPLERS),
        ("multi_dataset_batch_sampler", MULTI_DATASET_BATCH_SAMPLERS),
    ):
        value = getattr(args, name)
        value = value.value if isinstance(value, Enum) else value
        if value is not None and value not in names and not callable(value):
            raise UsageError(f"{name}={value!r}: choose {', '.join(map(repr, names))}, a class or a function.")
        setattr(args, name, value)
    if args.batch_sampler is not None and args.no_duplicates_in_batch is not None:
        raise UsageError(
            f"batch_sampler={args.batch_sampler!r} and no_duplicates_in_batch={args.no_duplicates_in_batch} both say "
            "which rows share a batch. Keep one."
        )
    if args.learning_rates and args.learning_rate_mapping:
        raise UsageError("learning_rates (by name) and learning_rate_mapping (by pattern) are both given. Keep one.")
    for pattern, rate in (args.learning_rate_mapping or {}).items():
        if not (isinstance(rate, int | float) and rate >= 0):
            raise UsageError(f"learning_rate_mapping={{{pattern!r}: {rate!r}}}: a learning rate is 0 or more.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"learning_rate_mapping: {pattern!r} is no regular expression: {error}.") from error
    if args.warmup_ratio is not None:
        if not 0 <= args.warmup_ratio < 1:
            raise UsageError(f"warmup_ratio={args.warmup_ratio!r}: it is a share of the steps, 0 to below 1.")
        if args.warmup_steps not in (0, args.warmup_ratio):
            raise UsageError(
                f"warmup_ratio={args.warmup_ratio!r} and warmup_steps={args.warmup_steps!r} both say how long the "
                "rate grows. Keep one."
            )
        args.warmup_steps, args.warmup_ratio = args.warmup_ratio, None


def _read(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}={text!r} is no JSON: {error}. Give an object as JSON has it, or a dict.") from error


def refuse_fields_of_a_model(args: Any) -> None:
    """Where the model is no SentenceTransformer. Raises UsageError."""
    for name in OF_THE_MODEL:
        if getattr(args, name):
            raise UsageError(
                f"{name}={getattr(args, name)!r} is read by the preprocess of a SentenceTransformer, and the model is "
                f"none. Give {name} to the data_collator."
            )
