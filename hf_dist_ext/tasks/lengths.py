"""How many tokens a row of each column may have: as the run file says, else as the model's folder, and never more than
the model has positions for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedding_model import EmbeddingModel

TABLES = ("position_embeddings", "wpe", "embed_positions")  # of learned positions, by their names in transformers


def lengths_of(
    model: EmbeddingModel, given: int | Mapping[str, int] | None, columns: list[str], of_tokenizer: int
) -> int | dict[str, int | None] | None:
    """The length of every column where they differ, in the order of the columns. None: the tokenizer's own."""
    lengths: int | dict[str, int | None] | None = given if isinstance(given, int) else model.max_length
    if isinstance(given, Mapping) and (alien := [column for column in given if column not in columns]):
        raise UsageError(f'max_length has "{alien[0]}", which is no column of this run: {", ".join(columns)}.')
    if isinstance(given, Mapping) or (given is None and model.lengths):
        query, *others = columns
        folders = dict.fromkeys(("query", "document"), _each(lengths)[0]) | model.lengths
        lengths = {query: folders["query"]} | dict.fromkeys(others, folders["document"]) | dict(given or {})
    most = positions_of(model.backbone)
    if most is None:
        return lengths
    longest = max((length for length in _each(lengths) if length is not None), default=0)
    if given is not None and longest > most:
        raise UsageError(f"max_length={longest}: the model has positions for {most} tokens. Give at most {most}.")
    if isinstance(lengths, Mapping):
        return {column: min(length or of_tokenizer, most) for column, length in lengths.items()}
    return lengths if lengths is None and of_tokenizer <= most else min(lengths or of_tokenizer, most)


def refuse_nothing_left(
    max_length: int | Mapping[str, int | None] | None,
    prompts: Mapping[str, str],
    columns: Sequence[str],
    tokenizer: Any,
) -> None:
    """UsageError where special tokens and the prompt of a column fill its length: its rows would all be the same."""
    for column in columns:
        length = max_length.get(column) if isinstance(max_length, Mapping) else max_length
        taken = len(tokenizer(prompts.get(column, ""), verbose=False)["input_ids"])
        if length is not None and length <= taken:
            raise UsageError(
                f'max_length={length} leaves nothing of the texts of column "{column}": its prompt and the special '
                f"tokens are {taken} tokens. Give more, or a shorter prompt."
            )


def _each(lengths: int | Mapping[str, int | None] | None) -> list[int | None]:
    return list(lengths.values()) if isinstance(lengths, Mapping) else [lengths]


def positions_of(backbone: nn.Module) -> int | None:
    """Tokens that the backbone's table of learned positions has rows for. None: it has no such table (rotary)."""
    for name, module in backbone.named_modules():
        if name.rpartition(".")[2] in TABLES and isinstance(module, nn.Embedding):
            skipped = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - skipped
    return None
