"""Hard negatives of a file of pairs: `hf-dist mine --model DIR --data pairs.jsonl --output mined.jsonl`.

(1) The pairs are read and checked as for training
(2) The model embeds every distinct query and document once. Scores are cosines
(3) data/hard_negatives.py chooses each query's negatives. A cross-encoder, where one is given, scores the candidates
    and the positives anew, and the file then holds its scores
(4) The rows are written under the names that they have, with a column `negative`, a list per row. A run file takes
    such a file as its dataset_name

Both sets of embeddings are held in memory: 4 bytes x dimensions for each distinct text.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm

from hf_dist_ext.data.columns import require_column
from hf_dist_ext.data.hard_negatives import Mined, Pairs, Wanted, mine, nearest, nearest_by_faiss
from hf_dist_ext.data.load import open_splits, opened, pick_split, prepare, refuse_bytes
from hf_dist_ext.data.row_check import RowCheck
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks import search

SEARCHES = {"torch": nearest, "faiss": nearest_by_faiss}
WRITERS = {".jsonl": Dataset.to_json, ".json": Dataset.to_json, ".parquet": Dataset.to_parquet}


@dataclass
class Mine:
    """What `hf-dist mine` was asked for; paths and names as a run file has them."""

    model: str
    data: str
    output: str
    split: str = "train"
    query_column: str = "query"
    positive_column: str = "positive"
    id_column: str | None = None
    corpus: str | None = None
    cross_encoder: str | None = None
    search: str = "torch"
    wanted: Wanted = field(default_factory=Wanted)


def main(asked: Mine) -> None:
    """Mine and write; prints what was found. Raises UsageError before anything is embedded."""
    _check(asked)
    rows = _read(asked.data, asked.split, asked)  # (1)
    more = [] if asked.corpus is None else _corpus(asked)
    groups = None if asked.id_column is None else rows[asked.id_column]
    pairs = Pairs(rows["query"], rows["positive"], groups, more)
    teacher = None if asked.cross_encoder is None else _teacher(asked.cross_encoder)
    embed = _encoder(asked.model)
    queries, documents = embed(pairs.queries, "query"), embed(pairs.documents, "document")  # (2)
    mined: list[Mined] = []
    with tqdm(total=len(queries), desc="mining", unit=" queries", disable=None) as bar:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = mine(
            pairs, queries, documents, asked.wanted, teacher=teacher, search=SEARCHES[asked.search], device=device
        )
        for chunk in found:  # (3)
            mined += chunk
            bar.update(len(chunk))
    _say(asked, pairs, mined)
    _write(asked, rows, pairs, mined)


def _check(asked: Mine) -> None:
    wanted, output = asked.wanted, Path(asked.output)
    if wanted.negatives < 1:
        raise UsageError(f"--negatives {wanted.negatives} is not a positive number of negatives.")
    if not 0 <= wanted.rank_min < wanted.rank_max:
        raise UsageError(
            f"--rank_min {wanted.rank_min} --rank_max {wanted.rank_max} holds no rank. Ranks begin at 0, and rank_max "
            "is the first that is left out."
        )
    if wanted.negatives > wanted.rank_max - wanted.rank_min:
        raise UsageError(
            f"--negatives {wanted.negatives} asks for more than the {wanted.rank_max - wanted.rank_min} ranks from "
            f"--rank_min {wanted.rank_min} to --rank_max {wanted.rank_max}. Raise rank_max."
        )
    if wanted.relative_margin is not None and not 0 <= wanted.relative_margin < 1:
        raise UsageError(f"--relative_margin {wanted.relative_margin} is a share of the positive's score: 0 to 1.")
    if output.suffix not in WRITERS:
        raise UsageError(f"--output {output}: a row holds a list of negatives. Give a .jsonl or .parquet file.")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.absolute().parent}. Make it first.")
    if output.exists():
        raise UsageError(f"--output {output} exists. Give a new file, or remove it.")
    if asked.search == "faiss" and not _has("faiss"):
        raise UsageError("--search faiss: faiss is not installed. pip install faiss-cpu, or leave --search out.")
    if asked.cross_encoder is not None and not _has("sentence_transformers"):
        raise UsageError(
            f"--cross_encoder {asked.cross_encoder} needs sentence-transformers, which is not installed. Run: pip "
            "install sentence-transformers"
        )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# (1) ---------------------------------------------------------------------------------------------------------------


def _open(name: str, split: str) -> Dataset:
    run = RunConfig(dataset_name=name)
    return pick_split(opened(open_splits, name, run), split, name, "--split")


def _read(name: str, split: str, asked: Mine) -> Dataset:
    columns = {"query": asked.query_column, "positive": asked.positive_column}
    run = RunConfig(dataset_name=name, columns=columns, id_column=asked.id_column)
    rows, check = _open(name, split), RowCheck(f"{name} ({split})")
    for role, column in columns.items():
        require_column(column, rows.column_names, name, f"--{role}_column")
    rows = prepare(rows, run, check)
    check.finish()
    for column in ("query", "positive"):
        _require_texts(rows, column, columns[column], name)
    return rows


def _require_texts(rows: Dataset, column: str, source: str, name: str) -> None:
    if getattr(rows.features[column], "dtype", None) not in ("string", "large_string"):
        raise UsageError(f'{name}: column "{source}" holds no text. Negatives are mined for texts.')


def _corpus(asked: Mine) -> Iterable[str]:
    """More documents: those of a file, under the positives' name."""
    documents = _open(asked.corpus, "train")
    require_column(asked.positive_column, documents.column_names, asked.corpus, "--corpus")
    _require_texts(documents, asked.positive_column, asked.positive_column, asked.corpus)
    refuse_bytes(documents, [asked.positive_column], asked.corpus)
    return (text for text in documents[asked.positive_column] if text)


# (2) ---------------------------------------------------------------------------------------------------------------


def _encoder(model_dir: str) -> Callable[[list[str], str], torch.Tensor]:
    """embed(texts, "query" or "document") -> (texts, D) float32 of length 1, with a progress bar."""
    try:
        model, processor = search.load(model_dir)
    except UsageError as error:
        if (
            not (Path(model_dir) / "modules.json").is_file()
            or importlib.util.find_spec("sentence_transformers") is None
        ):
            raise
        print(f"{error} sentence-transformers loads this folder instead.")
        return _encoder_of_sentence_transformers(model_dir)

    def embed(texts: list[str], role: str) -> torch.Tensor:
        with tqdm(total=len(texts), desc=f"embedding, {role}", unit=" texts", disable=None) as bar:
            rows = search.embed(model, processor, texts, role, done=bar.update)
        return torch.nn.functional.normalize(rows, dim=-1)

    return embed


def _encoder_of_sentence_transformers(model_dir: str) -> Callable[[list[str], str], torch.Tensor]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(model_dir)

    def embed(texts: list[str], role: str) -> torch.Tensor:
        encode = {"query": model.encode_query, "document": model.encode_document}[role]
        rows = encode(texts, normalize_embeddings=True, show_progress_bar=sys.stderr.isatty(), convert_to_numpy=True)
        return torch.from_numpy(rows).float()

    return embed


def _teacher(name: str) -> Callable[[list[tuple[str, str]]], Any]:
    from sentence_transformers import CrossEncoder

    try:
        model = CrossEncoder(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"--cross_encoder {name} can not be loaded: {error}") from error
    if model.num_labels != 1:
        raise UsageError(f"--cross_encoder {name} has {model.num_labels} outputs. A teacher gives one score per pair.")
    return lambda texts: model.predict(texts, show_progress_bar=False)


# (4) ---------------------------------------------------------------------------------------------------------------


def _say(asked: Mine, pairs: Pairs, mined: list[Mined]) -> None:
    found = sum(len(of_query.negatives) for of_query in mined)
    if not found:
        raise UsageError(
            f"no query of {asked.data} has a negative: ranks {asked.wanted.rank_min} to {asked.wanted.rank_max} of "
            f"{len(pairs.documents)} documents, relative_margin={asked.wanted.relative_margin}. Widen one of them."
        )
    without = sum(not of_query.negatives for of_query in mined)
    print(
        f"{len(pairs.queries)} queries, {len(pairs.documents)} documents: {found / len(mined):.2f} negatives per "
        f"query, {without} queries without any."
    )


def _write(asked: Mine, rows: Dataset, pairs: Pairs, mined: list[Mined]) -> None:
    def more_columns() -> Iterator[dict[str, Any]]:
        for query, document in zip(pairs.query_of_row, pairs.document_of_row, strict=True):
            of_query = mined[query]
            row = {"negative": [pairs.documents[number] for number in of_query.negatives]}
            if asked.cross_encoder is not None:  # the positive's first
                row["scores"] = [of_query.positives[document], *of_query.scores]
            yield row

    names = {"query": asked.query_column, "positive": asked.positive_column}  # a run file's `columns` still fit
    columns = {names.get(name, name): list(rows[name]) for name in rows.column_names}
    added = list(more_columns())
    columns |= {name: [row[name] for row in added] for name in added[0]}
    output = Path(asked.output)
    unfinished = output.with_name(f"{output.name}.{uuid.uuid4().hex}.unfinished")  # another run may write it too
    try:
        with unfinished.open("wb") as file:  # `datasets` takes a name with "*" or "::" for several files
            WRITERS[output.suffix](Dataset.from_dict(columns), file)
        unfinished.replace(output)
    except OSError as error:
        words = error.strerror or error
        raise UsageError(f"{output} cannot be written: {words}. Give an --output where there is room.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    fields = {"dataset_name": asked.output}
    if any(name != column for name, column in names.items()):
        fields["columns"] = {**names, "negative": "negative"}
    print(f"{asked.output}: {len(rows)} rows. Train on it: {json.dumps(fields, ensure_ascii=False)[1:-1]}")
