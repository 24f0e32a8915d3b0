"""`DistTrainer`: the subclass of Trainer, and what it is made of.

With `loss=None` every hook hands straight to Trainer. The work is done by parts, each made once with what it reads:
`step` (a step of a loss over embeddings), `health` (what keeps a run well), `strategy` (how the model is spread over
processes), `data_position` and the keeper of checkpoints, whose hooks lie in `position_hooks.py` and
`checkpoint_hooks.py`. Here are the rest of the hooks, in the order of a run. No maths lives here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_dist_ext.checkpoints import loss_state
from hf_dist_ext.data.sampling import no_duplicates_sampler
from hf_dist_ext.engine.budget import ChunkBudget
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import activity
from hf_dist_ext.frozen import feature_cache, freeze
from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.frozen.image_stand_in import ImageStandIn
from hf_dist_ext.frozen.run_mode import fully_frozen_roots
from hf_dist_ext.strategies import choose, collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.training import checks, loss_scale, metrics
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.checkpoint_hooks import CheckpointHooks
from hf_dist_ext.training.health import Health, LeaveEvaluation
from hf_dist_ext.training.meter import MetricsFile, StepMeter
from hf_dist_ext.training.out_of_memory import FittingSizes
from hf_dist_ext.training.position_hooks import PositionHooks
from hf_dist_ext.training.scaling import Scaling
from hf_dist_ext.training.sizes import StepSizes
from hf_dist_ext.training.step import EmbeddingStep, forward_parameters, trained_parameters
from hf_dist_ext.training.timing import Profiler, StepClock

logger = logging.get_logger(__name__)


class DistTrainer(CheckpointHooks, PositionHooks):
    """Drop-in for `transformers.Trainer`, plus `loss`.

    Args:
        loss: scores embeddings, `loss(own, everyone, row_offset, ids) -> LossOutput` (see `losses.InfoNCELoss`).
            Batches are then mappings column -> features; the first column is the anchor, the second its positive,
            further ones hold hard negatives. None: the model's own loss, exactly as Trainer.

    Raises:
        UsageError: a model or setup that the gradient cache can not be exact with.
    """

    args: DistTrainingArguments
    health: Health
    strategy: Strategy
    _initial_global_step = 0  # Trainer's, from the beginning of training on
    image_stand_in: ImageStandIn | None = None
    feature_cache: feature_cache.FeatureCache | None = None
    freeze_watch: freeze.FreezeWatch | None = None
    step: EmbeddingStep | None = None

    def __init__(self, model: Any = None, args: Any = None, *more: Any, loss: Callable | None = None, **options: Any):
        self.loss, self._rate_names, self._rates = loss, [], {}
        self.strategy = Strategy()
        processor = more[3] if len(more) > 3 else options.get("processing_class")
        self._makes_pictures = getattr(processor, "image_processor", None) is not None
        if args is None:
            args = DistTrainingArguments(output_dir="tmp_trainer")
        if loss is None:
            checks.refuse_without_loss(args)
        else:
            checks.prepare_arguments(args)
            self.strategy = choose.of_model(model, args)
            if options.get("compute_metrics") is None and len(more) < 7:
                metrics.check_can_be_computed(args)
                normalizes = getattr(loss, "normalize", False)
                options["compute_metrics"] = partial(metrics.metrics_of_prediction, normalizes=normalizes)
        self.freeze_plan = freeze.freeze(model, args)
        with self.strategy.constructing(args):
            super().__init__(model, args, *more, **options)
        uses_cache = loss is not None and self.args.uses_gradient_cache
        fitting = FittingSizes(self.args, loss) if uses_cache else None
        self.health = self._make_health(fitting)
        if self.health.is_called_back:
            self.add_callback(self.health)
        self.strategy.constructed(self.model)
        loader = self.accelerator.dataloader_config
        checks.check_what_is_read(self.args, loader, self.strategy, self.optimizer is not None, loss is not None)
        if (loss is not None or self.freeze_plan is not None) and not self.strategy.keeps_float32:
            checks.warn_of_rounded_updates(self.model)
        if self.freeze_plan is not None:
            self.freeze_watch = freeze.FreezeWatch(
                lambda: self.freeze_plan,
                lambda: self.bare_model,
                is_skipped=lambda: self.health.is_update_skipped,
                holds_gradients=self.strategy.holds_gradients,
            )
            self.add_callback(self.freeze_watch)
        if self.freeze_plan is not None or loss is not None:
            self.image_stand_in = self.make_image_stand_in()
        self.meter = StepMeter(lambda: self.strategy.rows)
        if loss is not None or self.freeze_plan is not None:  # else the output folder holds what Trainer's would
            self.add_callback(MetricsFile())
        self.scaling = Scaling(
            lambda: (self._train_batch_size, self.data_position.rows_per_micro_batch),
            lambda: getattr(self, "stage", None),
            self.log,
        )
        if loss is not None or self.freeze_plan is not None or getattr(self.args, "scaling_baseline", None):
            self.add_callback(self.scaling)
        self.clock = StepClock(self.args.device)
        if getattr(self.args, "profile_steps", None):
            self.add_callback(Profiler(self.args.profile_steps))
        if loss is None:
            is_across = self.args.average_tokens_across_devices
            self._items = loss_scale.ItemsWatch(
                self.accelerator.num_processes // self.get_tp_size() if is_across else 1,
                self.compute_loss_func is None and self.model_accepts_loss_kwargs and not self.args.torch_compile,
                self.is_world_process_zero(),
            )
            return
        self.add_callback(self.clock)
        if isinstance(loss, nn.Module):
            loss.to(self.args.device)
        self.step = self._make_step(fitting)
        self.strategy.check(bool(self._loss_parameters()), self.chunk_budget is not None)
        if self.args.uses_gradient_cache:
            checks.check_model(self.model, self.args)

    # ---- setting up ----

    def create_accelerator_and_postprocess(self) -> None:
        with choose.building(self.args, self.strategy):
            super().create_accelerator_and_postprocess()
        self.strategy = choose.of_accelerator(self.accelerator, self.strategy)
        if (gather := self.strategy.gather_for_metrics()) is not None:
            # Trainer's loops over an evaluation take it from both.
            self.accelerator.gather_for_metrics = gather
            self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)
        frozen_roots = None if self.freeze_plan is None or self.model is None else fully_frozen_roots(self.model)
        self.strategy.place(self.model, self.args, self.loss is not None, frozen_roots)

    @property
    def bare_model(self) -> nn.Module:
        """The model without its wrappers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _make_health(self, fitting: FittingSizes | None) -> Health:
        return Health(
            self.args,
            is_guarded=self.loss is not None or self.freeze_plan is not None,
            has_scaler=self.strategy.has_scaler(self.args),
            processor=self.processing_class,
            sizes=fitting,
            progress=self._progress,
            rows=lambda: self.strategy.rows,
            take_begun=lambda: self.data_position.take_begun("bad_rows"),
        )

    def _progress(self) -> tuple[int, int]:
        return self.state.global_step, self._initial_global_step

    def _make_step(self, fitting: FittingSizes | None) -> EmbeddingStep:
        sizes = StepSizes(
            self.args,
            loss=lambda: self.loss,
            model=lambda: self.bare_model,
            strategy=lambda: self.strategy,
            progress=self._progress,
            fitting=fitting,
            takes_column="column" in forward_parameters(self.model),
            has_stand_in=self.image_stand_in is not None,
        )
        return EmbeddingStep(sizes, self._prepare_inputs, self._precision, self.clock)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            yield

    @property
    def chunk_budget(self) -> ChunkBudget | None:
        """What measures the size of chunks, where it is automatic."""
        return None if self.step is None else self.step.sizes.budget

    def make_image_stand_in(self) -> ImageStandIn | None:
        has_loss = self.loss is not None
        return freeze.stand_in_for_images(
            self.bare_model, self.processing_class, has_loss, lambda: self.strategy.forwards_are_collective
        )

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        if not self.strategy.syncs_replicated:  # Trainer's hooks would reduce over all ranks and at every backward
            super()._sync_replicated_trainable_parameters(model)

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        if self.freeze_plan is not None and self.args.ddp_find_unused_parameters is None:
            # DDP follows requires_grad, and a stand-in serves batches without images, so nothing is unused; searching
            # costs a graph walk per forward.
            if self._makes_pictures or "vision" not in module_groups(self.model):
                self.args.ddp_find_unused_parameters = False
        if self.loss is not None and self.args.uses_gradient_cache and self.args.ddp_broadcast_buffers is None:
            # Modules that write to their buffers are refused with a cache: there is nothing to broadcast.
            self.args.ddp_broadcast_buffers = False
        if self._has_own_arguments:
            options |= choose.plugins(self.args, options.get("fsdp_plugin"))
        found = super()._build_accelerator_args(**options)
        if self._has_own_arguments:
            choose.set_handlers(self.args, found["kwargs_handlers"], self.loss is not None)
        return found

    def _prepare_for_training(self, *arguments: Any, **options: Any):
        prepared = super()._prepare_for_training(*arguments, **options)
        self.strategy.wrapped(self.model_wrapped, self.loss is not None)
        return prepared

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        if self.loss is not None:
            accelerator = getattr(self, "accelerator", None)
            self.strategy = choose.of_accelerator(accelerator, choose.of_model(model, self.args))
        self.freeze_plan = freeze.freeze(model, self.args)
        return model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.freeze_watch is not None:
            self.freeze_watch.check_before_optimizer(self.args)
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and getattr(self.args, "learning_rates", None):
            rates = self.args.learning_rates
            self._rate_names = freeze.split_by_learning_rate(optimizer, self.model, rates)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        # Trainer makes the scheduler when the optimizer is prepared: the first moment at which a parameter that no
        # wrapper owns may join it (accelerate's FSDP2 refuses optimizers with foreign parameters).
        if self.loss is not None and self.optimizer is not None:
            loss_state.add_loss_group(self.optimizer, self._loss_parameters())
        self.strategy.read_as(
            self._saves_trainable_only,
            self._trusts_checkpoints,
            around=lambda: loss_state.loss_state_apart(self.loss, self.optimizer),
        )
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_learning_rate(self) -> float:
        # Trainer asks just before the schedule moves on, so these are the rates of the step that is logged.
        self._rates = freeze.rates_for_log(self.optimizer, self._rate_names) if self._rate_names else {}
        return super()._get_learning_rate()

    def _loss_parameters(self) -> list[nn.Parameter]:
        return trained_parameters(self.loss)

    def get_train_dataloader(self):
        if self.loss is not None:
            batch, per_device = self.data_position.rows_per_micro_batch, self._train_batch_size
            checks.check_rows(self.train_dataset, self.args.no_duplicates_in_batch, per_device, batch)
        if getattr(self.args, "frozen_feature_cache", None) is None:
            return self._watched(super().get_train_dataloader())
        collate, options = self.data_collator, (self.args, self.accelerator.autocast, self.image_stand_in)
        if self.feature_cache is None:
            self.feature_cache = feature_cache.filled(self.bare_model, self.train_dataset, collate, *options)
        self.feature_cache.must_have_all = self.strategy.frozen_forwards_are_collective
        self.data_collator = feature_cache.CachingCollator(collate, self.feature_cache)
        try:
            return self._watched(super().get_train_dataloader())
        finally:
            self.data_collator = collate

    def _watched(self, loader: Any) -> Any:
        if hasattr(self.args, "max_bad_rows") and isinstance(loader, DataLoader):
            self.health.bad_rows.watch(loader, self.train_dataset)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None):
        if self.loss is None:
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        wanted, columns = self.args.no_duplicates_in_batch, getattr(self.data_collator, "columns", None)
        if wanted and self.args.train_sampling_strategy != "random":
            raise UsageError(
                f"no_duplicates_in_batch=true is an order of its own, and train_sampling_strategy="
                f"{str(self.args.train_sampling_strategy)!r} another. Keep one."
            )
        if wanted is not False and self.args.train_sampling_strategy == "random":
            is_possible = columns is not None and hasattr(dataset, "column_names") and hasattr(dataset, "__len__")
            if is_possible or wanted:
                return self._no_duplicates_sampler(dataset, columns)
        return super()._get_train_sampler(train_dataset)

    def _no_duplicates_sampler(self, dataset: Any, columns: Any):
        if columns is None:
            raise UsageError(
                "no_duplicates_in_batch=true needs a data_collator that names its columns: ContrastiveCollator."
            )
        return no_duplicates_sampler(
            dataset,
            columns[:2],
            window=self.data_position.rows_per_micro_batch,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            id_column=getattr(self.data_collator, "id_column", None),
        )

    # ---- a run ----

    @property
    def was_preempted(self) -> bool:
        """`train()` returned because of a signal, after a complete checkpoint (none before step 1)."""
        return self.health.was_preempted

    @property
    def stop_signal(self) -> str | None:
        """The name of the signal that asked this process to leave, if one did."""
        return None if self.health.stop is None else self.health.stop.received

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        with self.health.running(is_search=self.hp_search_backend is not None):
            try:
                return super().train(*arguments, **options)
            except LeaveEvaluation:  # the one before the first step: there is nothing to save
                self.control.should_training_stop = True
                return TrainOutput(self.state.global_step, 0.0, {})

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        with self.clock.part("data"), self.health.loading():
            return super().get_batch_samples(*arguments, **options)

    # ---- a step ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.loss is None:
            loss = self._own_loss_step(model, inputs, num_items_in_batch)
        else:
            self._prepare_embedding_step(model)
            accumulated, is_last = self.current_gradient_accumulation_steps, self.accelerator.sync_gradients
            step, layout = self.step.run(model, inputs, self.health.inputs, accumulated, is_last)
            self.meter.add(step, layout.chunked, layout.counts)
            loss = step.loss / accumulated
        return self.health.after_backward(loss, inputs, self.accelerator.sync_gradients)

    def _own_loss_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Trainer's, with the model's own loss."""
        if self.feature_cache is not None:
            inputs = self.feature_cache.take(inputs, self.args.device)
        accumulated = 1 if self.loss_is_scaled_for_ga is False else self.current_gradient_accumulation_steps
        items = self._items.watched(num_items_in_batch, self.model, accumulated)
        loss = super().training_step(model, inputs, items)
        if items is not num_items_in_batch:
            self._items.warn_if_unused(self.accelerator.unwrap_model(self.model), accumulated)
        return loss

    def _prepare_embedding_step(self, model: nn.Module) -> None:
        model.train()
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()  # as Trainer's step, which this one replaces
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        if self.strategy.model is not model:
            mode, own = self.args.gradient_cache_fsdp, self._loss_parameters()
            self.strategy.start(model, mode, own, self.optimizer, has_towers=self.step.sizes.takes_column)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **options)
        if self.health.guard is None or return_outputs or not torch.is_grad_enabled():
            return found
        return self.strategy.mark(found, found.detach())

    def _clip_grad_norm(self, model: nn.Module):
        own = [] if self.loss is None else self._loss_parameters()
        norm = self.strategy.clip(model.parameters(), own, self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        activity.enter("clipping gradients, update")
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.health.guard is not None:
            grad_norm = self.strategy.update_norm(grad_norm)
        if hasattr(grad_norm, "full_tensor"):  # of FSDP2: a collective, once; logging it would be another
            grad_norm = grad_norm.full_tensor()
        drop_update = partial(self.strategy.drop_update, self.optimizer, self.state.global_step + 1)
        self.health.before_update(grad_norm, self.state.max_steps, drop_update)
        return grad_norm

    # ---- after a step ----

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: nn.Module, trial: Any, *more: Any, **options: Any
    ):
        self.health.leave_if_asked(self.control)
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *more, **options)
        except LeaveEvaluation:
            self.control.should_training_stop = True
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.health.check_weights(model)
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, *arguments: Any, **options: Any) -> TrainOutput:
        with self.health.finalizing(self.state):
            return super()._finalize_training(*arguments, **options)

    # ---- evaluation ----

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        activity.leave_step("evaluating")
        started = time.perf_counter()
        found = super().evaluate(*arguments, **options)
        self.meter.exclude(time.perf_counter() - started)
        return found

    @torch.no_grad()
    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None):
        """With a loss: (loss, embeddings of anchors and positives, their ids); the loss of the training step."""
        if self.loss is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss, embeddings, ids = self.step.score_only(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        anchor, positive, *_ = embeddings
        labels = metrics.ids_of_rows(ids, anchor, positive, embeddings[anchor])
        return loss, (embeddings[anchor].contiguous(), embeddings[positive].contiguous()), labels

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.loss is not None and "loss" in logs:
            logs.update(self.meter.read(self.args.device) | self.clock.read())
        if "learning_rate" in logs:
            logs.update(self._rates)
        if "loss" in logs:
            logs.update(self.health.for_log())
        super().log(logs, start_time)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.loss is None:
            return super()._track_num_input_tokens(inputs)
        if self.args.include_num_input_tokens_seen != "no":
            # host numbers of this rank's chunks, so counting costs no synchronisation but the gather itself
            real, computed = self.meter.last_tokens
            seen = real if self.args.include_num_input_tokens_seen == "non_padding" else computed
            everyone = self.strategy.rows.one_of_each(collectives.exchange([seen], self.args.device))
            self.state.num_input_tokens_seen += sum(row[0] for row in everyone)
