"""Rows as sentence-transformers reads them, made into batches by the model's own `preprocess`.

    collator = SentenceCollator(model.preprocess, ["anchor", "positive"], prompts={"anchor": "query: "})
    collator([{"anchor": "add", "positive": "def add(a, b): ...", "label": 1}, ...])
    # {"anchor": {"input_ids", "attention_mask"}, "positive": {...}, "ids": {...}, "targets": {"label": (B,)},
    #  "constants": {"anchor": {"modality": "text", "prompt_length": 3}, ...}}

The columns of the rows are embedded in their order. Tensors of `preprocess` are features, whatever their first axis
holds (engine/images.py cuts those of pictures); what else it gives is the same for all rows, a column's constants.
Where it gives tokens and nothing else, these are taken out of its padding, so that they travel end to end.
Letters: B rows, R values of a column, N their tokens, T tokens of the longest.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_dist_ext import policy
from hf_dist_ext.data.collator import (
    CONSTANTS,
    NUM_PAIR_COLUMNS,
    RESERVED,
    as_list,
    check_columns,
    check_same_number,
    content_ids,
    groups_of,
    is_empty,
    labels_of,
)
from hf_dist_ext.data.columns import PARTS
from hf_dist_ext.data.mixture import SOURCE, one_source
from hf_dist_ext.data.tokens import KEPT, MASK, Tokens, without_rows
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import show

logger = logging.getLogger(__name__)

# The first of these that rows have is no column, but what the loss compares with.
LABELS = ("label", "labels", "score", "scores")
# What a processor calls the tokens that it writes for a tile (or for an image, where it cuts none into tiles).
TOKENS_PER_TILE = ("image_seq_length", "image_seq_len")
OF_FLAT_ROWS = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}

Prompt = str | Sequence[str]
Prompts = Prompt | Mapping[str, Prompt | Mapping[str, Prompt]] | None


@dataclass(eq=False)
class SentenceCollator:
    """Makes rows into a batch, alike in every process.

    Args:
        preprocess: `model.preprocess`: (values, prompt=, task=) -> mapping of features.
        columns: those of the rows that are embedded, for who asks; a batch has the columns of its rows.
        prompts: a prompt for all columns, or column -> prompt, dataset -> prompt, dataset -> {column -> prompt}. A
            list in the place of a prompt: one is drawn for each row, by seed, epoch and the row's first two columns.
        routes: column -> task, or dataset -> {column -> task}.
        max_length: tokens kept of a value, of all columns or by column or task; None: the model's own limits.
        has_positions: a column without a task is "query" if it is the first, else "document", as of token vectors.
        tokenizer: the model's; None: it has none.
        processor: the model's, which knows how pictures are cut into tiles; None: it has none.
        source: the dataset whose prompts and routes hold; None: that which the rows name, if any.
        seed: of drawn prompts.
        sources: dataset -> what reads its rows, where there are several that differ in more than prompts and routes.
        flat: tokens are not padded (engine/flat.py); DistTrainer asks for it.
        is_of_run: rows are those of a run file: `columns` alone are embedded, a text of the first two is never empty,
            and labels are `label_column`. The next three fields are read then alone.
        id_column: becomes `ids["group"]`.
        label_column: a number per row, a list of them or a list of such lists; float32.
        label_shape: of every row's label, () for a number; None: as the rows of a batch agree.
        same_number_of_negatives: refuses rows that have fewer negatives than others, for a loss that takes the k-th
            negatives of all rows as a column.

    A value is whatever `preprocess` takes: a text, a picture, messages, a mapping of modalities. From the third column
    on a row may hold a list of texts or none, as several negatives or no negative: they follow each other, and nothing
    but a list that a loss reads as candidates of all rows may be uneven. Labels keep their numbers: int64 of integers,
    else float32.

    Raises:
        UsageError: columns with a reserved name, labels that make no tensor, prompts that do not fit the datasets or
            the model.
    """

    preprocess: Callable[..., Mapping[str, Any]]
    columns: Sequence[str] = ()
    prompts: Prompts = None
    routes: Mapping[str, Any] | None = None
    max_length: int | Mapping[str, int] | None = None
    has_positions: bool = False
    tokenizer: Any = None
    processor: Any = None
    source: str | None = None
    seed: int = 0
    sources: Mapping[str, SentenceCollator] = field(default_factory=dict)
    flat: bool = False
    is_of_run: bool = False
    id_column: str | None = None
    label_column: str | None = None
    label_shape: tuple[int, ...] | None = None
    same_number_of_negatives: bool = False

    def __post_init__(self):
        if self.is_of_run:
            check_columns(self.columns, self.prompts, self.max_length, self.label_column)
        # shared with the workers of a loader, which live through an epoch
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_() if self.draws_prompts else None
        self._forget()

    def _forget(self) -> None:
        self._are_wide: dict[str, bool] = {}  # column -> see `_is_wide`
        self._of_sources: dict[str | None, SentenceCollator] = {self.source: self}

    def _copy(self, **changes: Any) -> SentenceCollator:
        """With other fields; both draw the prompts of the same epoch."""
        own = copy.copy(self)
        own.__dict__.update(changes)
        own._forget()
        return own

    def with_sources(self, sources: Mapping[str, SentenceCollator]) -> SentenceCollator:
        """One that hands a batch to the collator of its dataset, and reads values of no dataset itself."""
        return self._copy(sources=sources)

    def of_columns(self, columns: Sequence[str]) -> SentenceCollator:
        return self._copy(columns=columns)

    def of_source(self, name: str | None) -> SentenceCollator:
        """The same for rows of one dataset."""
        if name not in self._of_sources:
            self._of_sources[name] = self.sources.get(name or "", self)._copy(source=name, sources={})
        return self._of_sources[name]

    def of_model(self, model: Any) -> SentenceCollator:
        """One that reads rows as another model does, whose lengths and tokenizer may be others; one that reads them by
        what is no model's `preprocess` stays."""
        if not hasattr(getattr(self.preprocess, "__self__", None), "encode"):
            return self
        return self._copy(
            preprocess=model.preprocess,
            tokenizer=getattr(model, "tokenizer", None),
            processor=getattr(model, "processor", None),
            sources={name: one.of_model(model) for name, one in self.sources.items()},
        )

    def as_flat(self) -> SentenceCollator:
        """One whose tokens are not padded. A subclass, which may look into its batches, stays."""
        if type(self).__module__ != __name__:
            return self
        return self._copy(flat=True, sources={name: one.as_flat() for name, one in self.sources.items()})

    def set_epoch(self, epoch: int) -> None:
        """From here on rows draw the prompts of this epoch."""
        for one in (self, *self.sources.values()):
            if one._epoch is not None:
                one._epoch.fill_(epoch)

    @property
    def draws_prompts(self) -> bool:
        return any(not isinstance(prompt, str) for prompt in _leaves(self.prompts))

    # ---- a batch ----

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        source = one_source(rows)
        if source is not None and source != self.source:
            return self.of_source(source)(rows)
        if self.is_of_run:
            columns, label = self._columns_of_run(rows), self.label_column
        else:
            label = label_column(rows[0])
            columns = [name for name in rows[0] if name not in (label, SOURCE)]
        if reserved := [name for name in columns if name in RESERVED]:
            raise UsageError(f'The rows have a column "{reserved[0]}", a name that batches need. Rename that column.')
        given = {name: [row.get(name) for row in rows] for name in columns}
        if self.is_of_run:
            given = {name: [_present(value) for value in of_rows] for name, of_rows in given.items()}
        found = [_flattened(place, of_rows, self.is_of_run) for place, of_rows in enumerate(given.values())]
        values, of_row = zip(*found, strict=True)
        for name, owners in zip(columns, of_row, strict=True) if self.same_number_of_negatives else ():
            check_same_number(name, np.bincount(owners, minlength=len(rows)).tolist())
        ids = {name: content_ids(of_column) for name, of_column in zip(columns, values, strict=True)}
        draws = _keys_of_rows(ids, columns) if self.draws_prompts else None
        batch: dict[str, Any] = {}
        constants = {}
        for place, name in enumerate(columns):
            key = None if draws is None else [draws[row] for row in of_row[place]]
            batch[name], constants[name] = self._column(name, place, values[place], key)
        batch["ids"] = ids | ({} if source is None else {SOURCE: source})
        if self.id_column is not None:
            batch["ids"]["group"] = groups_of(self.id_column, rows)
        if label is not None:
            labels = [row.get(label) for row in rows]
            labels = labels_of(label, labels, self.label_shape, torch.float32 if self.is_of_run else None)
            batch["targets"] = {"label": labels}
        if constants := {name: one for name, one in constants.items() if one}:
            batch[CONSTANTS] = constants
        return batch

    def _columns_of_run(self, rows: list[dict[str, Any]]) -> list[str]:
        """Those that the rows have. Raises UsageError for rows that a run file does not allow."""
        for place, name in enumerate(self.columns):
            is_pair, values = place < NUM_PAIR_COLUMNS, [row.get(name) for row in rows]
            if is_pair and (lacking := next((row for row in rows if name not in row), None)) is not None:
                raise UsageError(f'The rows have no column "{name}", only {", ".join(lacking)}. Check columns.')
            if is_pair and any(isinstance(value, str) and is_empty(value) for value in values):
                raise UsageError(f'Column "{name}" holds an empty text: every row needs a {name}. Remove the row.')
            if is_pair and any(isinstance(value, Mapping) and is_empty(value) for value in values):
                raise UsageError(f'Column "{name}" holds a row without text and image. Remove the row.')
            for value in values:
                if isinstance(value, int | float) or (is_pair and (value is None or isinstance(value, list))):
                    raise UsageError(
                        f'Column "{name}" holds {value!r}, which is not text. Remove the row or map a column.'
                    )
        return [name for name in self.columns if any(name in row for row in rows)]

    def features(self, column: str, values: list) -> dict[str, Any]:
        """Of values of a column, without a batch around them."""
        return self._column(column, self._place(column), values, None)[0]

    def _column(
        self, name: str, place: int, values: list, draws: list[str] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Features of (R, ...), and the constants."""
        if not values:  # no row of this batch has one; rows of other processes may
            features, constants = self._column(name, place, [""], None if draws is None else [""])
            return without_rows(features), constants
        features, constants = self._preprocessed(name, place, values, draws)
        tokens = unpadded(features, *self._padding())
        if tokens is None or (MASK in features and (not self.flat or self._is_wide(name, place))):
            return features, constants
        return (tokens.flat if self.flat else tokens.padded)(*self._padding()), constants

    def _preprocessed(
        self, name: str, place: int, values: list, draws: list[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the model makes of values: (tensors, the rest)."""
        task, prompt = self.task_of(name, place), self.prompt_of(name)
        if draws is not None and not isinstance(prompt, str | None):
            texts = zip(values, draws, strict=True)
            values, prompt = [self._drawn(prompt, name, key) + _text(name, text) for text, key in texts], None
        length = self._length_of(name, task)
        more = {} if length is None else {"max_length": length}
        found = self.preprocess(values, prompt=prompt, task=task, **more)
        if task is not None:
            found = {**found, "task": task}
        if "pixel_values" in found and "input_ids" in found:
            found = {**found, **tiles_of_rows(found["input_ids"].tolist(), self.processor)}
        is_constant = {key: _is_constant(value) for key, value in found.items()}
        dropped = OF_FLAT_ROWS if "cu_seq_lens_q" in found else ()
        constants = {key: value for key, value in found.items() if is_constant[key] and key not in dropped}
        return {key: value for key, value in found.items() if not is_constant[key]}, constants

    def _is_wide(self, name: str, place: int) -> bool:
        """Whether the model pads rows to more than the longest of them, as SigLIP, which reads the last position of a
        fixed width; all its rows are left as it pads them."""
        if name not in self._are_wide:
            mask = self._preprocessed(name, place, [""], [""] if self.draws_prompts else None)[0].get(MASK)
            self._are_wide[name] = mask is not None and not bool(mask.all())
        return self._are_wide[name]

    # ---- prompts, routes ----

    def prompt_of(self, column: str) -> Prompt | None:
        """A prompt, or a list of those that rows draw from."""
        prompts = self.prompts if self.is_of_run else of_source(self.prompts, self.source, "prompts")
        return prompts.get(column) if isinstance(prompts, Mapping) else prompts

    def task_of(self, column: str, place: int) -> str | None:
        routes, task = self.routes or {}, None
        if any(isinstance(value, Mapping) for value in routes.values()):
            routes = routes.get(self.source or "", {})
        task = routes.get(column)
        return ("document" if place else "query") if task is None and self.has_positions else task

    def _length_of(self, column: str, task: str | None) -> int | None:
        lengths = self.max_length
        return lengths if isinstance(lengths, int | None) else lengths.get(column, lengths.get(task or ""))

    def _drawn(self, prompts: Sequence[str], column: str, key: str) -> str:
        assert self._epoch is not None
        facts = f"{self.seed} {int(self._epoch)} {column} {key}".encode()
        return prompts[int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), "little") % len(prompts)]

    # ---- tokens ----

    def _padding(self) -> tuple[dict[str, int], str]:
        """(key -> the number of padding, the side of it), of the model's tokenizer."""
        of = self.tokenizer
        ids, types = getattr(of, "pad_token_id", None) or 0, getattr(of, "pad_token_type_id", None) or 0
        return {"input_ids": ids, "token_type_ids": types}, getattr(of, "padding_side", "right")

    def _place(self, column: str) -> int:
        return list(self.columns).index(column)


class ContrastiveCollator(SentenceCollator):
    """The same for a model that is no SentenceTransformer: texts by a tokenizer, pictures by an image processor.

        collator = ContrastiveCollator(tokenizer, ["query", "positive"], max_length={"query": 64, "positive": 256})
        collator([{"query": "add", "positive": "def add(a, b): ..."}, ...])
        # {"query": {"input_ids", "attention_mask"}, "positive": {...}, "ids": {"query": ..., "positive": ...}}

    The first two columns hold one text (or PIL image) per row. A further column holds the row's negatives, one or a
    list; a negative column that none of the rows has is left out. `prompts` go before the text and are not part of its
    id. `tokenizer`: None where there are only images. `max_length` is in tokens; None is the tokenizer's own limit.
    `more`: fields of a SentenceCollator.
    """

    def __init__(
        self,
        tokenizer: Any,
        columns: Sequence[str],
        prompts: Mapping[str, str] | None = None,
        max_length: int | Mapping[str, int] | None = None,
        id_column: str | None = None,
        processor: Any = None,
        **more: Any,
    ):
        if tokenizer is not None:
            ensure_padding(tokenizer)
        more |= {"max_length": max_length, "tokenizer": tokenizer, "processor": processor, "id_column": id_column}
        super().__init__(
            _TokenizerReader(tokenizer, processor), list(columns), dict(prompts or {}), is_of_run=True, **more
        )


@dataclass(eq=False)
class _TokenizerReader:
    """A model's `preprocess`, of a tokenizer and a processor."""

    tokenizer: Any
    processor: Any

    def limit(self, given: int | None) -> int | None:
        """The longest text in tokens, None without a limit."""
        limit = given or self.tokenizer.model_max_length
        return limit if limit < 10**9 else None  # transformers writes "no limit" as 1e30

    def __call__(
        self, values: list, prompt: str | None = None, task: str | None = None, max_length: int | None = None
    ) -> Mapping[str, Any]:
        if all(isinstance(value, str) for value in values):
            texts, limit = [(prompt or "") + text for text in values], self.limit(max_length)
            options = {"truncation": limit is not None, "max_length": limit}
            return self.tokenizer(texts, padding=True, return_tensors="pt", **options)
        if odd := [value for value in values if isinstance(value, str | list | dict)]:
            raise UsageError(f"A column of images holds {odd[0]!r}. Remove the row or map a column.")
        if self.processor is None:
            raise UsageError("A column holds images, but the model has no image processor.")
        images = getattr(self.processor, "image_processor", self.processor)(images=values, return_tensors="pt")
        return {name: value for name, value in images.items() if isinstance(value, torch.Tensor)}


def ensure_padding(tokenizer: Any) -> None:
    """Give it a padding token where it has none."""
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise UsageError("The tokenizer has no padding token, so texts can not be batched. Set its pad_token.")
    # The attention mask hides padding, so any token serves; saved with the tokenizer, it serves others too.
    logger.info("The tokenizer has no padding token; it pads with its end token %s.", tokenizer.eos_token)
    tokenizer.pad_token = tokenizer.eos_token


def label_column(columns: Mapping[str, Any] | Sequence[str]) -> str | None:
    return next((name for name in LABELS if name in columns), None)


def of_source(option: Any, source: str | None, name: str) -> Any:
    """What an option that may be by dataset says of one: a value for all columns, or by column.

    Raises:
        UsageError: it is by dataset and column, and there is one dataset without a name.
    """
    if not isinstance(option, Mapping) or not option:
        return option
    if source is not None and source in option:
        return option[source]
    if not isinstance(next(iter(option.values())), Mapping):
        return option
    if source is None:
        raise UsageError(
            f"{name} are by dataset and column ({', '.join(option)}), and the rows name no dataset. Give a "
            f"DatasetDict of these names, or {name} by column."
        )
    return {}


def unpadded(features: Mapping[str, Any], fill: Mapping[str, int], side: str) -> Tokens | None:
    """The tokens of features that are nothing but tokens: padded ones, those of an embedding bag (input_ids (N,),
    offsets (R,)), and rows end to end (cu_seq_lens_q (R + 1,)). None: they are something else, or padded on another
    side or with other numbers."""
    ids = features.get("input_ids")
    if ids is None:
        return None
    if ids.dim() == 1 and features.keys() == {"input_ids", "offsets"}:
        lengths = np.diff(features["offsets"].numpy(), append=len(ids))
        return Tokens({"input_ids": ids.numpy().astype(np.int32)}, lengths)
    if "cu_seq_lens_q" in features and features.keys() - {"input_ids"} <= OF_FLAT_ROWS:
        lengths = features["cu_seq_lens_q"].diff().long().numpy()
        return Tokens({"input_ids": ids[0].numpy().astype(np.int32)}, lengths)
    if ids.dim() != 2 or MASK not in features or not features.keys() <= {*KEPT, MASK}:
        return None
    mask = features[MASK].numpy().astype(bool)
    values = {key: features[key].numpy()[mask].astype(KEPT[key]) for key in KEPT if key in features}
    tokens = Tokens(values, mask.sum(1))
    again = {} if mask.all() else tokens.padded(fill, side)
    return tokens if all(value.equal(features[key].long()) for key, value in again.items()) else None


def tiles_of_rows(ids: Sequence[list[int]], processor: Any) -> dict[str, list[int]]:
    """How many tiles of pictures every row has, by its tokens; empty where the processor makes no tiles, or writes
    as many tokens for a picture as its size asks for (Gemma 4, EmbeddingGemma 2)."""
    if hasattr(getattr(processor, "image_processor", None), "max_soft_tokens"):
        return {}
    each = next((getattr(processor, name) for name in TOKENS_PER_TILE if hasattr(processor, name)), None)
    return {} if each is None else {"num_tiles": [row.count(image_token(processor)) // each for row in ids]}


def image_token(processor: Any) -> int | None:
    # Gemma's processors call the token before an image theirs; the tokenizer knows the one for its patches.
    found = (getattr(one, "image_token_id", None) for one in (processor.tokenizer, processor))
    return next((token for token in found if token is not None), None)


def _is_constant(value: Any) -> bool:
    return isinstance(value, str | int | float | None) or (isinstance(value, torch.Tensor) and not value.dim())


def _present(value: Any) -> Any:
    """What a row of text and picture has of the two: sentence-transformers refuses a part that is none."""
    if isinstance(value, list | tuple):
        return [_present(one) for one in value]
    if not isinstance(value, Mapping) or not value.keys() <= {*PARTS}:
        return value
    parts = {kind: one for kind, one in value.items() if not is_empty(one)}
    return next(iter(parts.values())) if len(parts) == 1 else parts


def _flattened(place: int, of_rows: list, is_of_run: bool) -> tuple[list, list[int]]:
    """(R,) values of a column, and the row of each."""
    if is_of_run and place >= NUM_PAIR_COLUMNS:
        are_several = any(value is None or isinstance(value, list) or is_empty(value) for value in of_rows)
    else:
        are_several = place >= NUM_PAIR_COLUMNS and any(map(_is_several, of_rows))
    if not are_several:
        return of_rows, list(range(len(of_rows)))
    split = [as_list(value) if is_of_run or _is_several(value) else [value] for value in of_rows]  # not a conversation
    pairs = [(one, row) for row, own in enumerate(split) for one in own if not is_empty(one)]
    return [one for one, _ in pairs], [row for _, row in pairs]


def _is_several(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and all(isinstance(one, str | None) for one in value))


def _keys_of_rows(ids: Mapping[str, torch.Tensor], columns: Sequence[str]) -> list[str]:
    """What tells a row from others when its prompts are drawn."""
    first = [ids[name].tolist() for name in columns[:NUM_PAIR_COLUMNS]]
    return [" ".join(map(str, of_row)) for of_row in zip(*first, strict=True)]


def _text(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise UsageError(
        f'prompts has a list for "{column}", one of which is drawn for each row\'s text, and a row holds '
        f"{type(value).__name__}. Give that column one prompt."
    )


def _leaves(prompts: Any) -> list[Any]:
    """Every prompt, and every list of those to draw from."""
    if isinstance(prompts, Mapping):
        return [leaf for value in prompts.values() for leaf in _leaves(value)]
    return [] if prompts is None else [prompts]


def pads_to_all_positions(first: Any, max_length: Any) -> bool:
    """Whether module 0 is a SigLIP, whose vector is that of the last position: its texts are padded to all positions
    from now on, and its folder says so, or the vector of a text would change with the texts beside it.

    Raises:
        UsageError: another max_length was given, an int or column -> int.
    """
    from sentence_transformers.base.modules import Transformer

    is_wide = isinstance(first, Transformer) and first.config.model_type in policy.FIXED_WIDTH
    if not is_wide or "text" not in first.modality_config:
        return False
    most = first.config.get_text_config().max_position_embeddings
    lengths = {*max_length.values()} if isinstance(max_length, Mapping) else {max_length or most}
    if lengths != {most}:
        raise UsageError(f"max_length={show(max_length)}: this model reads texts of {most} tokens. Remove max_length.")
    text = {"padding": "max_length", "max_length": most} | first.processing_kwargs.get("text", {})
    if first.processing_kwargs.get("text") != text:
        logger.info(f"texts are padded to {most} tokens, as the model's vector is that of the last position.")
        first.processing_kwargs = {**first.processing_kwargs, "text": text}
    return True
