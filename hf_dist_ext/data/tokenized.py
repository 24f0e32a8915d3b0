"""A run that reads its rows more than once tokenizes their texts once: `datasets` keeps the tokens in its cache.

(1) The file of the tokens is named after all that they depend on: the rows, and for each column the tokenizer, the
    prompt and the length. A later run on the same rows finds it
(2) The first process to come makes it, with the tokenizer's own threads; the others wait for it (kept_files.py)
(3) A row's texts then carry their tokens to the collator (tokens.py), mapped from the file

Texts are tokenized as they are read, by the collator and so in the loader's workers, where that is no more work (one
pass over the rows, a stream) or the tokens may be others each time (BPE dropout, a tokenizer with code of its own).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from datasets import Dataset, Features, List, Value
from transformers.utils import logging

from hf_dist_ext.data.collator import as_list, is_empty
from hf_dist_ext.data.kept_files import kept_file
from hf_dist_ext.data.mixture import Mixture, RowsAround
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.data.tokens import KEPT, TokenizedText
from hf_dist_ext.failures import activity

logger = logging.get_logger(__name__)

VERSION = 4  # of the file


def tokenized_once(dataset: Any, collator: Any, args: Any, rows_per_micro_batch: int) -> Any:
    """The dataset, or one whose rows' texts are `TokenizedText`. Every process calls it.

    `args`: the trainer's, which say how many rows the run reads.
    """
    if not hasattr(dataset, "__len__"):
        return dataset
    rows = math.ceil(args.num_train_epochs * len(dataset))
    if args.max_steps > 0:
        rows = args.max_steps * args.gradient_accumulation_steps * rows_per_micro_batch
    return _tokenized(dataset, collator) if rows > len(dataset) else dataset


def rows_of(dataset: Any) -> Any:
    """The dataset of the user, of which Trainer's samplers ask what it is."""
    return dataset.dataset if isinstance(dataset, TokenizedRows) else dataset


def _tokenized(dataset: Any, collator: Any) -> Any:
    if isinstance(dataset, Mixture) and hasattr(collator, "of_source"):
        sources = {name: _tokenized(one, collator.of_source(name)) for name, one in dataset.sources.items()}
        return Mixture(sources, dataset.shares)
    if not isinstance(dataset, Dataset) or dataset.format["type"] is not None:
        return dataset  # a transform of the user's may give other texts each time
    if not hasattr(collator, "tokens_depend_on") or not datasets.is_caching_enabled():
        return dataset
    shown = dataset.format["columns"]  # not those that `with_format` leaves out
    texts = [name for name in collator.columns if name in shown and _holds_texts(dataset.features[name])]
    how = {name: collator.tokens_depend_on(name) for name in texts if collator.gives_tokens(name)}
    columns = [name for name, facts in how.items() if facts is not None]
    if not columns:
        return dataset
    facts = [VERSION, transformers.__version__, tokenizers.__version__, dataset._fingerprint, len(dataset)]
    try:
        tokens = _kept([*facts, *((name, how[name]) for name in columns)], dataset, collator, columns)
    except OSError as error:
        logger.warning(
            f"tokens can not be kept in {datasets.config.HF_DATASETS_CACHE} ({error}): texts are tokenized again in "
            "every epoch. Set HF_DATASETS_CACHE to a folder with room."
        )
        return dataset
    return TokenizedRows(dataset, tokens, columns)


def _holds_texts(feature: Any) -> bool:
    return column_kind(feature) in ("text", "texts")


# ---- (1), (2) ----


def _kept(facts: list, dataset: Dataset, collator: Any, columns: list[str]) -> Dataset:
    """The tokens in the file that is named after `facts`."""
    key = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def read(path: Path) -> Dataset:
        tokens = Dataset.from_file(str(path))
        if len(tokens) != len(dataset):
            raise ValueError(f"it holds {len(tokens)} of {len(dataset)} rows")
        return tokens

    def make(path: Path) -> None:
        dataset.map(
            partial(_tokens_of, collator=collator, columns=columns),
            batched=True,
            remove_columns=dataset.column_names,
            features=_features(collator, columns),
            cache_file_name=str(path),
            new_fingerprint=key,
            desc="tokens",
        )

    return kept_file(f"tokens_{key}.arrow", read, make)


def _features(collator: Any, columns: list[str]) -> Features:
    keys = [(column, key) for column in columns for key in collator.token_keys(column)]
    return Features({f"{column}.{key}": List(List(Value(np.dtype(KEPT[key]).name))) for column, key in keys})


def _tokens_of(rows: Mapping[str, list], collator: Any, columns: list[str]) -> pa.Table:
    """Columns "query.input_ids", ...: a list of lists per row, one for each text."""
    activity.touch()  # it goes on
    table = {}
    for column in columns:
        of_rows = [_texts(value) for value in rows[column]]
        texts = [text for of_row in of_rows for text in of_row]
        tokens = collator.tokens(column, texts or [""])  # tokenizers refuse no text at all; no row has this one
        for key, values in tokens.values.items():
            values = pa.ListArray.from_arrays(_offsets(tokens.lengths), pa.array(values))
            counts = [len(of_row) for of_row in of_rows]
            table[f"{column}.{key}"] = pa.ListArray.from_arrays(_offsets(counts), values)
    return pa.table(table)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _texts(value: Any) -> list[str]:
    """Those of a row that are no empty ones."""
    return [text for text in as_list(value) if not is_empty(text)]


# ---- (3) ----


class TokenizedRows(RowsAround):
    """The rows of a `datasets.Dataset`, whose texts carry tokens in `columns`."""

    def __init__(self, dataset: Dataset, tokens: Dataset, columns: list[str]):
        super().__init__(dataset)
        self.tokens, self.columns = tokens.with_format("arrow"), columns

    def __getitem__(self, key: Any) -> Any:
        return self.__getitems__([key])[0] if isinstance(key, int) else self.dataset[key]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        rows, table = self.dataset.__getitems__(numbers), self.tokens[numbers]
        for column in self.columns:
            keys = [key for key in KEPT if f"{column}.{key}" in table.column_names]
            kept = [table.column(f"{column}.{key}").to_numpy() for key in keys]  # (rows,) arrays of arrays
            for row, *of_row in zip(rows, *kept, strict=True):
                texts = zip(_texts(row[column]), *of_row, strict=True)
                carried = [TokenizedText(text, dict(zip(keys, own, strict=True))) for text, *own in texts]
                if isinstance(row[column], list):
                    row[column] = carried
                elif carried:
                    row[column] = carried[0]
        return rows
