"""Rows end to end through a backbone, as engine/packing.py lays them: attention within rows, positions, pooling.

(1) transformers asks its registry for the function of an attention implementation. Those that can keep rows apart are
    replaced there by one that does so where a forward says where rows begin, and is the former one otherwise: the
    model's config, and so what is saved, is not touched. The kernels are
        flash_attention_2, 3, 4   FlashAttention with the lengths that transformers hands on
        sdpa on a GPU             torch.nn.attention.varlen in half precision, where it can (`_takes_all_lengths`)
        sdpa elsewhere            scaled_dot_product_attention, once for every run of rows of equal length
(2) a mask that is there and that nobody reads keeps transformers from making one of t x t
(3) the mean, first or last token of every row is found by the offsets at which rows begin
(4) padded rows: no forward asks the device whether any row is padded (`padding_is_known`)

`rows` are those of engine/packing.py (`RowBounds`). Shapes: b rows, t tokens of all of them, H the backbone's width, h
heads of width d.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dist_ext.policy import FLASH, PACKED_FAMILIES, VARLEN_CAPABILITY, VARLEN_HEAD_WIDTH
from hf_dist_ext.strategies.base import meanwhile

# torch 2.11's function takes fewer heads of keys than of queries without being told. Remove when the minimum is 2.12.
VARLEN_IS_TOLD_OF_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters

POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # of sentence-transformers: those of `pool_packed`

# ---- which models can ----


def why_not(backbone: PreTrainedModel) -> str | None:
    """Why rows can not go end to end through this backbone; None: they can."""
    config = backbone.config
    kinds = [kind.__module__ for kind in type(backbone).__mro__]
    if config.model_type not in PACKED_FAMILIES or not any(kind.startswith("transformers.models.") for kind in kinds):
        return f'of model type "{config.model_type}" it is not known that its layers keep the rows of a sequence apart'
    if config._attn_implementation not in ("sdpa", *FLASH):
        return f'attn_implementation="{config._attn_implementation}" does not keep the rows of a sequence apart'
    if getattr(config, "is_causal", None) is False and getattr(config, "sliding_window", None) is not None:
        if config._attn_implementation in FLASH or getattr(config, "use_bidirectional_attention", False):
            return "its config says is_causal=false, and its sliding windows are not known to be those of padded rows"
    return None


# ---- (1), (2) ----


def sentence_inputs_of(first: Any, features: dict[str, Any], rows: Any) -> dict[str, Any]:
    """What a Transformer of sentence-transformers takes. Its Pooling finds rows by `cu_seq_lens_q`."""
    _register_pooling()
    if "position_ids" not in first._declared_forward_params:
        features.pop("position_ids", None)
    if first.model_forward_params is not None:
        first.model_forward_params |= {"packed_rows"}
    return {**inputs_of(first.model, features, rows), "cu_seq_lens_q": rows.offsets}


def inputs_of(backbone: PreTrainedModel, features: dict[str, Any], rows: Any) -> dict[str, Any]:
    """What the backbone takes; `features` without a mask, each (1, t, ...)."""
    _register()
    embeddings = getattr(backbone, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids") and not rows.has_positions:
        ids, padding = features["input_ids"], embeddings.padding_idx
        features["position_ids"] = _positions_of_ids(ids[0], padding, rows.offsets).unsqueeze(0)
    some = next(value for value in features.values() if isinstance(value, torch.Tensor))
    unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=some.device)  # (2)
    return {**features, "attention_mask": unread, "packed_rows": rows}


def _positions_of_ids(ids: torch.Tensor, padding: int, offsets: torch.Tensor) -> torch.Tensor:
    """(t,): as RoBERTa and its kin count, whose positions begin behind the padding token's number and leave out
    padding tokens, which a text may hold."""
    is_counted = ids != padding
    counted = is_counted.cumsum(0)
    before = pad(counted, (1, 0))[offsets[:-1].long()]  # (b,)
    own = counted - before.repeat_interleave(offsets.diff(), output_size=len(ids))
    return own * is_counted + padding


@functools.cache
def _register() -> None:
    for name in ("sdpa", *FLASH):
        own = _attend_with_sdpa if name == "sdpa" else _attend_with_flash
        AttentionInterface.register(name, functools.partial(_attention, ALL_ATTENTION_FUNCTIONS[name], own))


def _attention(
    of_padded: Callable,
    of_packed: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: Any = None,
    by_one_kernel: Callable | None = None,
    **options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`by_one_kernel`: instead of `of_packed` where torch's kernel takes all lengths at once."""
    if packed_rows is None:
        return of_padded(module, query, key, value, attention_mask, **options)
    if by_one_kernel is not None and not options.get("dropout"):
        query = _as_autocast(query)
        of_packed = by_one_kernel if _takes_all_lengths(query) else of_packed
    return of_packed(of_padded, module, query, key, value, packed_rows, **options)


def _attend_with_flash(
    of_padded: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Any,
    **options,
) -> tuple[torch.Tensor, None]:
    sizes = {"cu_seq_lens_q": rows.offsets, "cu_seq_lens_k": rows.offsets}
    sizes |= {"max_length_q": rows.longest, "max_length_k": rows.longest}
    return of_padded(module, query, key, value, None, **(options | sizes))


def _attend_with_sdpa(
    of_padded: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """query (1, h, t, d), key and value with as many heads or fewer -> (1, t, h, d)."""
    if is_causal is None:  # else the config says it
        is_causal = module.is_causal
    elif module.is_causal and not is_causal and sliding_window is not None:
        # transformers' mask of a decoder that is made to see both ways counts a window's last token in.
        sliding_window += 1
    query, key, value = (_as_autocast(one.squeeze(0)) for one in (query, key, value))
    if not dropout and _takes_all_lengths(query):
        reach = -1 if sliding_window is None else sliding_window - 1
        grouped = {"enable_gqa": True} if len(key) != len(query) and VARLEN_IS_TOLD_OF_GROUPS else {}
        attended = varlen_attn(
            *(one.transpose(0, 1) for one in (query, key, value)), rows.offsets, rows.offsets, rows.longest,
            rows.longest, scale=scaling, window_size=(reach, 0 if is_causal else reach), **grouped,
        )  # fmt: skip
        return attended.unsqueeze(0), None
    runs = [(length, len(list(same))) for length, same in groupby(rows.lengths)]
    tokens = [length * count for length, count in runs]
    attended = []
    # By tokens first, as they lie in memory: the gradients of all runs are put together without a strided copy.
    for (length, count), *parts in zip(
        runs, *(one.transpose(0, 1).split(tokens) for one in (query, key, value)), strict=True
    ):
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = _window(length, sliding_window, is_causal, query.device)
        of_run = scaled_dot_product_attention(
            *(part.unflatten(0, (count, length)).transpose(1, 2) for part in parts),  # (count, h, length, d)
            attn_mask=mask, dropout_p=dropout, is_causal=is_causal and mask is None, scale=scaling,
            enable_gqa=len(key) != len(query),
        )  # fmt: skip
        attended.append(of_run.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).unsqueeze(0), None


def _as_autocast(one: torch.Tensor) -> torch.Tensor:
    """As scaled_dot_product_attention casts by itself, and torch's other kernel does not: rotary embeddings and norms
    of heads leave queries and keys in float32 beside values in half precision."""
    kind = one.device.type
    if one.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return one
    return one.to(torch.get_autocast_dtype(kind))


def _takes_all_lengths(query: torch.Tensor) -> bool:
    """Whether torch's kernel for rows of many lengths, which has no dropout, takes heads as these, (h, t, d)."""
    width = query.shape[-1]
    fits = query.dtype.itemsize == 2 and width % 8 == 0 and width <= VARLEN_HEAD_WIDTH
    return query.is_cuda and fits and _has_kernel(query.device)


def _has_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= VARLEN_CAPABILITY


def _window(length: int, size: int, is_causal: bool, device: torch.device) -> torch.Tensor:
    """(length, length), true where a token sees another one: fewer than `size` away, and not behind it."""
    token = torch.arange(length, device=device)
    distance = token[:, None] - token
    return (distance.abs() < size) & (distance >= 0) if is_causal else distance.abs() < size


@functools.cache
def leave_uncompiled() -> None:
    """Before a model is compiled. What reads the lengths of rows stays outside of its graphs: they would hold the
    lengths, and be made again for every chunk. torch's kernel for rows of many lengths reads none on the host, and is
    an operator of the graph."""
    _register()
    _register_pooling()
    torch.compiler.assume_constant_result(_has_kernel)
    for name in ("sdpa", *FLASH):
        of_padded, of_packed = ALL_ATTENTION_FUNCTIONS[name].args
        outside = torch.compiler.disable(of_packed, reason="the lengths of its rows")
        inside = of_packed if name == "sdpa" else None
        AttentionInterface.register(name, functools.partial(_attention, of_padded, outside, by_one_kernel=inside))
    pooling = _pooling()
    pooling._forward_flattened = torch.compiler.disable(pooling._forward_flattened, reason="the lengths of its rows")


# ---- (3) ----


@functools.cache
def _register_pooling() -> None:
    """sentence-transformers 6.2 adds up the tokens of flat rows by `index_add` (Pooling._forward_flattened). On a GPU
    its sums have no fixed order, so pass 3 would not repeat pass 1 bit for bit. Remove when they have."""
    theirs = _pooling()._forward_flattened

    def flattened(self: Any, tokens: torch.Tensor, features: dict, prompt_length: int | None = None) -> Any:
        rows, mode = features.get("packed_rows"), self.pooling_mode
        if rows is None or prompt_length or not (isinstance(mode, str) and mode in POOLINGS):
            return theirs(self, tokens, features, prompt_length=prompt_length)
        pooled = pool_packed(tokens.squeeze(0), rows, POOLINGS[mode])
        # Without autocast the modules behind have the precision of the tokens, as their weights do.
        return [pooled if torch.is_autocast_enabled(tokens.device.type) else pooled.to(tokens.dtype)]

    _pooling()._forward_flattened = flattened


def _pooling() -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling


def pool_packed(tokens: torch.Tensor, rows: Any, pooling: str) -> torch.Tensor:
    """(t, H) -> (b, H), at least float32."""
    offsets = rows.offsets
    wide = torch.promote_types(tokens.dtype, torch.float32)
    if pooling == "mean":
        # Not index_add, whose sums on a GPU have no fixed order: pass 3 repeats pass 1 bit for bit.
        return torch.segment_reduce(tokens.to(wide), "mean", offsets=offsets.long(), axis=0)
    places = offsets[:-1] if pooling == "cls" else offsets[1:] - 1
    return tokens[places.long()].to(wide)


# transformers reads every mask back to the host, to run attention without one, in a faster kernel, where no row is
# padded, and so the host waits for the device in every forward. Whoever cut the chunk knows (`Chunk.is_full`).
ASKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # (mask of real tokens or None, ...)


def padding_is_known(is_full: bool | None) -> AbstractContextManager:
    """Around a forward. `is_full`: whether none of its rows is padded; None: transformers looks."""
    asks = () if is_full is None else ASKS
    answers = {name: functools.partial(_answered, getattr(masking_utils, name), is_full) for name in asks}
    return meanwhile(masking_utils, **answers)


def _answered(theirs: Callable, is_full: bool, padding_mask: Any, *given: Any, **more: Any) -> bool:
    """Whether the mask can be left out."""
    if padding_mask is None or is_full:
        return theirs(None, *given, **more)
    return False
