"""Rows of image-text data become conversations with pictures, and all rows are checked before a model is built.

    train, evaluation = load_conversations(run)
    example = ConversationReader(run, train.column_names).read(train[0])
    example.images, example.messages  # [PIL image, ...], [{"role": "user", "content": [{"type": "image"}, ...]}, ...]

A row has one of two forms:
* LLaVA's: `conversations` [{"from": "human" | "gpt" | "system", "value": text}] (or role and content), in which every
  <image> stands for the next of the row's pictures; `image` is a file, several, or nothing
* columns: `image`, `prompt` and `answer`; without a mark <image> in the prompt the pictures come before it

(1) JSON and JSONL files are read here, since rows of LLaVA's files differ in types that Arrow keeps apart. Everything
    else is opened by data/load.py
(2) Rows are numbered. One process of each machine reads them once without their pictures, and checks who speaks, that
    there are as many marks as pictures, and that the files exist
(3) The collator reads them again, with pictures
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from hf_dist_ext.data import digits
from hf_dist_ext.data.collator import as_list
from hf_dist_ext.data.columns import AnyDataset, arrow_batches, columns_of, require_column, type_name
from hf_dist_ext.data.image_files import find_image
from hf_dist_ext.data.kept_files import kept_file
from hf_dist_ext.data.load import facts_of, load_datasets, open_splits, refuse_empty
from hf_dist_ext.data.row_check import RowCheck
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig

COLUMNS = ("image", "conversations", "prompt", "answer")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
TEXTS = ("value", "content")  # of a turn
MARK = "<image>"
VERSION = 2  # of the rows that are kept of a JSON file
ROW = "row"  # the number of a row in its file, for errors
Message = dict[str, Any]  # {"role": ..., "content": [{"type": "image"} | {"type": "text", "text": ...}, ...]}


@dataclass
class Example:
    """A conversation and its pictures, in the order of the marks that stand for them."""

    images: list[Any]
    messages: list[Message]
    where: str  # for errors


def load_conversations(run: RunConfig, **options: int | None) -> tuple[AnyDataset, AnyDataset | None]:
    """The run's training and evaluation rows; UsageError for what is not there or does not fit together. `options`:
    of `load_datasets`."""
    return load_datasets(run, open_rows, check_rows, **options)


# (1) ---------------------------------------------------------------------------------------------------------------


def open_rows(name: str, run: RunConfig) -> Mapping[str, AnyDataset]:
    if name == digits.NAME:
        return digits.load_digits(run.dataset_config_name)
    path = Path(name).expanduser()
    if path.suffix in (".json", ".jsonl") and path.is_file() and not run.streaming:
        return {"train": _kept(path, run.columns or {})}
    return open_splits(name, run)


def _kept(path: Path, names: Mapping[str, Any]) -> Dataset:
    """The rows of a file, kept in `datasets`' cache: one process parses it, the others and later runs read Arrow."""
    facts = [VERSION, str(path.resolve()), facts_of(path), sorted(map(repr, names.items()))]
    key = hashlib.blake2b(repr([*facts, datasets.__version__]).encode(), digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        Dataset.from_dict(_uniform(_json_rows(path), names)).save_to_disk(str(folder))

    return kept_file(key, lambda folder: datasets.load_from_disk(str(folder)), make)


def _json_rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]  # a text may hold other line ends
    except UnicodeDecodeError as error:
        raise UsageError(f'Dataset "{path}" is not UTF-8 text: {error}.') from error
    except json.JSONDecodeError as error:
        raise UsageError(f'Dataset "{path}" is not JSON or JSON lines: {error}.') from error
    if not all(isinstance(row, dict) for row in rows):
        raise UsageError(f'Dataset "{path}": a row is not an object {{"image": ..., "conversations": [...]}}.')
    return rows


def _uniform(rows: list[dict[str, Any]], names: Mapping[str, Any]) -> dict[str, list]:
    """The columns that any row has, of one type each: Arrow would refuse a file where `image` is now a name and now a
    list. `names`: what the run calls them; a file to evaluate on may call them as here."""
    there = {name for row in rows for name in row}
    found = {}
    for column in COLUMNS:
        known = [name for name in (names.get(column, column), column) if isinstance(name, str) and name in there]
        if known or column == "image":
            source = known[0] if known else names.get(column, column)
            found[source] = [_of_one_type(column, row.get(source)) for row in rows]
    return found if rows else {}


def _of_one_type(column: str, value: Any) -> Any:
    if column == "image":
        return [str(one) for one in as_list(value) if one is not None]
    if column == "conversations" and isinstance(value, list):
        return [{key: _text(key, one) for key, one in dict(turn).items()} for turn in value]
    return value


def _text(key: str, value: Any) -> str | None:
    """None: a turn whose text is none, which `ConversationReader` refuses by its row."""
    if value is None or isinstance(value, str):
        return value
    return None if key in TEXTS and isinstance(value, list | dict) else json.dumps(value)


# (2) ---------------------------------------------------------------------------------------------------------------


def check_rows(dataset: AnyDataset, run: RunConfig, check: RowCheck) -> AnyDataset:
    """The columns that are read, with numbered rows; every row of a dataset that is not a stream is checked."""
    available = columns_of(dataset)
    reader = ConversationReader(run, available, check.name)
    dataset = dataset.select_columns(list(reader.columns.values()))
    if isinstance(dataset, IterableDataset):  # whose readers each would count from 0
        return dataset
    refuse_empty(dataset, check.name)
    texts = dataset.select_columns([column for key, column in reader.columns.items() if key != "image"])
    pictures = _pictures(dataset, reader.columns.get("image"))
    check.rows(zip(texts, pictures, strict=True), lambda row: reader.check(*row))
    return dataset.add_column(ROW, np.arange(len(dataset)))


def _pictures(dataset: Dataset, column: str | None) -> Iterator[list[str | None]]:
    """Per row its files, or None for each picture that is stored in the dataset: pixels are not read here."""
    if column is None:
        yield from itertools.repeat([], len(dataset))
        return
    feature = dataset.features[column]
    inner = getattr(feature, "feature", feature)
    is_list, is_image = inner is not feature, isinstance(inner, datasets.Image)
    is_text = isinstance(inner, datasets.Value) and ("string" in inner.dtype or inner.dtype == "null")
    if not is_image and not is_text:
        raise UsageError(f'column "{column}" holds {type_name(feature)}; image must be pictures or file names.')
    for table in arrow_batches(dataset.select_columns([column])):
        values = table.column(column)
        if is_text:
            for value in values.to_pylist():
                yield [file for file in as_list(value) if file]
        else:
            counts = pc.list_value_length(values) if is_list else values.is_valid()
            for count in counts.to_pylist():
                yield [None] * (count or 0)


# (3) ---------------------------------------------------------------------------------------------------------------


class ConversationReader:
    """Makes a row into an `Example`. It can be pickled, since the loader's workers use it."""

    def __init__(self, run: RunConfig, available: list[str], name: str = "the dataset"):
        self.name, self.folder = name, run.image_folder
        self.prompt = (run.prompts or {}).get("prompt", "")
        self.columns = _resolve(run.columns, available, name)
        if self.folder is not None and not os.path.isdir(self.folder):
            raise UsageError(f'image_folder="{self.folder}" is no folder. Paths start at {Path.cwd()}.')

    def read(self, row: Mapping[str, Any]) -> Example:
        """A row with its pictures opened."""
        stored = as_list(row.get(self.columns.get("image", "")))
        images = [image for image in stored if image is not None and image != ""]
        where = f"{self.name}, row {row[ROW]} (counted from 0)" if ROW in row else self.name
        try:
            messages = self.messages(row, len(images))
            return Example([self._open(image) for image in images], messages, where)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    def check(self, row: Mapping[str, Any], images: list[str | None]) -> None:
        """What can be known without opening a picture."""
        self.messages(row, len(images))
        for file in images:
            if file is not None:
                find_image(file, self.folder)

    def messages(self, row: Mapping[str, Any], num_images: int) -> list[Message]:
        if "conversations" in self.columns:
            turns = [self._turn(turn) for turn in row[self.columns["conversations"]] or []]
        else:
            prompt, answer = (row.get(self.columns.get(key, "")) or "" for key in ("prompt", "answer"))
            prompt = self.prompt + prompt
            if MARK not in prompt:
                prompt = MARK * num_images + prompt
            turns = [("user", prompt), ("assistant", answer)]
        self._check_turns(turns)
        marks = sum(text.count(MARK) for _, text in turns)
        if marks != num_images:
            raise UsageError(
                f"it has {num_images} image(s) but {marks} mark(s) {MARK} in its text. "
                f"Put one {MARK} where each image belongs, and none elsewhere."
            )
        return [{"role": role, "content": _content(text)} for role, text in turns]

    def _turn(self, turn: Mapping[str, Any]) -> tuple[str, str]:
        said_by, text = turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content")
        if said_by not in ROLES or not isinstance(text, str):
            raise UsageError(
                f'{json.dumps(dict(turn))[:80]} is no turn. It takes {{"from": "human", "gpt" or '
                '"system", "value": text}.'
            )
        return ROLES[said_by], text

    def _check_turns(self, turns: list[tuple[str, str]]) -> None:
        roles = [role for role, _ in turns if role != "system"]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            raise UsageError(
                f"the speakers are {', '.join(role for role, _ in turns) or 'none'}; "
                "human and gpt must take turns, human first and gpt last."
            )
        for role, text in turns:
            if role == "assistant" and (not text.strip() or MARK in text):
                raise UsageError(f"an answer {f'holds {MARK}' if text.strip() else 'is empty'}. Remove the row.")

    def _open(self, image: Any) -> Any:
        from PIL import Image, UnidentifiedImageError

        if not isinstance(image, str):
            return image.convert("RGB")
        path = find_image(image, self.folder)
        try:
            with Image.open(path) as opened:
                return opened.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise UsageError(f"{path} cannot be read as an image: {error}.") from error


def _content(text: str) -> list[dict[str, str]]:
    """Text with marks -> parts; the line break that LLaVA's files put beside a mark is the template's business."""
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(MARK)):
        piece = piece.removeprefix("\n") if index else piece
        if index:
            parts.append({"type": "image"})
        if index < text.count(MARK):
            piece = piece.removesuffix("\n")
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def _resolve(columns: Any, available: list[str], name: str) -> dict[str, str]:
    """Our column names -> the dataset's own that exist, enough of them to make a conversation."""
    columns = {column: column for column in COLUMNS if column in available} if columns is None else dict(columns)
    for column, source in columns.items():
        if column not in COLUMNS:
            raise UsageError(f'columns has "{column}"; task "image-text-to-text" knows {", ".join(COLUMNS)}.')
        if not isinstance(source, str):
            raise UsageError(f'columns["{column}"] is a list; here every column is one of the dataset.')
        require_column(source, available, name, f'columns["{column}"]')
    if "conversations" not in columns and "answer" not in columns:
        raise UsageError(
            f"{name} has the columns {', '.join(available)}, neither conversations nor answer. Map them: "
            'columns={"image": "...", "prompt": "...", "answer": "..."}.'
        )
    if "conversations" in columns and {"prompt", "answer"} & columns.keys():
        columns = {key: value for key, value in columns.items() if key not in ("prompt", "answer")}
    return columns
