"""`DistTrainer`: Trainer's hooks, wired to the gradient cache. No maths lives here.

With `loss=None` every override hands straight to Trainer. With a loss over embeddings:

(1) a batch is column -> features; `chunking` cuts it, all ranks agree on the number of chunks
(2) `gradient_cache` encodes, scores and replays them; without a cache each column is one chunk whose graph is kept
(3) `distributed` gathers embeddings and says which backward reduces
(4) the division by gradient accumulation and the fp16 scale enter in `_backward`, that is once
(5) the loss's own parameters join the optimizer, the clipping, the reduction and the checkpoint
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from . import (
    checkpointing,
    communication,
    deepspeed_step,
    distributed,
    feature_cache,
    frozen_training,
    sharding,
)
from .callbacks import MetricsFile, StepMeter
from .checkpoint_hooks import CheckpointHooks
from .chunk_budget import ChunkBudget, costliest_chunk, longest_row, widened
from .chunking import Chunk, ChunkedBatch, ChunkLimits, lay_out
from .data_position import PositionHooks
from .errors import UsageError
from .frozen_columns import batch_of_pooled, forward_bytes_per_token, frozen_columns, has_frozen_backbone
from .gradient_cache import CachedStep, RandomState, cached_step, encode_without_graph
from .layer_classes import repeated_layer_classes
from .out_of_memory import MemoryRetry
from .safety import SafeTrainer
from .step_timing import Profiler, StepClock
from .training_args import DistTrainingArguments

logger = logging.get_logger(__name__)

Batch = Mapping[str, Mapping[str, torch.Tensor]]


class DistTrainer(SafeTrainer, CheckpointHooks, PositionHooks):
    """Drop-in for `transformers.Trainer`, plus `loss`.

    Args:
        loss: scores embeddings, `loss(own, everyone, row_offset, ids) -> LossOutput` (see `losses.InfoNCELoss`).
            Batches are then mappings column -> features; the first column is the anchor, the second its positive,
            further ones hold hard negatives. None: the model's own loss, exactly as Trainer.

    Raises:
        UsageError: a model or setup that the gradient cache can not be exact with.
    """

    args: DistTrainingArguments
    freeze_plan: Any = None  # what trains, when fields say so
    feature_cache: feature_cache.FeatureCache | None = None

    def __init__(self, model: Any = None, args: Any = None, *more: Any, loss: Callable | None = None, **options: Any):
        self.loss, self._budget, self._rate_names, self._rates = loss, None, [], {}
        if args is None:
            args = DistTrainingArguments(output_dir="tmp_trainer")
        if loss is not None:
            _prepare_arguments(args)
            if options.get("compute_metrics") is None and len(more) < 7:
                options["compute_metrics"] = _retrieval_metrics
        self.freeze_plan = frozen_training.freeze(model, args)
        super().__init__(model, args, *more, **options)
        if self.freeze_plan is not None:
            self.add_callback(frozen_training.FreezeWatch(self))
            self.image_stand_in = frozen_training.stand_in_for_images(self)
        self.meter = StepMeter()
        self.add_callback(MetricsFile())
        self._clock = StepClock(self.args.device)
        if getattr(self.args, "profile_steps", None):
            self.add_callback(Profiler(self.args.profile_steps))
        if loss is None:
            return
        self.add_callback(self._clock)
        if isinstance(loss, nn.Module):
            loss.to(self.args.device)
        self._takes_column = "column" in _forward_parameters(self.model)
        self._reduction: distributed.Reduction | None = None
        self._loss_gradients_are_used = True
        self._may_widen = True
        # DeepSpeed's engine has taken its step by the time an update could be redone.
        can_redo = self.args.uses_gradient_cache and not self.is_deepspeed_enabled
        self._retry = MemoryRetry(self) if can_redo else None
        self._budget = self._make_budget()
        _check_setup(self)

    # ---- setting up ----

    def create_accelerator_and_postprocess(self) -> None:
        with sharding.without_fsdp(self.args), distributed.fsdp_on_cpu():
            super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled and self.model is not None:
            sharding.without_pinning(self.accelerator.state.fsdp_plugin)
            _name_layers_to_shard(self.accelerator.state.fsdp_plugin, self.model, self.args)
            if self.freeze_plan is not None:
                frozen_training.replicate_frozen_parts(
                    self.accelerator.state.fsdp_plugin, self.model, self.args.frozen_parts_fsdp
                )

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        is_ours = self.loss is not None or self.freeze_plan is not None
        if is_ours and self.args.ddp_find_unused_parameters is None:
            # DDP follows requires_grad, and with a loss the last backward of a step reaches every trainable parameter;
            # searching for unused ones costs a graph walk per forward. Models that skip parameters on some batches
            # set the argument to True.
            self.args.ddp_find_unused_parameters = False
        if self.loss is not None and self.args.uses_gradient_cache and self.args.ddp_broadcast_buffers is None:
            # Modules that write to their buffers are refused with a cache: there is nothing to broadcast.
            self.args.ddp_broadcast_buffers = False
        if self._has_own_arguments:
            options |= sharding.options(self.args, options.get("fsdp_plugin"))
        found = super()._build_accelerator_args(**options)
        if self._has_own_arguments:
            communication.options(self, found["kwargs_handlers"])
        return found

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        self.freeze_plan = frozen_training.freeze(model, self.args)
        return model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.freeze_plan is not None:
            frozen_training.check_before_optimizer(self)
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and getattr(self.args, "learning_rates", None):
            rates = self.args.learning_rates
            self._rate_names = frozen_training.split_by_learning_rate(optimizer, self.model, rates)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        # Trainer makes the scheduler when the optimizer is prepared: the first moment at which a parameter that no
        # wrapper owns may join it (accelerate's FSDP2 refuses optimizers with foreign parameters).
        if self.loss is not None and self.optimizer is not None:
            checkpointing.add_loss_group(self.optimizer, self._loss_parameters())
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_learning_rate(self) -> float:
        # Trainer asks just before the schedule moves on, so these are the rates of the step that is logged.
        self._rates = frozen_training.rates_for_log(self.optimizer, self._rate_names) if self._rate_names else {}
        return super()._get_learning_rate()

    def _loss_parameters(self) -> list[nn.Parameter]:
        parameters = self.loss.parameters() if isinstance(self.loss, nn.Module) else ()
        return [p for p in parameters if p.requires_grad]

    def get_train_dataloader(self):
        if self.loss is not None:
            _check_enough_rows(self)
        if getattr(self.args, "frozen_feature_cache", None) is None:
            return super().get_train_dataloader()
        with feature_cache.features_in_batches(self):
            return super().get_train_dataloader()

    def _get_train_sampler(self, train_dataset: Any = None):
        return self.placed(self._train_order(train_dataset))

    def _train_order(self, train_dataset: Any):
        if self.loss is None:
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        wanted, columns = self.args.no_duplicates_in_batch, getattr(self.data_collator, "columns", None)
        if wanted is not False and self.args.train_sampling_strategy == "random":
            is_possible = columns is not None and hasattr(dataset, "column_names") and hasattr(dataset, "__len__")
            if is_possible or wanted:
                return self._no_duplicates_sampler(dataset, columns)
        return super()._get_train_sampler(train_dataset)

    def _no_duplicates_sampler(self, dataset: Any, columns: Any):
        from .sampling import no_duplicates_sampler

        if columns is None:
            raise UsageError(
                "no_duplicates_in_batch=true needs a data_collator that names its columns: ContrastiveCollator."
            )
        return no_duplicates_sampler(
            dataset,
            columns[:2],
            window=self._train_batch_size * self.args.world_size,  # accelerate deals consecutive batches to ranks
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            id_column=getattr(self.data_collator, "id_column", None),
        )

    # ---- a step ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.loss is None:
            inputs = feature_cache.take_features(self, inputs)
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        if self._loss_gradients_are_used and isinstance(self.loss, nn.Module):
            self.loss.zero_grad()
        if self._reduction is None or self._reduction.model is not model:
            self._reduction = distributed.Reduction(
                model, lambda: self.accelerator.sync_gradients, self.args.gradient_cache_fsdp, self._takes_column
            )
        batch, ids = split_ids(self._prepare_inputs(inputs))
        step, chunked, counts = self._step(model, batch, ids)
        self._loss_gradients_are_used = self.accelerator.sync_gradients
        if self.accelerator.sync_gradients:
            distributed.average_gradients(self._loss_parameters())
        self.meter.add(step, chunked, counts)
        return self._backward_done(step.loss / self.current_gradient_accumulation_steps, inputs)

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
            deepspeed_step.check_chunks(self, kept, len(to_train.chunks()), len(to_train.tables))
            options = {"score": lambda embeddings: self._score(embeddings, ids, counts), "sync": sync}
            if self._retry is not None:
                encode, options["score"], options["sync"] = self._retry.watched(encode, **options)
            if budget is not None and budget.is_guarding:
                options |= budget.guarded(**options) | {"replays_last": True}
            options["score"], options["sync"] = self._clock.score(options["score"]), self._clock.sync(options["sync"])
            step = cached_step(
                to_train,
                encode,
                backward=self._backward,
                loss_parameters=self._loss_parameters(),
                keep_graph=kept,
                backward_together=not (self._reduction.is_fsdp or deepspeed_step.is_zero3(self)),
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
            return budget.run(attempt, reset, can_retry=is_first and not self._reduction.is_fsdp)

        def finish(chunked: ChunkedBatch, counts: dict[str, list[int]]) -> None:
            encode, score = functools.partial(self._encode, model), lambda rows: self._score(rows, ids, counts)
            self._retry.finish(chunked, counts, encode, score, self._reduction)

        step = run() if self._retry is None else self._retry.run(run, found, finish)
        self._may_widen = not step.drew_randomness
        return step, *found

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
        plans = [chunked] if wide is None else [chunked, wide]
        needed = [plan.num_chunks(by_vision=True) for plan in plans]
        everyone = distributed.exchange([*rows.values(), *chain(*needed)], self.args.device)
        # A forward is a collective there: every rank runs as many as the one that needs most.
        if self.is_fsdp_enabled or deepspeed_step.is_zero3(self):
            most = [max(numbers) for numbers in zip(*(row[len(rows) :] for row in everyone), strict=True)]
            for plan, own in zip(plans, needed, strict=True):
                plan.agree(most[: len(own)], by_vision=True)
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
        # FSDP's forwards are collectives: every rank keeps the graphs of the same chunks.
        return self._budget.agree(kept) if self.is_fsdp_enabled else kept

    def _log_budget(self) -> None:
        budget = self._budget
        size = f"{budget.tokens} tokens per chunk, " if budget.fixed is None else ""
        logger.info(
            f"gradient cache: {size}from {budget.measured.bytes_per_token:.0f} bytes per token measured and "
            f"{budget.measured.available / 2**30:.2f} GiB for activations."
        )

    def _encode(self, model: nn.Module, chunk: Chunk, **more: Any) -> torch.Tensor:
        column = {"column": chunk.column} if self._takes_column else {}
        with self.compute_loss_context_manager():
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
        anchor = next(iter(embeddings))
        everyone, row_offset = None, 0
        if distributed.world_size() > 1 and getattr(self.loss, "cross_device_negatives", True):
            everyone = distributed.GatheredColumns(embeddings, counts)
            row_offset = sum(counts[anchor][: distributed.rank()])
            ids = None if ids is None else distributed.gather_ids(ids, counts, anchor)
        output = self.loss(embeddings, everyone, row_offset=row_offset, ids=ids)
        loss, metrics = output if isinstance(output, tuple) else (output, {})
        weight = distributed.row_weight(embeddings[anchor].shape[0], counts[anchor])
        return loss * weight, {name: value * weight for name, value in metrics.items()}

    def _backward(self, loss: torch.Tensor) -> None:
        loss = loss / self.current_gradient_accumulation_steps
        if self.is_deepspeed_enabled:
            deepspeed_step.backward(self, loss, self._reduction.completes)
        else:
            self.accelerator.backward(loss)

    def _clip_grad_norm(self, model: nn.Module):
        if self.loss is None or not self._loss_parameters():
            return super()._clip_grad_norm(model)
        parameters = chain(model.parameters(), self._loss_parameters())
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    # ---- evaluation ----

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        started = time.perf_counter()
        metrics = super().evaluate(*arguments, **options)
        self.meter.exclude(time.perf_counter() - started)
        return metrics

    @torch.no_grad()
    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None):
        """With a loss: (loss, embeddings of anchors and positives, own row numbers); the loss of the training step."""
        if self.loss is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        batch, ids = split_ids(self._prepare_inputs(inputs))
        chunked, wide, counts = self._cut(batch)
        chunked = wide or chunked  # no graph is held here either
        chunks = chunked.chunks()
        embeddings = chunked.to_columns([self._encode(model, chunk).float() for chunk in chunks], chunks)
        loss, _ = self._score(embeddings, ids, counts)
        if prediction_loss_only:
            return loss, None, None
        anchors, positives, *_ = embeddings.values()
        return loss, (anchors.contiguous(), positives.contiguous()), torch.zeros(len(anchors), device=loss.device)

    # ---- logging ----

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        with self._clock.part("data"):
            return super().get_batch_samples(*arguments, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.loss is not None and "loss" in logs:
            logs.update(self.meter.read(self.args.device) | self._clock.read())
        if "learning_rate" in logs:
            logs.update(self._rates)
        super().log(logs, start_time)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.loss is None:
            return super()._track_num_input_tokens(inputs)
        if self.args.include_num_input_tokens_seen != "no":
            # host numbers of this rank's chunks, so counting costs no synchronisation but the gather itself
            real, computed = self.meter.last_tokens
            seen = real if self.args.include_num_input_tokens_seen == "non_padding" else computed
            self.state.num_input_tokens_seen += sum(row[0] for row in distributed.exchange([seen], self.args.device))


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
    if len(columns) < 2:
        raise UsageError(f"a contrastive batch needs an anchor and a positive column, got {list(columns)}.")
    ids = inputs.get("ids")
    return columns, ids if ids is None else {name: values for name, values in ids.items() if name != "row"}


def _shape_of(inputs: Any) -> str:
    return f"keys {list(inputs)}" if isinstance(inputs, Mapping) else type(inputs).__name__


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters


def _prepare_arguments(args: DistTrainingArguments) -> None:
    if not isinstance(args, DistTrainingArguments):
        raise UsageError(
            f"DistTrainer with a loss needs DistTrainingArguments, got {type(args).__name__}; the fields are the same."
        )
    args.remove_unused_columns = False  # the dataset's columns are the batch's columns, not the model's arguments
    if args.accelerator_config.dispatch_batches is None:
        # A dispatched batch is cut by rows of its first tensor; columns may hold different numbers of rows.
        args.accelerator_config.dispatch_batches = False
    if args.n_gpu > 1:
        raise UsageError(
            f"{args.n_gpu} GPUs are visible to one process, which Trainer would wrap in nn.DataParallel: no negatives "
            "across devices and wrong gradients for cached chunks. Start it with `accelerate launch`, or make one "
            "device visible (CUDA_VISIBLE_DEVICES=0)."
        )


def _check_setup(trainer: DistTrainer) -> None:
    args, model = trainer.args, trainer.model
    if trainer.is_deepspeed_enabled:
        deepspeed_step.check(trainer)
    if not args.uses_gradient_cache:
        return
    was_training = model.training
    model.train()  # what Trainer does before every step; a model may keep its own modules in eval there
    coupled = [
        name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training
    ]
    model.train(was_training)
    if coupled:
        raise UsageError(
            f"the gradient cache can not be exact with {coupled[0]!r} ({len(coupled)} batch normalisations in "
            "training mode): its output depends on which rows share a chunk. Keep it in eval mode, replace it by a "
            "LayerNorm or GroupNorm, or switch the cache off."
        )
    if args.activation_checkpointing:
        logger.info(
            "gradient cache and activation checkpointing are both on: the cache encodes every chunk twice and keeps "
            "one chunk's activations, checkpointing adds a third forward and keeps one layer's. Prefer smaller chunks "
            "alone unless a single chunk does not fit."
        )


def _check_enough_rows(trainer: DistTrainer) -> None:
    try:
        rows = len(trainer.train_dataset)
    except TypeError:  # streaming
        return
    batch = trainer._train_batch_size * trainer.args.world_size
    if rows < batch:
        raise UsageError(
            f"the training set has {rows} rows, fewer than one global batch of {batch} "
            f"({trainer._train_batch_size} per device x {trainer.args.world_size} processes). "
            "Lower per_device_train_batch_size or add data."
        )


def _name_layers_to_shard(plugin: Any, model: nn.Module, args: Any) -> None:
    """accelerate's own choice crashes for many encoders or shards almost nothing (layer_classes.py says which)."""
    min_num_params = getattr(args, "min_num_params", None) or 0
    if plugin.transformer_cls_names_to_wrap is None or min_num_params:
        # Empty: one unit, not accelerate's guess.
        plugin.transformer_cls_names_to_wrap = repeated_layer_classes(model, min_num_params)


def _retrieval_metrics(prediction: Any) -> dict[str, float]:
    from .metrics import retrieval_metrics

    anchors, positives = prediction.predictions
    return retrieval_metrics(torch.from_numpy(anchors), torch.from_numpy(positives))
