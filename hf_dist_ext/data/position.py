"""Where a run stands in its data, so that another batch size, accumulation or number of processes goes on from there.

(1) `RowsUsed` names an epoch and how many rows of it were used, of all ranks together. These rows are always the
    beginning of the epoch's order
(2) A checkpoint's manifest holds them, the batch it was made with, and what the order depends on (fingerprint.py)
(3) An unchanged run resumes as Trainer does, bit for bit. A changed run takes the rest of the order of the epoch in
    which it stopped, in its own batches, and whole epochs from then on. Its steps and its schedule are counted anew
    for what is left

order.py draws the order and cuts it into batches. Where the order depends on the batch, the epoch that was begun
keeps its order. The manifest holds a digest of it, and a sampler that later gives another order is an error. A stream
of `datasets` knows itself what was read of it (stream_order.py): its state is asked for, stored and given back here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch.utils.data import IterableDataset
from transformers.utils import logging

from hf_dist_ext.data import order, stream_order
from hf_dist_ext.data.fingerprint import check_same_data, data_fingerprint, length, seed_of_order
from hf_dist_ext.data.order import EpochBatches, GlobalBatches, OneSourceSampler, RowsUsed, StandIn
from hf_dist_ext.data.stream_order import Dealer, MixedDealer, StreamState
from hf_dist_ext.data.stream_readers import is_stream
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)


class RestOfStream(IterableDataset):
    """A stream that goes on in epoch `first` behind its first `rows` rows."""

    def __init__(self, stream: Any, first: int, rows: int):
        self.stream, self.first, self.rows, self.epoch = stream, first, rows, first

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        used = self.rows if self.epoch == self.first else 0
        if used and hasattr(self.stream, "skip"):
            return iter(self.stream.skip(used))
        return itertools.islice(self.stream, used, None)


class DataPosition:
    """The rows that a trainer has used, and how it goes on behind them. Trainer's hooks ask it.

    Args:
        run: the trainer. With transformers' own TrainingArguments everything is Trainer's.
        exchange: gives every rank's list of integers for this rank's.
    """

    def __init__(self, run: Any, exchange: Callable[[list[int]], list[list[int]]]):
        self.run, self.args, self._exchange = run, run.args, exchange
        self._dealer: Dealer | MixedDealer | None = None  # of the loader that was made last
        self._reset()

    def _reset(self) -> None:
        self.used = RowsUsed()
        self.stream: StreamState | None = None  # of a stream in one order, after the last batch that was used
        self._resumed: RowsUsed | None = None  # (3): set when the run was changed
        self._resumed_step = 0
        self._random_states_of: str | None = None  # a checkpoint, until its random states are those of this process
        self._rows_of_epoch: int | None = None
        self._order: EpochBatches | None = None  # of the present epoch; None of a stream
        self._begun: dict[str, Any] = {}  # what a checkpoint tells of the epoch in which it was written, until read

    @property
    def rows_per_micro_batch(self) -> int:
        """The rows of all ranks together."""
        return self.run.rows_of_micro_batch()[1]

    @property
    def reads_in_one_order(self) -> bool:
        config = self.run.accelerator.dataloader_config
        is_whole = not config.dispatch_batches and not config.split_batches
        return self.run.has_own_arguments and is_stream(self.run.train_dataset) and is_whole

    # ---- (2): what checkpoints hold ----

    def facts(self) -> dict[str, Any]:
        """For the manifest; a finished epoch is the beginning of the next."""
        now, dataset = self.used, self.run.train_dataset
        how = {
            "dataloader_num_workers": self.args.dataloader_num_workers,
            "stream_order": "one" if self.reads_in_one_order else None,
            "data_fingerprint": data_fingerprint(dataset),
            "data_length": length(dataset),
        }
        if isinstance(sampler := getattr(self._order, "sampler", None), OneSourceSampler):
            how["sources"] = sampler.facts()
        is_left = self.stream is None and self.run.control.should_epoch_stop  # by a callback
        if is_left or (self._rows_of_epoch is not None and now.rows >= self._rows_of_epoch):
            now = replace(now, epoch=now.epoch + 1, rows=0, window=self.rows_per_micro_batch)
        elif now.rows:
            how["order_digest"] = None if self._order is None else self._order.digest()
        return {"samples_seen": now.samples, "position": asdict(now)} | how

    def save(self, folder: str) -> None:
        if self.stream is not None:
            stream_order.save(self.stream, folder)

    # ---- (3): a training begins and ends ----

    @contextmanager
    def training(self, folder: str | None) -> Iterator[None]:
        """Around a training, which goes on from the checkpoint in `folder`, or starts afresh."""
        self._reset()
        self.used = RowsUsed(window=self.rows_per_micro_batch)
        if self.reads_in_one_order:
            stream_order.check_stream(self.args, self.run.train_dataset)
            self.stream = StreamState()
        content = self.run.keeper.resumed
        if folder and "position" in content:
            check_same_data(self.args, self.run.train_dataset, content, folder)
            if self.args.ignore_data_skip:  # the data begin anew
                samples = content["position"]["samples"]
                self.used = replace(self.used, samples=samples, is_regular=False)
            else:
                self._continue(content, folder)
        try:
            yield
        finally:
            self.stream = None

    def _continue(self, content: Mapping[str, Any], folder: str) -> None:
        args, dataset, used = self.args, self.run.train_dataset, RowsUsed(**content["position"])
        own, everyone = self.run.rows_of_micro_batch()
        now = {
            "data_parallel_size": everyone // own,
            "per_device_train_batch_size": own,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        }
        if isinstance(dataset, IterableDataset) and self.stream is None:  # else workers change nothing
            now["dataloader_num_workers"] = args.dataloader_num_workers
        changed = [name for name in now if content[name] != now[name]]
        self.used, self._begun = used, {name: content.get(name) for name in ("order_digest", "sources")}
        if changed and content.get("sources"):
            self._begun["order_digest"] = None  # what is left of the epoch is cut anew
        if (content["stream_order"] == "one") != self.reads_in_one_order:
            how = "in one order, not" if content["stream_order"] else "not in one order, but"
            raise UsageError(
                f"{folder} read its stream {how} through accelerate's dispatch_batches or split_batches, and this run "
                "would do the other: its place is not one of this order. Set accelerator_config as it was."
            )
        if self.stream is not None:
            self.stream = stream_order.load(folder)
            self._random_states_of = folder if content["world_size"] == args.world_size else None
            if content["data_fingerprint"] != data_fingerprint(dataset):  # allow_changed_data
                self.stream = self.stream.forgotten()
        elif changed or not used.is_regular:
            self.used = self._resumed = replace(used, is_regular=False)
            self._resumed_step = content["step"]
        if changed and args.process_index == 0:
            logger.warning(
                f"{' and '.join(changed)} changed since the checkpoint: epoch {used.epoch} goes on behind its first "
                f"{used.rows} rows, none is repeated or skipped."
            )

    # ---- the loader ----

    def rest_of_dataset(self) -> Any:
        """The training set for Trainer's own loader. A stream in one order is dealt by a `Dealer`; of another one a
        changed run leaves out the rows that were used."""
        dataset = self.run.train_dataset
        if self.reads_in_one_order:
            self._dealer = self._dealer_of(dataset)
            return stream_order.DealtRows(self._dealer.features)
        if self._resumed is None or not isinstance(dataset, IterableDataset):
            return dataset
        if self.args.dataloader_num_workers:
            raise UsageError(
                "this stream can not go on with another batch and dataloader_num_workers: its workers' shares are not "
                "known. Set dataloader_num_workers=0, resume with the checkpoint's batch, or make it a "
                "datasets.IterableDataset."
            )
        return RestOfStream(dataset, self._resumed.epoch, self._resumed.rows)

    def _dealer_of(self, stream: Any) -> Dealer | MixedDealer:
        args, (own, everyone) = self.args, self.run.rows_of_micro_batch()
        return stream_order.dealer_of(
            stream,
            own,
            stream_order.Ranks(args.process_index, args.world_size, everyone // own),
            self.stream or StreamState(),
            args.dataloader_num_workers,
            args.dataloader_multiprocessing_context,
            args.allow_changed_data,
            args.device,
            seed=seed_of_order(args),
        )

    def take_over(self, loader: Any) -> None:
        """Let a loader of Trainer's take its batches from `EpochBatches`, or from the dealer of its stream."""
        begun = self._resumed
        if not self.run.has_own_arguments or isinstance(loader.dataset, IterableDataset):
            return
        if isinstance(loader.dataset, stream_order.DealtRows):
            order.replace_batches(loader, self._dealer)
            return
        fills = "filled" if self.run.accelerator.dataloader_config.even_batches else "uneven"
        last = "split" if self.run.loss is not None else fills  # over the processes
        batches = order.take_over(loader, seed=seed_of_order(self.args), last=last, begun=begun)
        if isinstance(sampler := getattr(batches, "sampler", None), OneSourceSampler) and self._begun.get("sources"):
            sampler.go_on(self._begun["sources"], self.used.epoch, self.used.rows)
        if begun is None:
            return
        if not isinstance(batches, EpochBatches):
            raise UsageError(
                f"{type(getattr(batches, 'sampler', None) or batches).__name__} can not go on with another batch: it "
                "makes the batches itself, or has no length. Resume with the checkpoint's batch size, accumulation "
                "and number of processes."
            )
        if isinstance(sampler, GlobalBatches) and begun.rows and begun.window != sampler.rows_per_batch:
            raise UsageError(
                f"{type(sampler.batches).__name__} made the batches of the epoch that the checkpoint began of "
                f"{begun.window} rows of all processes, and a batch has {sampler.rows_per_batch} now. Resume with "
                "as many rows per batch (per_device_train_batch_size x processes)."
            )

    # ---- Trainer's counts ----

    def counts(self, counted: tuple, loader: Any) -> tuple:
        """(epochs, updates per epoch, ..., steps of the whole run), as Trainer `counted` them, for what is left."""
        if self._resumed is None:
            return counted
        rows = self._rows_in(loader)
        if rows is not None and not self._batches_in(max(0, rows - self._resumed.rows)):
            # drop_last drops all that is left of the epoch, and Trainer ends a run in an epoch without a batch.
            begun = replace(self._resumed, epoch=self._resumed.epoch + 1, rows=0, window=self.rows_per_micro_batch)
            self.used, self._resumed, self._begun = begun, begun, {}
        args, (epochs, updates, *others, max_steps) = self.args, counted
        if args.max_steps > 0:  # as many epochs as the steps that are left may need
            epochs = self._resumed.epoch + 1 + math.ceil(max(0, max_steps - self._resumed_step) / updates)
        else:  # behind the steps that were made: those of the begun epoch's rest, and whole epochs from then on
            whole_epochs = args.num_train_epochs - self._resumed.epoch - 1
            left = rows - self._resumed.rows + math.ceil(min(0, whole_epochs) * rows)
            batches = self._batches_in(max(0, left))
            max_steps = self._resumed_step + math.ceil(batches / args.gradient_accumulation_steps)
            max_steps += math.ceil(max(0, whole_epochs) * updates)
        return (epochs, updates, *others, max_steps)

    def first_batch(self, counted: tuple[int, int], state: Any, max_steps: int, num_epochs: int) -> tuple[int, int]:
        """(epoch, batch of it) with which a training begins; `counted`: as Trainer counts them."""
        if state.global_step >= max_steps:
            return num_epochs, 0  # nothing is left; Trainer takes one more step in the middle of an epoch
        if self._resumed is not None or self.stream is not None:
            return (0 if self._resumed is None else self._resumed.epoch), 0  # a stream itself begins at its state
        place = self.used.epoch, self.used.rows // self.rows_per_micro_batch
        if is_stream(self.run.train_dataset) and self.used.samples:
            return place  # Trainer takes the steps of all epochs for batches of the first
        # A callback may have left an epoch before its end, which Trainer counts as if it had not.
        is_as_long = self.run.keeper.resumed.get("data_length") == length(self.run.train_dataset)
        epochs, batches = max(counted, place) if is_as_long else counted  # allow_changed_data: of other rows
        if epochs or batches:  # also of a stock checkpoint
            rows = batches * self.rows_per_micro_batch
            rows_per_step = self.rows_per_micro_batch * self.args.gradient_accumulation_steps
            samples = self.used.samples or state.global_step * rows_per_step
            self.used = replace(self.used, epoch=epochs, rows=rows, samples=samples)
        return epochs, batches

    def _batches_in(self, rows: int) -> int:
        batches = rows / self.rows_per_micro_batch
        return math.floor(batches) if self.args.dataloader_drop_last else math.ceil(batches)

    def _rows_in(self, loader: Any) -> int | None:
        """Of a whole epoch."""
        batches = order.batches_of(loader)
        return batches.num_rows if isinstance(batches, EpochBatches) else length(self.run.train_dataset)

    # ---- an epoch, and the batches of a step ----

    def begin_epoch(self, epoch: int, loader: Any, num_batches: int, state: Any) -> dict[str, Any]:
        """What Trainer's loop over an epoch shall take instead of its own numbers."""
        if self.stream is not None:
            # Its only epoch; `state.epoch` goes on where it was, as a share of max_steps.
            done = state.global_step / state.max_steps
            return {"epoch": done, "epochs_trained": done}
        batch, changed = self.rows_per_micro_batch, {}
        if epoch != self.used.epoch:
            self.used = replace(self.used, epoch=epoch, rows=0, window=batch)
        batches = order.batches_of(loader)
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(epoch)  # whatever accelerate has wrapped it in
        self._order = batches if isinstance(batches, EpochBatches) else None
        if self._order is not None:
            self._check_order(self._order)
        rows, is_resumed = self._rows_in(loader), self._resumed is not None and epoch == self._resumed.epoch
        if rows is None:
            return changed
        if is_resumed:
            num_batches = self._batches_in(rows - self._resumed.rows)
            updates = max(1, math.ceil(num_batches / self.args.gradient_accumulation_steps))
            changed = {"steps_in_epoch": num_batches, "num_update_steps_per_epoch": updates}
        self._rows_of_epoch = min(rows, (self._resumed.rows if is_resumed else 0) + num_batches * batch)
        return changed

    def _check_order(self, batches: EpochBatches) -> None:
        """The order of the epoch is that of all processes, and the one that a resumed run has begun."""
        self.used = replace(self.used, window=batches.made_for(batches.epoch))
        digest, sampler = batches.digest(), type(batches.sampler).__name__
        as_it_should = (
            "Let the order follow from `set_epoch(epoch)`, from a global generator (torch's, numpy's, Python's), or "
            "from a torch.Generator in the attribute `generator`."
        )
        of_processes = self._exchange([int(digest[:15], 16)])
        if of_processes.count(of_processes[0]) != len(of_processes):
            raise UsageError(
                f"the processes do not draw the same order of epoch {batches.epoch} from {sampler}, so rows would be "
                f"repeated and others skipped. {as_it_should}"
            )
        begun = self._begun.pop("order_digest", None)  # once, as the next epoch is another
        if begun is None or begun == digest or self.used.rows == 0:
            return
        text = (
            f"the order of epoch {batches.epoch} that {sampler} gives now is not the one that the checkpoint has "
            "begun, so rows would be repeated and others skipped"
        )
        if not self.args.allow_changed_data:
            raise UsageError(f"{text}. {as_it_should} Or set allow_changed_data=true.")
        if self.args.process_index == 0:
            logger.warning(f"allow_changed_data: {text}.")

    def used_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader; those of a stream say how far it has come when they are taken."""
        for batch in batches:
            if self.stream is not None:
                self.stream = self._dealer.states.popleft()
            yield batch

    def add(self, batches: list[Any]) -> None:
        """Count the rows of a step's batches as used. A batch without rows of its own becomes a `StandIn`."""
        used, size = self.used, self.rows_per_micro_batch
        if self._order is not None:
            for i, batch in enumerate(batches):
                if isinstance(batch, Mapping) and self._order.is_stand_in(used.rows + i * size):
                    batches[i] = StandIn(batch)
        rows = len(batches) * size
        if self._rows_of_epoch is not None:
            rows = min(rows, max(0, self._rows_of_epoch - used.rows))
        self.used = replace(used, rows=used.rows + rows, samples=used.samples + rows)
        if self.stream is not None:
            self.used = replace(self.used, epoch=self.stream.epoch, rows=self.stream.rows)

    def take_random_states(self) -> str | None:
        """The checkpoint whose random states a stream takes behind its first batches: starting a loader's workers has
        drawn a number. None when there is none, or no longer."""
        checkpoint, self._random_states_of = self._random_states_of, None
        return checkpoint if self.stream is not None else None
