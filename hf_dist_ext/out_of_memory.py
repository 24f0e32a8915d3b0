"""Memory that runs out in the middle of a run with the gradient cache: all ranks halve the chunk and redo the update.

(1) a rank that runs out leaves its micro-batch. The others do not know, so it goes through the collectives they wait
    for, at the cost of one row: embeddings of NaN are gathered, a gradient of NaN is reduced. Under FSDP with weights
    kept whole over a step ("speed"), the first forward gathers them layer by layer: one more of a row gathers the rest
(2) it says so in the exchange that every update has (safety.py); no weight has moved yet
(3) all drop the gradients, halve their chunks, go back to the random state before the update, and run its
    micro-batches again. The gradient does not depend on the chunk size, so nothing of the run changes but its speed

It cannot be redone when the reducing backward itself runs out while others wait in it, nor where every chunk is a row
of collectives (FSDP "memory", HSDP): the error ends the run then, says on which rank, and with which chunks to resume.
The first steps of an automatic size have a cheaper way of their own (chunk_budget.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import distributed
from .chunking import ChunkedBatch, ChunkLimits
from .errors import RunError
from .gradient_cache import CachedStep, Phase, RandomState

if TYPE_CHECKING:
    from .trainer import DistTrainer

logger = logging.getLogger(__name__)

SMALLEST_SHARE = 1 / 1024  # of the token or patch limit


class MemoryRetry:
    """Of one trainer. `share` is what is left of the chunk limits; `has_failed` what this rank has to say in (2)."""

    def __init__(self, trainer: DistTrainer):
        self.trainer = trainer
        self.share, self.has_failed = 1.0, False
        self._is_scored = self._is_reducing = False
        self._metrics: dict[str, torch.Tensor] = {}
        self._before: tuple | None = None

    def limits(self, given: ChunkLimits) -> ChunkLimits:
        if self.share == 1:
            return given
        lower = {
            name: max(1, int(getattr(given, name) * self.share))
            for name in ("max_rows", "max_tokens", "max_patches")
            if getattr(given, name) is not None
        }
        return replace(given, **lower)

    # ---- (1) ----

    def update_begins(self, random_state: RandomState) -> None:
        """Before the first micro-batch of an update."""
        self.has_failed = False
        trainer = self.trainer
        self._before = random_state, trainer.meter.snapshot(), trainer._tr_loss.clone()

    def watched(self, score: Callable, sync: Callable) -> dict[str, Callable]:
        """The same functions for `cached_step`, noting which collectives are behind this rank."""
        self._is_scored = self._is_reducing = False

        def noting_score(embeddings: Any) -> Any:
            loss, self._metrics = score(embeddings)
            self._is_scored = True
            return loss, self._metrics

        def noting_sync(phase: Phase) -> Any:
            # DDP is armed by the forward; FSDP's collectives come with the backward.
            is_armed = phase.is_last and self.trainer.accelerator.sync_gradients
            self._is_reducing |= is_armed and not self.trainer._reduction.is_fsdp
            return sync(phase)

        return {"score": noting_score, "sync": noting_sync}

    def backward_begins(self) -> None:
        self._is_reducing |= self.trainer._reduction.completes

    def run(
        self, step: Callable[[], CachedStep], found: list, finish: Callable[[ChunkedBatch, dict], None]
    ) -> CachedStep:
        """`step()`; when memory runs out, what the others need (`finish`) and a step whose loss is NaN."""
        self._is_scored = self._is_reducing = False
        try:
            return step()
        except torch.OutOfMemoryError as error:
            if not found or self.trainer.args.auto_find_batch_size:
                raise
            if not self._can_redo(found[0]):
                step = self.trainer.state.global_step + 1
                raise RunError(
                    f"step {step}: rank {distributed.rank()} ran out of memory where the others wait for it, so the "
                    f"step can not be run again. Resume with {self._smaller()}."
                ) from error
        # Behind the except block: the error holds the tensors of every frame it passed.
        _empty_cache(self.trainer.args.device)
        self.has_failed = True
        chunked, counts = found
        self.trainer._reduction.forget_failed_chunk()
        if distributed.world_size() > 1:
            finish(chunked, counts)
        loss = torch.full((), float("nan"), device=self.trainer.args.device)
        return CachedStep(loss, {}, len(chunked.chunks()), 0, drew_randomness=True)

    def _can_redo(self, chunked: ChunkedBatch) -> bool:
        if distributed.world_size() == 1:
            return True
        budget, reduction = self.trainer._budget, self.trainer._reduction
        if budget is not None and budget.is_measuring:
            return False  # behind the step, ranks agree on what they found
        # A row without an image gathers no vision layers, of which the others wait for each.
        has_vision = reduction.is_fsdp and any(chunk.has_vision for chunk in chunked.chunks())
        return not (self._is_reducing or reduction.has_collectives_in_chunks or has_vision)

    def _smaller(self) -> str:
        """The next chunk sizes, as the run file says them."""
        budget = self.trainer._budget
        if budget is not None and budget.fixed is None:
            fields = {"gradient_cache_chunk_size": None, "gradient_cache_chunk_tokens": max(1, budget.tokens // 2)}
            if budget.is_measuring:
                fields = {"gradient_cache_chunk_size": 1}
        else:
            limits = self.trainer._limits()
            sizes = {
                "gradient_cache_chunk_size": limits.max_rows,
                "gradient_cache_chunk_tokens": limits.max_tokens,
                "gradient_cache_chunk_patches": limits.max_patches,
            }
            fields = {name: max(1, size // 2) for name, size in sizes.items() if size is not None}
        return ", ".join(f'"{name}": {json.dumps(size)}' for name, size in fields.items())

    def finish(self, chunked: ChunkedBatch, counts: dict, encode: Callable, score: Callable, sync: Callable) -> None:
        """The rest of a step's collectives with numbers that are not finite: what they reach is dropped in (3)."""
        trainer, parameters = self.trainer, self.trainer._loss_parameters()
        nan, device = float("nan"), trainer.args.device
        limits = ChunkLimits(1, width_multiple=chunked.limits.width_multiple)
        rows = ChunkedBatch([replace(table, bounds=[]) for table in chunked.tables], limits).chunks()
        one_of_each = {chunk.table: chunk for chunk in rows}
        if not self._is_scored:
            leaves = {}
            for number, chunk in one_of_each.items():  # also gathers what FSDP has not
                with sync(Phase(with_graph=False)), torch.no_grad():
                    row = encode(chunk)
                for name in chunked.tables[number].columns:  # (B, D) each, in the dtype that cached_step scores
                    dtype = torch.float32 if row.dtype.itemsize < 4 else row.dtype
                    shape = counts[name][distributed.rank()], row.shape[1]
                    leaves[name] = torch.full(shape, nan, dtype=dtype, device=device, requires_grad=True)
            leaves = {name: leaves[name] for name in counts}
            loss, self._metrics = score(leaves)
            torch.autograd.grad(loss, [*leaves.values(), *parameters], allow_unused=True)
        with sync(Phase(with_graph=True, is_last=True)):
            terms = [(encode(chunk) * nan).sum() for chunk in one_of_each.values()]
            terms += [(parameter * nan).sum() for parameter in parameters]
            trainer._backward(sum(term for term in terms if term.requires_grad))

    # ---- (3) ----

    def go_back(self, ranks: list[int], step: int) -> None:
        """On every rank: smaller chunks, and the state before the update."""
        trainer, budget = self.trainer, self.trainer._budget
        if budget is not None and budget.fixed is None:
            can_halve = budget._can_halve
            budget._halve()
        else:
            can_halve = self._can_halve()
            self.share /= 2
        where = ", ".join(map(str, ranks))
        if not can_halve:
            raise RunError(f"step {step}: rank {where} ran out of memory with the smallest chunks there are.")
        what = "the chunks are halved" if self.share == 1 else f"chunks are {self.share:g} of what was given"
        logger.warning(f"step {step}: rank {where} ran out of memory; {what} from here on, the step is run again.")
        trainer.optimizer.zero_grad()
        for parameter in trainer._loss_parameters():
            parameter.grad = None
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            scaler.update()  # the gradients of this attempt were unscaled; it takes that for an overflow
        random_state, meter, loss = self._before
        random_state.restore()
        trainer.meter.restore(meter)
        trainer._tr_loss.copy_(loss)
        _empty_cache(trainer.args.device)

    def _can_halve(self) -> bool:
        rows = self.trainer.args.gradient_cache_chunk_size
        return rows * self.share > 1 if isinstance(rows, int) else self.share > SMALLEST_SHARE


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
