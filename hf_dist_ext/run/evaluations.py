"""`evaluations` of a run file: what is evaluated beside the held-out rows, and how, checked before anything is read.

    {"type": "retrieval", "name": "nfcorpus", "path": "data/nfcorpus", "ndcg_at_k": [10, 100]}

Each type is a dataclass below, whose fields are those of an entry. Options have the names of sentence-transformers'
evaluators. data/evaluations.py reads what an entry names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import Field, check_entry, check_name, parse_type, show
from hf_dist_ext.run.files import looks_like_a_path


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """
    Attributes:
        name: of the figures: `eval_<name>_...`.
        split: of the data; None: the only one, else "test".
        similarity_fn_names: how two embeddings are compared; None: as the loss does.
        dims: leading dimensions that are also evaluated alone.
        precisions: of embeddings that are also evaluated.
    """

    similarities: ClassVar[tuple[str, ...]] = ("cosine", "dot")
    # Fields that the evaluator of sentence-transformers has nothing of, and what to write instead.
    refused: ClassVar[Mapping[str, str]] = {}

    path: str
    name: str
    split: str | None = None
    similarity_fn_names: list[Literal["cosine", "dot", "euclidean", "manhattan"]] | None = None
    dims: list[int] | None = None
    precisions: list[Literal["int8", "binary"]] | None = None


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
        corpus_chunk_size: documents of all processes whose embeddings are held at once.
        ignore_identical_ids: a document with the query's own id is no answer to it, as BEIR and MTEB count.
    """

    accuracy_at_k: list[int] = dataclasses.field(default_factory=lambda: [1, 3, 5, 10])
    precision_recall_at_k: list[int] = dataclasses.field(default_factory=lambda: [1, 3, 5, 10])
    mrr_at_k: list[int] = dataclasses.field(default_factory=lambda: [10])
    ndcg_at_k: list[int] = dataclasses.field(default_factory=lambda: [10])
    map_at_k: list[int] = dataclasses.field(default_factory=lambda: [100])
    corpus_chunk_size: int = 50_000
    ignore_identical_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class NanoBeir(Sides, Evaluation):
    """The small data sets of NanoBEIR.

    Attributes:
        path: a data set of the hub with its parts, or a folder that is laid out as one.
        dataset_names: which of the parts; None: all that sentence-transformers knows.
    """

    similarities: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Mapping[str, str]] = {
        "name": "its figures have the names of the data sets, such as NanoMSMARCO. Remove name",
        "precisions": "it quantises nothing. Remove precisions",
        "split": "each data set is a split of its own. Name it in dataset_names",
    }

    path: str = "sentence-transformers/NanoBEIR-en"
    dataset_names: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class RowsEvaluation(Evaluation):
    """
    Attributes:
        config: of a dataset with several.
        columns: name here -> the data's; those that are not named are called as here.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "precisions": 'the evaluator of sentence-transformers quantises nothing. Remove precisions; "sts" and '
        '"retrieval" take them'
    }

    config: str | None = None
    columns: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Similarity(RowsEvaluation):
    """
    Attributes:
        column: of the run, whose tower and length both sentences have; None: its first.
        prompt: the text before both; None: that of `column`.
    """

    similarities: ClassVar[tuple[str, ...]] = ("cosine", "dot", "euclidean", "manhattan")
    refused: ClassVar[Mapping[str, str]] = {}

    column: str | None = None
    prompt: str | None = ""


@dataclass(frozen=True, kw_only=True)
class BinaryClassification(Similarity):
    """Fields as of pairs with a score."""

    refused: ClassVar[Mapping[str, str]] = RowsEvaluation.refused


@dataclass(frozen=True, kw_only=True)
class Triplet(Sides, RowsEvaluation):
    """
    Attributes:
        margin: the positive must be so much closer than the negative.
    """

    similarities: ClassVar[tuple[str, ...]] = Similarity.similarities

    margin: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reranking(Sides, RowsEvaluation):
    """
    Attributes:
        at_k: of MRR and nDCG.
    """

    at_k: int = 10


@dataclass(frozen=True, kw_only=True)
class Mteb(Sides, Evaluation):
    """A task of the package `mteb`, whose data are the folder `path`.

    Attributes:
        task: its name in MTEB.
        column: of the run, whose tower and length texts have that are neither queries nor documents; None: its first.
        prompt: the text before these; None: that of `column`.
    """

    task: str
    column: str | None = None
    prompt: str | None = ""


TYPES: dict[str, type[Evaluation]] = {
    "retrieval": Retrieval,
    "nanobeir": NanoBeir,
    "sts": Similarity,
    "binary": BinaryClassification,
    "triplet": Triplet,
    "reranking": Reranking,
    "mteb": Mteb,
}
COLUMNS = {  # of the data, by their names here
    Similarity: ("sentence1", "sentence2", "score"),
    BinaryClassification: ("sentence1", "sentence2", "label"),
    Triplet: ("anchor", "positive", "negative"),
    Reranking: ("query", "positive", "negative"),
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
    if kind not in TYPES:
        raise UsageError(f"{where} has type={json.dumps(kind)}. Types: {', '.join(TYPES)}.")
    takes = {one.name: _field(one) for one in dataclasses.fields(TYPES[kind])}
    check_entry(given, f'{where} of type "{kind}"', takes)
    for name, value in given.items():
        if isinstance(value, list) and len(set(value)) < len(value):
            raise UsageError(f"{where}: {name}={show(value)} names one twice. Remove it.")
    for name, instead in TYPES[kind].refused.items():
        if given.get(name) is not None:
            raise UsageError(f'{where} of type "{kind}" takes no {name}: {instead}.')
    if kind == "nanobeir":
        given = {"path": NanoBeir.path, "name": "NanoBEIR_mean"} | given
    if not given.get("path"):
        raise UsageError(f"{where} has no path. Give the folder or file with its data.")
    _check_path(given["path"], where)
    if kind == "mteb":
        _check_mteb(given, where)
    given.setdefault("name", re.sub(r"[^\w.-]", "-", Path(given["path"]).name.partition(".")[0]))
    one = TYPES[kind](**given)
    if wrong := set(one.similarity_fn_names or ()) - set(one.similarities):
        takes = ", ".join(one.similarities) or "the similarity of the loss. Remove similarity_fn_names"
        raise UsageError(f'{where}: similarity_fn_names has "{min(wrong)}"; type "{kind}" takes {takes}.')
    if alien := set(getattr(one, "columns", None) or ()) - set(COLUMNS.get(type(one), ())):
        raise UsageError(f'{where}: columns has "{min(alien)}"; type "{kind}" reads {", ".join(COLUMNS[type(one)])}.')
    if kind == "reranking" and len(one.similarity_fn_names or ()) > 1:
        raise UsageError(f'{where}: type "reranking" compares in one way. Give similarity_fn_names one name.')
    return one


def _field(one: dataclasses.Field) -> Field:
    least = 0 if one.name == "margin" else 1
    return Field(one.name, parse_type(str(one.type)), bounds={"minimum": least, "minItems": 1})


def _check_mteb(given: dict[str, Any], where: str) -> None:
    if not given.get("task"):
        raise UsageError(f'{where} of type "mteb" has no task. Give its name in MTEB, such as "NFCorpus".')
    if useless := [name for name in ("similarity_fn_names", "dims", "precisions") if given.get(name) is not None]:
        raise UsageError(f'{where}: type "mteb" compares as MTEB does and reads no {useless[0]}. Remove it.')
    if importlib.util.find_spec("mteb") is None:
        raise UsageError(
            f'{where} of type "mteb" needs the package mteb, which is not installed: pip install mteb. Without it the '
            'folder of a retrieval task is read with {"type": "retrieval", "ignore_identical_ids": true}.'
        )
    given.setdefault("name", given["task"])


def _check_path(path: str, where: str) -> None:
    """What is clearly a path here must be here; a hub id may be cached or reached."""
    if looks_like_a_path(path) and not Path(path).expanduser().exists():
        raise UsageError(
            f"{where}: path={json.dumps(path)}: there is no such file or folder. Paths start at {Path.cwd()}."
        )
