"""How long the rows of a run are: sampled from its data where that lies here, and cut where the run would cut them.

(1) the limit: `max_length` of the run file, else what the model's folder or its tokenizer says, as in training
(2) some rows of the data's files are read, and the model's own tokenizer counts their tokens, prompts included
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dist_ext.planner.local_files import UNREADABLE, files_of, model_file, rows_of
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.sources import query_column

ROWS = 2000
UNSEEN = 1.25  # times the longest row of a sample is taken for the longest of all rows
CHARACTERS = 16  # of a text per token of its limit: more can not matter
MOST_FILES = 8  # of a folder, that are sampled
MOST_TOKENS = 100_000  # a tokenizer that says more says that it has no limit
READERS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a column's rows: of half of them at most `median`, of 95 % at most `p95`; `mean` of all. `most` is
    taken for the longest of the data."""

    rows: int
    mean: float
    median: int
    p95: int
    most: int

    def in_words(self, column: str) -> str:
        return (
            f"{column} has {self.median} tokens (median), {self.p95} (p95), by {self.rows:,} sampled rows: counted "
            f"with rows of {self.most} at most"
        )


def limit_of(fields: RunConfig, column: str, is_query: bool) -> int | None:
    """Tokens at which training cuts the rows of a column; None: nothing here says so."""
    given = fields.max_length.get(column) if isinstance(fields.max_length, Mapping) else fields.max_length
    if given is not None or not fields.model_name_or_path:
        return given
    name, revision = fields.model_name_or_path, fields.model_revision
    for file in READERS:
        reading = _json(model_file(name, file, revision))
        length = reading.get("query_length" if is_query else "document_length") or reading.get("max_seq_length")
        if length is not None:
            return int(length)
    tokenizer = _json(model_file(fields.tokenizer_name or name, "tokenizer_config.json", revision))
    length = tokenizer.get("model_max_length")
    return int(length) if length is not None and length < MOST_TOKENS else None


def _json(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path is not None else {}


def sampled(fields: RunConfig, names: Mapping[str, Any], limits: Mapping[str, int]) -> dict[str, Lengths]:
    """Our column name -> lengths, of the columns that hold texts. `names`: our name -> the data's, or several of them.
    Empty where the data or the tokenizer does not lie here, or can not be read: training says why."""
    tokenizer = model_file(fields.tokenizer_name or fields.model_name_or_path or "", "tokenizer.json", None)
    of_data = files_of(fields.dataset_name, fields.train_split)
    files = of_data[:: max(1, len(of_data) // MOST_FILES)]
    if tokenizer is None or not files:
        return {}
    from tokenizers import Tokenizer

    counter = Tokenizer.from_file(str(tokenizer))
    counter.no_truncation()
    counter.no_padding()
    try:
        read = [rows_of(file, -(-ROWS // len(files))) for file in files]
    except UNREADABLE:
        return {}
    rows = [row for of_file, _ in read for row in of_file]
    is_part = len(files) < len(of_data) or any(leaves_out for _, leaves_out in read)
    found = {}
    for name, source in names.items():
        prompt = (fields.prompts or {}).get(name) or ""
        texts = [prompt + text for row in rows for text in _texts(row, name, source)]
        if texts and name in limits:
            found[name] = _lengths(counter, texts, limits[name], is_part)
    return found


def negatives_of(fields: RunConfig) -> dict[str, list[str]]:
    """The column "negative" of data whose columns the run file does not map, as often as a row has texts in it."""
    try:
        files = files_of(fields.dataset_name, fields.train_split)[:1]
        texts = next((row for file in files for row in rows_of(file, 1)[0]), {}).get("negative")
    except UNREADABLE:
        return {}
    return {"negative": ["negative"] * (len(texts) if isinstance(texts, list) else 1)} if texts else {}


def _texts(row: Mapping[str, Any], name: str, source: Any) -> Iterator[str]:
    """Of a row in a column: one, or those of several columns, or of a list."""
    names = dict.fromkeys([source] if isinstance(source, str) else source if isinstance(source, list) else [])
    if name == source == "query":
        names = {query_column(row): None}
    for value in (row.get(one) for one in names):
        yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))


def _lengths(counter: Any, texts: list[str], limit: int, is_part: bool) -> Lengths:
    """`is_part`: of the data, so that a longer row may lie in the rest."""
    encoded = counter.encode_batch([text[: CHARACTERS * limit] for text in texts])
    counts = sorted(min(limit, len(one.ids)) for one in encoded)
    number, most = len(counts), min(limit, round(counts[-1] * (UNSEEN if is_part else 1)))
    return Lengths(number, sum(counts) / number, counts[number // 2], counts[number * 19 // 20], most)
