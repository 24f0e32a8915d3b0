"""How long the rows of a run are: sampled from its data where that lies here, and cut where the run would cut them.

(1) the limit: `max_length` of the run file, else what the model's folder or its tokenizer says, as in training
(2) some rows of a local JSON lines, JSON, CSV or parquet file are read, from all over it
(3) the model's own tokenizer counts their tokens, prompts included
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hf_dist_ext.planner.model_files import model_file
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.sources import query_column

ROWS = 2000
UNSEEN = 1.25  # times the longest row of a sample is taken for the longest of all rows
CHARACTERS = 16  # of a text per token of its limit: more can not matter
LARGEST_JSON = 2**28  # bytes of a file that is one JSON list, and is read whole
MOST_TOKENS = 100_000  # a tokenizer that says more says that it has no limit
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
UNREADABLE = (OSError, ValueError, csv.Error)


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


# (1) ---------------------------------------------------------------------------------------------------------------


def limit_of(fields: RunConfig, column: str, is_query: bool) -> int | None:
    """Tokens at which training cuts the rows of a column; None: nothing here says so."""
    given = fields.max_length.get(column) if isinstance(fields.max_length, Mapping) else fields.max_length
    if given is not None or not fields.model_name_or_path:
        return given
    name, revision = fields.model_name_or_path, fields.model_revision
    for file in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json"):
        reading = _json(model_file(name, file, revision))
        length = reading.get("query_length" if is_query else "document_length") or reading.get("max_seq_length")
        if length is not None:
            return int(length)
    length = _json(model_file(fields.tokenizer_name or name, "tokenizer_config.json", revision)).get(
        "model_max_length"
    )
    return int(length) if length is not None and length < MOST_TOKENS else None


def _json(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path is not None else {}


# (2), (3) ----------------------------------------------------------------------------------------------------------


def sampled(fields: RunConfig, names: Mapping[str, Any], limits: Mapping[str, int]) -> dict[str, Lengths]:
    """Our column name -> lengths, of the columns that hold texts. `names`: our name -> the data's, or several of them.
    Empty where the data or the tokenizer does not lie here, or can not be read: training says why."""
    tokenizer = model_file(fields.tokenizer_name or fields.model_name_or_path or "", "tokenizer.json", None)
    of_data = files_of(fields.dataset_name, fields.train_split)
    files = of_data[:: max(1, len(of_data) // 8)]
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
        texts = [text for row in rows for text in _texts(row, name, source)]
        if texts and name in limits:
            prompt = (fields.prompts or {}).get(name) or ""
            found[name] = _lengths(counter, [prompt + text for text in texts], limits[name], is_part)
    return found


def negatives_of(fields: RunConfig) -> dict[str, list[str]]:
    """The column "negative" of data whose columns the run file does not map, as often as a row has texts in it."""
    try:
        row = next(
            (row for file in files_of(fields.dataset_name, fields.train_split)[:1] for row in rows_of(file, 1)[0]), {}
        )
    except UNREADABLE:
        return {}
    texts = row.get("negative")
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
    most = min(limit, round(counts[-1] * (UNSEEN if is_part else 1)))
    return Lengths(
        len(counts), sum(counts) / len(counts), counts[len(counts) // 2], counts[len(counts) * 19 // 20], most
    )


def files_of(name: str | None, split: str) -> list[Path]:
    """The data files that `dataset_name` names here; of a folder those of the split, where some are called so."""
    path = Path(name or "").expanduser()
    if path.is_file():
        return [path] if path.suffix in ENDINGS else []
    if not name or not path.is_dir():
        return []
    files = sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())
    of_split = [file for file in files if split in file.stem]
    return of_split or files


def rows_of(path: Path, count: int) -> tuple[list[Mapping[str, Any]], bool]:
    """(about so many rows, from all over a file, of a CSV file the first ones; whether it has others)"""
    if path.suffix == ".parquet":
        rows, leaves_out = _of_parquet(path, count)
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(islice(csv.DictReader(file), count + 1))
        rows, leaves_out = rows[:count], len(rows) > count
    elif _is_list(path):
        is_small = path.stat().st_size < LARGEST_JSON
        of_file = json.loads(path.read_text(encoding="utf-8-sig")) if is_small else []
        rows = _spread(of_file, count)
        leaves_out = not is_small or len(rows) < len(of_file)
    else:
        rows, leaves_out = _of_lines(path, count)
    return [row for row in rows if isinstance(row, Mapping)], leaves_out


def _is_list(path: Path) -> bool:
    with path.open(encoding="utf-8-sig") as file:
        return file.read(1) == "["


def _spread(rows: Sequence[Any], count: int) -> Sequence[Any]:
    return rows[:: max(1, -(-len(rows) // count))]


def _of_lines(path: Path, count: int) -> tuple[list[Any], bool]:
    """A small file is read whole; of a large one the line that follows each of `count` places."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < 2**24:
            lines = [line for line in file if line.strip()]
            some = _spread(lines, count)
            return [json.loads(line) for line in some], len(some) < len(lines)
        found = []
        for i in range(count):
            file.seek(size * i // count)
            if i:
                file.readline()
            if line := file.readline().strip():
                found.append(json.loads(line))
        return found, True


def _of_parquet(path: Path, count: int) -> tuple[list[Any], bool]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    groups, found = list(_spread(range(file.num_row_groups), 8)), []
    for group in groups:
        rows = file.read_row_group(group)
        share = -(-count // len(groups))
        found += rows.take(list(_spread(range(rows.num_rows), share))).to_pylist()
    return found, len(found) < file.metadata.num_rows
