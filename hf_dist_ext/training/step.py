"""One training step of a loss over embeddings: the batch is cut and the gradient cache runs over it.

(1) `_cut`: `chunking` cuts a batch, all ranks tell each other their rows and agree on the number of chunks
(2) `_step`: `gradient_cache` encodes, scores and replays them; without a cache each column is one chunk whose graph is
    kept; what is frozen is encoded once (`frozen_columns`)
(3) `_score`: `distributed` gathers embeddings; a rank's loss counts by its rows
(4) `_backward`: the division by gradient accumulation and the fp16 scale enter here, that is once

No maths lives here. `DistTrainer` sets what these methods read: `loss`, `_budget`, `_sizes`, `strategy`,
`_takes_column`, `_may_widen`, `_proven`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import Trainer
from transformers.utils import logging

from hf_dist_ext import policy
from hf_dist_ext.data.epoch_order import StandIn
from hf_dist_ext.engine.budget import ChunkBudget, costliest_chunk, longest_row, widened
from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch, ChunkLimits
from hf_dist_ext.engine.gradient_cache import (
    SCORE,
    CachedStep,
    Phase,
    RandomState,
    cached_step,
    encode_without_graph,
)
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.encode_once import (
    batch_of_pooled,
    forward_bytes_per_token,
    frozen_columns,
    has_frozen_backbone,
)
from hf_dist_ext.frozen.image_stand_in import ImageStandIn
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.training.health import Health
from hf_dist_ext.training.out_of_memory import (
    ALL_GRAPHS,
    PLACES,
    FittingSizes,
    empty_cache,
    is_lack_of_memory,
    place_out_of_memory,
)

logger = logging.get_logger(__name__)

Batch = Mapping[str, Mapping[str, torch.Tensor]]


class Layout(NamedTuple):
    """How one batch is cut, as all ranks agree."""

    chunked: ChunkedBatch
    wide: ChunkedBatch | None  # larger chunks for the pass without a graph
    counts: dict[str, list[int]]  # rows per column and rank
    num_kept: int  # graphs
    is_larger: bool = False  # than every step that was tried out, on some rank

    def left_to_shrink(self) -> dict[str, Any]:
        """For `Sizes.smaller`."""
        chunks = self.chunked.chunks()
        return {
            "has_wider": self.wide is not None,
            "num_kept": min(self.num_kept, len(chunks) - 1),
            "can_halve": any(chunk.num_rows > 1 for chunk in chunks),
        }


class EmbeddingSteps(Trainer):
    """What `DistTrainer` does with a batch of columns."""

    loss: Callable | None
    _budget: ChunkBudget | None
    _sizes: FittingSizes | None
    health: Health
    _before_update: RandomState
    _layout: Layout | None = None  # of the micro-batch that runs
    _proven: list[int]  # the largest `_demand` that was tried out
    strategy: Strategy
    _takes_column: bool
    _may_widen: bool
    image_stand_in: ImageStandIn | None
    _own_loss: torch.Tensor

    def _step(self, model: nn.Module, batch: Batch, ids: Any) -> tuple[CachedStep, ChunkedBatch, dict[str, list[int]]]:
        """One micro-batch. Where memory runs out on one process, the update so far is dropped, and its micro-batches
        are run again in smaller chunks from the random state before it."""
        if not self.health.inputs:
            self._before_update = RandomState(self.args.device)
        earlier: list[Any] = []
        while True:
            try:
                for inputs in earlier:
                    self._attempt(model, *split_ids(self._prepare_inputs(inputs)))
                return self._attempt(model, batch, ids), self._layout.chunked, self._layout.counts
            except Exception as error:
                if self._sizes is None or self._layout is None or not is_lack_of_memory(error):
                    raise
                if not self.strategy.can_redo:
                    raise self._sizes.end_run(self._step_number, **self._layout.left_to_shrink()) from error
            # Behind the except block: the error holds the tensors of every frame it passed.
            self._sizes.shrink(self._sizes.place, self._step_number, [0], **self._layout.left_to_shrink())
            for parameter in chain(model.parameters(), self._loss_parameters()):
                parameter.grad = None
            self._before_update.restore()
            empty_cache(self.args.device)
            earlier = [*self.health.inputs]  # as the data loader gave them

    def _attempt(self, model: nn.Module, batch: Batch, ids: Any) -> CachedStep:
        bare, budget = self.accelerator.unwrap_model(self.model, keep_torch_compile=False), self._budget
        frozen = frozen_columns(bare, batch)
        layout = self._layout = self._fitting_layout(model, batch)
        chunked, wide, counts, num_kept, _ = layout
        encode = functools.partial(self._encode, model)
        is_measured = budget is not None and budget.is_measuring and not self.health.inputs

        def score(embeddings: dict[str, torch.Tensor]):
            if is_measured:
                budget.reserve(self._loss_bytes(layout, next(iter(embeddings.values())).shape[1]))
            return self._score(embeddings, ids, counts)

        with budget.measured_step() if is_measured else nullcontext():
            to_train, watches = chunked, functools.partial(self._phase, is_measured, is_measured)
            if self._encodes_once(bare):
                to_pooled = functools.partial(encode, stops_at_pooled=True)
                to_train, wide = batch_of_pooled(encode_without_graph(wide or chunked, to_pooled, watches)), None
                watches = functools.partial(self._phase, False, is_measured)
            self.strategy.check_graphs(num_kept, len(to_train.chunks()))
            step = cached_step(
                to_train,
                encode,
                score,
                backward=self._backward,
                phase=watches,
                loss_parameters=self._loss_parameters(),
                keep_graph=num_kept,
                backward_together=not self.strategy.forwards_are_collective,
                last_reaches_all=self.image_stand_in is None and self.strategy.max_live_graphs is None,
                wide=wide,
                is_frozen=lambda chunk: chunk.column in frozen,
            )
        self._may_widen = not step.drew_randomness
        return replace(step, num_chunks=len(chunked.chunks()))

    @contextmanager
    def _phase(self, measures_chunks: bool, measures_score: bool, phase: Phase) -> Iterator[None]:
        """Whoever watches the parts of a step. A score has collectives of its own."""
        with ExitStack() as watched:
            watched.enter_context(self._clock.phase(phase))
            if self._sizes is not None:
                watched.enter_context(self._sizes.phase(phase))
            if measures_score if phase.kind == SCORE else measures_chunks:
                watched.enter_context(self._budget.phase(phase))
            if phase.kind != SCORE:
                watched.enter_context(self.strategy.phase(phase))
            yield

    @property
    def _step_number(self) -> int:
        return self.state.global_step + 1

    def _encodes_once(self, bare: nn.Module) -> bool:
        return self.args.uses_gradient_cache and has_frozen_backbone(bare)

    # ---- sizes, agreed by all ranks before the first forward ----

    def _fitting_layout(self, model: nn.Module, batch: Batch) -> Layout:
        """How the batch is cut. Under DDP, a step that needs more than any before is tried out on every rank."""
        while True:
            layout = self._cut(batch)
            if self._sizes is None or self.health.inputs or not layout.is_larger:
                return layout
            if (bare := self.strategy.bare_to_try(model)) is None:
                return layout
            place = self._place_out_of_memory(bare, layout)
            left = layout.left_to_shrink()
            answer = [PLACES.index(place) if place else -1, left["can_halve"], left["num_kept"]]
            everyone = collectives.exchange(answer, self.args.device)
            failed = [rank for rank, (number, *_) in enumerate(everyone) if number >= 0]
            if not failed:
                if self.state.global_step > self._initial_global_step:  # the optimizer's state exists
                    self._proven = [max(pair) for pair in zip(self._proven, self._demand(layout), strict=True)]
                return layout
            left |= {"can_halve": any(row[1] for row in everyone), "num_kept": max(row[2] for row in everyone)}
            self._sizes.shrink(PLACES[everyone[failed[0]][0]], self._step_number, failed, **left)

    def _place_out_of_memory(self, bare: nn.Module, layout: Layout) -> str | None:
        state, encodes_once = RandomState(self.args.device), self._encodes_once(bare)
        more = {"stops_at_pooled": True} if encodes_once else {}
        place = place_out_of_memory(
            functools.partial(self._encode, bare, **more),
            layout.chunked,
            layout.wide,
            layout.left_to_shrink()["num_kept"],
            functools.partial(self._loss_bytes, layout),
            has_graph=not encodes_once,
        )
        for parameter in bare.parameters():
            parameter.grad = None
        state.restore()
        empty_cache(self.args.device)
        return place

    def _loss_bytes(self, layout: Layout, dimensions: int) -> int:
        own = layout.chunked.row_counts()
        is_gathered = getattr(self.loss, "cross_device_negatives", True)
        everyone = {name: sum(rows) for name, rows in layout.counts.items()} if is_gathered else own
        anchors, *_ = own.values()
        _, *candidates = everyone.values()
        halvings = getattr(self.loss, "tile_halvings", 0)
        return policy.loss_stage_bytes(
            sum(own.values()), sum(everyone.values()), anchors, sum(candidates), dimensions, halvings
        )

    @staticmethod
    def _demand(layout: Layout) -> list[int]:
        """What makes a step take more memory than another one."""
        wide = layout.wide or layout.chunked
        rows = sum(map(sum, layout.counts.values()))
        return [costliest_chunk(layout.chunked), costliest_chunk(wide), layout.num_kept, rows]

    def _limits(self) -> ChunkLimits:
        args = self.args
        size = None if args.gradient_cache_chunk_size == "auto" else args.gradient_cache_chunk_size
        limits = ChunkLimits(
            size,
            args.gradient_cache_chunk_tokens,
            args.gradient_cache_width_multiple,
            args.gradient_cache_chunk_patches,
        )
        return limits if self._sizes is None else limits.scaled(self._sizes.now.share)

    def _make_budget(self) -> ChunkBudget | None:
        args = self.args
        finds_size, keeps = args.gradient_cache_chunk_size == "auto", args.gradient_cache_keep_graph == "auto"
        if not args.uses_gradient_cache or not (finds_size or keeps):
            return None
        gib = args.gradient_cache_memory_gib or (1.0 if args.device.type == "cpu" else None)
        budget = ChunkBudget(
            args.device,
            None if gib is None else int(gib * 2**30),
            weights=lambda: self.model.parameters(),
            finds_size=finds_size,
            keeps_graphs=keeps,
        )
        bare = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if self._encodes_once(bare):
            budget.forward_bytes = forward_bytes_per_token(bare.config)
        return budget

    def _cut(self, batch: Batch) -> Layout:
        """This rank's batch in chunks; every number that decides what a step does is the same on all ranks."""
        args, budget, chunked = self.args, self._budget, self._lay_out(batch)
        if budget is not None:
            was_measuring = budget.is_measuring
            if torch.is_grad_enabled() and not self.health.inputs:
                budget.propose(may_settle=self.state.global_step > 0)
            everyone = collectives.exchange([longest_row(chunked), budget.proposed], args.device)
            longest, tokens = max(row[0] for row in everyone), min(row[1] for row in everyone)
            limits = budget.limits(longest, tokens, self._limits(), self._sizes.now.share)
            chunked = ChunkedBatch(chunked.tables, limits)
            if was_measuring and not budget.is_measuring:
                self._log_budget()
        factor = self._widening()
        wide = widened(chunked, factor) if factor > 1 and self._may_widen else None
        rows, plans = chunked.row_counts(), [chunked, wide] if factor > 1 else [chunked]
        if isinstance(batch, StandIn):
            rows = dict.fromkeys(rows, 0)
        # With a stand-in every forward runs the vision layers.
        by_vision = self.image_stand_in is None
        needed = [(plan or chunked).num_chunks(by_vision) for plan in plans]
        layout = Layout(chunked, wide, {name: [rows[name]] for name in rows}, self._num_kept_graphs(chunked))
        everyone = collectives.exchange(
            [self._may_widen, layout.num_kept, self._needs_more(layout), *rows.values(), *chain(*needed)], args.device
        )
        may_widen, num_kept, is_larger, *_ = zip(*everyone, strict=True)
        self._may_widen = all(may_widen)
        # Every rank runs as many as the one that needs most.
        if self.strategy.forwards_are_collective:
            most = [max(numbers) for numbers in zip(*(row[3 + len(rows) :] for row in everyone), strict=True)]
            for plan, own in zip(plans, needed, strict=True):
                if plan is chunked or self._may_widen:
                    plan.agree(most[: len(own)], by_vision)
                most = most[len(own) :]
        counts = {name: [row[3 + i] for row in collectives.one_of_each(everyone)] for i, name in enumerate(rows)}
        return Layout(chunked, wide if self._may_widen else None, counts, min(num_kept), any(is_larger))

    def _needs_more(self, layout: Layout) -> bool:
        return any(now > before for now, before in zip(self._demand(layout), self._proven, strict=True))

    def _widening(self) -> int:
        """How many times larger the chunks of the pass without a graph are."""
        if not self.args.uses_gradient_cache or self._sizes is not None and not self._sizes.now.widens:
            return 1
        bare = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if self._budget is not None and self._budget.forward_bytes is not None:
            return 1  # the size was found for this very pass
        num_layers = getattr(getattr(bare, "config", None), "num_hidden_layers", None)
        return policy.widening(num_layers, is_checkpointed(bare))

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
            return ALL_GRAPHS
        kept = self.args.gradient_cache_keep_graph
        if kept == "auto":
            kept = self._budget.keep_graph(costliest_chunk(chunked))
        return min(kept, self._sizes.now.max_kept_graphs)

    def _log_budget(self) -> None:
        budget = self._budget
        size = f"{budget.measured.tokens} tokens per chunk, " if budget.finds_size else ""
        logger.info(
            f"gradient cache: {size}from {budget.measured.bytes_per_token:.0f} bytes per token measured; of the "
            f"{budget.measured.available / 2**30:.2f} GiB for a step {budget.measured.intercept / 2**30:.2f} GiB are "
            "taken by what does not depend on the chunk."
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
        # A compiled model may run as a CUDA graph, whose next replay writes into the same memory.
        return embeddings.clone() if self.args.torch_compile else embeddings

    def _score(self, embeddings: dict[str, torch.Tensor], ids: Any, counts: dict[str, list[int]]):
        """The loss of this rank's rows, weighted by their number. A stand-in for rows (data/epoch_order.py) is scored
        as if its row were the first of all, so that every rank asks for the same columns, and weighs nothing."""
        anchor, rank = next(iter(embeddings)), collectives.data_parallel_rank()
        own = {name: of_ranks[rank] for name, of_ranks in counts.items()}
        everyone, row_offset = None, 0
        if collectives.data_parallel_size() > 1 and getattr(self.loss, "cross_device_negatives", True):
            rows = {name: embeddings[name][: own[name]] for name in embeddings}
            everyone = collectives.GatheredColumns(rows, counts)
            row_offset = sum(counts[anchor][:rank]) if own[anchor] else 0
            if ids is not None:
                ids = {name: values[: own.get(name, own[anchor])] for name, values in ids.items()}
                ids = collectives.gather_ids(ids, counts, anchor)
        output = self.loss(embeddings, everyone, row_offset=row_offset, ids=ids)
        loss, metrics = output if isinstance(output, tuple) else (output, {})
        weight = collectives.row_weight(own[anchor], counts[anchor])
        self._own_loss = loss.detach()
        return loss * weight, {name: value * weight for name, value in metrics.items()}

    def _backward(self, loss: torch.Tensor) -> None:
        self.strategy.backward(loss / self.current_gradient_accumulation_steps, self._own_loss)


def _configs_by_column(model: nn.Module) -> dict[str, Any]:
    """The config of every column's own tower (TowerModel); empty for other models."""
    towers, columns = getattr(model, "towers", None), getattr(model, "column_to_tower", {})
    return {column: getattr(towers[tower], "config", None) for column, tower in columns.items()}


def is_checkpointed(model: nn.Module) -> bool:
    """Whether layers give up their activations and are run again: by transformers or by FSDP."""
    return any(
        getattr(m, "gradient_checkpointing", False) or isinstance(m, CheckpointWrapper) for m in model.modules()
    )


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
