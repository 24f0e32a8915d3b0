"""A task of the package `mteb`, run by mteb on the model that trains, with its data from a folder in the place of the
hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from datasets.exceptions import DatasetsError
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util.similarity import SimilarityFunction

from hf_dist_ext.data.load import path_of, place_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.evaluators import drawing_apart
from hf_dist_ext.run.evaluations import Mteb


class MtebEvaluator(BaseEvaluator):
    """The task's main score, the mean over its splits and subsets.

    Args:
        similarity: how embeddings are compared: "cosine" or "dot".
        embed_inputs: (model, texts, encode_fn_name=, batch_size=) -> embeddings, as of sentence-transformers'
            evaluators.
    """

    def __init__(self, options: Mteb, similarity: str, batch_size: int, embed_inputs: Callable):
        super().__init__()
        with drawing_apart(seed=0):  # mteb sets the seeds of every generator
            self.task, self.name = load_task(options), options.name
        self.similarity, self.batch_size, self.embed_inputs = similarity, batch_size, embed_inputs
        self.primary_metric = f"{self.name}_main_score"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        import mteb

        result = mteb.evaluate(
            _Encoder(self, model), self.task, cache=None, co2_tracker=False, overwrite_strategy="always",
            encode_kwargs={"batch_size": self.batch_size, "show_progress_bar": False}, show_progress_bar=False,
        )  # fmt: skip
        (of_task,) = result.task_results
        metrics = {self.primary_metric: of_task.get_score()}
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


class _Encoder:
    """What mteb calls an encoder (`mteb.models.EncoderProtocol`)."""

    def __init__(self, evaluator: MtebEvaluator, model: Any):
        from mteb.models import ModelMeta

        self.model, self.embed_inputs, self.mteb_model_meta = model, evaluator.embed_inputs, ModelMeta.create_empty()
        self.similarity = SimilarityFunction.to_similarity_fn(evaluator.similarity)
        self.similarity_pairwise = SimilarityFunction.to_similarity_pairwise_fn(evaluator.similarity)

    def encode(self, inputs: Any, *, prompt_type: Any = None, batch_size: int = 32, **others: Any) -> Any:
        """(texts, D). `inputs`: batches with "text"; `prompt_type`: whether they are queries or documents."""
        rows = [text for batch in inputs for text in batch["text"]]
        kind = getattr(prompt_type, "value", None)
        kind = kind if kind in ("query", "document") else None
        return self.embed_inputs(self.model, rows, encode_fn_name=kind, batch_size=batch_size, show_progress_bar=False)


def load_task(options: Mteb) -> Any:
    """mteb's object, with its data loaded.

    Raises:
        UsageError: mteb has no such task of texts, or cannot load it from the folder.
    """
    import mteb
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    try:
        task = mteb.get_task(options.task)
    except KeyError as error:
        raise UsageError(f"mteb has no such task: {error.args[0].removeprefix('KeyError: ')}") from error
    if isinstance(task, AbsTaskAggregate):
        parts = [part.metadata.name for part in task.tasks]
        raise UsageError(
            f"the task {options.task} is the mean of {len(parts)} with datasets of their own. Give each an entry: "
            f"{', '.join(parts)}."
        )
    if (kinds := sorted(task.metadata.modalities)) != ["text"]:
        raise UsageError(f"the task {options.task} is about {' and '.join(kinds)}; only tasks of texts are run.")
    if options.split is not None:
        if options.split not in task.eval_splits:
            raise UsageError(
                f'the task {options.task} has the splits {", ".join(task.eval_splits)}, not "{options.split}".'
            )
        task.filter_eval_splits([options.split])
    hub_id, folder = task.metadata.dataset["path"], path_of(options.path)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder. Give a clone of {hub_id}, the task's dataset on the hub.")
    of_folder = task.metadata.dataset | {"path": place_of(options.path)}
    task.metadata = task.metadata.model_copy(update={"dataset": of_folder})
    try:
        task.load_data()
    except (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300].rstrip(".")
        raise UsageError(
            f"mteb could not load the task {options.task} from {folder}: {reason}. The folder must be laid out as "
            f"{hub_id}, the task's dataset on the hub."
        ) from error
    subsets = [task.dataset.get(subset, task.dataset) for subset in task.hf_subsets]
    if missing := [split for split in task.eval_splits for subset in subsets if split not in subset]:
        raise UsageError(
            f'{folder} has no split "{missing[0]}"; the task {options.task} is evaluated on '
            f'{", ".join(task.eval_splits)}. Give one as "split", or the missing files.'
        )
    return task
