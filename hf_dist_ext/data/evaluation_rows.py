"""Reads rows of texts to evaluate on: pairs with a score, triplets, and queries with right and wrong documents.

Rows come from what training rows may come from: a json, csv, parquet or arrow file, a folder, the cache or the hub. A
text that stands in several rows is embedded once: rows hold the numbers of their texts in `items`. Letters: N rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hf_dist_ext.data.collator import as_list
from hf_dist_ext.data.columns import columns_of, require_column
from hf_dist_ext.data.items import Items, choose_split
from hf_dist_ext.data.load import loading_errors, open_splits, opened
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.evaluations import COLUMNS, Reranking, RowsEvaluation, Similarity, Triplet

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SimilarityData:
    """
    Attributes:
        pairs: (N, 2) numbers of the sentences.
        scores: (N,) as people gave them.
    """

    options: Similarity
    items: Items
    pairs: np.ndarray
    scores: np.ndarray


@dataclass(eq=False)
class TripletData:
    """
    Attributes:
        anchors: (N,) numbers in `queries`.
        positives, negatives: (N,) numbers in `documents`.
    """

    options: Triplet
    queries: Items
    documents: Items
    anchors: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray


@dataclass(eq=False)
class RerankingData:
    """
    Attributes:
        asked: (N,) numbers in `queries`.
        listed: per row the numbers of its documents, the right ones first.
        num_right: (N,) how many of these are right.
    """

    options: Reranking
    queries: Items
    documents: Items
    asked: np.ndarray
    listed: list[np.ndarray]
    num_right: np.ndarray


def read_similarity(options: Similarity) -> SimilarityData:
    rows = _read(options)
    scores = _as_numbers(rows["score"])
    if len(set(scores.tolist())) < 2:
        raise UsageError(
            "all scores are equal, so nothing can be correlated with them. Check the column and the split."
        )
    first, second = _texts(rows, "sentence1"), _texts(rows, "sentence2")
    items, numbers = _items(first + second)
    return SimilarityData(options, items, numbers.reshape(2, -1).T, scores)


def read_triplets(options: Triplet) -> TripletData:
    rows = _read(options)
    queries, anchors = _items(_texts(rows, "anchor"))
    documents, numbers = _items(_texts(rows, "positive") + _texts(rows, "negative"))
    return TripletData(options, queries, documents, anchors, *numbers.reshape(2, -1))


def read_reranking(options: Reranking) -> RerankingData:
    rows = _read(options)
    right, wrong = ([_filled(value) for value in rows[name]] for name in ("positive", "negative"))
    kept = [row for row in range(len(right)) if right[row] and wrong[row]]
    if not kept:
        raise UsageError("no row has both a positive and a negative document, so there is nothing to rank.")
    if len(kept) < len(right):
        number = len(right) - len(kept)
        logger.warning(f'evaluation "{options.name}": {number} row(s) without a positive or a negative are left out.')
    queries, asked = _items([_texts(rows, "query")[row] for row in kept])
    documents, numbers = _items([text for row in kept for text in (*right[row], *wrong[row])])
    ends = np.cumsum([len(right[row]) + len(wrong[row]) for row in kept])
    num_right = np.array([len(right[row]) for row in kept])
    return RerankingData(options, queries, documents, asked, np.split(numbers, ends[:-1]), num_right)


def _read(options: RowsEvaluation) -> dict[str, list]:
    """The columns by their names here."""
    scores = (options.columns or {}).get("score")
    config = RunConfig(dataset_name=options.path, dataset_config_name=options.config, label_column=scores)
    splits = opened(open_splits, options.path, config)
    split = choose_split(splits, options.split, options.path)
    dataset, rows = splits[split], {}
    where = options.path if len(splits) == 1 else f"{options.path} ({split})"  # a file's only one is called "train"
    for name in COLUMNS[type(options)]:
        source = (options.columns or {}).get(name, name)
        require_column(source, columns_of(dataset), where, f'columns["{name}"]')
        with loading_errors(options.path):
            rows[name] = dataset[source][:]
    if not len(dataset):
        raise UsageError(f"{where} has no rows.")
    return rows


def _texts(rows: Mapping[str, list], name: str) -> list[str]:
    for row, value in enumerate(rows[name]):
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f'row {row} (counted from 0): "{name}" is {value!r}, which is no text. Remove the row.')
    return rows[name]


def _filled(value: Any) -> list[str]:
    """The texts of a row's value, one or several."""
    return [text for text in as_list(value) if isinstance(text, str) and text.strip()]


def _as_numbers(values: Sequence[Any]) -> np.ndarray:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise UsageError(f'row {row} (counted from 0): "score" is {value!r}, which is no number. Remove the row.')
    return np.asarray(values, dtype=np.float64)


def _items(texts: list[str]) -> tuple[Items, np.ndarray]:
    """Distinct texts, and the number of each text."""
    encoded = pa.array(texts, pa.large_string()).dictionary_encode()
    return Items(pa.chunked_array([encoded.dictionary])), encoded.indices.to_numpy().astype(np.int64)
