"""`evaluations` of a run file: what is evaluated beside the held-out rows, and how, checked before anything is read.

    {"type": "retrieval", "name": "nfcorpus", "path": "data/nfcorpus", "ndcg_at_k": [10, 100]}

Each type is a dataclass below, whose fields are those of an entry and have the names of sentence-transformers'
evaluators. data/evaluations.py reads the data, and evaluation/from_files.py makes the evaluator.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import gone
from hf_dist_ext.run.fields import Field, check_entry, check_name, parse_type, show
from hf_dist_ext.run.files import looks_like_a_path


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """
    Attributes:
        name: of the figures: `eval_<name>_...`.
        split: of the data; None: the only one, else "test".
        similarity_fn_names: how two embeddings are compared; None: as the loss does.
        truncate_dim: leading dimensions that are compared; None: all.
    """

    path: str
    name: str
    split: str | None = None
    similarity_fn_names: list[Literal["cosine", "dot", "euclidean", "manhattan"]] | None = None
    truncate_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Of queries and of documents: the column of the run whose tower, prompt and length they have (None: its first
    and its second), and the text before each (None: the column's prompt)."""

    query_column: str | None = None
    corpus_column: str | None = None
    query_prompt: str | None = None
    corpus_prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Retrieval(Sides, Evaluation):
    """
    Attributes:
        corpus_chunk_size: documents whose embeddings are held at once; None: as the evaluator says, 50,000 or, of
            token vectors, 5,000.
    """

    accuracy_at_k: list[int] = dataclasses.field(default_factory=lambda: [1, 3, 5, 10])
    precision_recall_at_k: list[int] = dataclasses.field(default_factory=lambda: [1, 3, 5, 10])
    mrr_at_k: list[int] = dataclasses.field(default_factory=lambda: [10])
    ndcg_at_k: list[int] = dataclasses.field(default_factory=lambda: [10])
    map_at_k: list[int] = dataclasses.field(default_factory=lambda: [100])
    corpus_chunk_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class RowsEvaluation(Evaluation):
    """
    Attributes:
        config: of a dataset with several.
        columns: name here -> the data's; those that are not named are called as here.
    """

    config: str | None = None
    columns: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Similarity(RowsEvaluation):
    """
    Attributes:
        column: of the run, whose tower and length both sentences have; None: its first.
        prompt: the text before both; None: that of `column`.
    """

    column: str | None = None
    prompt: str | None = ""


@dataclass(frozen=True, kw_only=True)
class Triplet(Sides, RowsEvaluation):
    """
    Attributes:
        margin: the positive must be so much closer than the negative.
    """

    margin: float = 0.0


TYPES: dict[str, type[Evaluation]] = {"retrieval": Retrieval, "sts": Similarity, "triplet": Triplet}
COLUMNS = {  # of the data, by their names here
    Similarity: ("sentence1", "sentence2", "score"),
    Triplet: ("anchor", "positive", "negative"),
}


def parse_evaluations(entries: Sequence[dict[str, Any]]) -> list[Evaluation]:
    """The entries of a run file. Raises UsageError for the first that cannot be."""
    found: list[Evaluation] = []
    for index, entry in enumerate(entries):
        one = _parse(entry, f"evaluations[{index}]")
        check_name(one.name, "evaluations", [other.name for other in found], may_have=".")
        found.append(one)
    return found


def _parse(entry: dict[str, Any], where: str) -> Evaluation:
    given = {name: value for name, value in entry.items() if not name.startswith("_")}
    kind = given.pop("type", None)
    for asked in (kind, *given):
        if asked in gone.EVALUATIONS:
            raise UsageError(f"{where}: {gone.EVALUATIONS[asked]}")
    if kind not in TYPES:
        raise UsageError(f"{where} has type={json.dumps(kind)}. Types: {', '.join(TYPES)}.")
    takes = {one.name: _field(one) for one in dataclasses.fields(TYPES[kind])}
    check_entry(given, f'{where} of type "{kind}"', takes)
    for name, value in given.items():
        if isinstance(value, list) and len(set(value)) < len(value):
            raise UsageError(f"{where}: {name}={show(value)} names one twice. Remove it.")
    if not given.get("path"):
        raise UsageError(f"{where} has no path. Give the folder or file with its data.")
    _check_path(given["path"], where)
    given.setdefault("name", re.sub(r"[^\w.-]", "-", Path(given["path"]).name.partition(".")[0]))
    one = TYPES[kind](**given)
    if alien := set(getattr(one, "columns", None) or ()) - set(COLUMNS.get(type(one), ())):
        raise UsageError(f'{where}: columns has "{min(alien)}"; type "{kind}" reads {", ".join(COLUMNS[type(one)])}.')
    return one


def _field(one: dataclasses.Field) -> Field:
    least = 0 if one.name == "margin" else 1
    return Field(one.name, parse_type(str(one.type)), bounds={"minimum": least, "minItems": 1})


def _check_path(path: str, where: str) -> None:
    """What is clearly a path here must be here; a hub id may be cached or reached."""
    if looks_like_a_path(path) and not Path(path).expanduser().exists():
        raise UsageError(
            f"{where}: path={json.dumps(path)}: there is no such file or folder. Paths start at {Path.cwd()}."
        )
