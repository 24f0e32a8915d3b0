"""Where a run stands in its data, so that another batch size, accumulation or number of processes goes on from there.

(1) the position is an epoch and the rows of it that were used, of all ranks together, which are always the beginning
    of the epoch's order
(2) a checkpoint's manifest holds the position, the batch it was made with, and what the order depends on: seed,
    number of rows, a fingerprint of the data. Other data are refused, unless allow_changed_data says that it is meant
(3) an unchanged run resumes as Trainer does, bit for bit. A changed one takes the rest of the order of the epoch it
    stopped in, in its own batches, and whole epochs from then on; steps and schedule are counted anew for what is left

data/epoch_order.py draws and cuts the order. Where that depends on the batch, the epoch that was begun keeps its
order, and a manifest holds the order's digest: a sampler that gives another one when it is asked again is refused.
Streams of `datasets` know their place themselves (data/stream_order.py); here it is asked for, kept and given back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker
from transformers.utils import logging

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.data import epoch_order, stream_order, stream_readers
from hf_dist_ext.data.epoch_order import Begun, EpochBatches, StandIn
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives

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
    """Of columns, length and rows spread over a `datasets.Dataset`, by content; of a stream what its order depends on;
    None for other kinds."""
    if stream_readers.is_stream(dataset):
        return stream_readers.fingerprint(dataset)
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return None
    raw, count = dataset.with_format("arrow"), len(dataset)  # as they are stored: nothing in them is decoded
    found = hashlib.blake2b(f"{sorted(dataset.column_names)} {count}".encode(), digest_size=16)
    for i in sorted({i * (count - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)} if count else ()):
        (row,) = raw[i].to_pylist()
        found.update(repr(sorted(row.items())).encode())
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
    if stream_readers.is_stream(dataset):
        words["content"] = "the stream has other columns or shards, or is shuffled with another seed"
    found = "; ".join(words[name] for name in changed)
    if not args.allow_changed_data:
        raise UsageError(
            f"{folder} can not be continued on these data: {found}, so rows would be repeated and others skipped. "
            "Restore them, or set allow_changed_data=true."
        )
    if trainer.is_world_process_zero():
        logger.warning(f"allow_changed_data: {found}; rows are repeated or skipped in the epoch that was begun.")


# ---- (3) ----


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
    _place: stream_order.StreamState | None = None  # of a stream in one order; that of the last batch that was used
    _order: EpochBatches | None = None  # of the present epoch; None of a stream
    _begun: dict[str, Any] = {}  # what a checkpoint tells of the epoch in which it was written, until it is read
    _dealer: stream_order.Dealer | None = None  # of the loader that was made last
    _resumed_from: str | None = None  # until the random states are those of this checkpoint

    @property
    def rows_per_micro_batch(self) -> int:
        """Of all ranks together."""
        return self.get_total_train_batch_size(self.args) // self.args.gradient_accumulation_steps

    @property
    def reads_in_one_order(self) -> bool:
        config = self.accelerator.dataloader_config
        return (
            hasattr(self.args, "allow_changed_data")
            and stream_readers.is_stream(self.train_dataset)
            and not config.dispatch_batches
            and not config.split_batches
        )

    def position_facts(self) -> dict[str, Any]:
        """For the manifest; a finished epoch is the beginning of the next."""
        now = self.position
        how = {
            "dataloader_num_workers": self.args.dataloader_num_workers,
            "stream_order": "one" if self.reads_in_one_order else None,
        }
        if self._rows_of_epoch is not None and now.rows >= self._rows_of_epoch:
            now = replace(now, epoch=now.epoch + 1, rows=0, window=self.rows_per_micro_batch)
        elif now.rows:
            how["order_digest"] = None if self._order is None else self._order.digest()
            how["bad_rows"] = self.bad_rows_of_epoch()
        return {"samples_seen": now.samples, "position": asdict(now)} | how

    def take_begun(self, name: str) -> Any:
        """What the resumed checkpoint tells of the epoch it was written in; once, as the next epoch is another."""
        return self._begun.pop(name, None)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any):
        self.position, self._resumed = Position(window=self.rows_per_micro_batch), None
        self._place, self._resumed_from, self._order, self._begun = None, None, None, {}
        if self.reads_in_one_order:
            self._check_stream()
            self._place = stream_order.StreamState()
        content = manifest.read(Path(resume_from_checkpoint)) if resume_from_checkpoint else None
        if content and "position" in content and hasattr(self.args, "allow_changed_data"):
            _check_data(self, content, resume_from_checkpoint)
            if self.args.ignore_data_skip:  # the data begin anew
                samples = content["position"]["samples"]
                self.position = replace(self.position, samples=samples, is_regular=False)
            else:
                self._continue(content, resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *arguments, **options)
        finally:
            self._place = None

    def _continue(self, content: dict[str, Any], folder: str) -> None:
        args, found = self.args, Position(**content["position"])
        now = {
            "data_parallel_size": self.rows_per_micro_batch // self._train_batch_size,
            "per_device_train_batch_size": self._train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        }
        if isinstance(self.train_dataset, IterableDataset) and self._place is None:  # else workers change nothing
            now["dataloader_num_workers"] = args.dataloader_num_workers
        before = {"data_parallel_size": content["world_size"]} | content  # older manifests
        changed = [name for name in now if before.get(name, now[name]) != now[name]]
        self.position, self._begun = found, {name: content.get(name) for name in ("order_digest", "bad_rows")}
        if stream_readers.is_stream(self.train_dataset):
            self._check_reading(content, changed, folder)
        is_unchanged = found.is_regular and not changed
        if self._place is not None:
            self._place = stream_order.load(folder)
            self._resumed_from = folder if content["world_size"] == args.world_size else None
            if content["data_fingerprint"] != data_fingerprint(self.train_dataset):  # allow_changed_data
                self._place = replace(self._place, states=None)
        elif not is_unchanged:
            self.position = self._resumed = replace(found, is_regular=False)
            self._resumed_step = content["step"]
        if changed and self.is_world_process_zero():
            logger.warning(
                f"{' and '.join(changed)} changed since the checkpoint: epoch {found.epoch} goes on behind its first "
                f"{found.rows} rows, none is repeated or skipped."
            )

    # ---- a stream of `datasets` ----

    def _check_stream(self) -> None:
        """What would make processes or epochs disagree about the one order."""
        by_epoch = [
            name
            for name in ("eval_strategy", "save_strategy", "logging_strategy")
            if getattr(self.args, name) == "epoch"
        ]
        if by_epoch:
            raise UsageError(
                f"{by_epoch[0]}='epoch' with a stream: its epochs follow each other inside of a batch. Set it to "
                "'steps'."
            )
        if self.args.world_size == 1:
            return
        if getattr(self.train_dataset, "_distributed", None) is not None:
            raise UsageError(
                "the stream was split by split_dataset_by_node, and would be split again here. Give every process "
                "the whole stream."
            )
        prints: list[Any] = [None] * self.args.world_size
        dist.all_gather_object(prints, data_fingerprint(self.train_dataset))
        if len(set(prints)) > 1:
            raise UsageError(
                "the stream is not the same on every process: other columns or shards, or shuffled without a seed. "
                "Give shuffle(seed=...)."
            )

    def _check_reading(self, content: dict[str, Any], changed: list[str], folder: str) -> None:
        was_one = content.get("stream_order") == "one"
        if was_one != self.reads_in_one_order:
            how = "in one order" if was_one else "through accelerate's dispatch_batches or split_batches"
            raise UsageError(
                f"{folder} read its stream {how}, which this run would not: its place is not one of this order. Set "
                "accelerator_config as it was."
            )
        if changed and not was_one:
            raise UsageError(
                f"{folder} can not be continued with another {changed[0]}: which process and loader worker reads a "
                "row of the stream depends on it. Set it as it was; without dispatch_batches and split_batches in "
                "accelerator_config it can be changed at any time."
            )

    def _in_one_order(self) -> Any:
        """The loader of this rank's rows; accelerate's part is to move its batches to the device."""
        args, shares = self.args, self.rows_per_micro_batch // self._train_batch_size
        self._dealer = stream_order.Dealer(
            self.train_dataset,
            self._train_batch_size,
            stream_order.Ranks(args.process_index, args.world_size, shares),
            self._place or stream_order.StreamState(),
            args.dataloader_num_workers,
            args.dataloader_multiprocessing_context,
            args.allow_changed_data,
            args.device,
        )
        loader = stream_order.loader(
            self._dealer,
            self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.accelerator.device_placement,
            rng_types=list(self.accelerator.rng_types or ()),
            non_blocking=self.accelerator.non_blocking,
        )

    def _used(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._place = self._dealer.states.popleft()
            yield batch

    # ---- the order ----

    def get_train_dataloader(self):
        if not self.reads_in_one_order:
            with self._rest_of_stream():
                loader = super().get_train_dataloader()
            if hasattr(self.args, "allow_changed_data"):
                self._own_order(loader)
            return loader
        return self._in_one_order()

    def _own_order(self, loader: Any) -> None:
        begun, args = self._resumed, self.args
        if isinstance(loader.dataset, IterableDataset):
            return
        fills = "filled" if self.accelerator.dataloader_config.even_batches else "uneven"
        epoch_order.take_over(
            loader,
            seed=args.seed if args.data_seed is None else args.data_seed,
            last=fills if getattr(self, "loss", None) is None else "split",
            begun=None if begun is None else Begun(begun.epoch, begun.rows, begun.window),
        )
        batches = epoch_order.batches_of(loader)
        if begun is not None and not isinstance(batches, EpochBatches):
            raise UsageError(
                f"{type(getattr(batches, 'sampler', None) or batches).__name__} can not go on with another batch: it "
                "makes the batches itself, or has no length. Resume with the checkpoint's batch size, accumulation "
                "and number of processes."
            )

    @contextmanager
    def _rest_of_stream(self) -> Iterator[None]:
        dataset = self.train_dataset
        if self._resumed is None or not isinstance(dataset, IterableDataset):
            yield
            return
        if self.args.dataloader_num_workers:
            raise UsageError(
                "this stream can not go on with another batch and dataloader_num_workers: its workers' shares are not "
                "known. Set dataloader_num_workers=0, resume with the checkpoint's batch, or make it a "
                "datasets.IterableDataset."
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
        rows, whole_epochs = self._rows_in(dataloader), args.num_train_epochs - self._resumed.epoch - 1
        left = rows - self._resumed.rows + math.ceil(min(0, whole_epochs) * rows)
        begun = math.ceil(max(0, left) / self.rows_per_micro_batch)
        max_steps = self._resumed_step + math.ceil(begun / args.gradient_accumulation_steps)
        max_steps += math.ceil(max(0, whole_epochs) * updates)
        return (epochs, updates, *others, max_steps)

    def _init_training_state(self, max_steps: int, updates: int, num_epochs: int, *more: Any):
        epochs, batches = super()._init_training_state(max_steps, updates, num_epochs, *more)
        if self._resumed is not None or self._place is not None:
            if self.state.global_step >= max_steps:
                return num_epochs, 0  # nothing is left
            return (0 if self._resumed is None else self._resumed.epoch), 0  # a stream itself begins at its place
        if stream_readers.is_stream(self.train_dataset) and self.position.samples:
            # Trainer takes the steps of all epochs for batches of the first.
            return self.position.epoch, self.position.rows // self.rows_per_micro_batch
        if epochs or batches:  # also of a stock checkpoint
            rows = batches * self.rows_per_micro_batch
            samples = self.position.samples or self.state.global_step * self.get_total_train_batch_size(self.args)
            self.position = replace(self.position, epoch=epochs, rows=rows, samples=samples)
        return epochs, batches

    def _run_epoch(self, **options: Any) -> None:
        if self._place is not None:
            # Its only epoch; `state.epoch` goes on where it was, as a share of max_steps.
            done = self.state.global_step / self.state.max_steps
            return super()._run_epoch(**options | {"epoch": done, "epochs_trained": done})
        epoch, batch = options["epoch"], self.rows_per_micro_batch
        if epoch != self.position.epoch:
            self.position = replace(self.position, epoch=epoch, rows=0, window=batch)
        order = epoch_order.batches_of(options["train_dataloader"])
        if hasattr(order, "set_epoch"):
            order.set_epoch(epoch)  # whatever accelerate has wrapped it in
        self._order = order if isinstance(order, EpochBatches) else None
        if self._order is not None:
            self._check_order(self._order)
        rows = self._rows_in(options["train_dataloader"])
        batches = options["steps_in_epoch"]
        if self._resumed is not None and epoch == self._resumed.epoch and rows is not None:
            left = (rows - self._resumed.rows) / batch
            batches = math.floor(left) if self.args.dataloader_drop_last else math.ceil(left)
            updates = max(1, math.ceil(batches / self.args.gradient_accumulation_steps))
            options |= {"steps_in_epoch": batches, "num_update_steps_per_epoch": updates}
        if rows is not None:
            self._rows_of_epoch = min(rows, self._begin_of(epoch) + batches * batch)
        super()._run_epoch(**options)

    def _rows_in(self, loader: Any) -> int | None:
        """Of a whole epoch."""
        order = epoch_order.batches_of(loader)
        if isinstance(order, EpochBatches):
            return order.num_rows
        return len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None

    def _check_order(self, order: EpochBatches) -> None:
        """The order of the epoch is that of all processes, and the one that a resumed run has begun."""
        self.position = replace(self.position, window=order.made_for(order.epoch))
        digest, sampler = order.digest(), type(order.sampler).__name__
        as_it_should = (
            "Let the order follow from `set_epoch(epoch)`, from a global generator (torch's, numpy's, Python's), or "
            "from a torch.Generator in the attribute `generator`."
        )
        found = collectives.exchange([int(digest[:15], 16)], self.args.device)
        if found.count(found[0]) != len(found):
            raise UsageError(
                f"the processes do not draw the same order of epoch {order.epoch} from {sampler}, so rows would be "
                f"repeated and others skipped. {as_it_should}"
            )
        begun = self.take_begun("order_digest")
        if begun is None or begun == digest or self.position.rows == 0:
            return
        text = (
            f"the order of epoch {order.epoch} that {sampler} gives now is not the one that the checkpoint has begun, "
            "so rows would be repeated and others skipped"
        )
        if not self.args.allow_changed_data:
            raise UsageError(f"{text}. {as_it_should} Or set allow_changed_data=true.")
        if self.is_world_process_zero():
            logger.warning(f"allow_changed_data: {text}.")

    def _begin_of(self, epoch: int) -> int:
        return self._resumed.rows if self._resumed is not None and epoch == self._resumed.epoch else 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any):
        if self._place is not None:
            epoch_iterator = self._used(epoch_iterator)
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._order is not None:
            for i, batch in enumerate(batches):
                first = self.position.rows + i * self.rows_per_micro_batch
                if isinstance(batch, Mapping) and self._order.is_stand_in(first):
                    batches[i] = StandIn(batch)
        rows = len(batches) * self.rows_per_micro_batch
        if self._rows_of_epoch is not None:
            rows = min(rows, max(0, self._rows_of_epoch - self.position.rows))
        self.position = replace(self.position, rows=self.position.rows + rows, samples=self.position.samples + rows)
        if self._place is not None:
            self.position = replace(self.position, epoch=self._place.epoch, rows=self._place.rows)
            if self._resumed_from is not None:  # starting a loader's workers draws a number
                self._load_rng_state(self._resumed_from)
                self._resumed_from = None
        return batches, items
