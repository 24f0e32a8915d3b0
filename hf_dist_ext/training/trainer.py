"""`DistTrainer`: the subclass of Trainer, and what it is made of.

With `loss=None` every hook hands straight to Trainer. The work is done by parts, each made once with what it reads:
`step` (a step of a loss over embeddings), `health` (what keeps a run well), `strategy` (how the model is spread over
processes), `data_position` (the place in the data), `keeper` (checkpoints) and `files` (what folders hold of the
model). Here are the hooks, in the order of a run. No maths lives here.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.utils import logging

from hf_dist_ext.audit import audit
from hf_dist_ext.audit.audit import AuditReport
from hf_dist_ext.checkpoints import facts as run_facts
from hf_dist_ext.checkpoints import hub, loss_state, resume
from hf_dist_ext.checkpoints.keeper import Keeper
from hf_dist_ext.checkpoints.model_files import ModelFiles
from hf_dist_ext.data.bad_rows import BatchMaker
from hf_dist_ext.data.mixture import RowNumbers
from hf_dist_ext.data.order import sampler_of
from hf_dist_ext.data.position import DataPosition
from hf_dist_ext.data.row_check import name_of
from hf_dist_ext.data.sentence_collator import SentenceCollator
from hf_dist_ext.engine.budget import ChunkBudget
from hf_dist_ext.engine.combined_losses import loss_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation import evaluators
from hf_dist_ext.evaluation.encoder import dist_encoder
from hf_dist_ext.evaluation.token_vectors import as_prediction
from hf_dist_ext.failures import activity
from hf_dist_ext.frozen import feature_cache, freeze
from hf_dist_ext.frozen.image_stand_in import ImageStandIn
from hf_dist_ext.frozen.run_mode import fully_frozen_roots
from hf_dist_ext.models.embedder import embedder_of, is_of_sentence_transformers
from hf_dist_ext.run import lease
from hf_dist_ext.run.files import upload_command
from hf_dist_ext.run.preemption import remove_mark
from hf_dist_ext.strategies import choose, collectives
from hf_dist_ext.strategies.base import Strategy, meanwhile
from hf_dist_ext.strategies.tensors import bare_optimizer, loss_parameters
from hf_dist_ext.training import (
    ahead,
    checks,
    compiling,
    learning_rate,
    metrics,
    packing,
    same_run,
    sentence_arguments,
    sentence_data,
    sentence_trainer,
)
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.health import EarlyStop, Health, LeaveEvaluation
from hf_dist_ext.training.meter import OF_OWN_LOSS, PARTS, MetricsFile, Profiler, StepClock, StepMeter
from hf_dist_ext.training.out_of_memory import FittingSizes
from hf_dist_ext.training.own_loss import ItemsWatch
from hf_dist_ext.training.scaling import Scaling
from hf_dist_ext.training.sizes import StepSizes
from hf_dist_ext.training.step import EmbeddingStep

logger = logging.get_logger(__name__)


class DistTrainer(Trainer):
    """Drop-in for `transformers.Trainer`, plus `loss`.

    Args:
        loss: scores embeddings, `loss(own, everyone, row_offset, ids) -> LossOutput` (see `losses.InfoNCELoss`), and
            takes `targets` too where it reads labels. Batches are then mappings column -> features; the first column
            is the anchor, the second its positive, further ones hold hard negatives. None: the model's own loss,
            exactly as Trainer; of a SentenceTransformer or MultiVectorEncoder what its own trainer takes then.
        evaluator: of sentence-transformers, or of your own, or a list of them: called with the model, a
            SentenceTransformer or MultiVectorEncoder, whose `encode` shares its rows out over processes. It needs no
            `eval_dataset`.

    Raises:
        UsageError: a model or setup that the gradient cache can not be exact with.
    """

    # Trainer's, which are None before they are made only
    model: nn.Module
    args: DistTrainingArguments
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR

    health: Health
    strategy: Strategy
    _initial_global_step = 0  # Trainer's, from the beginning of training on
    push_in_progress: Any = None
    image_stand_in: ImageStandIn | None = None
    feature_cache: feature_cache.FeatureCache | None = None
    freeze_watch: freeze.FreezeWatch | None = None
    files: ModelFiles
    step: EmbeddingStep = None  # type: ignore[assignment]  # None without a loss
    _new_loss: dict[str, Any] | None = None  # the state of a loss that begins anew with every model
    stage: str | None = None  # the name of the run's
    _is_begun = True  # what a `train()` begins with; a loader that somebody asks for begins none
    _optimizer_name: str | None = None
    _rate_names: Sequence[str] = ()  # of the optimizer's groups
    _rates: Mapping[str, float] = {}  # of these
    _unwrapped: tuple[nn.Module, nn.Module] | None = None  # `model`, and what it is without its wrappers

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        loss: Callable | None = None,
        evaluator: Any = None,
        **options: Any,
    ):
        given = sentence_trainer.bound(model, args, more, options | {"loss": loss, "evaluator": evaluator})
        named = sentence_trainer.converted(given)
        self.loss: Any = named.pop("loss")
        self.evaluator: Any = evaluators.as_one(named.pop("evaluator"))
        if self.evaluator is not None and named.get("eval_dataset") is None:
            named["eval_dataset"] = []  # Trainer evaluates only what it is given, and then this too
        self._eval_dataloaders: dict[str, DataLoader] = {}  # Trainer's
        self._prepare(model, named["args"], named)
        with self.strategy.constructing(named["args"]):
            super().__init__(**named)
        self._make_parts()
        self._take_model()
        self._add_watchers()
        self.has_their_card = sentence_trainer.add_card(self, given)

    # ---- setting up ----

    def _prepare(self, model: nn.Module | None, args: Any, named: dict[str, Any]) -> None:
        """Before Trainer's constructor, whose arguments are `named`: what is refused, who trains, and what a loss over
        embeddings adds to them."""
        checks.refuse_objects(model, self.loss, named)
        is_own = isinstance(args, DistTrainingArguments)
        if is_own and not is_of_sentence_transformers(model):
            sentence_arguments.refuse_fields_of_a_model(args)
        self.strategy = Strategy()
        if self.loss is None:
            if is_own:
                checks.refuse_without_loss(args)
        else:
            sentence_trainer.refuse_hooks(type(self), DistTrainer)
            checks.prepare_arguments(args, named.get("compute_loss_func"))
            self.strategy = choose.of_model(model, args)
            if named.get("compute_metrics") is None and getattr(self.loss, "num_columns", None) != 1:
                metrics.check_can_be_computed(args)
                named["compute_metrics"] = metrics.PairMetrics(self.loss)
        self.freeze_plan = freeze.freeze(model, args)
        processor, uses_cache = named.get("processing_class"), self.loss is not None and args.uses_gradient_cache
        checks.set_defaults_of_ddp(args, model, processor, self.freeze_plan is not None, uses_cache)

    def _make_parts(self) -> None:
        args, loss = self.args, self.loss
        # Trainer makes the loaders of `evaluate` and `predict` with it.
        vars(self)["_get_dataloader"] = partial(metrics.loader, self, self._get_dataloader)
        self.data_position = DataPosition(self, collectives.exchange)
        self.keeper = Keeper(args, loss, lease.check)
        fitting = FittingSizes(args) if loss is not None and args.uses_gradient_cache else None
        self.health = Health(self, loss is not None or self.freeze_plan is not None, fitting)
        self.keeper.is_guarded = self.health.guard is not None
        self.clock = StepClock(args.device)
        self.scaling = Scaling(self)
        if isinstance(loss, nn.Module):
            loss.to(args.device)
            collectives.take_from_first((state := loss_state.state_of(loss)).values())
            self._new_loss = None if self.model_init is None else copy.deepcopy(state)
        if loss is None:
            is_across = args.average_tokens_across_devices
            self._items = ItemsWatch(
                self.accelerator.num_processes // self.get_tp_size() if is_across else 1,
                self.compute_loss_func is None and self.model_accepts_loss_kwargs and not args.torch_compile,
                self.is_world_process_zero(),
            )

    def _take_model(self) -> None:
        """What is decided for one model, and begins anew where `model_init` has made another."""
        if self.model_init is not None and isinstance(self.data_collator, SentenceCollator):
            self.data_collator = self.data_collator.of_model(self.bare_model)
        self.files = ModelFiles(self)
        self.feature_cache, self.meter = None, StepMeter(self)
        self.image_stand_in = self.make_image_stand_in() if self.is_ours else None
        if self.loss is not None:
            self.step = self._make_step()
        if self._new_loss is not None:
            cast(nn.Module, self.loss).load_state_dict(self._new_loss)
        self.strategy.constructed(self.model)
        checks.check(self)
        if self.step is not None:
            self.step.sizes.may_pack = packing.may_pack(self.args, self.bare_model, self.strategy)

    def _make_step(self) -> EmbeddingStep:
        with self.strategy.saving_whole(self.model):
            embedder = embedder_of(self.bare_model)
        return EmbeddingStep(self, StepSizes(self, self.health.sizes, embedder, self.image_stand_in is not None))

    def _add_watchers(self) -> None:
        """Callbacks. Without a loss and frozen parts the output folder holds what Trainer's would."""
        has_loss, is_ours = self.loss is not None, self.is_ours
        if self.has_own_arguments and self.health.is_called_back:
            self.add_callback(self.health)
        if self.freeze_plan is not None:
            self.freeze_watch = freeze.FreezeWatch(self)
            self.add_callback(self.freeze_watch)
        if self.has_own_arguments:
            self.keeper.at_begin.append(partial(remove_mark, str(self.args.output_dir)))
        if is_ours:
            self.add_callback(MetricsFile())
        if is_ours or self.options.scaling_baseline:
            self.add_callback(self.scaling)
        if patience := self.options.early_stopping_patience:
            self.add_callback(EarlyStop(patience))
        if steps := self.options.profile_steps:
            self.add_callback(Profiler(steps))
        self.clock.parts = PARTS if has_loss else OF_OWN_LOSS if is_ours else ()
        if self.clock.parts:
            self.add_callback(self.clock)

    def create_accelerator_and_postprocess(self) -> None:
        with choose.building(self.args, self.strategy):
            super().create_accelerator_and_postprocess()
        self._settle(choose.of_accelerator(self.accelerator, self.strategy), self.model)

    def _settle(self, strategy: Strategy, model: nn.Module | None) -> None:
        """The strategy of this accelerator and this model; None: `model_init` makes one later, and this runs again."""
        self.strategy = strategy
        if (gather := self.strategy.gather_for_metrics()) is not None:
            # Trainer's loops over an evaluation take it from both.
            self.accelerator.gather_for_metrics = gather
            self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)
        frozen_roots = None if self.freeze_plan is None or model is None else fully_frozen_roots(model)
        self.strategy.place(model, self.args, self.loss is not None, frozen_roots)

    @property
    def has_own_arguments(self) -> bool:
        """With transformers' own checkpoints are Trainer's, but for the loss's parameters and the token."""
        return isinstance(self.args, DistTrainingArguments)

    @property
    def options(self) -> Any:
        """Our fields: the arguments, or what they are by default beside transformers' own."""
        return self.args if self.has_own_arguments else DistTrainingArguments

    @property
    def is_ours(self) -> bool:
        """Not what Trainer would train: a loss over embeddings, or frozen parts."""
        return self.loss is not None or self.freeze_plan is not None

    @property
    def bare_model(self) -> nn.Module:
        """The model without its wrappers. A step asks often, and accelerate 1.15 reads files of DeepSpeed to
        answer (utils/imports.py), so it is asked once per model."""
        if self._unwrapped is None or self._unwrapped[0] is not self.model:
            self._unwrapped = self.model, self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return self._unwrapped[1]

    def progress(self) -> tuple[int, int]:
        """Updates made, and how many of them before this start."""
        return self.state.global_step, self._initial_global_step

    def rows_of_micro_batch(self) -> tuple[int, int]:
        """(those of this process, those of all together)"""
        everyone = self.get_total_train_batch_size(self.args) // self.args.gradient_accumulation_steps
        return self._train_batch_size, everyone

    @contextmanager
    def precision(self) -> Iterator[None]:
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
        if self.has_own_arguments:
            options |= choose.plugins(self.args, options.get("fsdp_plugin"))
        options = super()._build_accelerator_args(**options)
        if self.has_own_arguments:
            choose.set_handlers(self.args, options["kwargs_handlers"], self.loss is not None)
        if self.loss is not None:
            compiling.prepare(self.args, options["dynamo_plugin"])
        return options

    def _prepare_for_training(self, *arguments: Any, **options: Any):
        prepared = super()._prepare_for_training(*arguments, **options)
        self.strategy.wrapped(self.model_wrapped, self.args, self.loss is not None)
        if self.is_ours:
            self.strategy.seed(self.args.seed, self.args.device)
        if self.loss is not None:
            self.step.begin()
            checks.warn_of_accumulation(self.args, self.loss)
            compiling.announce(self.args, self.strategy, self.step.sizes.may_pack)
        if self.has_own_arguments:
            self.keeper.begin()
        return prepared

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        sentence_trainer.refuse_other_encoder(model)
        if self.loss is None and is_of_sentence_transformers(model):
            raise UsageError(
                f"loss is missing: model_init makes a {type(model).__name__}, and which kind of model it makes is not "
                "known before. Give loss, such as loss=CoSENTLoss."
            )
        self.freeze_plan, strategy = freeze.freeze(model, self.args), self.strategy
        if self.loss is not None:
            strategy = choose.of_accelerator(self.accelerator, choose.of_model(model, self.args))
        self._settle(strategy, model)
        return model

    def _begin_training(self) -> None:
        """Once in a `train()`, when Trainer has made its model and a search has set its arguments, before either
        weights or rows are read."""
        is_begun, self._is_begun = self._is_begun, True
        if is_begun:
            return
        if self.model_init is not None:
            self._take_model()
            self._check_same_run()
        if self.loss is not None:  # an optimizer may have been given since the trainer was made
            loss_state.check_optimizer(self.loss, self.optimizer, self.lr_scheduler)
        if self.has_own_arguments:
            self._fit_checkpoint()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.freeze_watch is not None:
            with self.strategy.saving_whole(self.model):  # so that the report counts all of it
                self.freeze_watch.check_before_optimizer(self.args)
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            self.strategy.arrange(optimizer)
        if is_new and (self.options.learning_rates or self.options.learning_rate_mapping):
            with self.strategy.saving_whole(self.model):
                given = self.model, self.loss, self.args, self.strategy.is_cut
                self._rate_names = freeze.give_rates(optimizer, *given)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        # Trainer makes the scheduler when the optimizer is prepared: the first moment at which a parameter that no
        # wrapper owns may join it (accelerate's FSDP2 refuses optimizers with foreign parameters).
        if self.loss is not None and self.optimizer is not None:
            loss_state.add_loss_group(self.optimizer, self.loss_parameters())
        self.strategy.read_as(
            self.files.is_part,
            self.options.trust_checkpoint,
            around=lambda: loss_state.loss_state_apart(self.loss, self.optimizer),
        )
        if (share := self.options.warmup_ratio) is not None:  # a search sets it after the arguments were made
            self.args.warmup_steps, self.options.warmup_ratio = share, None
        learning_rate.warn_of_warmup(self.args, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def loss_parameters(self) -> list[nn.Parameter]:
        return loss_parameters(self.loss)

    def get_train_dataloader(self):
        self._begin_training()
        dataset = self.train_dataset
        if self.loss is not None:
            checks.check_rows(dataset, self.args.no_duplicates_in_batch, *self.rows_of_micro_batch())
        with meanwhile(self, train_dataset=dataset, data_collator=self.data_collator):
            self._fill_feature_cache()
            self._prepare_texts()
            loader = self._loader_of_rest()
        if self.has_own_arguments and isinstance(loader, DataLoader):
            then = [] if self.feature_cache is None else [self.feature_cache.replace]
            then += [] if self.step is None else [self.step.sizes.cut_ahead()]
            self.health.bad_rows.watch(loader, name_of(dataset), then)
        return loader

    def _prepare_texts(self) -> None:
        """Texts travel without padding."""
        if self.loss is None or self.feature_cache is not None:
            return
        if not self.accelerator.dataloader_config.dispatch_batches:  # such a batch is cut by rows of its tensors
            self.data_collator = getattr(self.data_collator, "as_flat", lambda: self.data_collator)()

    def _fill_feature_cache(self) -> None:
        """Where frozen features are kept, batches are to hold them."""
        if self.options.frozen_feature_cache is None:
            return
        if self.feature_cache is None:
            rows, collate = self.train_dataset, self.data_collator
            if hasattr(rows, "__len__"):  # bad ones are not counted, since training meets them again
                counts = torch.zeros(1 + self.args.dataloader_num_workers)
                collate = BatchMaker(collate, rows, name_of(rows), bool(self.options.max_bad_rows), counts)
                rows = RowNumbers(rows)
            given = self.args, self.accelerator.autocast, self.image_stand_in
            self.feature_cache = feature_cache.filled(self.bare_model, rows, collate, self.loss, *given)
        self.feature_cache.must_have_all = self.strategy.frozen_forwards_are_collective

    def _loader_of_rest(self) -> Any:
        """Trainer's own loader, of what a resumed run has still to read."""
        self.train_dataset = self.data_position.rest_of_dataset()
        loader = super().get_train_dataloader()
        self.data_position.take_over(loader)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None):
        if self.loss is not None:
            train_dataset = self.train_dataset if train_dataset is None else train_dataset
            window = self.data_position.rows_per_micro_batch
            if (sampler := sampler_of(self.args, train_dataset, self.data_collator, window)) is not None:
                return sampler
        return super()._get_train_sampler(train_dataset)

    # ---- a run ----

    @property
    def was_preempted(self) -> bool:
        """`train()` returned because of a signal, after a complete checkpoint (none before step 1)."""
        return self.health.was_preempted

    @property
    def stop_signal(self) -> str | None:
        """The name of the signal that asked this process to leave, if one did."""
        return None if self.health.stop is None else self.health.stop.received

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> TrainOutput:
        if self.model_init is None:
            self._check_same_run()
        with self.health.running(is_search=self.hp_search_backend is not None):
            if self.has_own_arguments:
                resume_from_checkpoint = self._choose_checkpoint(resume_from_checkpoint)
            try:
                self._is_begun = False
                position = self.data_position.training(cast("str | None", resume_from_checkpoint))
                kernels = compiling.fused_kernels(self.loss is not None)
                with self.keeper.background.ended(), self.strategy.training(), position, kernels:
                    return super().train(resume_from_checkpoint, *arguments, **options)
            except LeaveEvaluation:  # the one before the first step: there is nothing to save
                self.control.should_training_stop = True
                return TrainOutput(self.state.global_step, 0.0, {})

    def audit(self, num_rows: int | None = None, reference: str = "auto") -> AuditReport:
        """Whether the gradient of this run's first update is right: `print(report)` is a table, `report.is_right` the
        answer. Call it before `train()`, on every process. Weights, buffers and random numbers stay as they are;
        under DeepSpeed train another trainer afterwards.

        num_rows: so many rows of the update instead of all. reference: the plain step in "float64" on the CPU or in
        "float32" on the device; "auto": float64 where that takes minutes at most.
        """
        return audit.audit(self, num_rows, reference)

    def _check_same_run(self) -> None:
        if self.has_own_arguments:
            data = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
            parts = self.data_collator, self.processing_class, self.loss, self.bare_model
            same_run.check(self.args, data, *parts, self.strategy.loads_alone)

    def _choose_checkpoint(self, asked: str | bool | None) -> str | None:
        """The checkpoint that this start goes on from, and what follows from it for the batch."""
        strategy = self.strategy
        checkpoint = self.keeper.choose(asked, strategy, getattr(self.accelerator, "scaler", None) is not None)
        resumed = self.keeper.resumed
        learning_rate.keep_effective_batch(self.args, resumed, strategy.rows.size, strategy.fixed_accumulation)
        return checkpoint

    def _fit_checkpoint(self) -> None:
        """Whether the model fits the checkpoint, and which run goes on."""
        self.files.carry((self.keeper.resumed.get("trains") or {}).get("carried", ()))
        self.files.prepare()
        has_weights_only = self.keeper.fit(
            self.bare_model,
            self.strategy,
            self.files.frozen_digests,
            self.files.dtype_of_base,
            load_adapters=lambda model, folder: super(DistTrainer, self)._load_from_checkpoint(str(folder), model),
            optimizer=self._name_optimizer(),
            is_search=self.hp_search_backend is not None,
        )
        if has_weights_only:
            self.files.carry_what_changed()
        learning_rate.scale(self.args, self.strategy.rows.size)

    def _name_optimizer(self) -> str:
        """The class of the optimizer that will train, as a manifest has it."""
        if self.optimizer is not None:
            kind = type(bare_optimizer(self.optimizer))
        else:
            kind, _ = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self._optimizer_name = f"{kind.__module__}.{kind.__name__}"
        return self._optimizer_name

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._begin_training()
        if not self.files.load(model or self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        given = learning_rate.given(self.optimizer, self.lr_scheduler) if self.has_own_arguments else None
        with loss_state.loss_state_apart(self.loss, self.optimizer, load_from=checkpoint):
            if self.files.load_optimizer(Path(checkpoint), self.optimizer):
                schedule = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
                self.lr_scheduler.load_state_dict(schedule)
                learning_rate.take_last(self.optimizer, self.lr_scheduler)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
        if given is not None:
            learning_rate.take_given(self.optimizer, self.lr_scheduler, given)
        loss_state.load_budget(self.chunk_budget, checkpoint)
        self.strategy.load(self.model_wrapped, checkpoint, self.args)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.has_own_arguments:
            given = self.args, self.state.global_step, checkpoint, self.keeper.resumed, self.strategy
            if resume.draws_anew(*given):
                return
        super()._load_rng_state(checkpoint)

    def set_initial_training_values(self, args: Any, dataloader: Any):
        return self.data_position.counts(super().set_initial_training_values(args, dataloader), dataloader)

    def _init_training_state(self, max_steps: int, updates: int, num_epochs: int, *more: Any):
        begun = super()._init_training_state(max_steps, updates, num_epochs, *more)
        if self.has_own_arguments:
            self.keeper.restore_best_checkpoint(self.state)
        return self.data_position.first_batch(begun, self.state, max_steps, num_epochs)

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]  # Trainer calls it by names
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            return  # before the first step: the checkpoint is of a run that had ended
        epoch, loader, num_batches = (options[name] for name in ("epoch", "train_dataloader", "steps_in_epoch"))
        changed = self.data_position.begin_epoch(epoch, loader, num_batches, self.state)
        getattr(self.data_collator, "set_epoch", int)(epoch)
        try:
            super()._run_epoch(**options | changed)
        except LeaveEvaluation:
            self._leave_epoch(options["model"], options["trial"])

    def _leave_epoch(self, model: nn.Module, trial: Any) -> None:
        self.control.should_training_stop = True
        self._save_checkpoint(model, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any):
        position = self.data_position
        with self.clock.part("data"), self.health.loading():
            batches, items = super().get_batch_samples(position.used_of(epoch_iterator), num_batches, device)
            position.add(batches)
            if self.step is not None:
                batches = [self._prepare_input(batch) for batch in batches]  # floats get the dtype of an engine
            for batch in batches:
                ahead.remember(batch)
            if (checkpoint := position.take_random_states()) is not None:
                self._load_rng_state(checkpoint)
            return batches, items

    # ---- a step ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        replay: tuple[Any, ...] = ()
        if self.loss is None:
            loss = self._own_loss_step(model, inputs, num_items_in_batch)
        else:
            self._prepare_embedding_step(model)
            accumulated, is_last = self.current_gradient_accumulation_steps, self.accelerator.sync_gradients
            step = self.step.train(model, inputs, self.health.inputs, accumulated, is_last)
            loss, replay = step.loss / accumulated, (step.replay_error, self.step.allowed_difference)
        return self.health.after_backward(loss, inputs, self.accelerator.sync_gradients, *replay)

    def _own_loss_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Trainer's, with the model's own loss."""
        if self.feature_cache is not None:
            inputs = self.feature_cache.take(inputs, self.args.device)
        accumulated = 1 if self.loss_is_scaled_for_ga is False else self.current_gradient_accumulation_steps
        items = self._items.watched(num_items_in_batch, self.model, accumulated)
        with self.strategy.marking() if self.health.guard is not None else nullcontext():
            loss = super().training_step(model, inputs, items)
        if items is not num_items_in_batch:
            self._items.warn_if_unused(self.accelerator.unwrap_model(self.model), accumulated)
        return loss

    def _prepare_embedding_step(self, model: nn.Module) -> None:
        """As Trainer's step, which is replaced."""
        model.train()
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        if self.strategy.model is not model:
            mode, own = self.args.gradient_cache_fsdp, self.loss_parameters()
            self.strategy.start(model, mode, own, self.optimizer, has_towers=self.step.sizes.takes_column)

    def _clip_grad_norm(self, model: nn.Module):
        own = [] if self.loss is None else self.loss_parameters()
        norm = self.strategy.clip(model.parameters(), own, self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        activity.enter("clipping gradients, update")
        if grad_norm is None:
            grad_norm = self.strategy.clip(model.parameters(), (), float("inf"))
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.health.guard is not None:
            grad_norm = self.strategy.update_norm(grad_norm)
        if hasattr(grad_norm, "full_tensor"):  # of FSDP2: a collective, once; logging it would be another
            grad_norm = grad_norm.full_tensor()
        drop_update = partial(self.strategy.drop_update, self.optimizer, self.state.global_step + 1)
        self.health.before_update(grad_norm, self.state.max_steps, drop_update)
        self.meter.end_update(self._tr_loss, self.health.is_update_skipped)
        # The schedule moves on after the update, so these are the rates of the step that is logged.
        self._rates = freeze.rates_for_log(self.optimizer, self._rate_names) if self._rate_names else {}
        return grad_norm

    # ---- checkpoints, the model ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.health.may_save(model):
            return None
        if not self.has_own_arguments:
            with loss_state.without_secrets(self.args):
                return super()._save_checkpoint(model, trial)
        self.keeper.save(
            Path(self._get_output_dir(trial=trial)),
            self.state,
            write=self._write_checkpoint,
            facts=self._facts,
            push=partial(hub.push_checkpoint, self),
        )

    def _write_checkpoint(self, folder: Path) -> None:
        """Every file of a checkpoint but its manifest, as Trainer writes them."""
        if self.hp_search_backend is None and not self.state.is_hyper_param_search:
            self.store_flos()
        self.save_model(str(folder), _internal_call=True)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        if self.args.save_only_model:
            loss_state.save_loss(self.loss, folder if self.args.should_save else None)
        else:
            self._write_states(folder)
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
        if self.args.should_save:
            parts = [*self.callback_handler.callbacks, self.control]
            loss_state.save_trainer_state(self.state, parts, folder)

    def _facts(self) -> dict[str, Any]:
        """Of a manifest."""
        with self.strategy.saving_whole(self.model):
            of_model = run_facts.of_model(self.bare_model, self.files.dtype_of_base)
        return {
            **run_facts.of_run(self.args, self.state, self.strategy, self._train_batch_size, self._optimizer_name),
            **of_model,
            **self.data_position.facts(),
            "frozen_fingerprint": self.files.frozen_fingerprint,
            "stage": self.stage,
            "trains": None if self.freeze_plan is None else self.freeze_plan.describe(),
        }

    @property
    def saves_complete_model(self) -> bool:
        """Whether `save_model` ends with a folder that from_pretrained loads."""
        return self.files.ends_complete

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict on the first rank, also when it is sharded. Every rank calls it."""
        return self.files.whole_weights()

    def _folder(self, given: str | None = None) -> Path:
        return Path(given or str(self.args.output_dir))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder, as_trainer = self._folder(output_dir), partial(super().save_model, _internal_call=True)
        with nullcontext() if _internal_call else self.files.replacing(folder):
            if _internal_call:
                is_saved = self.files.save_for_resume(folder, self._save, self.keeper.writer)
            else:
                is_saved = self.files.save_at_end(folder, self._save, as_trainer, self._facts)
            if not is_saved:
                as_trainer(str(folder))
        if self.has_their_card and not _internal_call and self.args.should_save:
            sentence_trainer.write_card(self.bare_model, folder, self.strategy)
        if self.args.push_to_hub and not _internal_call:
            push = partial(hub.push_saved, self) if self.is_ours else self.push_to_hub
            push(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        given, folder = token or self.args.hub_token, self.args.output_dir
        later = upload_command(str(folder), self.args.hub_model_id)
        remedy = f"Or train without push_to_hub, and push the folder when the hub can be reached: {later}"
        is_asked = self.has_own_arguments and self.is_world_process_zero()
        with hub.reached("push_to_hub=true", remedy, given) if is_asked else nullcontext():
            super().init_hf_repo(token, **({} if private is None else {"private": private}))  # new in 5.23

    def push_to_hub(self, commit_message: str | None = "End of training", *arguments: Any, **options: Any):
        if not self.is_ours:
            return super().push_to_hub(commit_message, *arguments, **options)
        with meanwhile(self.args, push_to_hub=False):
            self.save_model()
        return hub.push_saved(self, commit_message, *arguments, **options)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = self._folder(output_dir)
        with loss_state.without_secrets(self.args):
            self.files.save_weights(folder, state_dict, super()._save, self.keeper.writer)

    def _write_states(self, folder: Path) -> None:
        """Of optimizer, schedule, strategy and data."""
        output_dir, saves, writer = str(folder), self.args.should_save, self.keeper.writer
        with loss_state.loss_state_apart(self.loss, self.optimizer, save_to=output_dir if saves else None):
            if not self.files.save_optimizer(folder, self.optimizer, writer):
                self._save_optimizer_and_scheduler(output_dir)
            elif saves:
                torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
        self.strategy.save(self.model_wrapped, folder, self.args, writer)
        if saves:
            loss_state.save_budget(self.chunk_budget, output_dir)
            self.data_position.save(output_dir)

    def _finalize_training(self, *arguments: Any, **options: Any) -> TrainOutput:
        # Loading takes time that a signal may not leave; the resumed run will.
        loads_best = self.args.load_best_model_at_end and not self.was_preempted
        ending = self.keeper.ending(self.state, loads_best) if self.has_own_arguments else nullcontext()
        with ending, meanwhile(self.args, load_best_model_at_end=False):
            if loads_best and self.state.best_model_checkpoint is not None:
                self._load_best()
            output = super()._finalize_training(*arguments, **options)
        hub.tell_failed(self.push_in_progress)
        return output._replace(training_loss=output.metrics.get("train_loss", math.nan))

    def _load_best(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self.strategy.has_engine or not self.files.load(self.model, Path(best)):
            self._load_best_model()
        loss_state.load_loss(self.loss, best)

    # ---- evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        activity.leave_step("evaluating")
        if is_of_sentence_transformers(self.bare_model):
            eval_dataset = sentence_data.evaluated(eval_dataset)
        is_apart = self.is_ours or self.health.stop is not None  # without our fields it draws as Trainer's does
        apart = evaluators.drawing_apart(self.args.seed) if is_apart else nullcontext()
        with apart, self.meter.paused():
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        # With dataloader_persistent_workers Trainer 5.23 keeps the loader of a dataset that it is given, and takes it
        # for that of the next one. Loaders of its own are kept.
        is_own = eval_dataset is None or isinstance(eval_dataset, str) or eval_dataset is self.eval_dataset
        with nullcontext() if is_own else meanwhile(self, _eval_dataloaders={}):
            return super().get_eval_dataloader(cast(Any, eval_dataset))

    def evaluation_loop(self, *arguments: Any, **options: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*arguments, **options)
        if self.evaluator is not None:
            cast(dict, output.metrics).update(self._run_evaluator(options.get("metric_key_prefix", "eval")))
        return output

    def _run_evaluator(self, asked: str) -> dict[str, Any]:
        prefix = evaluators.prefix_once(asked, self.eval_dataset)
        if prefix is None:
            return {}
        wrapped = self._wrap_model(self.model, training=False)
        after_batch = partial(self.health.on_prediction_step, self.args, self.state, self.control)
        forward = partial(self.step.forward_of_stages, wrapped) if self.strategy.is_cut else wrapped
        encoder = dist_encoder(self.bare_model, forward, self.strategy, self.args.device, self.precision, after_batch)
        folder, state = Path(str(self.args.output_dir), "eval"), self.state
        figures = evaluators.run_evaluators(
            self.evaluator, encoder, folder, state.epoch, state.global_step, self.args.seed
        )
        return evaluators.named(figures, prefix)

    @torch.no_grad()
    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None):
        """With a loss: (loss, embeddings of anchors and positives, ids or labels), of a single column its embeddings
        and labels; the loss of the training step."""
        if self.loss is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss, embeddings, facts = self.step.score_only(model, inputs)
        if prediction_loss_only or (len(embeddings) == 1 and isinstance(self.compute_metrics, metrics.PairMetrics)):
            return loss, None, None
        if len(embeddings) == 1:
            only: Any = next(iter(embeddings.values()))
            return loss, as_prediction(only), facts.targets.get("label", loss.new_zeros(len(only)))
        anchor, positive, *_ = embeddings
        rows: Any = embeddings[anchor]
        labels = metrics.labels_of_rows(loss_of(self.loss, facts.source), facts, anchor, positive, rows)
        return loss, (as_prediction(embeddings[anchor]), as_prediction(embeddings[positive])), labels

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        is_of_steps = "loss" in logs
        self.meter.correct(logs)
        if is_of_steps and self.clock.parts:
            logs.update(self.clock.read())
        if is_of_steps and self.loss is not None:
            logs.update(self.meter.read(self.args.device))
            logs.update(self.strategy.for_log(logs))
        if "learning_rate" in logs:
            logs.update(self._rates)
        if is_of_steps:
            logs.update(self.health.for_log())
        super().log(logs, start_time)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.loss is None:
            super()._track_num_input_tokens(inputs)
        elif self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += self.meter.count_seen(self.args.include_num_input_tokens_seen)
