"""Whether a tokenizer knows the texts: a vocabulary of other texts makes most words one and the same token, and the
loss then stays where it began."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from datasets import Dataset

from hf_dist_ext.data.collator import as_list
from hf_dist_ext.errors import UsageError

logger = logging.getLogger(__name__)

ROWS, SHARE = 200, 0.1  # rows that are looked at; more unknown tokens than this share are named


def refuse_unknown_ids(tokenizer: Any, rows: int | None) -> None:
    """UsageError for ids that the model has no embedding for: the first of them would end the run in its forward.
    `rows`: the `vocab_size` of `model_config`; None: it is the tokenizer's."""
    largest = max(tokenizer.get_vocab().values(), default=0) if hasattr(tokenizer, "get_vocab") else 0
    if rows is not None and largest >= rows:
        raise UsageError(
            f"model_config has vocab_size {rows}, and the tokenizer has ids up to {largest}. Remove vocab_size, which "
            "then is the tokenizer's, or give another tokenizer."
        )


def warn_of_unknown(tokenizer: Any, rows: Any, columns: Iterable[str]) -> None:
    """A line for each column with many unknown tokens. A stream is not looked at: its rows are read once."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or not isinstance(rows, Dataset):
        return
    for column in columns:
        if column not in rows.column_names:
            continue
        values = rows.select(range(min(ROWS, len(rows))))[column]
        texts = [text for value in values for text in as_list(value) if isinstance(text, str) and text]
        # verbose: transformers would warn of texts that are too long, which are cut before a model sees them
        ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        tokens = [token for of_text in ids for token in of_text]
        share = tokens.count(unknown) / max(1, len(tokens))
        if share > SHARE:
            logger.warning(
                f'{share:.0%} of the tokens of column "{column}" are unknown to the tokenizer: its vocabulary is of '
                "other texts. Give the tokenizer of the model, or one that was trained on texts like these."
            )
