"""Pipeline parallelism of a causal language model that is trained with its own loss.

That loss is a sum over tokens, divided by the number of all tokens that count (Trainer's `num_items_in_batch`). So it
is a sum over chunks as it is, and one pass over the stages trains on it:

(1) the batch of a device is cut into chunks of so many rows, as they come and at the batch's width
(2) forwards and backwards run in the order of a schedule; the last stage's forward ends with the loss of its chunk
(3) the last stage tells the sum over chunks to the other ranks of its pipeline
(4) once per update gradients are averaged over the copies of the pipeline; then first and last stage add up theirs of
    a tied weight, so that both copies of it train alike, to the last bit

An evaluation is (2) without backwards. Letters: B rows of a batch, b of a chunk, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_dist_ext.engine.chunks import Chunk
from hf_dist_ext.engine.gradient_cache import PhaseContext, refuse_nothing_trains
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.mesh import STAGES
from hf_dist_ext.strategies.pipeline import own_loss_stages
from hf_dist_ext.strategies.pipeline.options import places_of
from hf_dist_ext.strategies.pipeline.own_loss_stages import Score, StagedModelWithLoss
from hf_dist_ext.strategies.pipeline.passes import Flow, Line, first_row
from hf_dist_ext.strategies.pipeline.strategy import Pipeline
from hf_dist_ext.strategies.tensors import held_here, split_as


class OwnLossPipeline(Pipeline):
    cut_kind, staged = StagedModelWithLoss, staticmethod(own_loss_stages.staged)
    has_first_pass = False

    def __init__(self, model: nn.Module | None, args: Any):
        super().__init__(model, args)
        self.rows_per_chunk: int = args.gradient_cache_chunk_size

    @contextmanager
    def constructing(self, args: Any) -> Iterator[None]:
        with super().constructing(args):
            self._agree_on_copies(places_of(args)[0])
            yield

    @torch.no_grad()
    def _agree_on_copies(self, places: Sequence[int]) -> None:
        """Where ranks have drawn weights, each for itself, a tied one is that of the first stage on both."""
        group = self.mesh.group(STAGES)
        for parameter in self.cut.copied:
            if 0 in self.cut.own:
                dist.send(held_here(parameter.data), group=group, group_dst=places[-1])
            else:
                dist.recv(held_here(parameter.data), group=group, group_src=places[0])

    # ---- a batch ----

    def train_batch(self, batch: Mapping[str, Any], score: Score, phase: PhaseContext) -> torch.Tensor:
        """Forward and backward of a batch, and its loss on every rank that holds its rows. `score`: of a part of the
        rows; the losses are added up."""
        leaf = torch.zeros((), device=self.line.device, requires_grad=True)
        self.backward(leaf, leaf.detach())  # which is asked what it makes of a loss
        with self.sharing_casts(self.cut.is_checkpointed):
            flow = self._run(batch, score, phase, seed=leaf.grad)
        return self._told(flow)

    def score_batch(
        self, batch: Mapping[str, Any], score: Score, has_loss: bool, wants_logits: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Likewise without a backward: the loss, None without one, and logits (B, T, V) where they are wanted."""
        flow = self._run(batch, score, lambda phase: nullcontext(), seed=None, keeps_logits=wants_logits)
        if self.sharded is not None:
            self.sharded.free()
        loss = self._told(flow) if has_loss else None
        if not wants_logits:
            return loss, None
        own = {"logits": torch.cat(list(flow.logits.values()))} if self.line.has_last else {}
        return loss, self.line.shared(own)["logits"]

    def _run(self, batch: Mapping[str, Any], score: Score, phase: PhaseContext, **options: Any) -> _OwnLossFlow:
        chunks = cut_rows(batch, self.rows_per_chunk)
        if self.forwards_are_collective:  # copies with fewer rows run idle chunks
            of_ranks = collectives.exchange([len(chunks)])
            chunks += [first_row(chunks[-1])] * (max(count for (count,) in of_ranks) - len(chunks))
        if not self.line.trains:
            self.line.look(chunks[0])
        flow = _OwnLossFlow(self.line, chunks, phase, score, **options)
        if flow.trains and not any(self.line.trains):
            refuse_nothing_trains()
        flow.run()
        return flow

    def _told(self, flow: _OwnLossFlow) -> torch.Tensor:
        """The sum of the chunks' losses, on every rank of the pipeline. float64 holds whatever a loss is."""
        loss = torch.zeros((), dtype=torch.float64, device=self.line.device)
        if self.line.has_last:
            loss += torch.stack(flow.losses).double().sum()
        dist.broadcast(loss, src=self.line.global_rank(self.line.places[-1]), group=self.line.group)
        return loss

    # ---- an update ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        super().finish_update(loss_parameters)
        other = self.line.last if 0 in self.cut.own else 0
        for parameter in self.cut.copied:
            if parameter.requires_grad:
                self._add_gradient_of(other, parameter)

    @torch.no_grad()
    def _add_gradient_of(self, stage: int, parameter: nn.Parameter) -> None:
        """Both ranks compute the same sum: an addition of two numbers has no order. Each has the same part of the
        parameter."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = split_as(parameter, parameter.grad)
        own, peer = held_here(parameter.grad), self.line.global_rank(self.line.places[stage])
        sent = own.contiguous()
        theirs = torch.empty_like(sent)
        messages = [
            dist.P2POp(kind, tensor, peer, self.line.group)
            for kind, tensor in ((dist.isend, sent), (dist.irecv, theirs))
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        own += theirs

    # ---- whole weights ----

    def collected(self, tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
        copies = self._names_of(self.cut.copies)
        return super().collected(
            {name: t for name, t in tensors.items() if name.partition("/")[0] not in copies}, keep
        )

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        """Tied weights are one tensor under two names, as `save_pretrained` expects."""
        whole = super().whole_weights(model, keep)
        for first, last in self.cut.ties if keep else ():
            name, *others = self._names_of({first.parameter, last.parameter})
            whole |= {other: whole[name] for other in others}
        return whole

    def _names_of(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        ids = {id(parameter) for parameter in parameters}
        return [name for name, p in self.whole.named_parameters(remove_duplicate=False) if id(p) in ids]


class _OwnLossFlow(Flow):
    """
    Args:
        score: the loss of a chunk, on the last stage.
        seed: the gradient of the loss; None: the run has no backwards.

    Attributes:
        logits: number of a chunk -> (b, T, V), where they are kept.
    """

    def __init__(
        self,
        line: Line,
        chunks: Sequence[Chunk],
        phase: PhaseContext,
        score: Score,
        seed: torch.Tensor | None,
        keeps_logits: bool = False,
    ):
        super().__init__(line, chunks, phase, states=None, gradients=None if seed is None else ())
        self.score, self.seed, self.keeps_logits = score, seed, keeps_logits
        self.logits: dict[int, torch.Tensor] = {}

    @property
    def losses(self) -> list[torch.Tensor]:
        return [loss for number, loss in self.embeddings.items() if not self.chunks[number].is_idle]

    def output_of(self, stage: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        line, chunk = self.line, self.chunks[number]
        if stage < line.last:
            return super().output_of(stage, number, hidden)
        loss, outputs = line.cut.score(chunk.features, hidden, self.score, line.precision)
        if self.keeps_logits and not chunk.is_idle:
            self.logits[number] = outputs["logits"] if isinstance(outputs, Mapping) else outputs[loss is not None]
        return hidden.new_zeros(()) if loss is None else loss

    def gradient_at_end(self, number: int) -> torch.Tensor:
        """An idle chunk trains nothing."""
        loss = self.embeddings[number]
        return torch.zeros_like(loss) if self.chunks[number].is_idle else self.seed.to(loss.dtype)


def cut_rows(batch: Mapping[str, Any], rows_per_chunk: int) -> list[Chunk]:
    """A batch with `input_ids` (B, T) -> chunks of its rows, in their order.

    Raises:
        UsageError: a tensor of the batch does not have one entry per row.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise UsageError(
            "a pipeline of a causal language model needs batches with input_ids (rows, tokens), got "
            f"{', '.join(batch)}. Tokenise the dataset, or give DistTrainer a data_collator that does."
        )
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() and len(value) != len(ids):
            raise UsageError(
                f"a pipeline cuts batches by rows: {name!r} has {len(value)} entries, input_ids {len(ids)} rows. "
                "Use a collator that pads (DataCollatorForLanguageModeling, DataCollatorForSeq2Seq), or leave it out."
            )
    rows, width = ids.shape
    bounds = [(start, min(start + rows_per_chunk, rows)) for start in range(0, rows, rows_per_chunk)]
    return [
        Chunk(partial(_rows, batch, start, stop), width, (stop - start) * width, None, 0, start, stop)
        for start, stop in bounds
    ]


def _rows(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {
        name: value[start:stop] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in batch.items()
    }
