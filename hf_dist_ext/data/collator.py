"""A collator makes rows into a batch: features per column, and ids that tell equal content from different content.

    collator = ContrastiveCollator(tokenizer, ["query", "positive"], max_length={"query": 64, "positive": 256})
    collator([{"query": "add", "positive": "def add(a, b): ..."}, ...])
    # {"query": {"input_ids", "attention_mask"}, "positive": {...}, "ids": {"query": ..., "positive": ...}}

It runs in the loader's workers: it can be pickled, and needs neither the dataset nor a process group.
Letters: B rows of one rank, K_i negatives of row i, T tokens.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_dist_ext.data.tokens import (
    KEPT,
    MASK,
    TokenizedText,
    Tokens,
    silence_threads,
    threads_of_tokenizer,
    tokens_depend_on,
    without_rows,
)
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.sources import NUM_PAIR_COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CUTS = "chunk_cuts"  # how the batch is cut into chunks (training/ahead.py)
CONSTANTS = "constants"  # column -> what its features are besides tensors over rows (models/embedder.py)
RESERVED = ("ids", "targets", CONSTANTS, CUTS)  # of a batch, and no columns


@dataclass(eq=False)
class ContrastiveCollator:
    """Makes rows into {column: features, ..., "ids": {column: (rows,) int64, "group": (B,)}}, alike in every process.

    The first two columns hold one text (or image) per row. A further column holds the row's negatives, one or a list;
    they are flattened row by row, and rows may have different numbers of them. A negative column that none of the rows
    has is left out. `prompts` go before the text and are not part of its id. `max_length` is in tokens; None is the
    tokenizer's own limit. `processor` turns PIL images into features. `id_column` becomes `ids["group"]`.
    `label_column` holds a number per row, a list of them, or a list of such lists, as long in every row; the batch
    then has "targets": {"label": (B,), (B, K) or (B, K, D)}, float32. `same_number_of_negatives` refuses rows that
    have fewer negatives than others, for a loss that takes the k-th negatives of all rows as a column. `label_shape`
    is that of every row's label, () for a number; None: as the rows of a batch agree. `flat`: texts are not padded, so
    that a batch takes the memory of its real tokens (engine/flat.py); DistTrainer asks for it.
    """

    tokenizer: PreTrainedTokenizerBase | None
    columns: Sequence[str]
    prompts: Mapping[str, str] | None = None
    max_length: int | Mapping[str, int] | None = None
    id_column: str | None = None
    pad_to_multiple_of: int | None = None
    with_ids: bool = True
    processor: Any = None
    label_column: str | None = None
    same_number_of_negatives: bool = False
    label_shape: tuple[int, ...] | None = None
    flat: bool = False

    def __post_init__(self):
        columns, tokenizer, max_length = list(self.columns), self.tokenizer, self.max_length
        self.columns, self.prompts = columns, dict(self.prompts or {})
        check_columns(columns, self.prompts, max_length, self.label_column)
        if self.id_column is not None and not self.with_ids:
            raise UsageError(
                f"id_column={self.id_column!r} is one of the ids, and with_ids=False gives none. Keep one."
            )
        multiple = self.pad_to_multiple_of
        for limit in (max_length.values() if isinstance(max_length, Mapping) else [max_length]) if multiple else ():
            if limit and limit % multiple:
                raise UsageError(f"max_length={limit} is no multiple of pad_to_multiple_of={multiple}.")
        if tokenizer is not None:
            ensure_padding(tokenizer)
        silence_threads()

    def __call__(self, rows: list[dict]) -> dict[str, dict[str, torch.Tensor]]:
        batch, ids = {}, {}
        for index, column in enumerate(self.columns):
            is_pair = index < NUM_PAIR_COLUMNS
            lacking = [row for row in rows if column not in row]
            if lacking and is_pair:
                raise UsageError(f'The rows have no column "{column}", only {", ".join(lacking[0])}. Check columns.')
            if len(lacking) == len(rows):
                continue
            values = [row.get(column) for row in rows]  # B
            if is_pair and any(isinstance(value, str) and is_empty(value) for value in values):
                raise UsageError(f'Column "{column}" holds an empty text: every row needs a {column}. Remove the row.')
            if not is_pair:
                # K_0 + ... + K_(B-1) values; an empty one is no negative
                of_rows = [[value for value in as_list(of_row) if not is_empty(value)] for of_row in values]
                if self.same_number_of_negatives:
                    check_same_number(column, [len(of_row) for of_row in of_rows])
                values = [value for of_row in of_rows for value in of_row]
            batch[column] = self.features(column, values)  # tensors of (rows, T) or (rows, ...)
            ids[column] = content_ids(values)
        if self.id_column is not None:
            ids["group"] = groups_of(self.id_column, rows)
        if self.with_ids:
            batch["ids"] = ids
        if self.label_column is not None:
            labels = [row.get(self.label_column) for row in rows]
            batch["targets"] = {"label": labels_of(self.label_column, labels, self.label_shape)}
        return batch

    def features(self, column: str, values: list) -> dict[str, torch.Tensor]:
        if not values:  # no row of this batch has a negative; rows of other processes may
            return without_rows(self.text_features(column, [""]))
        if all(isinstance(value, str) for value in values):
            return self.text_features(column, values)
        for value in values:
            if value is None or isinstance(value, (str, int, float, list, dict)):
                raise UsageError(
                    f'Column "{column}" holds {value!r}, which is not text. Remove the row or map a column.'
                )
        if self.processor is None:
            raise UsageError(f'Column "{column}" holds images, but the model has no image processor.')
        image_processor = getattr(self.processor, "image_processor", self.processor)
        images = image_processor(images=values, return_tensors="pt")
        return {name: value for name, value in images.items() if isinstance(value, torch.Tensor)}

    def text_features(self, column: str, texts: list[str]) -> dict[str, torch.Tensor]:
        """(rows, T) per key of the tokenizer; with `flat` (tokens of all rows,)."""
        tokenizer, multiple = self.tokenizer_of(column), self.pad_to_multiple_of
        if not self.gives_tokens(column):
            options = {"padding": True, "pad_to_multiple_of": multiple, "return_tensors": "pt"}
            return dict(self._tokenized(column, texts, **options))
        fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        tokens = self.tokens(column, texts)
        return (tokens.flat if self.flat else tokens.padded)(fill, tokenizer.padding_side, multiple)

    # ---- tokens ----

    def tokenizer_of(self, column: str) -> Any:
        """None where there are only images."""
        return self.tokenizer

    def gives_tokens(self, column: str) -> bool:
        """Whether texts become ids and a mask, and nothing else that only their tokenizer could pad."""
        names = set(getattr(self.tokenizer_of(column), "model_input_names", ()))
        return {"input_ids", MASK} <= names <= {*KEPT, MASK}

    def token_keys(self, column: str) -> list[str]:
        return [key for key in self.tokenizer_of(column).model_input_names if key != MASK]

    def tokens_depend_on(self, column: str) -> list | None:
        """All that a text's tokens depend on; None where that is not known, or they may be others each time."""
        own = tokens_depend_on(self.tokenizer_of(column))
        return None if own is None else [(self.prompts or {}).get(column, ""), self.limit_of(column), own]

    def as_flat(self) -> Any:
        """One that makes the same batches without padding their texts. One of the user's own, which may look into the
        batches that it inherits, stays."""
        if type(self).__module__ not in (__name__, "hf_dist_ext.data.routed_collator"):
            return self
        own = copy.copy(self)
        own.flat = True
        return own

    def limit_of(self, column: str) -> int | None:
        """The longest text in tokens, None without a limit."""
        limit = self.max_length.get(column) if isinstance(self.max_length, Mapping) else self.max_length
        limit = limit or self.tokenizer_of(column).model_max_length
        return limit if limit < 10**9 else None  # transformers writes "no limit" as 1e30

    def tokens(self, column: str, texts: list[str]) -> Tokens:
        """Those that the texts carry, or of the tokenizer."""
        tokenized = [text for text in texts if isinstance(text, TokenizedText)]
        if len(tokenized) == len(texts):
            return Tokens.of_texts(tokenized)
        return Tokens.of_rows(self._tokenized(column, texts, padding=False))

    def _tokenized(self, column: str, texts: list[str], **options: Any) -> Mapping[str, Any]:
        prompt, limit = (self.prompts or {}).get(column, ""), self.limit_of(column)
        with threads_of_tokenizer():
            return self.tokenizer_of(column)(
                [prompt + text for text in texts], truncation=limit is not None, max_length=limit, **options
            )


def ensure_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give it a padding token where it has none."""
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise UsageError("The tokenizer has no padding token, so texts can not be batched. Set its pad_token.")
    # The attention mask hides padding, so any token serves; saved with the tokenizer, it serves others too.
    logger.info("The tokenizer has no padding token; it pads with its end token %s.", tokenizer.eos_token)
    tokenizer.pad_token = tokenizer.eos_token


def check_columns(
    columns: Sequence[str], prompts: Any, max_length: int | Mapping[str, int] | None, label_column: str | None
) -> None:
    """Raises UsageError for options of a column that there is not. Warns of negatives that differ by their prompt."""
    assert len(columns) >= NUM_PAIR_COLUMNS and not {*RESERVED} & {*columns}, columns
    by_column = prompts if isinstance(prompts, Mapping) else {}
    for option, value in (("prompts", by_column), ("max_length", max_length)):
        for column in value if isinstance(value, Mapping) else ():
            if column not in columns:
                raise UsageError(f'{option} has "{column}", which is no column of this run: {", ".join(columns)}.')
    if label_column is not None and "label" in columns:
        raise UsageError('columns: the name "label" is that of the labels. Call that column something else.')
    without = [column for column in columns[NUM_PAIR_COLUMNS:] if column not in by_column]
    if without and by_column.get(columns[1]):
        logger.warning(
            'prompts has one for "%s" and none for "%s": hard negatives can then be told by what they lack. '
            "Give it the same, or an empty one if that is meant.",
            columns[1],
            without[0],
        )


def groups_of(column: str, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """(B,) ids of the rows' groups."""
    groups = [row[column] for row in rows]
    if any(map(is_empty, groups)):  # as a stream may have them: all of these rows would be of one group
        raise UsageError(f'id_column "{column}" is null or empty in a row. Give every row an id.')
    return content_ids(groups)


def labels_of(column: str, values: list, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """(B,), (B, K) or (B, K, D) in float32, whatever the numbers: processes send each other their labels. `shape`:
    that of a row's."""
    try:
        labels = torch.tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f'label_column "{column}": a label must be a number, or a list of as many numbers in every row: {error}. '
            f"The first row of the batch holds {values[0]!r}. Correct the rows, or name another column."
        ) from error
    if shape is not None and labels.shape[1:] != shape:
        raise UsageError(
            f'label_column "{column}": the first row of the data has a label of the shape {list(shape)}, and a later '
            f"one of {list(labels.shape[1:])}. Every row needs as many numbers. It holds {values[0]!r}."
        )
    return labels


def label_shape_of(stream: Any, column: str | None) -> tuple[int, ...] | None:
    """Of the first row's label, where rows are read while training; None: there is none, or all rows are known."""
    if column is None or hasattr(stream, "__len__"):
        return None
    label = next(iter(stream)).get(column)
    return tuple(labels_of(column, [label]).shape[1:])


def check_same_number(column: str, numbers: list[int]) -> None:
    if len(set(numbers)) > 1:
        raise UsageError(
            f'Column "{column}": one row has {max(numbers)} negatives and another one {min(numbers)}, and the loss '
            "takes the first, second, ... negatives of all rows as a column each. Give every row as many."
        )


def content_ids(values: Sequence) -> torch.Tensor:
    return torch.tensor([content_id(value) for value in values], dtype=torch.long)


def content_id(value: Any) -> int:
    """63 bits that are equal for equal content in every process and run, which Python's own hash is not."""
    value = value.numpy() if isinstance(value, torch.Tensor) else value
    if isinstance(value, bytes):
        content = value
    elif hasattr(value, "tobytes"):  # a picture, an array
        content = f"{getattr(value, 'mode', '')}{value.size}".encode() + value.tobytes()
    elif isinstance(value, Mapping):  # a text with images
        content = repr([(kind, [content_id(one) for one in as_list(some)]) for kind, some in value.items()]).encode()
    else:
        content = str(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def is_empty(value: Any) -> bool:
    """Whether there is nothing to embed. A text of nothing but white space is empty."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or value == [] or (isinstance(value, str) and (not value or value.isspace()))


def as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]
