"""Evaluators of sentence-transformers and of mteb, made from what the `evaluations` of a run file name.

    evaluators = evaluators_of(read_evaluations(entries), model, columns, prompts, batch_size=32)

Figures have the evaluation's name before them. Those of leading dimensions and of quantised values come from an
evaluator of their own, with `dim256_`, `int8_` or `dim256_int8_` after the name. Where a definition of
sentence-transformers lacks what an entry asks for, UsageError says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorRerankingEvaluator,
    MultiVectorTripletEvaluator,
)
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    RerankingEvaluator,
    TripletEvaluator,
)
from sentence_transformers.util.similarity import SimilarityFunction

from hf_dist_ext.data.evaluation_rows import RerankingData, SimilarityData, TripletData
from hf_dist_ext.data.mteb_tasks import MtebData, seeds_of_its_own
from hf_dist_ext.errors import UsageError


class EncodedSide(NamedTuple):
    """How one side of an evaluation is encoded: by `encode_query`, `encode_document` or (None) `encode`."""

    task: str | None
    prompt: str


class EvaluatedView(NamedTuple):
    """Of embeddings: leading dimensions, and values in a lower precision. None: all, and as they are."""

    name: str
    dim: int | None
    precision: str | None


def evaluators_of(
    given: Sequence[Any],
    model: Any,
    columns: Sequence[str],
    prompts: Mapping[str, str],
    tasks: Mapping[str, str] | None = None,
    batch_size: int = 32,
) -> list[BaseEvaluator]:
    """
    Args:
        given: of `read_evaluations`; a corpus has no evaluator here.
        model: the SentenceTransformer or MultiVectorEncoder that trains.
        columns: of the run, queries first.
        prompts: column -> the text before its rows; "": none.
        tasks: column -> "query" or "document", the side of the model that encodes it; None: the first column is the
            query, the others are documents.
    """
    tasks = tasks or {column: "document" if i else "query" for i, column in enumerate(columns)}

    def side(column: str | None, prompt: str | None, default: str) -> EncodedSide:
        column = default if column is None else column
        return EncodedSide(tasks.get(column), prompts.get(column, "") if prompt is None else prompt)

    found = []
    for data in given:
        options = data.options
        if type(data) not in KINDS:
            raise UsageError(
                f'evaluation "{options.name}": a corpus is evaluated by hf_dist_ext itself. Leave it out.'
            )
        sides = {None: side(getattr(options, "column", None), getattr(options, "prompt", ""), columns[0])}
        if hasattr(options, "query_column"):
            sides["query"] = side(options.query_column, options.query_prompt, columns[0])
            sides["document"] = side(options.corpus_column, options.corpus_prompt, columns[1])
        for dim, precision in product([None, *(options.dims or ())], [None, *(options.precisions or ())]):
            parts = [options.name, f"dim{dim}" if dim else "", precision or ""]
            view = EvaluatedView("_".join(filter(None, parts)), dim, precision)
            evaluator = KINDS[type(data)](data, model, view, batch_size)
            evaluator.embed_inputs = partial(_embedded, evaluator.embed_inputs, sides)
            found.append(evaluator)
    return found


def _embedded(
    embed: Callable,
    sides: Mapping[str | None, EncodedSide],
    model: Any,
    rows: Any,
    encode_fn_name: str | None = None,
    **more,
) -> Any:
    """In the place of an evaluator's `embed_inputs`."""
    task, prompt = sides[encode_fn_name]
    more |= {"task": task} if encode_fn_name is None and task else {}
    more |= {"encode_fn_name": task} if encode_fn_name is not None else {}
    return embed(model, rows, prompt=prompt, **more)


def _similarity(data: SimilarityData, model: Any, view: EvaluatedView, batch_size: int) -> BaseEvaluator:
    if isinstance(model, MultiVectorEncoder):
        raise UsageError(
            f'evaluation "{data.options.name}": sentence-transformers correlates no scores of token vectors. Remove '
            "it, or train a model with one vector per row."
        )
    first, second = (data.items.take(numbers) for numbers in data.pairs.T)
    return EmbeddingSimilarityEvaluator(
        first, second, data.scores.tolist(), batch_size, name=view.name, precision=view.precision,
        truncate_dim=view.dim, similarity_fn_names=_similarities(data.options, model), write_csv=False,
    )  # fmt: skip


def _triplet(data: TripletData, model: Any, view: EvaluatedView, batch_size: int) -> BaseEvaluator:
    _refuse_precision(data.options, view)
    rows = [data.queries.take(data.anchors), *map(data.documents.take, (data.positives, data.negatives))]
    more = {"margin": data.options.margin, "name": view.name, "batch_size": batch_size, "write_csv": False}
    if isinstance(model, MultiVectorEncoder):
        return MultiVectorTripletEvaluator(*rows, **more)
    return TripletEvaluator(
        *rows, truncate_dim=view.dim, similarity_fn_names=_similarities(data.options, model), **more
    )


def _reranking(data: RerankingData, model: Any, view: EvaluatedView, batch_size: int) -> BaseEvaluator:
    _refuse_precision(data.options, view)
    rows = [
        {"query": query, "positive": documents[:num_right], "negative": documents[num_right:]}
        for query, documents, num_right in zip(
            data.queries.take(data.asked), map(data.documents.take, data.listed), data.num_right, strict=True
        )
    ]
    more = {"at_k": data.options.at_k, "name": view.name, "batch_size": batch_size, "write_csv": False}
    if isinstance(model, MultiVectorEncoder):
        return MultiVectorRerankingEvaluator(rows, **more)
    (similarity,) = _similarities(data.options, model)
    compare = SimilarityFunction.to_similarity_fn(similarity)
    return RerankingEvaluator(rows, similarity_fct=compare, truncate_dim=view.dim, **more)


def _similarities(options: Any, model: Any) -> list[str]:
    return options.similarity_fn_names or [model.similarity_fn_name]


def _refuse_precision(options: Any, view: EvaluatedView) -> None:
    if view.precision:
        raise UsageError(
            f'evaluation "{options.name}": the evaluators of sentence-transformers for triplets and lists quantise '
            "nothing. Remove precisions; those of pairs with a score and of a corpus take it."
        )


class MtebEvaluator(BaseEvaluator):
    """A task of `mteb` whose data are in a folder: its main score, the mean over its splits and subsets."""

    def __init__(self, data: MtebData, model: Any, view: EvaluatedView, batch_size: int):
        super().__init__()
        self.task, self.name, self.batch_size = data.task, view.name, batch_size
        self.primary_metric = f"{view.name}_main_score"

    def __call__(self, model: Any, output_path: Any = None, epoch: float = -1, steps: int = -1) -> dict[str, float]:
        import mteb

        with seeds_of_its_own():
            result = mteb.evaluate(
                _MtebModel(model, self.embed_inputs), self.task, cache=None, co2_tracker=False,
                encode_kwargs={"batch_size": self.batch_size, "show_progress_bar": False},
                overwrite_strategy="always", show_progress_bar=False,
            )  # fmt: skip
        (of_task,) = result.task_results
        metrics = {self.primary_metric: of_task.get_score()}
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def embed_inputs(self, model: Any, rows: list, encode_fn_name: str | None = None, **options: Any) -> Any:
        return getattr(model, f"encode_{encode_fn_name}" if encode_fn_name else "encode")(rows, **options)


class _MtebModel:
    """What mteb calls an encoder (`mteb.models.EncoderProtocol`)."""

    def __init__(self, model: Any, embed: Callable):
        from mteb.models import ModelMeta

        self.model, self.embed, self.mteb_model_meta = model, embed, ModelMeta.create_empty()
        self.similarity, self.similarity_pairwise = model.similarity, model.similarity_pairwise

    def encode(self, inputs: Any, *, prompt_type: Any = None, batch_size: int = 32, **others: Any) -> Any:
        """(texts, D). `inputs`: batches with "text"; `prompt_type`: whether they are queries or documents."""
        rows = [text for batch in inputs for text in batch["text"]]
        kind = getattr(prompt_type, "value", None)
        return self.embed(self.model, rows, kind if kind in ("query", "document") else None, batch_size=batch_size)


KINDS: dict[type, Callable[[Any, Any, EvaluatedView, int], Any]] = {
    SimilarityData: _similarity,
    TripletData: _triplet,
    RerankingData: _reranking,
    MtebData: MtebEvaluator,
}
