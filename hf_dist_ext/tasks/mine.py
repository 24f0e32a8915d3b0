"""Hard negatives of a file of pairs: `hf-dist mine --model DIR --data pairs.jsonl --output mined.jsonl`.

(1) The pairs are read and checked as for training
(2) `mine_hard_negatives` of sentence-transformers embeds every distinct text once and chooses; its options are ours
(3) Rows are left out whose negative is the query's own text, or shares an id with one of the query's rows
(4) The rest is written under the names that the data has. A run file takes such a file as its dataset_name

All embeddings are held in memory: 4 bytes x dimensions for each distinct text.
"""

from __future__ import annotations

import json
import math
import random
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from hf_dist_ext.data.columns import require_column
from hf_dist_ext.data.load import open_splits, pick_split, prepare, refuse_bytes
from hf_dist_ext.data.row_check import RowCheck
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.folders import resolve_folder
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks.search import facts_of_model
from hf_dist_ext.tasks.serving import load_for_serving, not_written, require_devices, require_new

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

WRITERS = {".jsonl": Dataset.to_json, ".json": Dataset.to_json, ".parquet": Dataset.to_parquet}
BOUNDS = {"absolute_margin", "relative_margin", "max_score", "min_score"}
SCORES = 1 << 26  # of queries and documents that are held at a time: 256 MiB


@dataclass
class Mine:
    """What `hf-dist mine` was asked for; paths and names as a run file has them.

    `options`: further arguments of `mine_hard_negatives`, under their names and with its defaults.
    """

    model: str
    data: str
    output: str
    split: str = "train"
    anchor_column_name: str = "query"
    positive_column_name: str = "positive"
    id_column: str | None = None
    corpus: str | None = None
    cross_encoder: str | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def main(asked: Mine) -> None:
    """Mine and write; prints what was found. Raises UsageError before anything is embedded."""
    from sentence_transformers.util import mine_hard_negatives

    _check(asked)
    rows = _read(asked)  # (1)
    more = {} if asked.corpus is None else {"corpus": _corpus(asked)}
    teacher = None if asked.cross_encoder is None else _teacher(asked.cross_encoder)
    model = load_for_serving(asked.model)
    names = {"query": asked.anchor_column_name, "positive": asked.positive_column_name}
    pairs = Dataset.from_dict({name: rows[role][:] for role, name in names.items()})
    num_documents = len(pairs) + len(more.get("corpus", ()))
    options = {"faiss_batch_size": max(1, SCORES // num_documents)} | asked.options
    if teacher is not None and not BOUNDS & options.keys():
        options["min_score"] = -math.inf  # without a bound mine_hard_negatives asks no cross-encoder
    if "cache_folder" in options:  # mine_hard_negatives takes the embeddings of all folders for those of one model
        options["cache_folder"] = str(Path(options["cache_folder"], facts_of_model(resolve_folder(asked.model))))
    random.seed(asked.seed)
    try:
        mined = mine_hard_negatives(pairs, model, *names.values(), cross_encoder=teacher, **more, **options)  # (2)
    except (ValueError, ImportError) as error:
        raise UsageError(f"mine_hard_negatives of sentence-transformers: {error}") from error
    if _names_negatives(asked):
        mined = _without_own(mined, rows, asked)  # (3)
    if not len(mined):
        raise UsageError(f"no query of {asked.data} has the negatives that were asked for. Widen ranks or margins.")
    _write(asked, mined, names)  # (4)


def _names_negatives(asked: Mine) -> bool:
    """Whether negatives stand in columns of their own."""
    is_named = asked.options.get("output_format", "triplet") in ("triplet", "n-tuple")
    return is_named and not asked.options.get("include_positives")


def _check(asked: Mine) -> None:
    if asked.id_column is not None and not _names_negatives(asked):
        raise UsageError(
            "--id_column goes with --output_format triplet or n-tuple, without --include_positives: it leaves out "
            "rows whose negative shares an id."
        )
    require_devices("--use_multi_process", asked.options.get("use_multi_process") or ())
    require_new(Path(asked.output), WRITERS, "mined rows")


# (1) ---------------------------------------------------------------------------------------------------------------


def _open(name: str, split: str) -> Dataset:
    run = RunConfig(dataset_name=name)
    return pick_split(open_splits(name, run), split, name, "--split")


def _read(asked: Mine) -> Dataset:
    name, split = asked.data, asked.split
    columns = {"query": asked.anchor_column_name, "positive": asked.positive_column_name}
    run = RunConfig(dataset_name=name, columns=columns, id_column=asked.id_column)
    rows, check = _open(name, split), RowCheck(f"{name} ({split})")
    for option in ("anchor_column_name", "positive_column_name"):
        require_column(getattr(asked, option), rows.column_names, name, f"--{option}")
    rows = prepare(rows, run, check)
    check.finish()
    for column in ("query", "positive"):
        _require_texts(rows, column, columns[column], name)
    return rows


def _require_texts(rows: Dataset, column: str, source: str, name: str) -> None:
    if getattr(rows.features[column], "dtype", None) not in ("string", "large_string"):
        raise UsageError(f'{name}: column "{source}" holds no text. Negatives are mined for texts.')


def _corpus(asked: Mine) -> list[str]:
    """More documents: those of a file, under the positives' name."""
    documents, column = _open(asked.corpus, "train"), asked.positive_column_name
    require_column(column, documents.column_names, asked.corpus, "--corpus")
    _require_texts(documents, column, column, asked.corpus)
    refuse_bytes(documents, [column], asked.corpus)
    return [text for text in documents[column] if text]


def _teacher(name: str) -> CrossEncoder:
    from sentence_transformers import CrossEncoder

    try:
        model = CrossEncoder(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"--cross_encoder {name} can not be loaded: {error}") from error
    if model.num_labels != 1:
        raise UsageError(f"--cross_encoder {name} has {model.num_labels} outputs. A teacher gives one score per pair.")
    return model


# (3), (4) ----------------------------------------------------------------------------------------------------------


def _negative_columns(mined: Dataset) -> list[str]:
    return [name for name in mined.column_names if name.startswith("negative")]


def _without_own(mined: Dataset, rows: Dataset, asked: Mine) -> Dataset:
    """`rows` have the columns query, positive and the id; an n-tuple goes whole where one of its negatives does."""
    ids, documents = defaultdict(set), defaultdict(set)  # query -> ids, id -> documents
    if asked.id_column is not None:
        for query, document, one in zip(rows["query"], rows["positive"], rows[asked.id_column], strict=True):
            ids[query].add(one)
            documents[one].add(document)

    def is_own(query: str, text: str) -> bool:
        return text == query or any(text in documents[one] for one in ids.get(query, ()))

    names = _negative_columns(mined)
    kept = [
        index
        for index, row in enumerate(mined)
        if not any(is_own(row[asked.anchor_column_name], row[name]) for name in names)
    ]
    print(f"{len(mined) - len(kept)} rows are left out whose negative is the query's own.")
    return mined.select(kept)


def _write(asked: Mine, mined: Dataset, names: dict[str, str]) -> None:
    output = Path(asked.output)
    unfinished = output.with_name(f"{output.name}.{uuid.uuid4().hex}.unfinished")  # another run may write it too
    try:
        with unfinished.open("wb") as file:  # `datasets` takes a name with "*" or "::" for several files
            WRITERS[output.suffix](mined, file)
        unfinished.replace(output)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"{asked.output}: {len(mined)} rows.", end=" " if _names_negatives(asked) else "\n")
    if not _names_negatives(asked):
        return
    fields: dict[str, Any] = {"dataset_name": asked.output}
    if any(name != column for name, column in names.items()):
        negatives = _negative_columns(mined)
        fields["columns"] = {**names, "negative": negatives if len(negatives) > 1 else negatives[0]}
    print(f"Train on it: {json.dumps(fields, ensure_ascii=False)[1:-1]}")
