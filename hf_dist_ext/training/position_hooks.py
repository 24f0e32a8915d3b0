"""Trainer's hooks around the place in the data, each of which asks `DataPosition` (data/position.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from accelerate.data_loader import prepare_data_loader
from transformers import Trainer

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.data.position import DataPosition
from hf_dist_ext.strategies import collectives


class PositionHooks(Trainer):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.data_position = DataPosition(
            self.args,
            lambda: self.train_dataset,
            self._rows_of_micro_batch,
            self.accelerator.dataloader_config,
            splits_last_batch=getattr(self, "loss", None) is not None,
            exchange=partial(collectives.exchange, device=self.args.device),
            read_manifest=manifest.read,
        )

    def _rows_of_micro_batch(self) -> tuple[int, int]:
        """(those of this process, those of all together)"""
        everyone = self.get_total_train_batch_size(self.args) // self.args.gradient_accumulation_steps
        return self._train_batch_size, everyone

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any):
        with self.data_position.training(resume_from_checkpoint):
            return super().train(resume_from_checkpoint, *arguments, **options)

    def get_train_dataloader(self):
        position, dataset = self.data_position, self.train_dataset
        if position.reads_in_one_order:
            collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
            return _on_device(position.loader_in_one_order(collate), self.accelerator)
        self.train_dataset = position.rest_of_dataset()
        try:
            loader = super().get_train_dataloader()
        finally:
            self.train_dataset = dataset
        position.take_over(loader)
        return loader

    def set_initial_training_values(self, args: Any, dataloader: Any):
        return self.data_position.counts(super().set_initial_training_values(args, dataloader), dataloader)

    def _init_training_state(self, max_steps: int, updates: int, num_epochs: int, *more: Any):
        found = super()._init_training_state(max_steps, updates, num_epochs, *more)
        return self.data_position.first_batch(found, self.state, max_steps, num_epochs)

    def _run_epoch(self, **options: Any) -> None:
        epoch, loader, num_batches = (options[name] for name in ("epoch", "train_dataloader", "steps_in_epoch"))
        changed = self.data_position.begin_epoch(epoch, loader, num_batches, self.state)
        super()._run_epoch(**options | changed)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any):
        batches, items = super().get_batch_samples(self.data_position.used_of(epoch_iterator), num_batches, device)
        self.data_position.add(batches)
        checkpoint = self.data_position.take_random_states()
        if checkpoint is not None:
            self._load_rng_state(checkpoint)
        return batches, items


def _on_device(loader: Any, accelerator: Any) -> Any:
    """accelerate's part of a loader that knows its own rows: it moves the batches to the device."""
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types or ()),
        non_blocking=accelerator.non_blocking,
    )
