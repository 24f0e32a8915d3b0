"""Reads what the `evaluations` of a run name, for evaluation/from_files.py, which makes evaluators of it.

    evaluations = read_evaluations([{"type": "retrieval", "path": "data/nfcorpus"}])

(1) BEIR's files: corpus.jsonl, queries.jsonl (both may be .gz) and qrels/<split>.tsv
(2) MTEB's layout, as `datasets` loads it: configurations "corpus", "queries", and "default" or "qrels"; from a folder,
    the cache or the hub
(3) what cannot be is refused before anything trains: ids that nobody knows or two rows have, queries without text
(4) rows of texts from what training rows may come from: a json, csv, parquet or arrow file, a folder, or the hub

A document is its title and its text, with a space between. Numbers of queries and documents are places in
`Items`. Letters: Q queries that have a right document, M documents, L pairs of a query and a document right for it.
"""

from __future__ import annotations

import csv
import gzip
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from datasets import Dataset

from hf_dist_ext.data.collator import as_list
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

logger = logging.getLogger(__name__)

ID_COLUMNS = {"corpus": ("_id", "id", "corpus-id"), "queries": ("_id", "id", "query-id")}
FILES = {"corpus": "corpus.jsonl", "queries": "queries.jsonl"}
QRELS_CONFIGS = ("qrels", "default")
NEEDED = (
    "Retrieval needs a folder with BEIR's files (corpus.jsonl, queries.jsonl, qrels/*.tsv), or a dataset with the "
    'configurations "corpus", "queries" and "default" or "qrels".'
)


class Items:
    """Texts or pictures by their numbers: a dataset of one column.

    Attributes:
        lengths: (n,) of the texts in characters; zeros for pictures.
        are_pictures: each is decoded when it is taken.
    """

    def __init__(self, values: Dataset):
        (self._column,) = values.column_names
        self._values, self.lengths = values, np.zeros(len(values), dtype=np.int64)
        self.are_pictures = isinstance(values.features[self._column], datasets.Image)
        if not self.are_pictures:
            self.lengths = pc.utf8_length(values.data.column(self._column)).to_numpy()

    def __len__(self) -> int:
        return len(self._values)

    def take(self, numbers: Sequence[int]) -> list:
        return self._values[list(numbers)][self._column]


@dataclass(eq=False)
class RetrievalData:
    """
    Attributes:
        links: (L, 2) query and document, sorted by query.
        gains: (L,) the scores of qrels, above 0.
        identical: (S, 2) query and document with the same id, sorted by query.
        order: (M,) place of every document's id among the sorted ids.
    """

    options: Retrieval
    queries: Items
    documents: Items
    links: np.ndarray
    gains: np.ndarray
    identical: np.ndarray
    order: np.ndarray


@dataclass(eq=False)
class RowsData:
    """`columns`: by the names of `COLUMNS`; texts, lists of texts of a reranking, numbers."""

    options: RowsEvaluation
    columns: dict[str, list]


@dataclass(eq=False)
class OfOthers:
    """Data that a package reads itself."""

    options: Evaluation


def read_evaluations(entries: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """What `evaluators_of` takes, from entries as in a run file. Raises UsageError."""
    options = parse_evaluations([dict(entry) for entry in entries or ()])
    with first_of_node():  # the others take from the caches what it has made
        return [_named(one) for one in options]


def _named(options: Evaluation) -> Any:
    try:
        if isinstance(options, Retrieval):
            return read_retrieval(options)
        return read_rows(options) if isinstance(options, RowsEvaluation) else OfOthers(options)
    except UsageError as error:
        raise UsageError(f'evaluation "{options.name}": {error}') from None


def read_retrieval(options: Retrieval) -> RetrievalData:
    folder = path_of(options.path)
    has_some = any((folder / f"{name}{end}").is_file() for name in FILES.values() for end in ("", ".gz"))
    # A clone from the hub says in its README what is which, and may call its files the same.
    is_beir = bool(_qrels_in(folder)) or (has_some and not (folder / "README.md").is_file())
    tables, qrels = _read_beir(folder, options.split) if is_beir else _read_mteb(options.path, options.split)
    ids = {kind: _ids(tables[kind], kind) for kind in FILES}
    query, document = (
        _numbers(qrels[column], ids[kind], kind) for column, kind in (("query", "queries"), ("document", "corpus"))
    )
    is_right = qrels["score"] > 0
    if options.ignore_identical_ids:
        is_right &= pc.not_equal(qrels["query"], qrels["document"]).to_numpy(zero_copy_only=False)
    pairs = np.stack([query, document], axis=1)
    if len(double := _first_double(pairs)):
        names = [ids[kind][int(number)].as_py() for kind, number in zip(("queries", "corpus"), double, strict=True)]
        raise UsageError(f'qrels name query "{names[0]}" and document "{names[1]}" twice. Keep one line.')
    if not is_right.any():
        raise UsageError("no line of qrels has a score above 0, so no document is right. Check the split.")
    used, place = np.unique(query[is_right], return_inverse=True)
    sorting = np.lexsort((document[is_right], place))
    queries, used_ids = tables["queries"].select(used), ids["queries"].take(pa.array(used))
    _refuse_empty_queries(queries, used_ids)
    same = pc.index_in(used_ids, ids["corpus"])
    same = same.fill_null(-1).to_numpy() if options.ignore_identical_ids else np.full(len(used), -1)
    return RetrievalData(
        options,
        _items(queries, "queries"),
        _items(tables["corpus"], "corpus"),
        links=np.stack([place, document[is_right]], axis=1)[sorting],
        gains=qrels["score"][is_right][sorting],
        identical=np.stack([np.flatnonzero(same >= 0), same[same >= 0]], axis=1),
        order=np.argsort(pc.sort_indices(ids["corpus"]).to_numpy()),
    )


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


def _read_beir(folder: Path, split: str | None) -> tuple[dict[str, Dataset], dict[str, Any]]:
    tables = {}
    for kind, name in FILES.items():
        if not (path := _file(folder, name)).is_file():
            raise UsageError(f"{folder} has no {name}. BEIR's layout is corpus.jsonl, queries.jsonl, qrels/*.tsv.")
        schema = pa.schema([(column, pa.large_string()) for column in ("_id", "title", "text")])
        try:  # columns that nobody reads may hold anything
            options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
            read = pa.json.ReadOptions(block_size=2**24)
            with pa.input_stream(path) as stream:
                table = pa.json.read_json(stream, read, options)
            table.validate(full=True)  # Arrow reads the JSON of any bytes
            tables[kind] = Dataset(table)
        except pa.ArrowException as error:
            raise UsageError(
                f'{path} cannot be read: {error}. Every line is an object with texts "_id" and "text".'
            ) from None
    if not (splits := _qrels_in(folder)):
        raise UsageError(f"{folder} has no qrels/*.tsv. BEIR's layout is corpus.jsonl, queries.jsonl, qrels/*.tsv.")
    qrels = _file(folder / "qrels", f"{_choose_split(dict.fromkeys(splits), split, 'qrels')}.tsv")
    try:
        return tables, _read_qrels(qrels)
    except UnicodeDecodeError as error:
        raise UsageError(f"{qrels} is not UTF-8 text: {error}.") from None


def _read_qrels(path: Path) -> dict[str, Any]:
    """Lines of query, document and score; the first may be a header."""
    lines = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        for number, line in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            try:
                query, document, score = line
                lines.append((query, document, float(score)))
                if not np.isfinite(lines[-1][-1]):
                    raise ValueError
            except ValueError:
                if number == 1 and len(line) == 3:
                    continue
                raise UsageError(
                    f"{path}, line {number}: {line} is not a query, a document and a score with tabs between."
                ) from None
    return _as_arrays(lines, str(path))


# (2) ---------------------------------------------------------------------------------------------------------------


def _read_mteb(path: str, split: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
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
    lines = list(zip(judged["query-id"], judged["corpus-id"], judged["score"], strict=True))
    tables = {}
    for kind, splits in loaded.items():  # the one of these is called as they are, or as that of qrels
        names = [name for name in (split, kind) if name in splits]
        tables[kind] = splits[_choose_split(splits, names[0] if names else None, kind)]
    return tables, _as_arrays(lines, f"{path} ({qrels})")


def _opened(path: str, config_name: str) -> Mapping[str, Any]:
    folder = path_of(path)
    if folder.is_dir():
        return open_here(folder, streaming=False, config_name=config_name, numbers={"score"})
    return datasets.load_dataset(place_of(path), config_name)


# (3) ---------------------------------------------------------------------------------------------------------------


def _as_arrays(lines: Sequence[tuple[Any, Any, float]], name: str) -> dict[str, Any]:
    if not lines:
        raise UsageError(f"{name} holds no line. Check the file or the split.")
    *ids, scores = zip(*lines, strict=True)
    query, document = (pa.array(map(str, side), pa.large_string()) for side in ids)
    return {"query": query, "document": document, "score": np.asarray(scores, dtype=np.float64)}


def _ids(table: Any, kind: str) -> pa.Array:
    column = next((name for name in ID_COLUMNS[kind] if name in table.column_names), None)
    if column is None:
        raise UsageError(
            f"{kind} have no column {' or '.join(ID_COLUMNS[kind])}, but {', '.join(table.column_names)}."
        )
    ids = _column(table, column).cast(pa.large_string()).combine_chunks()
    if ids.null_count:
        raise UsageError(f"{kind}: {ids.null_count} of {len(ids)} rows have no {column}. Give every row an id.")
    if (counts := pc.value_counts(ids)) and len(counts) < len(ids):
        double = counts.filter(pc.greater(counts.field("counts"), 1))[0].as_py()
        raise UsageError(f'{kind}: the id "{double["values"]}" stands in {double["counts"]} rows. Keep one of them.')
    return ids


def _column(table: Dataset, name: str) -> pa.ChunkedArray:
    return table.select_columns([name]).with_format("arrow")[:].column(name)


def _numbers(ids: pa.Array, known: pa.Array, kind: str) -> np.ndarray:
    """The places of `ids` among the known ones."""
    numbers = pc.index_in(ids, known)
    if numbers.null_count:
        unknown = pc.unique(ids.filter(numbers.is_null()))
        raise UsageError(
            f'qrels name {len(unknown)} id(s) that are not in {kind}, such as "{unknown[0]}". Remove their lines, or '
            f"give the {kind} that these qrels belong to."
        )
    return numbers.to_numpy()


def _first_double(pairs: np.ndarray) -> np.ndarray:
    values, counts = np.unique(pairs, axis=0, return_counts=True)
    return values[counts.argmax()] if counts.max(initial=0) > 1 else np.empty(0)


def _items(table: Any, kind: str) -> Items:
    """Texts, titles first; pictures where there is no text."""
    if "text" not in table.column_names:
        pictures = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
        if not pictures:
            raise UsageError(f"{kind} have no column text, but {', '.join(table.column_names)}.")
        return Items(table.select_columns(pictures[:1]))
    stored = _column(table, "text").type
    if not (pa.types.is_string(stored) or pa.types.is_large_string(stored)):
        raise UsageError(f"{kind}: the column text holds {stored}, not text.")
    texts = pc.fill_null(_column(table, "text").cast(pa.large_string()), "")
    if kind == "corpus" and "title" in table.column_names:
        titles = pc.fill_null(_column(table, "title").cast(pa.large_string()), "")
        texts = pc.utf8_trim_whitespace(pc.binary_join_element_wise(titles, texts, pa.scalar(" ", pa.large_string())))
    if kind == "corpus" and not pc.any(pc.greater(pc.binary_length(texts), 0)).as_py():
        raise UsageError('corpus: no row has a "text" or a "title". Give the texts of documents these names.')
    return Items(Dataset(pa.table({"text": texts})))


def _refuse_empty_queries(queries: Any, ids: pa.Array) -> None:
    if "text" not in queries.column_names:
        return
    is_empty = pc.equal(pc.utf8_trim_whitespace(pc.fill_null(_column(queries, "text"), "")), "")
    if pc.any(is_empty).as_py():
        empty = ids.filter(is_empty.combine_chunks())
        raise UsageError(f'{len(empty)} queries have no text, such as "{empty[0]}". Remove them from qrels.')


# (4) ---------------------------------------------------------------------------------------------------------------


def read_rows(options: RowsEvaluation) -> RowsData:
    names = {name: (options.columns or {}).get(name, name) for name in COLUMNS[type(options)]}
    numbers = names.get("score") or names.get("label")
    config = RunConfig(dataset_name=options.path, dataset_config_name=options.config, label_column=numbers)
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
    if "query" in names:
        rows = _lists(options, rows)
    for name, values in rows.items():
        if name in ("score", "label"):
            _check_numbers(name, values)
        elif name not in ("positive", "negative") or "anchor" in names:
            _check_texts(name, values)
    return RowsData(options, rows)


def _lists(options: RowsEvaluation, rows: Mapping[str, list]) -> dict[str, list]:
    """Of rows with right and with wrong documents, lists of both."""
    filled = {name: [[t for t in as_list(value) if isinstance(t, str) and t.strip()] for value in rows[name]]
              for name in ("positive", "negative")}  # fmt: skip
    kept = [row for row, both in enumerate(zip(*filled.values(), strict=True)) if all(both)]
    if not kept:
        raise UsageError("no row has both a positive and a negative document, so there is nothing to rank.")
    if len(kept) < len(rows["query"]):
        number = len(rows["query"]) - len(kept)
        logger.warning(f'evaluation "{options.name}": {number} row(s) without a positive or a negative are left out.')
    return {name: [values[row] for row in kept] for name, values in (dict(rows) | filled).items()}


def _check_texts(name: str, values: list) -> None:
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f'row {row} (counted from 0): "{name}" is {value!r}, which is no text. Remove the row.')


def _check_numbers(name: str, values: list) -> None:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise UsageError(f'row {row} (counted from 0): "{name}" is {value!r}, which is no number. Remove the row.')
    if name == "label" and set(values) != {0, 1}:
        raise UsageError(f"labels are {', '.join(map(str, sorted(set(values))[:3]))}, and they must be 0 and 1.")
    if len(set(values)) < 2:
        raise UsageError(
            "all scores are equal, so nothing can be correlated with them. Check the column and the split."
        )
