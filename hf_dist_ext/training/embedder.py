"""Embeddings of many texts (or pictures) for an evaluation: every rank encodes a share of them.

Items are dealt to ranks in turn, the longest first, so that the ranks' work is alike and a batch has little padding. A
forward may be a collective, so all ranks run as many batches as the one with the largest share; a rank without items
left encodes one again and drops it. Letters: n items, D embedding, W ranks with rows of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from hf_dist_ext.data.items import Items
from hf_dist_ext.run.evaluations import Sides
from hf_dist_ext.training.step import EmbeddingStep
from hf_dist_ext.training.token_vectors import Compared, gathered, together


class ItemsEmbedder:
    """Made for one evaluation of a model.

    Args:
        model: in its wrappers, in eval mode.
        collator: has `features(column, values)`, `columns` and `prompts`, as ContrastiveCollator.
        after_batch: called after every batch, equally often on all ranks.
    """

    def __init__(self, step: EmbeddingStep, model: nn.Module, collator: Any, after_batch: Callable[[], Any]):
        self.step, self.model, self.collator, self.after_batch = step, model, collator, after_batch
        self.rows = step.strategy().rows

    def own(
        self, items: Items, numbers: np.ndarray, column: str, prompt: str | None = None
    ) -> tuple[torch.Tensor, Compared]:
        """This rank's share of the items with these numbers (n > 0): their numbers (n_own,) and embeddings
        (n_own, D), or token vectors, both on the device. `prompt` None: the column's."""
        numbers = numbers[np.argsort(-items.lengths[numbers], kind="stable")]
        own, size = numbers[self.rows.index :: self.rows.size], self.step.args.eval_batch_size
        num_batches = -(-len(numbers[:: self.rows.size]) // size)
        batches = [own[i * size : (i + 1) * size] for i in range(num_batches)]
        found = []
        for features in self._loaded(items, [b if len(b) else numbers[-1:] for b in batches], column, prompt):
            found.append(self.step.embeddings_of(self.model, self.step.prepare({column: features}))[column])
            self.after_batch()
        return torch.from_numpy(own).to(found[0].device), together(found)[: len(own)]

    def _loaded(self, items: Items, batches: Sequence, column: str, prompt: str | None) -> Iterator[dict]:
        collator = self.collator
        if prompt is not None:
            collator = copy.copy(collator)
            collator.prompts = {**collator.prompts, column: prompt}
        loader = DataLoader(
            batches,
            batch_size=None,
            collate_fn=partial(_features, items, collator, column),
            num_workers=self.step.args.dataloader_num_workers,
            generator=torch.Generator(),  # else it would draw from the one that training draws from
        )
        return iter(loader)

    def whole(self, items: Items, column: str, prompt: str | None = None) -> Compared:
        """The embeddings of all items on every rank, (n, D) or token vectors, in their order."""
        numbers, own = self.own(items, np.arange(len(items)), column, prompt)
        counts = [len(range(i, len(items), self.rows.size)) for i in range(self.rows.size)]
        everyone = gathered(self.rows, own, counts)
        places = self.rows.gather(numbers, counts)
        return everyone[places.argsort()]

    def sides(self, options: Sides) -> list[tuple[str, str | None]]:
        """Column and prompt of queries and of documents."""
        query, document, *_ = self.collator.columns
        return [
            (options.query_column or query, options.query_prompt),
            (options.corpus_column or document, options.corpus_prompt),
        ]

    def added(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the sum over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def lowest(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the smallest of all ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def _reduced(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        if self.rows.size > 1:
            dist.all_reduce(values, how, group=self.rows.peers)
        return values


def _features(items: Items, collator: Any, column: str, numbers: np.ndarray) -> dict[str, torch.Tensor]:
    return collator.features(column, items.take(numbers))
