"""Evaluators of sentence-transformers, made from what the `evaluations` of a run file name.

    evaluators = evaluators_of(read_evaluations(entries), model, columns, prompts, batch_size=32)

Figures have the evaluation's name before them. An evaluator has two attributes more, for reports:

    figure_names      all figures that it gives
    headlines         those that a report shows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.multi_vector_encoder import evaluation as of_tokens
from sentence_transformers.sentence_transformer import evaluation as of_vectors
from sentence_transformers.util.similarity import SimilarityFunction

from hf_dist_ext.data.evaluations import RetrievalData, RowsData
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.evaluations import Evaluation, Retrieval, Sides, Similarity

MAXSIM = "maxsim"
OF_ONE_VECTOR = ("similarity_fn_names", "truncate_dim")


def evaluators_of(
    given: Sequence[Any],
    model: Any,
    columns: Sequence[str] = ("query", "positive"),
    prompts: Mapping[str, str] | None = None,
    batch_size: int = 32,
    similarity: str | None = None,
) -> list[BaseEvaluator]:
    """
    Args:
        given: of `read_evaluations`.
        model: the SentenceTransformer or MultiVectorEncoder that trains.
        columns: of the run: the first one is encoded as queries, the others as documents.
        prompts: column -> the text before its rows; "": none.
        similarity: how embeddings are compared where an evaluation does not say it; None: as the model says.

    Raises:
        UsageError: what does not fit the model or the columns.
    """
    similarity = MAXSIM if isinstance(model, MultiVectorEncoder) else similarity or model.similarity_fn_name
    found = []
    for data in given:
        options = data.options
        try:
            _check_fits(options, model)
            sides = _sides(options, columns, prompts or {})
        except UsageError as error:
            raise UsageError(f'evaluation "{options.name}": {error}') from None
        names = list(options.similarity_fn_names or [similarity])
        more = {"name": options.name, "batch_size": batch_size, "write_csv": False}
        if similarity != MAXSIM:
            more["truncate_dim"] = options.truncate_dim
        make = _retrieval if isinstance(data, RetrievalData) else _similarity if "score" in data.columns else _triplet
        evaluator, figures, headlines = make(data, names, more)
        evaluator.embed_inputs = partial(_embedded, evaluator.embed_inputs, sides)
        evaluator.figure_names = [f"{options.name}_{figure}" for figure in figures]
        evaluator.headlines = [f"{options.name}_{figure}" for figure in headlines]
        found.append(evaluator)
    return found


def _sides(
    options: Evaluation, columns: Sequence[str], prompts: Mapping[str, str]
) -> dict[str | None, tuple[str, str]]:
    """What an evaluator encodes as queries, as documents or (None) as neither -> as which of the two, with which
    prompt."""

    def side(column_field: str, prompt_field: str, default: str) -> tuple[str, str]:
        column, prompt = getattr(options, column_field, None), getattr(options, prompt_field, "")
        if column is not None and column not in columns:
            raise UsageError(f'{column_field}="{column}" is no column of this run: {", ".join(columns)}.')
        column = default if column is None else column
        return "query" if column == columns[0] else "document", prompts.get(column, "") if prompt is None else prompt

    sides: dict[str | None, tuple[str, str]] = {None: side("column", "prompt", columns[0])}
    if isinstance(options, Sides):
        sides["query"] = side("query_column", "query_prompt", columns[0])
        sides["document"] = side("corpus_column", "corpus_prompt", columns[1])
    return sides


def _check_fits(options: Evaluation, model: Any) -> None:
    if not isinstance(model, MultiVectorEncoder):
        width = model.get_embedding_dimension()
        if width and (options.truncate_dim or 0) > width:
            raise UsageError(f"truncate_dim is {options.truncate_dim}, but embeddings have {width}.")
        return
    if isinstance(options, Similarity):
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
    more |= {"task" if encode_fn_name is None else "encode_fn_name": task, "prompt": prompt}
    return embed(model, rows, **more)


# ---- (data, how embeddings are compared, common arguments) -> evaluator, names of its figures, its headlines ----


def _retrieval(data: RetrievalData, names: list[str], more: dict[str, Any]) -> tuple[Any, list[str], list[str]]:
    options: Retrieval = data.options
    ks = {
        "accuracy": options.accuracy_at_k, "precision": options.precision_recall_at_k,
        "recall": options.precision_recall_at_k, "ndcg": options.ndcg_at_k, "mrr": options.mrr_at_k,
        "map": options.map_at_k,
    }  # fmt: skip
    more |= {f"{name}_at_k": ks[name] for name in ("accuracy", "mrr", "ndcg", "map")}
    more["precision_recall_at_k"] = ks["recall"]
    if options.corpus_chunk_size is not None:
        more["corpus_chunk_size"] = options.corpus_chunk_size
    kind: type = of_tokens.MultiVectorInformationRetrievalEvaluator
    if names != [MAXSIM]:
        kind = of_vectors.InformationRetrievalEvaluator
        more["score_functions"] = {name: SimilarityFunction.to_similarity_fn(name) for name in names}
        more["main_score_function"] = names[0]
    evaluator = kind(data.queries, dict.fromkeys(data.corpus_ids), data.relevant, **more)
    evaluator.corpus = data.corpus  # it takes slices of it, and pictures are decoded when they are taken
    figures = [f"{one}_{name}@{k}" for one in names for name in ks for k in ks[name]]
    shown = [f"{one}_{name}@{max(ks[name])}" for one in names for name in ("recall", "ndcg", "mrr", "map")]
    return evaluator, figures, shown


def _similarity(data: RowsData, names: list[str], more: dict[str, Any]) -> tuple[Any, list[str], list[str]]:
    evaluator = of_vectors.EmbeddingSimilarityEvaluator(*data.columns.values(), similarity_fn_names=names, **more)
    figures = [f"{figure}_{one}" for one in _with_max(names) for figure in ("pearson", "spearman")]
    return evaluator, figures, [one for one in figures if one.startswith("spearman")]


def _triplet(data: RowsData, names: list[str], more: dict[str, Any]) -> tuple[Any, list[str], list[str]]:
    kind: type = of_tokens.MultiVectorTripletEvaluator
    if names != [MAXSIM]:
        kind, more = of_vectors.TripletEvaluator, more | {"similarity_fn_names": names}
    figures = [f"{one}_accuracy" for one in _with_max(names)]
    return kind(*data.columns.values(), margin=data.options.margin, **more), figures, figures


def _with_max(names: Sequence[str]) -> list[str]:
    return [*names, "max"] if len(names) > 1 else names
