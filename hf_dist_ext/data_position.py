"""Where a run stands in its data, so that another batch size, accumulation or number of processes goes on from there.

(1) the position is an epoch and the rows of it that were used, of all ranks together; accelerate deals the rows of an
    epoch's order to the ranks in turn, so what was used is always the beginning of that order
(2) a checkpoint's manifest holds the position, the batch it was made with, and what the order depends on: seed,
    number of rows, a fingerprint of the data. Other data are refused, unless allow_changed_data says that it is meant
(3) an unchanged run resumes as Trainer does, bit for bit. A changed one takes the rest of the order of the epoch it
    stopped in, in its own batches, and whole epochs from then on; steps and schedule are counted anew for what is left

The order of an epoch without duplicates in a batch depends on the batch; the epoch that was begun keeps its order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler
from transformers import Trainer
from transformers.utils import logging

from . import manifest
from .errors import UsageError
from .sampling import NoDuplicatesSampler

logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # that a fingerprint looks at


@dataclass(frozen=True)
class Position:
    """`rows` of epoch `epoch` were used; its order was made for global batches of `window` rows. `samples`: rows of
    the whole run. `is_regular`: every step so far had the present run's batch, so that Trainer can find the place."""

    epoch: int = 0
    rows: int = 0
    window: int = 0
    samples: int = 0
    is_regular: bool = True


# ---- (2) ----


def data_fingerprint(dataset: Any) -> str | None:
    """Of columns, length and rows spread over a `datasets.Dataset`, by content; None for other kinds."""
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return None
    from datasets import Image

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
    raw, count = dataset.with_format(None), len(dataset)
    found = hashlib.blake2b(f"{sorted(dataset.column_names)} {count}".encode(), digest_size=16)
    for i in sorted({i * (count - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)} if count else ()):
        found.update(repr(sorted(raw[i].items())).encode())
    return found.hexdigest()


def _check_data(trainer: PositionHooks, content: dict[str, Any], folder: str) -> None:
    args, dataset = trainer.args, trainer.train_dataset
    now = {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "rows": len(dataset) if hasattr(dataset, "__len__") else None,
        "content": data_fingerprint(dataset),
    }
    before = {
        "seed": content["seed"] if content["data_seed"] is None else content["data_seed"],
        "rows": content["data_length"],
        "content": content["data_fingerprint"],
    }
    changed = [name for name in now if before[name] is not None and now[name] != before[name]]
    if not changed:
        return
    words = {
        "seed": f"the seed of the order was {before['seed']}, now it is {now['seed']}",
        "rows": f"the training set had {before['rows']} rows, now it has {now['rows']}",
        "content": "the rows of the training set are others",
    }
    found = "; ".join(words[name] for name in changed)
    if not args.allow_changed_data:
        raise UsageError(
            f"{folder} can not be continued on these data: {found}, so rows would be repeated and others skipped. "
            "Restore them, or set allow_changed_data=true."
        )
    if trainer.is_world_process_zero():
        logger.warning(f"allow_changed_data: {found}; rows are repeated or skipped in the epoch that was begun.")


# ---- (3) ----


class RestOfOrder(Sampler[int]):
    """The order of a sampler without the first `rows` of epoch `epoch`; later epochs are `after`'s, whole."""

    def __init__(self, begun: Sampler[int], after: Sampler[int], epoch: int, rows: int):
        self.begun, self.after, self.first, self.rows = begun, after, epoch, rows
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for sampler in (self.begun, self.after):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if self.epoch != self.first:
            yield from self.after
            return
        for i, row in enumerate(self.begun):
            if i >= self.rows:
                yield row

    def __len__(self) -> int:
        return len(self.after)  # of a whole epoch; PositionHooks knows how many batches the begun one has left


class RestOfStream(IterableDataset):
    """A stream without the first `rows` of epoch `epoch`."""

    def __init__(self, stream: Any, epoch: int, rows: int):
        self.stream, self.first, self.rows, self.epoch = stream, epoch, rows, epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        begun = self.epoch == self.first
        if begun and hasattr(self.stream, "skip"):
            yield from self.stream.skip(self.rows)
            return
        for i, row in enumerate(self.stream):
            if not begun or i >= self.rows:
                yield row


class PositionHooks(Trainer):
    """Trainer's hooks around the position; without DistTrainingArguments everything is Trainer's."""

    position = Position()
    _resumed: Position | None = None  # (3): set when the run was changed
    _rows_of_epoch: int | None = None

    @property
    def rows_per_micro_batch(self) -> int:
        """Of all ranks together."""
        return self.get_total_train_batch_size(self.args) // self.args.gradient_accumulation_steps

    def position_facts(self) -> dict[str, Any]:
        """For the manifest; a finished epoch is the beginning of the next."""
        now = self.position
        if self._rows_of_epoch is not None and now.rows >= self._rows_of_epoch:
            now = replace(now, epoch=now.epoch + 1, rows=0, window=self.rows_per_micro_batch)
        return {"samples_seen": now.samples, "position": asdict(now)}

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any):
        self.position, self._resumed = Position(window=self.rows_per_micro_batch), None
        content = manifest.read(Path(resume_from_checkpoint)) if resume_from_checkpoint else None
        if content and "position" in content and hasattr(self.args, "allow_changed_data"):
            _check_data(self, content, resume_from_checkpoint)
            self._continue(content)
        return super().train(resume_from_checkpoint, *arguments, **options)

    def _continue(self, content: dict[str, Any]) -> None:
        args, found = self.args, Position(**content["position"])
        names = ("world_size", "per_device_train_batch_size", "gradient_accumulation_steps")
        now = {"world_size": args.world_size, "per_device_train_batch_size": self._train_batch_size}
        now["gradient_accumulation_steps"] = args.gradient_accumulation_steps
        self.position = found
        if found.is_regular and all(content[name] == now[name] for name in names):
            return
        self.position = self._resumed = replace(found, is_regular=False)
        self._resumed_step = content["step"]
        if self.is_world_process_zero():
            logger.warning(
                f"the batch is not the one of the checkpoint: epoch {found.epoch} goes on behind its first "
                f"{found.rows} rows, none is repeated or skipped."
            )

    # ---- the order ----

    def placed(self, sampler: Sampler[int] | None) -> Sampler[int] | None:
        """A training sampler that begins where the resumed run stopped."""
        if self._resumed is None or sampler is None:
            return sampler
        if type(sampler) is RandomSampler:  # what accelerate would make of it; it does not look inside ours
            sampler = SeedableRandomSampler(
                sampler.data_source,
                generator=getattr(sampler, "generator", None) or torch.Generator(),
                data_seed=self.accelerator.dataloader_config.data_seed,
            )
        begun = sampler
        if isinstance(sampler, NoDuplicatesSampler) and sampler.window != self._resumed.window:
            begun = NoDuplicatesSampler(sampler.ids, self._resumed.window, sampler.seed)
        if not isinstance(sampler, SeedableRandomSampler | NoDuplicatesSampler | SequentialSampler):
            raise UsageError(
                f"{type(sampler).__name__} can not go on with another batch: its order is not known outside of a run. "
                "Resume with the checkpoint's batch size, accumulation and number of processes."
            )
        return RestOfOrder(begun, sampler, self._resumed.epoch, self._resumed.rows)

    def get_train_dataloader(self):
        with self._rest_of_stream():
            return super().get_train_dataloader()

    @contextmanager
    def _rest_of_stream(self) -> Iterator[None]:
        dataset = self.train_dataset
        if self._resumed is None or not isinstance(dataset, IterableDataset):
            yield
            return
        if self.args.dataloader_num_workers:
            raise UsageError(
                "a stream can not go on with another batch and dataloader_num_workers: its workers' shares are not "
                "known. Set dataloader_num_workers=0, or resume with the checkpoint's batch."
            )
        self.train_dataset = RestOfStream(dataset, self._resumed.epoch, self._resumed.rows)
        try:
            yield
        finally:
            self.train_dataset = dataset

    # ---- Trainer's counts ----

    def set_initial_training_values(self, args: Any, dataloader: Any):
        values = super().set_initial_training_values(args, dataloader)
        if self._resumed is None:
            return values
        epochs, updates, *others, max_steps = values
        if args.max_steps > 0:  # as many epochs as the steps that are left may need
            epochs = self._resumed.epoch + 1 + math.ceil(max(0, max_steps - self._resumed_step) / updates)
            return (epochs, updates, *others, max_steps)
        # Behind the steps that were made: those of the begun epoch's rest, and whole epochs from then on.
        rows, whole_epochs = len(self.train_dataset), args.num_train_epochs - self._resumed.epoch - 1
        left = rows - self._resumed.rows + math.ceil(min(0, whole_epochs) * rows)
        begun = math.ceil(max(0, left) / self.rows_per_micro_batch)
        max_steps = self._resumed_step + math.ceil(begun / args.gradient_accumulation_steps)
        max_steps += math.ceil(max(0, whole_epochs) * updates)
        return (epochs, updates, *others, max_steps)

    def _init_training_state(self, max_steps: int, updates: int, *more: Any):
        epochs, batches = super()._init_training_state(max_steps, updates, *more)
        if self._resumed is not None:
            return self._resumed.epoch, 0
        if epochs or batches:  # also of a stock checkpoint
            rows = batches * self.rows_per_micro_batch
            samples = self.position.samples or self.state.global_step * self.get_total_train_batch_size(self.args)
            self.position = replace(self.position, epoch=epochs, rows=rows, samples=samples)
        return epochs, batches

    def _run_epoch(self, **options: Any) -> None:
        epoch, batch = options["epoch"], self.rows_per_micro_batch
        if epoch != self.position.epoch:
            self.position = replace(self.position, epoch=epoch, rows=0, window=batch)
        has_length = hasattr(self.train_dataset, "__len__")
        rows = len(self.train_dataset) if has_length else None
        batches = options["steps_in_epoch"]
        if self._resumed is not None and epoch == self._resumed.epoch and has_length:
            left = (rows - self._resumed.rows) / batch
            batches = math.floor(left) if self.args.dataloader_drop_last else math.ceil(left)
            updates = max(1, math.ceil(batches / self.args.gradient_accumulation_steps))
            options |= {"steps_in_epoch": batches, "num_update_steps_per_epoch": updates}
        if has_length:
            self._rows_of_epoch = min(rows, self._begin_of(epoch) + batches * batch)
        super()._run_epoch(**options)

    def _begin_of(self, epoch: int) -> int:
        return self._resumed.rows if self._resumed is not None and epoch == self._resumed.epoch else 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any):
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        rows = len(batches) * self.rows_per_micro_batch
        if self._rows_of_epoch is not None:
            rows = min(rows, max(0, self._rows_of_epoch - self.position.rows))
        self.position = replace(self.position, rows=self.position.rows + rows, samples=self.position.samples + rows)
        return batches, items
