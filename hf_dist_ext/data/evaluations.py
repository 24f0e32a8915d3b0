"""Reads what the `evaluations` of a run name, for evaluation/from_files.py, which makes evaluators of it.

    evaluations = read_evaluations([{"type": "retrieval", "path": "data/nfcorpus"}])

(1) BEIR's files: corpus.jsonl, queries.jsonl (both may be .gz) and qrels/<split>.tsv
(2) MTEB's layout, as `datasets` loads it: configurations "corpus", "queries", and "default" or "qrels"; from a folder,
    the cache or the hub
(3) what cannot be is refused before anything trains: ids that nobody knows or two rows have, queries without text
(4) rows of texts from what training rows may come from: a json, csv, parquet or arrow file, a folder, or the hub

A document is its title and its text, with a space between.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.json
from datasets import Dataset

from hf_dist_ext.data.columns import columns_of, require_column
from hf_dist_ext.data.load import (
    loading_errors,
    open_here,
    open_splits,
    path_of,
    place_of,
    say_what_is_not_read,
)
from hf_dist_ext.data.row_check import first_of_node
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.evaluations import COLUMNS, Evaluation, Retrieval, RowsEvaluation, parse_evaluations

ID_COLUMNS = {"corpus": ("_id", "id", "corpus-id"), "queries": ("_id", "id", "query-id")}
FILES = {"corpus": "corpus.jsonl", "queries": "queries.jsonl"}
QRELS_CONFIGS = ("qrels", "default")
NEEDED = (
    "Retrieval needs a folder with BEIR's files (corpus.jsonl, queries.jsonl, qrels/*.tsv), or a dataset with the "
    'configurations "corpus", "queries" and "default" or "qrels".'
)
Judgement = tuple[str, str, float]  # ids of a query and a document, and what the document is worth


@dataclass(eq=False)
class RetrievalData:
    """
    Attributes:
        queries: id -> text or picture; those that have a right document.
        corpus: texts, or a column of pictures, each decoded when it is taken.
        relevant: id of a query -> ids of its right documents, those with a score above 0.
    """

    options: Retrieval
    queries: dict[str, Any]
    corpus_ids: list[str]
    corpus: Sequence
    relevant: dict[str, set[str]]


@dataclass(eq=False)
class RowsData:
    """`columns`: by the names of `COLUMNS`; texts and numbers."""

    options: RowsEvaluation
    columns: dict[str, list]


def read_evaluations(entries: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """What `evaluators_of` takes, from entries as in a run file. Raises UsageError."""
    options = parse_evaluations([dict(entry) for entry in entries or ()])
    with first_of_node():  # the others take from the caches what it has made
        return [_named(one) for one in options]


def _named(options: Evaluation) -> RetrievalData | RowsData:
    try:
        if isinstance(options, Retrieval):
            return read_retrieval(options)
        assert isinstance(options, RowsEvaluation)
        return read_rows(options)
    except UsageError as error:
        raise UsageError(f'evaluation "{options.name}": {error}') from None


def read_retrieval(options: Retrieval) -> RetrievalData:
    folder = path_of(options.path)
    has_some = any((folder / f"{name}{end}").is_file() for name in FILES.values() for end in ("", ".gz"))
    # A clone from the hub says in its README what is which, and may call its files the same.
    is_beir = bool(_qrels_in(folder)) or (has_some and not (folder / "README.md").is_file())
    tables, qrels = _read_beir(folder, options.split) if is_beir else _read_mteb(options.path, options.split)
    relevant: dict[str, set[str]] = {}
    for query, document, score in qrels:
        if score > 0:
            relevant.setdefault(query, set()).add(document)
    if not relevant:
        raise UsageError("no line of qrels has a score above 0, so no document is right. Check the split.")
    ids = {kind: _ids(tables[kind], kind) for kind in FILES}
    _refuse_unknown((query for query, _, _ in qrels), ids["queries"], "queries")
    _refuse_unknown((document for _, document, _ in qrels), ids["corpus"], "corpus")
    queries, corpus = (_contents(tables[kind], kind) for kind in ("queries", "corpus"))
    asked = {name: row for name, row in zip(ids["queries"], queries, strict=True) if name in relevant}
    if empty := [name for name, row in asked.items() if row == ""]:
        raise UsageError(f'{len(empty)} queries have no text, such as "{empty[0]}". Remove them from qrels.')
    return RetrievalData(options, asked, ids["corpus"], corpus, relevant)


# (1) ---------------------------------------------------------------------------------------------------------------


def _file(folder: Path, name: str) -> Path:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.is_file() and packed.is_file():
        raise UsageError(f"{folder} has {name} and {name}.gz. Remove the one that is not meant.")
    return packed if packed.is_file() else plain


def _qrels_in(folder: Path) -> list[str]:
    """Splits; a copy that an editor keeps, such as test.tsv.bak, is none."""
    names = {path.name.removesuffix(".gz") for path in (folder / "qrels").glob("*.tsv*")}
    return sorted(name.removesuffix(".tsv") for name in names if name.endswith(".tsv"))


def _choose_split(splits: Mapping[str, Any], asked: str | None, what: str) -> str:
    """The name of the one that is asked for; None: the only one, else "test". Raises UsageError."""
    if asked is None:
        asked = next(iter(splits)) if len(splits) == 1 else "test"
    if asked not in splits:
        raise UsageError(f'{what}: there is no split "{asked}", but {", ".join(splits)}. Choose one with split.')
    return asked


def _read_beir(folder: Path, split: str | None) -> tuple[dict[str, Dataset], list[Judgement]]:
    tables = {}
    for kind, name in FILES.items():
        if not (path := _file(folder, name)).is_file():
            raise UsageError(f"{folder} has no {name}. BEIR's layout is corpus.jsonl, queries.jsonl, qrels/*.tsv.")
        schema = pa.schema([(column, pa.large_string()) for column in ("_id", "title", "text")])
        # columns that nobody reads may hold anything
        options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        try:
            with pa.input_stream(path) as stream:
                table = pa.json.read_json(stream, pa.json.ReadOptions(block_size=2**24), options)
            table.validate(full=True)  # Arrow reads the JSON of any bytes
        except pa.ArrowException as error:
            raise UsageError(
                f'{path} cannot be read: {error}. Every line is an object with texts "_id" and "text".'
            ) from None
        tables[kind] = Dataset(table)
    if not (splits := _qrels_in(folder)):
        raise UsageError(f"{folder} has no qrels/*.tsv. BEIR's layout is corpus.jsonl, queries.jsonl, qrels/*.tsv.")
    path = _file(folder / "qrels", f"{_choose_split(dict.fromkeys(splits), split, 'qrels')}.tsv")
    try:
        return tables, _read_qrels(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}.") from None


def _finite(score: str) -> float:
    if not math.isfinite(number := float(score)):
        raise ValueError(score)
    return number


def _read_qrels(path: Path) -> list[Judgement]:
    """Lines of query, document and score; the first may be a header."""
    found = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        for number, line in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            try:
                query, document, score = line
                found.append((query, document, _finite(score)))
            except ValueError:
                if number == 1 and len(line) == 3:
                    continue
                raise UsageError(
                    f"{path}, line {number}: {line} is not a query, a document and a score with tabs between."
                ) from None
    return found


# (2) ---------------------------------------------------------------------------------------------------------------


def _read_mteb(path: str, split: str | None) -> tuple[dict[str, Dataset], list[Judgement]]:
    if path_of(path).is_file():
        raise UsageError(f"{path} is a file. {NEEDED}")
    place = place_of(path)
    with loading_errors(path):
        names = datasets.get_dataset_config_names(place)
        qrels = next((name for name in QRELS_CONFIGS if name in names), None)
        if not {"corpus", "queries"} <= set(names) or qrels is None:
            raise UsageError(f"{path} has the configurations {', '.join(names)}. {NEEDED}")
        loaded = {name: _opened(path, name) for name in ("corpus", "queries", qrels)}
    judged = loaded.pop(qrels)
    judged = judged[_choose_split(judged, split, "qrels")]
    missing = {"query-id", "corpus-id", "score"} - set(judged.column_names)
    if missing:
        raise UsageError(f'{path}, configuration "{qrels}", has no column "{min(missing)}".')
    lines = zip(judged["query-id"], judged["corpus-id"], judged["score"], strict=True)
    tables = {}
    for kind, splits in loaded.items():  # the one of these is called as they are, or as that of qrels
        names = [name for name in (split, kind) if name in splits]
        tables[kind] = splits[_choose_split(splits, names[0] if names else None, kind)]
    return tables, [(str(query), str(document), float(score)) for query, document, score in lines]


def _opened(path: str, config_name: str) -> Mapping[str, Any]:
    folder = path_of(path)
    if folder.is_dir():
        return open_here(folder, streaming=False, config_name=config_name, numbers={"score"})
    return datasets.load_dataset(place_of(path), config_name)


# (3) ---------------------------------------------------------------------------------------------------------------


def _ids(table: Dataset, kind: str) -> list[str]:
    column = next((name for name in ID_COLUMNS[kind] if name in table.column_names), None)
    if column is None:
        raise UsageError(
            f"{kind} have no column {' or '.join(ID_COLUMNS[kind])}, but {', '.join(table.column_names)}."
        )
    ids = table[column][:]
    if None in ids:
        raise UsageError(f"{kind}: {ids.count(None)} of {len(ids)} rows have no {column}. Give every row an id.")
    ids = [str(one) for one in ids]
    if len(set(ids)) < len(ids):
        ((double, count),) = Counter(ids).most_common(1)
        raise UsageError(f'{kind}: the id "{double}" stands in {count} rows. Keep one of them.')
    return ids


def _refuse_unknown(asked: Iterable[str], known: list[str], kind: str) -> None:
    if unknown := sorted(set(asked) - set(known)):
        raise UsageError(
            f'qrels name {len(unknown)} id(s) that are not in {kind}, such as "{unknown[0]}". Remove their lines, or '
            f"give the {kind} that these qrels belong to."
        )


def _contents(table: Dataset, kind: str) -> Sequence:
    """Texts, titles first; pictures where there is no text."""
    if "text" not in table.column_names:
        pictures = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
        if not pictures:
            raise UsageError(f"{kind} have no column text, but {', '.join(table.column_names)}.")
        return table[pictures[0]]
    if (stored := str(table.data.schema.field("text").type)) not in ("string", "large_string"):
        raise UsageError(f"{kind}: the column text holds {stored}, not text.")
    names = [name for name in ("title", "text") if name in table.column_names and (kind, name) != ("queries", "title")]
    rows = zip(*(table[name][:] for name in names), strict=True)
    texts = [" ".join(part for part in row if part).strip() for row in rows]
    if kind == "corpus" and not any(texts):
        raise UsageError('corpus: no row has a "text" or a "title". Give the texts of documents these names.')
    return texts


# (4) ---------------------------------------------------------------------------------------------------------------


def read_rows(options: RowsEvaluation) -> RowsData:
    names = {name: (options.columns or {}).get(name, name) for name in COLUMNS[type(options)]}
    config = RunConfig(dataset_name=options.path, dataset_config_name=options.config, label_column=names.get("score"))
    splits = open_splits(options.path, config)
    say_what_is_not_read(options.path)
    split = _choose_split(splits, options.split, options.path)
    dataset, rows = splits[split], {}
    where = options.path if len(splits) == 1 else f"{options.path} ({split})"  # a file's only one is called "train"
    for name, source in names.items():
        require_column(source, columns_of(dataset), where, f'columns["{name}"]')
        with loading_errors(options.path):
            rows[name] = dataset[source][:]
    if not len(dataset):
        raise UsageError(f"{where} has no rows.")
    for name, values in rows.items():
        (_check_numbers if name == "score" else _check_texts)(name, values)
    return RowsData(options, rows)


def _check_texts(name: str, values: list) -> None:
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f'row {row} (counted from 0): "{name}" is {value!r}, which is no text. Remove the row.')


def _check_numbers(name: str, values: list) -> None:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise UsageError(f'row {row} (counted from 0): "{name}" is {value!r}, which is no number. Remove the row.')
    if len(set(values)) < 2:
        raise UsageError(
            "all scores are equal, so nothing can be correlated with them. Check the column and the split."
        )
