"""A task of `mteb`, run on the model as it is in training.

Every rank runs the task and encodes its share of the texts; all have all embeddings, so that all compute the same
figures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize

from hf_dist_ext.data.items import Items
from hf_dist_ext.data.mteb_tasks import MtebData, seeds_of_its_own
from hf_dist_ext.run.evaluations import Mteb
from hf_dist_ext.training.embedder import ItemsEmbedder


def run(data: MtebData, embedder: ItemsEmbedder, similarity: str) -> dict[str, float]:
    """Name -> the task's main score, the mean over its splits and subsets. Every rank calls it."""
    import mteb

    with seeds_of_its_own():
        result = mteb.evaluate(
            Encoder(embedder, data.options, similarity),
            data.task,
            cache=None,
            co2_tracker=False,
            encode_kwargs={"batch_size": embedder.step.args.eval_batch_size, "show_progress_bar": False},
            overwrite_strategy="always",
            show_progress_bar=False,
        )
    (of_task,) = result.task_results
    return {name: of_task.get_score() for name in names(data.options, similarity)}


def names(options: Mteb, similarity: str, is_short: bool = False) -> list[str]:
    return [f"{options.name}_main_score"]


class Encoder:
    """What mteb calls an encoder (`mteb.models.EncoderProtocol`). `similarity`: "cosine" or "dot"."""

    def __init__(self, embedder: ItemsEmbedder, options: Mteb, similarity: str):
        from mteb.models import ModelMeta

        self.embedder, self.options, self.compares = embedder, options, similarity
        self.mteb_model_meta = ModelMeta.create_empty()

    def encode(self, inputs: Any, *, prompt_type: Any = None, **others: Any) -> np.ndarray:
        """(texts, D) float32. `inputs`: batches with "text"; `prompt_type`: whether they are queries or documents."""
        texts = [text for batch in inputs for text in batch["text"]]
        own = self.options.column or self.embedder.collator.columns[0], self.options.prompt
        query, document = self.embedder.sides(self.options)
        column, prompt = {"query": query, "document": document}.get(getattr(prompt_type, "value", None), own)
        items = Items(pa.chunked_array([pa.array(texts, pa.large_string())]))
        return self.embedder.whole(items, column, prompt).float().cpu().numpy()

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """(n, D), (m, D) -> (n, m)"""
        first, second = self._compared(first), self._compared(second)
        return first @ second.T

    def similarity_pairwise(self, first: Any, second: Any) -> torch.Tensor:
        """(n, D), (n, D) -> (n,)"""
        return (self._compared(first) * self._compared(second)).sum(dim=-1)

    def _compared(self, rows: Any) -> torch.Tensor:
        rows = torch.atleast_2d(torch.as_tensor(rows))
        return normalize(rows, dim=-1) if self.compares == "cosine" else rows
