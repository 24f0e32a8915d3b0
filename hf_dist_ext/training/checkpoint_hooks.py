"""Trainer's hooks for checkpoints, which hand on to checkpoints/; the base class of `DistTrainer`.

With transformers' own TrainingArguments all of it is Trainer's, but for the loss's parameters and the token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from hf_dist_ext.checkpoints import commit, hub, loss_state, merge, resume, safe_reading, trainable, weights
from hf_dist_ext.checkpoints.facts import RunFacts, base_model
from hf_dist_ext.checkpoints.keeper import Keeper
from hf_dist_ext.run import lease
from hf_dist_ext.strategies import agreed
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.training import learning_rate
from hf_dist_ext.training.arguments import DistTrainingArguments


class CheckpointHooks(Trainer):
    strategy: Strategy

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.keeper = Keeper(self.args, self.loss, lease.check)

    @property
    def _has_own_arguments(self) -> bool:
        return isinstance(self.args, DistTrainingArguments)

    @property
    def _processor(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    @property
    def _trusts_checkpoints(self) -> bool:
        return getattr(self.args, "trust_checkpoint", False)

    # ---- what a folder holds ----

    @property
    def _saves_trainable_only(self) -> bool:
        return self.freeze_plan is not None and self._has_own_arguments

    @property
    def _saves_optimizer_by_name(self) -> bool:
        return self._saves_trainable_only or self.strategy.saves_by_name

    @property
    def _saves_shards(self) -> bool:
        return self._has_own_arguments and self.strategy.saves_shards

    @property
    def saves_complete_model(self) -> bool:
        """Whether `save_model` ends with a folder that from_pretrained loads: not when only a part was trained, unless
        it was asked for, or the rest is in no folder and on no hub."""
        return not self._saves_trainable_only or self.args.save_full_model or base_model(self.bare_model) is None

    @property
    def _merges_adapters(self) -> bool:
        is_wanted = self._saves_trainable_only or (self._has_own_arguments and self.args.save_full_model)
        return is_wanted and merge.has_adapters(self.bare_model)

    @property
    def _keeps_adapters_alone(self) -> bool:
        """Whether a folder holds the adapters of an `EmbeddingModel`, whose base lies somewhere, and no more."""
        if not self._has_own_arguments or self._saves_trainable_only or self.args.save_full_model:
            return False
        return merge.can_stand_alone(self.bare_model)

    # ---- a checkpoint ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self._has_own_arguments:
            return super()._save_checkpoint(model, trial)
        if self.keeper.committed_step == self.state.global_step:
            return  # asked for twice, as when an evaluation was left: to write it again would put it at risk
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        output_dir = self._get_output_dir(trial=trial)
        self.keeper.save(
            Path(output_dir),
            self.state,
            self.strategy,
            tensors=self._tensors_to_save(),
            write=lambda folder: self._write_checkpoint(output_dir, str(folder)),
            facts=self._facts,
            push=lambda folder: self._push_from_checkpoint(str(folder)) if self.args.push_to_hub else None,
        )

    def _write_checkpoint(self, output_dir: str, folder: str) -> None:
        """Every file of a checkpoint but its manifest, as Trainer writes them."""
        self.save_model(folder, _internal_call=True)
        if self.state.best_global_step and self.args.save_strategy != "no":
            best = os.path.join(output_dir, f"checkpoint-{self.state.best_global_step}")
            if os.path.exists(best):
                self.state.best_model_checkpoint = best
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if self.args.should_save:
            self._save_state(folder)

    def _save_state(self, folder: str) -> None:
        states = self.state.stateful_callbacks
        for part in [*self.callback_handler.callbacks, self.control]:
            if isinstance(part, ExportableState):
                name = type(part).__name__
                if isinstance(states[name], list):
                    states[name].append(part.state())
                else:
                    states[name] = part.state()
        self.state.save_to_json(os.path.join(folder, "trainer_state.json"))

    def _tensors_to_save(self) -> Iterator[torch.Tensor]:
        for values in (getattr(self.optimizer, "state", None) or {}).values():
            yield from (value for value in values.values() if hasattr(value, "element_size"))
        yield from (p for p in self.model.parameters() if not self._saves_trainable_only or p.requires_grad)

    def _facts(self) -> dict[str, Any]:
        facts = RunFacts(
            step=self.state.global_step,
            epoch=self.state.epoch,
            position=self.data_position.facts(self.health.bad_rows.of_epoch()),
            per_device_train_batch_size=self._train_batch_size,
            sharding=self.strategy.name,
            rows=self.strategy.rows,
            frozen_fingerprint=self.keeper.frozen_fingerprint,
            stage=getattr(self, "stage", None),
            trains=None if self.freeze_plan is None else self.freeze_plan.describe(),
        )
        return facts.content(self.args, self.bare_model)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder, model = Path(output_dir or self.args.output_dir), self.bare_model
        if self.keeper.writer.is_later and loss_state.can_save_later(model):
            if self.args.should_save:
                loss_state.save_description(model, self._processor, self.args, folder)
                loss_state.save_later(model, state_dict, folder, self.keeper.writer)
            return
        with loss_state.without_secrets(self.args):
            if not self._keeps_adapters_alone:
                return super()._save(output_dir, state_dict)
            agreed.together(partial(super()._save, output_dir, state_dict))
        merge.complete_adapters(self.bare_model, state_dict, folder, self._processor, self.args.should_save)

    def _save_description(self, folder: Path) -> None:
        if self.args.should_save:
            loss_state.save_description(self.bare_model, self._processor, self.args, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        saves, folder, writer = self.args.should_save, Path(output_dir), self.keeper.writer
        with loss_state.loss_state_apart(self.loss, self.optimizer, save_to=output_dir if saves else None):
            is_saved = True
            if self._saves_optimizer_by_name and self.strategy.has_engine:
                self.strategy.save_engine(self.model_wrapped, folder)
            elif self._saves_optimizer_by_name:
                trainable.save_optimizer(
                    self.model, self.optimizer, folder, self.args, self._saves_shards, self.keeper.writer
                )
            elif not self._has_own_arguments or not self.strategy.save_optimizer(
                self.model, self.optimizer, folder, saves, writer
            ):
                super()._save_optimizer_and_scheduler(output_dir)
                is_saved = False
            if is_saved and saves:
                torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
        if self.chunk_budget is not None and saves:
            loss_state.save_budget(self.chunk_budget, output_dir)
        self.strategy.save(self.model_wrapped, folder, self.args, writer)
        if saves:
            self.data_position.save(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        before = getattr(self, "push_in_progress", None)
        is_free = self.args.hub_always_push or before is None or before.is_done()
        if self._has_own_arguments and self.is_world_process_zero() and self.args.hub_strategy != "end" and is_free:
            hub.copy_model(Path(checkpoint_folder), Path(self.args.output_dir))
        with loss_state.without_secrets(self.args):
            super()._push_from_checkpoint(checkpoint_folder)

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        self.keeper.background.collect()
        super()._maybe_log_save_evaluate(*arguments, **options)

    def _finalize_training(self, *arguments: Any):
        self.keeper.background.collect(wait=True)
        if not self._has_own_arguments:
            return super()._finalize_training(*arguments)
        if self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = resume.best_checkpoint(self.args, self.state.best_model_checkpoint)
        # With save_total_limit=1 Trainer would now delete every folder but the best, complete and newest or not.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*arguments)
        finally:
            self.args.save_total_limit = limit

    # ---- the model that a run ends with ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if not (self._save_model_of_checkpoint(folder) if _internal_call else self._save_final_model(folder)):
            super().save_model(output_dir, _internal_call)
        elif self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_model_of_checkpoint(self, folder: Path) -> bool:
        """False where Trainer does it."""
        if self._saves_trainable_only:
            self._save_description(folder)
            self._save_trainable(folder, self._saves_shards)
        elif self._saves_shards:  # the weights follow in their own format
            self._save_description(folder)
        elif self.strategy.split:
            self._save_whole(folder)
        else:
            return False
        return True

    def _save_final_model(self, folder: Path) -> bool:
        """False where Trainer does it."""
        if not self.saves_complete_model:
            agreed.together(lambda: self._save_description(folder))
            agreed.together(lambda: self._save_trainable(folder, is_sharded=False))
            self._commit_model(folder, [trainable.WEIGHTS, trainable.FROZEN])
        elif self._keeps_adapters_alone:
            if self._saves_shards:
                self._save(str(folder), state_dict=self.whole_weights())
            else:
                super().save_model(str(folder), _internal_call=True)  # without its push
            self._commit_model(folder, merge.ADAPTER_FILES)
        elif self._merges_adapters:
            if self.args.should_save:
                merge.save_merged(self.bare_model, self.processing_class, folder)
        elif self._saves_shards or self.strategy.split:
            self._save_whole(folder)
        else:
            return False
        return True

    def _save_whole(self, folder: Path) -> None:
        whole = self.whole_weights()
        with self.strategy.saving_whole(self.model):
            self._save(str(folder), state_dict=whole)

    def _save_trainable(self, folder: Path, is_sharded: bool) -> None:
        digests = self.keeper.frozen_digests or {}
        trainable.save_weights(
            self.model,
            self.freeze_plan.saved,
            digests,
            folder,
            self.args.should_save,
            is_sharded,
            self.keeper.writer,
        )

    def _commit_model(self, folder: Path, names: list[str]) -> None:
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            commit.commit_model(folder, names, self._facts())

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict on the first rank, also when it is sharded. Every rank calls it."""
        return self.strategy.whole_weights(self.model, keep=self.args.should_save)

    # ---- resuming ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any):
        if not self._has_own_arguments:
            with self.data_position.training(resume_from_checkpoint):
                return super().train(resume_from_checkpoint, *arguments, **options)
        if self.args.save_full_model:
            merge.check_can_save_merged(self.bare_model, self.strategy.forwards_are_collective)
        if self._saves_trainable_only:
            self.keeper.fingerprint_frozen(self.bare_model, self.freeze_plan.saved)
        resume_from_checkpoint = self.keeper.resume(
            resume_from_checkpoint,
            self.bare_model,
            self.strategy,
            load_adapters=lambda model, folder: super(CheckpointHooks, self)._load_from_checkpoint(str(folder), model),
            has_scaler=getattr(self.accelerator, "scaler", None) is not None,
            is_search=self.hp_search_backend is not None,
        )
        parallel, why_fixed = self.strategy.rows.size, self.strategy.fixed_accumulation
        learning_rate.keep_effective_batch(self.args, resume_from_checkpoint, parallel, why_fixed)
        learning_rate.scale(self.args, parallel)
        with self.keeper.background.ended(), self.data_position.training(resume_from_checkpoint):
            return super().train(resume_from_checkpoint, *arguments, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._saves_trainable_only:
            self._load_trainable(model or self.model, resume_from_checkpoint)
        elif not self._load_by_own_names(resume_from_checkpoint):
            safe_reading.check(Path(resume_from_checkpoint), self._trusts_checkpoints)
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_trainable(self, model: nn.Module, folder: str) -> None:
        trainable.load_weights(model, self.freeze_plan.saved, Path(folder), self._trusts_checkpoints)

    def _load_by_own_names(self, folder: str) -> bool:
        """False where the folder has the names of memory, or FSDP reads its own format."""
        if self.strategy.load_whole(self.model, folder):
            return True
        return not self.strategy.reads_own_format and weights.load_in_memory_names(self.bare_model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        given = learning_rate.given(self.optimizer, self.lr_scheduler) if self._has_own_arguments else None
        apart = loss_state.loss_state_apart(self.loss, self.optimizer, load_from=checkpoint)
        with apart:
            is_empty = self.strategy.has_no_optimizer_state(checkpoint)
            if self._saves_optimizer_by_name or is_empty:
                if not self.strategy.has_engine and not is_empty:  # DeepSpeed's engine has read all of it
                    trainable.load_optimizer(self.model, self.optimizer, Path(checkpoint), self._trusts_checkpoints)
                scheduler = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
                self.lr_scheduler.load_state_dict(scheduler)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
        if given is not None:
            learning_rate.take_given(self.optimizer, self.lr_scheduler, given)
        if self.chunk_budget is not None:
            loss_state.load_budget(self.chunk_budget, checkpoint)
        self.strategy.load(self.model_wrapped, checkpoint, self.args)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._has_own_arguments:
            if resume.draws_anew(self.args, self.state.global_step, checkpoint, self.strategy.rows):
                return
        super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._saves_trainable_only and not self.strategy.has_engine:
            self._load_trainable(self.model, best)
        elif self.strategy.has_engine or not self._load_by_own_names(best):
            safe_reading.check(Path(best), self._trusts_checkpoints)
            super()._load_best_model()
        loss_state.load_loss(self.loss, best)
