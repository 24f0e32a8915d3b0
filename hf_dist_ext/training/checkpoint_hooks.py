"""Trainer's hooks for checkpoints, wired to the parts; the base class of `DistTrainer`.

(1) saving: `commit` around it all, `trainable_checkpoint` for runs with frozen parts, `checkpointing` for the loss
(2) the model that a run ends with: never nothing, complete unless the run was of frozen parts
(3) resuming: `resume` says from what, the same parts read it

With transformers' own TrainingArguments all of it is Trainer's, but for the loss's parameters and the token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from hf_dist_ext.checkpoints import async_save, commit, hub, loss_state, merge, resume, trainable
from hf_dist_ext.checkpoints.safe_reading import trusted_reading
from hf_dist_ext.strategies import agreed, collectives, ddp, tensor_parallel, zero_checkpoint
from hf_dist_ext.training import learning_rate
from hf_dist_ext.training.arguments import DistTrainingArguments

logger = logging.get_logger(__name__)


class CheckpointHooks(Trainer):
    _put_off: list | None = None  # while a checkpoint is written: the pushes that wait for its commit
    _as_given: Mapping[str, Any] = {}  # and arguments that are overridden for as long
    _committed_step: int | None = None  # of this run's last checkpoint
    _run: Mapping[str, Any] | None = None  # which run its checkpoints are of (checkpoints/manifest.py)
    _saving: async_save.Saving | None = None  # a save in flight
    _saving_group: Any = None  # what it talks over
    _has_said_sync = False  # that the memory has no room for the copy of one
    _frozen_digests: dict[str, str] | None = None  # of the weights that checkpoints leave out
    _split: tensor_parallel.SplitModel | None = None  # a model under tensor parallelism

    @property
    def _has_own_arguments(self) -> bool:
        return isinstance(self.args, DistTrainingArguments)

    @property
    def _saves_trainable_only(self) -> bool:
        return self.freeze_plan is not None and self._has_own_arguments

    @property
    def _saves_optimizer_by_name(self) -> bool:
        """As runs with frozen parts do; Trainer can not write that of a model under tensor parallelism."""
        return self._saves_trainable_only or self._split is not None

    @property
    def saves_complete_model(self) -> bool:
        """Whether `save_model` ends with a folder that from_pretrained loads: not when only a part was trained, unless
        it was asked for, or the rest is in no folder and on no hub."""
        return not self._saves_trainable_only or self.args.save_full_model or commit.base_model(self._bare) is None

    @property
    def _merges_adapters(self) -> bool:
        is_wanted = self._saves_trainable_only or (self._has_own_arguments and self.args.save_full_model)
        return is_wanted and merge.has_adapters(self)

    @property
    def _keeps_adapters_alone(self) -> bool:
        """Whether a folder holds the adapters of an `EmbeddingModel`, whose base lies somewhere, and no more."""
        if not self._has_own_arguments or self._saves_trainable_only or self.args.save_full_model:
            return False
        return merge.can_stand_alone(self._bare)

    @property
    def _bare(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # ---- (1) ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._committed_step == self.state.global_step:
            return  # asked for twice, as when an evaluation was left: to write it again would put it at risk
        with commit.committed(self, trial) if self._has_own_arguments else nullcontext():
            super()._save_checkpoint(model, trial)

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        async_save.collect(self)
        super()._maybe_log_save_evaluate(*arguments, **options)

    def _finalize_training(self, *arguments: Any):
        async_save.collect(self, wait=True)
        if self._has_own_arguments and self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = resume.best_checkpoint(self)
        # With save_total_limit=1 Trainer would now delete every folder but the best, complete and newest or not.
        with commit.put_off(self) if self._has_own_arguments else nullcontext():
            return super()._finalize_training(*arguments)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with loss_state.without_secrets(self.args, self._as_given):
            if not self._keeps_adapters_alone:
                return super()._save(output_dir, state_dict)
            agreed.together(partial(super()._save, output_dir, state_dict))
        merge.complete_adapters(self, Path(output_dir or self.args.output_dir), state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with loss_state.loss_state_apart(self, save_to=output_dir):
            if self._saves_optimizer_by_name:
                save_optimizer = trainable.save_optimizer
                if self.is_deepspeed_enabled:
                    save_optimizer = zero_checkpoint.save
                save_optimizer(self, Path(output_dir))
                if self.args.should_save:
                    torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))
            else:
                super()._save_optimizer_and_scheduler(output_dir)
        loss_state.save_budget(self, output_dir)
        ddp.save(self, output_dir)
        if self.args.should_save:
            self.data_position.save(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._put_off is not None:
            self._put_off.append(lambda: self._push_from_checkpoint(checkpoint_folder))
            return
        before = getattr(self, "push_in_progress", None)
        is_free = self.args.hub_always_push or before is None or before.is_done()
        if self._has_own_arguments and self.is_world_process_zero() and self.args.hub_strategy != "end" and is_free:
            hub.copy_model(Path(checkpoint_folder), Path(self.args.output_dir))
        with loss_state.without_secrets(self.args, self._as_given):
            super()._push_from_checkpoint(checkpoint_folder)

    # ---- (2) ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        is_sharded = self._has_own_arguments and trainable.is_sharded(self)
        if self._saves_trainable_only and (_internal_call or not self.saves_complete_model):
            if _internal_call:
                loss_state.save_description(self, folder)
                trainable.save_weights(self, folder)
            else:
                agreed.together(lambda: loss_state.save_description(self, folder))
                agreed.together(lambda: trainable.save_weights(self, folder, may_shard=False))
                commit.commit_model(self, folder, [trainable.WEIGHTS, trainable.FROZEN])
        elif is_sharded and _internal_call:  # the weights follow in their own format
            loss_state.save_description(self, folder)
            return
        elif self._keeps_adapters_alone and not _internal_call:
            merge.save_adapters(self, folder)
        elif self._merges_adapters and not _internal_call:
            merge.save_merged(self, folder)
        elif is_sharded or self._split is not None:
            whole = self.whole_weights()
            with tensor_parallel.saved_as_whole(self.model):
                self._save(str(folder), state_dict=whole)
        else:
            return super().save_model(output_dir, _internal_call)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict on the first rank, also when it is sharded. Every rank calls it."""
        if self._split is not None:
            return tensor_parallel.whole_weights(self.model, keep=self.args.should_save)
        return self.accelerator.get_state_dict(self.model)

    # ---- (3) ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any):
        self._committed_step = None
        if self._has_own_arguments and self.args.save_full_model:
            merge.check_can_save_merged(self)
        if self._saves_trainable_only and self._frozen_digests is None:
            self._frozen_digests = trainable.frozen_digests(self._bare, self.freeze_plan.saved)
        if self._has_own_arguments:
            resume_from_checkpoint = resume.choose(self, resume_from_checkpoint)
            learning_rate.keep_effective_batch(self.args, resume_from_checkpoint, self.is_deepspeed_enabled)
            learning_rate.scale(self.args, self.args.world_size // collectives.ranks_per_rows())
        with async_save.ended(self):
            return super().train(resume_from_checkpoint, *arguments, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._saves_trainable_only:
            trainable.load_weights(
                model or self.model, self.freeze_plan.saved, Path(resume_from_checkpoint), self.args.trust_checkpoint
            )
        elif not loss_state.load_embedding_model(self, resume_from_checkpoint):
            with trusted_reading(self._trusts):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        takes_given = checkpoint is not None and self._has_own_arguments
        given = learning_rate.given(self.optimizer, self.lr_scheduler) if takes_given else None
        with loss_state.loss_state_apart(self, load_from=checkpoint), trusted_reading(self._trusts):
            is_empty = checkpoint is not None and self.is_fsdp_enabled and _has_no_optimizer_state(checkpoint)
            if checkpoint is not None and (self._saves_optimizer_by_name or is_empty):
                if not self.is_deepspeed_enabled and not is_empty:  # DeepSpeed's engine has read all of it
                    trainable.load_optimizer(self, Path(checkpoint), self._trusts)
                scheduler = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
                self.lr_scheduler.load_state_dict(scheduler)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
        if given is not None:
            learning_rate.take_given(self.optimizer, self.lr_scheduler, given)
        loss_state.load_budget(self, checkpoint)
        ddp.load(self, checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._has_own_arguments or not resume.draws_anew(self, checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._saves_trainable_only and not self.is_deepspeed_enabled:
            trainable.load_weights(self.model, self.freeze_plan.saved, Path(best), self._trusts)
        elif self.is_deepspeed_enabled or not loss_state.load_embedding_model(self, best):
            with trusted_reading(self._trusts):
                super()._load_best_model()
        loss_state.load_loss(self, best)

    @property
    def _trusts(self) -> bool:
        return getattr(self.args, "trust_checkpoint", False)


def _has_no_optimizer_state(checkpoint: str) -> bool:
    """Whether FSDP saved an optimizer without any tensor, as plain SGD is: torch 2.13 fails to load it ("Expected
    device to be set" in torch/distributed/checkpoint/state_dict.py). Remove when torch loads it."""
    file = Path(checkpoint, "optimizer.bin")
    return file.is_file() and not torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state"]
