"""What a run evaluates beside its held-out rows, with the model as it is.

    evaluations = Evaluations(read_evaluations([...]), loss, model, collator)
    evaluations.run(embedder, "eval")       # {"eval_nfcorpus_cosine_ndcg@10": ..., ...}

Figures have the names that sentence-transformers' evaluators give them; those of dimensions and quantised values have
`dim256_`, `int8_` or `dim256_int8_` after the evaluation's name. Every rank computes them from the same numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hf_dist_ext.data.evaluation_rows import RerankingData, SimilarityData, TripletData
from hf_dist_ext.data.evaluations import RetrievalData
from hf_dist_ext.data.mteb_tasks import MtebData
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.evaluations import Mteb
from hf_dist_ext.training import corpus_retrieval, mteb_tasks, row_evaluations
from hf_dist_ext.training.embedder import ItemsEmbedder
from hf_dist_ext.training.views import views_of

# (data, embedder, similarity) -> figures, and (options, similarity, is_short) -> their names
KINDS = {
    RetrievalData: (corpus_retrieval.run, corpus_retrieval.names),
    SimilarityData: (row_evaluations.similarity, row_evaluations.names_of_similarity),
    TripletData: (row_evaluations.triplets, row_evaluations.names_of_triplets),
    RerankingData: (row_evaluations.reranking, row_evaluations.names_of_reranking),
    MtebData: (mteb_tasks.run, mteb_tasks.names),
}


class Evaluations:
    """
    Args:
        given: of `read_evaluations`.
        similarity: how the loss compares embeddings: "cosine", "dot" or "maxsim".
        collator: of the training rows.
    """

    def __init__(self, given: Sequence[Any], similarity: str, collator: Any):
        self.given, self.similarity = list(given), similarity
        self._due: str | None = None
        if given and not (hasattr(collator, "features") and hasattr(collator, "columns")):
            raise UsageError(
                f"evaluations encode texts as the columns of a batch, which {type(collator).__name__} does not make "
                "one by one. Use hf_dist_ext.data.ContrastiveCollator."
            )
        for data in self.given:
            _check_columns(data.options, collator.columns)
            if similarity == "maxsim":
                _check_token_vectors(data.options)

    @property
    def names(self) -> list[str]:
        """Of all figures, without "eval_"."""
        return [name for data in self.given for name in KINDS[type(data)][1](data.options, self.similarity, False)]

    @property
    def headlines(self) -> list[str]:
        """The names that a report shows before and after training: of whole embeddings."""
        return [name for data in self.given for name in self._headlines(data)]

    def _headlines(self, data: Any) -> list[str]:
        whole = replace(data.options, dims=None, precisions=None)
        return KINDS[type(data)][1](whole, self.similarity, True)

    def by_view(self, figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Headline -> "whole", "dim128", "int8" and so on -> figure, of evaluations with `dims` or `precisions`.
        `figures`: what `evaluate()` gives."""
        found = {}
        for data in self.given:
            name = data.options.name
            prefixes = list(dict.fromkeys(view.prefix for view in views_of(data.options, self.similarity)))
            for headline in self._headlines(data) if len(prefixes) > 1 else ():
                of_view = {prefix: f"eval_{name}_{prefix}{headline.removeprefix(f'{name}_')}" for prefix in prefixes}
                labels = {prefix: prefix.replace("_", " ").strip() or "whole" for prefix in prefixes}
                found[headline] = {labels[prefix]: figures[one] for prefix, one in of_view.items()}
        return found

    def check(self, best: str | None, paired: Sequence[str] | None, model: Any) -> None:
        """Before anything runs. Raises UsageError.

        Args:
            best: `metric_for_best_model`.
            paired: what the evaluation of rows gives, without "eval_"; None: not known.
            model: without its wrappers.
        """
        width = getattr(model, "embedding_dim", None)
        for options in (data.options for data in self.given):
            if width and (wide := [dim for dim in options.dims or () if dim > width]):
                raise UsageError(f'evaluation "{options.name}": dims has {wide[0]}, but embeddings have {width}.')
        if paired is None or best is None or (name := best.removeprefix("eval_")) in (known := [*paired, *self.names]):
            return
        near = difflib.get_close_matches(name, known, 3, 0.3) or known
        raise UsageError(
            f'metric_for_best_model="{best}" is none of the {len(known)} figures of this run\'s evaluations. Closest: '
            f"{', '.join(near[:3])}."
        )

    @contextmanager
    def due(self, prefix: str | None) -> Iterator[None]:
        """Around an evaluation of the trainer: the figures are added once, to those of its first loop. None: not."""
        is_outer = self._due is None and bool(self.given)
        self._due = prefix if is_outer else self._due
        try:
            yield
        finally:
            self._due = None if is_outer else self._due

    def take_due(self) -> str | None:
        """The prefix of figures that are wanted now."""
        prefix, self._due = self._due, None
        return prefix

    @torch.no_grad()
    def run(self, embedder: ItemsEmbedder, prefix: str) -> dict[str, float]:
        """Every rank calls it."""
        found = {}
        for data in self.given:
            found |= KINDS[type(data)][0](data, embedder, self.similarity)
        return {f"{prefix}_{name}": float(value) for name, value in found.items()}


def _check_token_vectors(options: Any) -> None:
    if isinstance(options, Mteb):
        raise UsageError(
            f'evaluation "{options.name}": tasks of mteb are evaluated with one vector per row, and the loss compares '
            "token vectors. Remove it."
        )
    given = [field for field in ("similarity_fn_names", "dims", "precisions") if getattr(options, field)]
    if given:
        raise UsageError(
            f'evaluation "{options.name}": {given[0]} is of one vector per row, and the loss compares token vectors, '
            f"by MaxSim. Remove {given[0]}."
        )


def _check_columns(options: Any, columns: Sequence[str]) -> None:
    for field in ("query_column", "corpus_column", "column"):
        column = getattr(options, field, None)
        if column is not None and column not in columns:
            raise UsageError(
                f'evaluation "{options.name}": {field}="{column}" is no column of this run: {", ".join(columns)}.'
            )
