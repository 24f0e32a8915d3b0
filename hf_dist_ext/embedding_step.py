"""One training step of a loss over embeddings: the batch is cut and the gradient cache runs over it.

(1) `_cut`: `chunking` cuts a batch, all ranks tell each other their rows and agree on the number of chunks
(2) `_step`: `gradient_cache` encodes, scores and replays them; without a cache each column is one chunk whose graph is
    kept; what is frozen is encoded once (`frozen_columns`)
(3) `_score`: `distributed` gathers embeddings; a rank's loss counts by its rows
(4) `_backward`: the division by gradient accumulation and the fp16 scale enter here, that is once

No maths lives here. `DistTrainer` sets what these methods read: `loss`, `_budget`, `_retry`, `_reduction`,
`_takes_column`, `_may_widen`, `_update`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from . import deepspeed_step, distributed
from .chunk_budget import ChunkBudget, costliest_chunk, longest_row, widened
from .chunking import Chunk, ChunkedBatch, ChunkLimits, lay_out
from .epoch_order import StandIn
from .errors import UsageError
from .frozen_columns import batch_of_pooled, forward_bytes_per_token, frozen_columns, has_frozen_backbone
from .gradient_cache import CachedStep, RandomState, cached_step, encode_without_graph
from .image_stand_in import ImageStandIn
from .out_of_memory import MemoryRetry

logger = logging.get_logger(__name__)

Batch = Mapping[str, Mapping[str, torch.Tensor]]


class EmbeddingSteps(Trainer):
    """What `DistTrainer` does with a batch of columns."""

    loss: Callable | None
    _budget: ChunkBudget | None
    _retry: MemoryRetry | None
    _reduction: distributed.Reduction
    _takes_column: bool
    _may_widen: bool
    image_stand_in: ImageStandIn | None
    _update: deepspeed_step.Update | None = None
    _own_loss: torch.Tensor

    def _step(self, model: nn.Module, batch: Batch, ids: Any) -> tuple[CachedStep, ChunkedBatch, dict[str, list[int]]]:
        found: list[Any] = []
        budget, start = self._budget, RandomState(self.args.device)
        if self._retry is not None and not self._inputs:
            self._retry.update_begins(start)
        bare = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        encodes_once = self.args.uses_gradient_cache and has_frozen_backbone(bare)
        frozen = frozen_columns(bare, batch)
        if budget is not None and encodes_once:
            budget.forward_bytes = forward_bytes_per_token(bare.config)

        def attempt() -> CachedStep:
            chunked, wide, counts = self._cut(batch)
            found[:] = chunked, counts
            is_measured = budget is not None and budget.is_measuring
            encode, sync = functools.partial(self._encode, model), self._reduction
            if is_measured:
                encode, sync = budget.encode(encode), budget.sync(sync)
            to_train = chunked
            if encodes_once:
                pooled = encode_without_graph(
                    wide or chunked, functools.partial(encode, stops_at_pooled=True), self._clock.sync(sync)
                )
                to_train, wide = batch_of_pooled(pooled), None
                encode, sync = functools.partial(self._encode, model), self._reduction
            kept = self._num_kept_graphs(chunked)
            deepspeed_step.check_chunks(self, kept, len(to_train.chunks()))
            options = {"score": lambda embeddings: self._score(embeddings, ids, counts), "sync": sync}
            if self._retry is not None:
                options |= self._retry.watched(**options)
            if budget is not None and budget.is_guarding:
                options |= budget.guarded(**options) | {"replays_last": True}
            options["score"], options["sync"] = self._clock.score(options["score"]), self._clock.sync(options["sync"])
            step = cached_step(
                to_train,
                encode,
                backward=self._backward,
                loss_parameters=self._loss_parameters(),
                keep_graph=kept,
                backward_together=not self.forwards_are_collective,
                last_reaches_all=self.image_stand_in is None and not deepspeed_step.is_zero3(self),
                wide=wide,
                is_frozen=lambda chunk: chunk.column in frozen,
                **options,
            )
            if is_measured:
                budget.step_ended()
            return replace(step, num_chunks=len(chunked.chunks()))

        def reset() -> None:
            model.zero_grad()
            start.restore()

        def run() -> CachedStep:
            if budget is None:
                return attempt()
            is_first = all(p.grad is None for p in model.parameters())
            return budget.run(attempt, reset, can_retry=is_first and not self.forwards_are_collective)

        def finish(chunked: ChunkedBatch, counts: dict[str, list[int]]) -> None:
            encode, score = functools.partial(self._encode, model), lambda rows: self._score(rows, ids, counts)
            self._retry.finish(chunked, counts, encode, score, self._reduction)

        step = run() if self._retry is None else self._retry.run(run, found, finish)
        self._may_widen = not step.drew_randomness
        return step, *found

    @property
    def forwards_are_collective(self) -> bool:
        """Whether a forward waits for other ranks, which then have to run the same ones: under FSDP, ZeRO-3 and tensor
        parallelism."""
        return self.is_fsdp_enabled or deepspeed_step.is_zero3(self) or distributed.ranks_per_rows() > 1

    def _limits(self) -> ChunkLimits:
        args = self.args
        size = None if args.gradient_cache_chunk_size == "auto" else args.gradient_cache_chunk_size
        limits = ChunkLimits(
            size,
            args.gradient_cache_chunk_tokens,
            args.gradient_cache_width_multiple,
            args.gradient_cache_chunk_patches,
        )
        return limits if self._retry is None else self._retry.limits(limits)

    def _make_budget(self) -> ChunkBudget | None:
        args, limits = self.args, self._limits()
        finds_size, keeps = args.gradient_cache_chunk_size == "auto", args.gradient_cache_keep_graph == "auto"
        if not args.uses_gradient_cache or not (finds_size or keeps):
            return None
        gib = args.gradient_cache_memory_gib or (1.0 if args.device.type == "cpu" else None)
        return ChunkBudget(
            args.device,
            None if gib is None else int(gib * 2**30),
            agree=lambda number: min(row[0] for row in distributed.exchange([number], args.device)),
            weights=self.model.parameters(),
            fixed=None if finds_size else limits,
            keeps_graphs=keeps,
        )

    def _cut(self, batch: Batch) -> tuple[ChunkedBatch, ChunkedBatch | None, dict[str, list[int]]]:
        """Chunks of this rank's batch, wider ones for the pass without a graph, every rank's rows per column."""
        chunked = self._lay_out(batch)
        if self._budget is not None:
            was_measuring = self._budget.is_measuring
            longest = -self._budget.agree(-longest_row(chunked))
            chunked = ChunkedBatch(
                chunked.tables, self._budget.limits(longest, self._limits(), self.state.global_step > 0)
            )
            if was_measuring and not self._budget.is_measuring:
                self._log_budget()
        factor = _widening(self.model.config) if self._may_widen and hasattr(self.model, "config") else 1
        wide = widened(chunked, factor) if factor > 1 and self.args.uses_gradient_cache else None
        rows = chunked.row_counts()
        if isinstance(batch, StandIn):
            rows = dict.fromkeys(rows, 0)
        plans = [chunked] if wide is None else [chunked, wide]
        # With a stand-in every forward runs the vision layers.
        by_vision = self.image_stand_in is None
        needed = [plan.num_chunks(by_vision) for plan in plans]
        everyone = distributed.exchange([*rows.values(), *chain(*needed)], self.args.device)
        everyone = distributed.one_of_each(everyone)
        # Every rank runs as many as the one that needs most.
        if self.forwards_are_collective:
            most = [max(numbers) for numbers in zip(*(row[len(rows) :] for row in everyone), strict=True)]
            for plan, own in zip(plans, needed, strict=True):
                plan.agree(most[: len(own)], by_vision)
                most = most[len(own) :]
        return chunked, wide, {name: [row[i] for row in everyone] for i, name in enumerate(rows)}

    def _lay_out(self, batch: Batch) -> ChunkedBatch:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        config = getattr(model, "config", None)
        is_cut = self.args.uses_gradient_cache
        return lay_out(
            batch,
            self._limits() if is_cut else ChunkLimits(),
            shares_tower=is_cut and not self._takes_column,
            pad_values={"input_ids": getattr(config, "pad_token_id", None) or 0},
            can_trim=is_cut,
            can_shift=getattr(config, "rope_parameters", None) is not None,
            sort=is_cut and self.args.gradient_cache_sort,
            model_config=_configs_by_column(model) or config,
        )

    def _num_kept_graphs(self, chunked: ChunkedBatch) -> int:
        if not self.args.uses_gradient_cache:
            return len(chunked.chunks())
        if self.args.gradient_cache_keep_graph != "auto":
            return self.args.gradient_cache_keep_graph
        kept = self._budget.keep_graph(costliest_chunk(chunked))
        # Every rank keeps the graphs of the same chunks.
        return self._budget.agree(kept) if self.forwards_are_collective else kept

    def _log_budget(self) -> None:
        budget = self._budget
        size = f"{budget.tokens} tokens per chunk, " if budget.fixed is None else ""
        logger.info(
            f"gradient cache: {size}from {budget.measured.bytes_per_token:.0f} bytes per token measured and "
            f"{budget.measured.available / 2**30:.2f} GiB for activations."
        )

    def _encode(self, model: nn.Module, chunk: Chunk, **more: Any) -> torch.Tensor:
        column = {"column": chunk.column} if self._takes_column else {}
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            output = model(**chunk.features, **column, **more)
        embeddings = output if isinstance(output, torch.Tensor) else _field(output, "embeddings")
        if not isinstance(embeddings, torch.Tensor) or embeddings.dim() != 2 or len(embeddings) != chunk.num_rows:
            found = tuple(embeddings.shape) if isinstance(embeddings, torch.Tensor) else type(output).__name__
            raise UsageError(
                f"{type(self.model).__name__} does not return embeddings: a loss over embeddings needs a tensor "
                f"({chunk.num_rows}, D) or an output with the field `embeddings`, got {found}. "
                "Wrap the backbone in hf_dist_ext.EmbeddingModel."
            )
        return embeddings

    def _score(self, embeddings: dict[str, torch.Tensor], ids: Any, counts: dict[str, list[int]]):
        """The loss of this rank's rows, weighted by their number. A stand-in for rows (epoch_order.py) is scored as if
        its row were the first of all, so that every rank asks for the same columns, and weighs nothing."""
        anchor, rank = next(iter(embeddings)), distributed.data_parallel_rank()
        own = {name: of_ranks[rank] for name, of_ranks in counts.items()}
        everyone, row_offset = None, 0
        if distributed.data_parallel_size() > 1 and getattr(self.loss, "cross_device_negatives", True):
            rows = {name: embeddings[name][: own[name]] for name in embeddings}
            everyone = distributed.GatheredColumns(rows, counts)
            row_offset = sum(counts[anchor][:rank]) if own[anchor] else 0
            if ids is not None:
                ids = {name: values[: own.get(name, own[anchor])] for name, values in ids.items()}
                ids = distributed.gather_ids(ids, counts, anchor)
        output = self.loss(embeddings, everyone, row_offset=row_offset, ids=ids)
        loss, metrics = output if isinstance(output, tuple) else (output, {})
        weight = distributed.row_weight(own[anchor], counts[anchor])
        self._own_loss = loss.detach()
        return loss * weight, {name: value * weight for name, value in metrics.items()}

    def _backward(self, loss: torch.Tensor) -> None:
        loss = self._reduction.reaching_all(loss / self.current_gradient_accumulation_steps)
        if self._retry is not None:
            self._retry.backward_begins()
        if self.is_deepspeed_enabled:
            self._update.backward(deepspeed_step.poisoned(loss, self._own_loss), self._reduction.completes)
        else:
            self.accelerator.backward(loss)


def _configs_by_column(model: nn.Module) -> dict[str, Any]:
    """The config of every column's own tower (TowerModel); empty for other models."""
    towers, columns = getattr(model, "towers", None), getattr(model, "column_to_tower", {})
    return {column: getattr(towers[tower], "config", None) for column, tower in columns.items()}


def _widening(config: Any) -> int:
    """How many times larger the chunks without a graph may be: they hold two layers' activations, not all of them."""
    return min(8, max(1, (getattr(config, "num_hidden_layers", None) or 1) // 2))


def split_ids(inputs: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, torch.Tensor]], Any]:
    """The batch's columns, and the reserved `ids` (text hashes) that never reach the model."""
    if not isinstance(inputs, Mapping) or not all(isinstance(value, Mapping) for value in inputs.values()):
        raise UsageError(
            "with a loss over embeddings a batch is a mapping column -> features, e.g. "
            f'{{"query": {{"input_ids": ...}}, "positive": {{...}}}}; got {_shape_of(inputs)}. '
            "Use hf_dist_ext.data.ContrastiveCollator."
        )
    columns = {name: features for name, features in inputs.items() if name != "ids"}
    columns = StandIn(columns) if isinstance(inputs, StandIn) else columns
    if len(columns) < 2:
        raise UsageError(f"a contrastive batch needs an anchor and a positive column, got {list(columns)}.")
    ids = inputs.get("ids")
    return columns, ids if ids is None else {name: values for name, values in ids.items() if name != "row"}


def _shape_of(inputs: Any) -> str:
    return f"keys {list(inputs)}" if isinstance(inputs, Mapping) else type(inputs).__name__


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters
