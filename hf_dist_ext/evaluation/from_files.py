"""Evaluators of sentence-transformers, of mteb and of whole corpora, made from what the `evaluations` of a run file
name.

    evaluators = evaluators_of(read_evaluations(entries), model, columns, prompts, batch_size=32)

Figures have the evaluation's name before them. Those of leading dimensions and of quantised values have `dim256_`,
`int8_` or `dim256_int8_` after the name; but for a corpus they come from an evaluator of their own. An evaluator has
three attributes more, for reports:

    figure_names      all that it gives, None: only the evaluator knows
    headlines         those that a report shows, of whole embeddings
    view_prefixes     "", "dim256_" and so on, of an evaluation of several
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.multi_vector_encoder import evaluation as of_tokens
from sentence_transformers.sentence_transformer import evaluation as of_vectors
from sentence_transformers.util.similarity import SimilarityFunction

from hf_dist_ext.data.load import loading_errors
from hf_dist_ext.data.row_check import first_of_node
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation import corpus
from hf_dist_ext.evaluation.mteb_task import MtebEvaluator
from hf_dist_ext.evaluation.views import View
from hf_dist_ext.run.evaluations import (
    BinaryClassification,
    Evaluation,
    Mteb,
    NanoBeir,
    Reranking,
    Retrieval,
    Sides,
    Similarity,
    Triplet,
)

MAXSIM = "maxsim"
OF_ONE_VECTOR = ("similarity_fn_names", "dims", "precisions")
OF_BINARY = ("accuracy", "accuracy_threshold", "f1", "f1_threshold", "precision", "recall", "ap", "mcc")


class EncodedSide(NamedTuple):
    """How one side of an evaluation is encoded: by `encode_query`, `encode_document` or (None) `encode`."""

    task: str | None
    prompt: str


class Made(NamedTuple):
    """`figures`: names of what the evaluator gives, without that of the evaluation; None: it does not say."""

    evaluator: Any
    figures: Sequence[str] | None
    headlines: Sequence[str] | None


def evaluators_of(
    given: Sequence[Any],
    model: Any,
    columns: Sequence[str] = ("query", "positive"),
    prompts: Mapping[str, str] | None = None,
    tasks: Mapping[str, str] | None = None,
    batch_size: int = 32,
    similarity: str | None = None,
) -> list[BaseEvaluator]:
    """
    Args:
        given: of `read_evaluations`.
        model: the SentenceTransformer or MultiVectorEncoder that trains.
        columns: of the run, queries first.
        prompts: column -> the text before its rows; "": none.
        tasks: column -> "query" or "document", the side of the model that encodes it; None: the first column is the
            query, the others are documents.
        similarity: how embeddings are compared where an evaluation does not say it; None: as the model says.

    Raises:
        UsageError: what does not fit the model, the columns, or an evaluator of sentence-transformers.
    """
    tasks = tasks or {column: "document" if i else "query" for i, column in enumerate(columns)}
    similarity = MAXSIM if isinstance(model, MultiVectorEncoder) else similarity or model.similarity_fn_name
    found = []
    with first_of_node():  # the others take from the caches what it has made
        for data in given:
            try:
                sides = _sides(data.options, columns, prompts or {}, tasks)
                found += _of_views(data, model, sides, similarity, batch_size)
            except UsageError as error:
                raise UsageError(f'evaluation "{data.options.name}": {error}') from None
    return found


def _sides(
    options: Evaluation, columns: Sequence[str], prompts: Mapping[str, str], tasks: Mapping[str, str]
) -> dict[str | None, EncodedSide]:
    def side(column_field: str, prompt_field: str, default: str) -> EncodedSide:
        column, prompt = getattr(options, column_field, None), getattr(options, prompt_field, "")
        if column is not None and column not in columns:
            raise UsageError(f'{column_field}="{column}" is no column of this run: {", ".join(columns)}.')
        column = default if column is None else column
        return EncodedSide(tasks.get(column), prompts.get(column, "") if prompt is None else prompt)

    sides: dict[str | None, EncodedSide] = {None: side("column", "prompt", columns[0])}
    if isinstance(options, Sides):
        sides["query"] = side("query_column", "query_prompt", columns[0])
        sides["document"] = side("corpus_column", "corpus_prompt", columns[1])
    return sides


def _of_views(data: Any, model: Any, sides: Mapping, similarity: str, batch_size: int) -> list[BaseEvaluator]:
    options, found = data.options, []
    _check_fits(options, model)
    views = [
        View(similarity, *one) for one in product([None, *(options.dims or ())], [None, *(options.precisions or ())])
    ]
    for view in views[:1] if isinstance(options, Retrieval) else views:  # a corpus is looked at in all views at once
        name = f"{options.name}_{view.prefix}".removesuffix("_")
        evaluator, figures, headlines = KINDS[type(options)](data, view, name, batch_size)
        for one in getattr(evaluator, "evaluators", [evaluator]):
            one.embed_inputs = partial(_embedded, one.embed_inputs, sides)
        evaluator.figure_names = None if figures is None else [f"{name}_{one}" for one in figures]
        if view.prefix:
            evaluator.headlines = []
        else:
            evaluator.headlines = None if headlines is None else [f"{name}_{one}" for one in headlines]
            evaluator.view_prefixes = [view.prefix for view in views]
        found.append(evaluator)
    return found


def _check_fits(options: Evaluation, model: Any) -> None:
    if not isinstance(model, MultiVectorEncoder):
        width = model.get_embedding_dimension()
        if width and (wide := [dim for dim in options.dims or () if dim > width]):
            raise UsageError(f"dims has {wide[0]}, but embeddings have {width}.")
        return
    if isinstance(options, (Similarity, Mteb)):
        raise UsageError(
            "it compares one vector per row, and the model gives token vectors. Remove it, or train a model with one "
            "vector per row."
        )
    if given := [field for field in OF_ONE_VECTOR if getattr(options, field)]:
        raise UsageError(
            f"{given[0]} is of one vector per row, and the model gives token vectors, which are compared by MaxSim. "
            f"Remove {given[0]}."
        )


def _embedded(
    embed: Callable, sides: Mapping, model: Any, rows: Any, encode_fn_name: str | None = None, **more: Any
) -> Any:
    """In the place of an evaluator's `embed_inputs`."""
    task, prompt = sides[encode_fn_name]
    more |= {"task": task} if encode_fn_name is None and task else {}
    more |= {"encode_fn_name": task} if encode_fn_name is not None else {}
    return embed(model, rows, **more | {"prompt": prompt})


def _encoded(model: Any, rows: list, encode_fn_name: str | None = None, **options: Any) -> Any:
    return getattr(model, f"encode_{encode_fn_name}" if encode_fn_name else "encode")(rows, **options)


# ---- (data, view, name, batch_size) -> Made ----


def _retrieval(data: Any, view: View, name: str, batch_size: int) -> Made:
    short = [corpus.names(data.options, view.similarity, is_short) for is_short in (False, True)]
    figures, headlines = ([one.removeprefix(f"{name}_") for one in names] for names in short)
    prefixes = tuple(f"{one}_" for one in _similarities(data.options, view))
    headlines = [one for one in headlines if one.startswith(prefixes)]
    return Made(corpus.CorpusEvaluator(data, view.similarity, batch_size, _encoded), figures, headlines)


def _similarity(data: Any, view: View, name: str, batch_size: int) -> Made:
    names = _similarities(data.options, view)
    evaluator = of_vectors.EmbeddingSimilarityEvaluator(
        *data.columns.values(), batch_size, name=name, precision=view.precision, truncate_dim=view.dim,
        similarity_fn_names=names, write_csv=False,
    )  # fmt: skip
    figures = [f"{figure}_{one}" for one in _with_max(names) for figure in ("pearson", "spearman")]
    return Made(evaluator, figures, [one for one in figures if one.startswith("spearman")])


def _binary(data: Any, view: View, name: str, batch_size: int) -> Made:
    names = _similarities(data.options, view)
    first, second, labels = data.columns.values()
    evaluator = of_vectors.BinaryClassificationEvaluator(
        first, second, [int(label) for label in labels], name, batch_size, write_csv=False, truncate_dim=view.dim,
        similarity_fn_names=names,
    )  # fmt: skip
    figures = [f"{one}_{figure}" for one in _with_max(names) for figure in OF_BINARY]
    return Made(evaluator, figures, [one for one in figures if one.endswith("_ap")])


def _triplet(data: Any, view: View, name: str, batch_size: int) -> Made:
    rows, names = data.columns.values(), _similarities(data.options, view)
    more = {"margin": data.options.margin, "name": name, "batch_size": batch_size, "write_csv": False}
    if view.similarity == MAXSIM:
        evaluator = of_tokens.MultiVectorTripletEvaluator(*rows, **more)
    else:
        evaluator = of_vectors.TripletEvaluator(*rows, truncate_dim=view.dim, similarity_fn_names=names, **more)
    figures = [f"{one}_accuracy" for one in _with_max(names)]
    return Made(evaluator, figures, figures)


def _reranking(data: Any, view: View, name: str, batch_size: int) -> Made:
    rows = [dict(zip(data.columns, row, strict=True)) for row in zip(*data.columns.values(), strict=True)]
    k = data.options.at_k
    more = {"at_k": k, "name": name, "batch_size": batch_size, "write_csv": False}
    figures = ["map", f"mrr@{k}", f"ndcg@{k}"]
    if view.similarity == MAXSIM:
        return Made(of_tokens.MultiVectorRerankingEvaluator(rows, **more), figures, figures)
    (one,) = _similarities(data.options, view)
    compare = SimilarityFunction.to_similarity_fn(one)
    evaluator = of_vectors.RerankingEvaluator(rows, similarity_fct=compare, truncate_dim=view.dim, **more)
    return Made(evaluator, figures, figures)


def _nano_beir(data: Any, view: View, name: str, batch_size: int) -> Made:
    options = data.options
    given = {"dataset_id": options.path, "batch_size": batch_size, "write_csv": False}
    with loading_errors(options.path):
        if view.similarity == MAXSIM:
            return Made(of_tokens.MultiVectorNanoBEIREvaluator(options.dataset_names, **given), None, None)
        compare = {view.similarity: SimilarityFunction.to_similarity_fn(view.similarity)}
        evaluator = of_vectors.NanoBEIREvaluator(
            options.dataset_names, truncate_dim=view.dim, score_functions=compare, **given
        )
    return Made(evaluator, None, None)


def _mteb(data: Any, view: View, name: str, batch_size: int) -> Made:
    evaluator = MtebEvaluator(data.options, view.similarity, batch_size, _encoded)
    return Made(evaluator, ["main_score"], ["main_score"])


def _similarities(options: Evaluation, view: View) -> list[str]:
    return list(options.similarity_fn_names or [view.similarity])


def _with_max(names: Sequence[str]) -> list[str]:
    return [*names, "max"] if len(names) > 1 else list(names)


KINDS: dict[type, Callable[..., Made]] = {
    Retrieval: _retrieval,
    Similarity: _similarity,
    BinaryClassification: _binary,
    Triplet: _triplet,
    Reranking: _reranking,
    NanoBeir: _nano_beir,
    Mteb: _mteb,
}
