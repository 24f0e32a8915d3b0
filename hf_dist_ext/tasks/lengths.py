"""How many tokens a row of each column may have: as the run file says, else as the model's folder, and never more than
the model has positions for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sentence_transformers.base.modules import Router, Transformer
from torch import nn

from hf_dist_ext.data.sentence_collator import pads_to_all_positions
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import dual_encoder_of
from hf_dist_ext.run.fields import show

TABLES = ("position_embeddings", "wpe", "embed_positions")  # of learned positions, by their names in transformers
OF_DUAL = "position_embedding"  # in CLIP and those like it; elsewhere one of patches has that name


def lengths_of(
    model: Any, given: int | Mapping[str, int] | None, columns: Sequence[str]
) -> dict[str, int | None] | None:
    """Column -> tokens, of a SentenceTransformer or MultiVectorEncoder; a column of None has the model's own limit.
    None: all columns have it."""
    if isinstance(given, Mapping) and (alien := [column for column in given if column not in columns]):
        raise UsageError(f'max_length has "{alien[0]}", which is no column of this run: {", ".join(columns)}.')
    first = model[0]
    if given is not None and not isinstance(first, Transformer | Router):
        raise UsageError(
            f"max_length={show(given)}: static embeddings read whole texts, here and in sentence-transformers. Remove "
            "it, or cut the texts of the data."
        )
    query, *others = columns
    own = {query: getattr(first, "query_length", None)}
    own |= dict.fromkeys(others, getattr(first, "document_length", None))
    lengths = dict.fromkeys(columns, given) if isinstance(given, int) else own | dict(given or {})
    most = positions_of(first) if isinstance(first, Transformer) else None
    if pads_to_all_positions(first, given):
        return None
    if most is not None:
        longest = max((length for length in lengths.values() if length is not None), default=0)
        if given is not None and longest > most:
            raise UsageError(f"max_length={longest}: the model has positions for {most} tokens. Give at most {most}.")
        if model.max_seq_length is None or model.max_seq_length > most:
            model.max_seq_length = most
        lengths = {column: None if length is None else min(length, most) for column, length in lengths.items()}
    return lengths if any(length is not None for length in lengths.values()) else None


def refuse_nothing_left(
    max_length: int | Mapping[str, int | None] | None,
    prompts: Mapping[str, str],
    columns: Sequence[str],
    tokenizer: Any,
) -> None:
    """UsageError where special tokens and the prompt of a column fill its length: its rows would all be the same."""
    for column in columns:
        length = max_length.get(column) if isinstance(max_length, Mapping) else max_length
        taken = len(tokenizer(prompts.get(column, ""), verbose=False)["input_ids"]) if length is not None else 0
        if length is not None and length <= taken:
            raise UsageError(
                f'max_length={length} leaves nothing of the texts of column "{column}": its prompt and the special '
                f"tokens are {taken} tokens. Give more, or a shorter prompt."
            )


def positions_of(backbone: nn.Module) -> int | None:
    """Tokens that the backbone's table of learned positions has rows for; of a dual encoder that of its texts. None:
    it has no such table (rotary)."""
    part, tables = getattr(dual_encoder_of(backbone), "text_model", None), (*TABLES, OF_DUAL)
    if part is None:
        part, tables = backbone, TABLES
    for name, module in part.named_modules():
        if name.rpartition(".")[2] in tables and isinstance(module, nn.Embedding):
            skipped = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - skipped
    return None
