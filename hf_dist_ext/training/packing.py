"""`gradient_cache_packing`: whether the rows of a chunk go through the model end to end, without padding.

What can not is known before training: true is refused then and told why, and "auto" pads. Batch by batch "auto" packs
where packing was measured to be faster (docs/benchmarks.md, packed chunks).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy

logger = logging.get_logger(__name__)

# Of the tokens that padded chunks would compute. Below it, packed and padded steps take the same time.
PADDING_WORTH_PACKING = 0.05


def may_pack(args: Any, model: nn.Module, strategy: Strategy) -> bool:
    """Whether chunks of this run may be packed. Raises UsageError where they must be and can not. `model`: without its
    wrappers."""
    asked = args.gradient_cache_packing
    if asked is False or not args.uses_gradient_cache:
        return False
    why = _why_padded(args, model, strategy)
    if why is None:
        if asked is True and (slow := _why_many_calls(args, model)) and args.process_index == 0:
            logger.warning(
                f"gradient_cache_packing=true: {slow}, so that attention takes a call for each length of a chunk's "
                'rows. Set it to "auto", which pads such chunks, or attn_implementation="flash_attention_2".'
            )
        return True
    if asked is True:
        raise UsageError(
            f'gradient_cache_packing=true: {why}. Set it to "auto", which pads chunks where they can not be packed.'
        )
    logger.debug(f"gradient cache: chunks are padded, not packed: {why}.")  # "auto" is the default: nobody asked
    return False


def _why_padded(args: Any, model: nn.Module, strategy: Strategy) -> str | None:
    if strategy.pads_rows:
        return strategy.pads_rows
    if getattr(args, "neftune_noise_alpha", None) is not None:
        return "neftune_noise_alpha scales its noise by the tokens of a row, and a packed chunk is one row to it"
    if has_prompt_tokens(model):
        return "the adapters put tokens of their own before a batch's rows"
    why = embedder_of(model).why_padded
    if why is None and args.gradient_cache_packing == "auto":
        return _why_many_calls(args, model)
    return why


def _why_many_calls(args: Any, model: Any) -> str | None:
    """On this device; on a CPU a call for each length is as quick. All ranks cut as the oldest of their devices."""
    if args.device.type == "cpu":
        return None
    major = torch.cuda.get_device_capability(args.device)[0] if args.device.type == "cuda" else 0
    return embedder_of(model).why_many_calls(collectives.smallest(major), args.bf16 or args.fp16)


def has_prompt_tokens(model: nn.Module) -> bool:
    """Whether adapters put tokens of their own before a batch's rows."""
    return any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values())


def decided(chunked: ChunkedBatch, asked: bool | str) -> ChunkedBatch:
    """A batch that was laid out to be packed, or its padded chunks where "auto" expects them to be as fast.

    Raises:
        UsageError: asked for, and rows of this batch can not be packed.
    """
    if asked is True:
        unpacked = [t for t in chunked.tables if t.num_rows and t.width and t.packed is None]
        if unpacked := [t for t in unpacked if t.num_text_rows == t.num_rows]:
            raise UsageError(
                f"gradient_cache_packing=true: rows of the columns {unpacked[0].columns} can not go end to end. Their "
                "attention_mask leaves out tokens between real ones, or all of a row, or they have features beside "
                "input_ids, token_type_ids and position_ids, or they are so long that the model's rotary embeddings "
                'follow the longest row. Set it to "auto", which pads such batches.'
            )
        return chunked
    padded = chunked.within(replace(chunked.limits, packs=False))
    (_, tokens), (_, packed) = padded.count_tokens(), chunked.count_tokens()
    return chunked if tokens - packed >= PADDING_WORTH_PACKING * tokens else padded
