"""The plain full-batch step: the rows of all processes through one model in one process, one loss, one backward.

An audit (audit.py) compares the run's gradient with it, so it has no chunks, no cache, no gather and no wrapper. The
model and the loss are copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from hf_dist_ext.checkpoints.trainable import named
from hf_dist_ext.data.row_facts import split
from hf_dist_ext.engine.combined_losses import loss_of
from hf_dist_ext.engine.flat import FlatRows, unfolded
from hf_dist_ext.engine.losses import as_output
from hf_dist_ext.engine.outputs import Output, tensors_of
from hf_dist_ext.models.embedder import embedder_of

Batch = Mapping[str, Any]


def trained(model: nn.Module, loss: Any) -> dict[str, nn.Parameter]:
    """What trains, by name: of the model without its wrappers, and of the loss."""
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    everything = {**named(model.named_parameters()), **{f"loss.{name}": parameter for name, parameter in own}}
    return {name: parameter for name, parameter in everything.items() if parameter.requires_grad}


class PlainStep:
    """`model`: a copy of the run's without its wrappers. The loss is copied, with the weights that it has now."""

    def __init__(self, model: nn.Module, loss: Callable):
        self.model, self.loss = model, copy.deepcopy(loss)
        self.embedder = embedder_of(self.model)
        self._dtypes = [tensor.dtype for tensor in self._tensors()]
        self._buffers = [buffer.clone() for part in self.parts for buffer in part.buffers()]

    @property
    def parts(self) -> list[nn.Module]:
        return [part for part in (self.model, self.loss) if isinstance(part, nn.Module)]

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for part in self.parts for tensor in (*part.parameters(), *part.buffers())]

    def gradients(
        self,
        update: Sequence[Sequence[Batch]],
        device: torch.device,
        around: Callable[[], AbstractContextManager],
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """Name -> gradient in float64 on the CPU, of the parameters that have one.

        update: per micro-batch those of all ranks that have rows. around: context of every forward. dtype: of all
        numbers; None: as the run has them.
        """
        for part in self.parts:
            part.to(device).train()
            part.zero_grad()
        buffers = (buffer for part in self.parts for buffer in part.buffers())
        for buffer, before in zip(buffers, self._buffers, strict=True):
            buffer.data.copy_(before)
        for tensor, own in zip(self._tensors(), self._dtypes, strict=True):
            tensor.data = tensor.data.to((dtype or own) if own.is_floating_point else own)
        for of_ranks in update:
            (self._loss([on(batch, device, dtype) for batch in of_ranks], around) / len(update)).backward()
        found = {name: parameter.grad for name, parameter in trained(self.model, self.loss).items()}
        return {name: grad.to("cpu", torch.float64) for name, grad in found.items() if grad is not None}

    def _loss(self, batches: Sequence[Batch], around: Callable[[], AbstractContextManager]) -> torch.Tensor:
        """The mean over the anchors of all ranks."""
        scores: Any = loss_of(self.loss, split(batches[0])[1].source)
        parts = [self._embedded(batch, scores, around) for batch in batches]
        if getattr(scores, "cross_device_negatives", True):
            parts = [tuple(_joined(kind) for kind in zip(*parts, strict=True))]
        losses, rows = [], []
        for own, ids, targets in parts:
            more = {"targets": targets} if targets else {}
            losses.append(as_output(scores(own, None, row_offset=0, ids=ids or None, **more)).loss)
            rows.append(len(tensors_of(next(iter(own.values())))[0]))
        return torch.stack([loss * own for loss, own in zip(losses, rows, strict=True)]).sum() / sum(rows)

    def _embedded(self, batch: Batch, scores: Any, around: Callable[[], AbstractContextManager]) -> tuple:
        """(embeddings, ids, targets) of one rank's rows, by column."""
        columns, facts = split(batch)
        read = {name: padded(columns[name]) for name in list(columns)[: getattr(scores, "num_columns", None)]}
        embeddings = {}
        for name, features in read.items():
            with around():
                column = name if self.embedder.takes_column else None
                embeddings[name] = self.embedder.call(self.model, features, column, facts.constants.get(name))
        ids = {name: rows for name, rows in (facts.ids or {}).items() if name in read or name not in columns}
        targets = dict(facts.targets)
        if hasattr(scores, "targets_of"):
            targets |= scores.targets_of({name: columns[name] for name in read}, facts.constants)
        return embeddings, ids, targets


def padded(features: Mapping[str, Any]) -> dict[str, Any]:
    """A column's features as tensors, also where its rows travelled end to end."""
    whole = unfolded(features)
    return {k: v.piece(slice(None), 0, v.places.width) if isinstance(v, FlatRows) else v for k, v in whole.items()}


def on(value: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """A batch with its tensors on the device, the floating ones in `dtype` if one is given."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {name: on(one, device, dtype) for name, one in value.items()}
    return value


def _joined(of_ranks: Iterable[Mapping[str, Output]]) -> dict[str, Output]:
    """column -> the rows of all ranks that have any; second axes of several lengths are padded at the end."""
    of_ranks = list(of_ranks)
    columns: dict[str, list[Any]] = {}
    for own in of_ranks:
        for name, rows in own.items():
            columns.setdefault(name, []).append(rows)
    return {name: _end_to_end(parts) for name, parts in columns.items()}


def _end_to_end(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {key: _end_to_end([part[key] for part in parts]) for key in parts[0]}
    if parts[0].dim() > 1 and len({part.shape[1] for part in parts}) > 1:
        longest = max(part.shape[1] for part in parts)
        parts = [pad(part, (0, 0) * (part.dim() - 2) + (0, longest - part.shape[1])) for part in parts]
    return torch.cat(list(parts))
