"""Training goes on while a checkpoint is written (`save_async`).

Large state goes through a `Writer`, which copies it to the CPU instead of writing it, and collects the writes in a
list. Small files (configs, random and trainer state) are written at once, and so are adapters. The copy is complete
before the next step. Then one thread makes the writes, hashes, commits and rotates, in this order. In it ranks talk
over a gloo group of their own, as collectives of two threads in one group would meet the wrong ones.

At most one save is in flight: the next one, the end of training and a preemption wait for it. Its error is raised
after the next step, or where it is waited for; the checkpoint is pushed there too. A run that fails otherwise waits as
well, but not for other processes that may be gone.

torch's `dcp.async_save` is a stager and a thread per call; two calls of it (weights, optimizer) would write in any
order, so its stager is used with one thread of ours.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from hf_dist_ext import launched
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.failures import activity
from hf_dist_ext.strategies import collectives

logger = logging.get_logger(__name__)

PEERS_SECONDS = 5.0  # that a failing rank waits for a save that needs the others: the launcher ends them soon
Write = Callable[[Any], None]  # takes the process group to talk over


def check(args: Any) -> None:
    if args.save_async and (args.deepspeed or launched.uses_deepspeed()):
        raise UsageError(
            "save_async=true does not work with DeepSpeed, whose engine writes its files itself. Turn it off, or "
            "use DDP or FSDP."
        )


# ---- copies instead of files ----


class Writer:
    """Writes what is large in a checkpoint: at once, or, with `copied`, when `make` is called with `writes`. Then the
    state of the moment is copied."""

    def __init__(self, copied: Callable[[Any], Any] | None = None):
        self.copied, self.writes = copied, []

    @property
    def is_later(self) -> bool:
        return self.copied is not None

    def write(self, state: Any, save: Callable[[Any, Any], None]) -> None:
        """`save` takes the state, or its copy, and the process group to talk over."""
        if self.copied is None:
            save(state, None)
        else:
            self.writes.append(partial(save, self.copied(state)))

    def torch(self, content: Any, path: Path) -> None:
        self.write(content, lambda content, group: torch.save(content, path))

    def tensors(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        self.write(tensors, lambda tensors, group: save_file(tensors, path, metadata={"format": "pt"}))

    def shards(self, state: dict[str, Any], folder: Path) -> None:
        """Every rank calls it."""
        self.write(state, lambda state, group: dcp.save(state, checkpoint_id=folder, process_group=group))


def make(writes: list[Write], group: Any) -> None:
    """All of them, also when one fails: ranks wait for each other in some. The first error is raised."""
    error = None
    while writes:  # each copy is freed when it is written
        try:
            writes.pop(0)(group)
        except Exception as found:
            error = error or found
    if error is not None:
        raise error


class Stager:
    """Copies states to the CPU; tensors that share memory share it in the copy, and DTensors stay shards.

    What comes from an accelerator goes into pinned memory, which the next copy of the same tensors uses again: to
    fresh memory that is not pinned a GPU copies several times more slowly. So a copy is valid until the next one."""

    def __init__(self) -> None:
        self._pinned: DefaultStager | None = None

    def copied(self, state: Any) -> Any:
        if any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_leaves(state)):
            self._pinned = self._pinned or DefaultStager(StagingOptions(True, False, False, True))
            return self._pinned.stage(state)
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            return stager.stage(state)
        finally:
            stager.close()


# ---- files while training goes on ----


class Saving:
    """A save in flight: `work(group)` in a thread. `push` is called by whoever finds it done."""

    def __init__(self, name: str, work: Write, push: Callable[[], None], group: Any):
        self.name, self.push, self.error = name, push, None
        self._device = torch.accelerator.current_device_index() if torch.accelerator.device_count() > 1 else None
        self._thread = threading.Thread(target=self._run, args=(work, group), name=f"writes {name}", daemon=True)
        self._thread.start()

    def _run(self, work: Write, group: Any) -> None:
        try:
            if self._device is not None:  # else a thread's is the first one, on which torch's writer would take memory
                torch.accelerator.set_device_index(self._device)
            work(group)
        except BaseException as error:  # every one of them is raised in the main thread
            self.error = error

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)


class Background:
    """The saves of one run that are made while training goes on. `timeout_seconds`: how long one rank may wait for
    the others in them."""

    def __init__(self, timeout_seconds: float):
        self.timeout, self.saving, self.stager = timedelta(seconds=timeout_seconds), None, Stager()
        self._group = None

    def begin(self, name: str, work: Write, push: Callable[[], None]) -> None:
        """Every rank calls it, with the same `work` to do."""
        assert self.saving is None
        if self._group is None and collectives.world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        self.saving = Saving(name, work, push, self._group)

    def collect(self, wait: bool = False) -> None:
        """Raise what went wrong with the save in flight, or push it; with `wait` once it has ended."""
        saving = self.saving
        if saving is None or not (wait or saving.is_done()):
            return
        if not saving.is_done():
            activity.leave_step(f"waiting until {saving.name} is written")
        saving.wait()
        self.saving = None
        if isinstance(saving.error, UsageError | RunError):
            raise saving.error
        if saving.error is not None:
            raise RunError(
                f"{saving.name} was not written: {type(saving.error).__name__}: {saving.error}. Earlier checkpoints "
                "are untouched: mend the cause and resume."
            ) from saving.error
        saving.push()

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Around a run: no save is in flight when it is left."""
        try:
            yield
        except BaseException:
            saving, self.saving = self.saving, None
            if saving is not None:
                saving.wait(None if collectives.world_size() == 1 else PEERS_SECONDS)
                if saving.error is not None or not saving.is_done():
                    logger.error(f"{saving.name} was not written: {saving.error or 'the run ended before'}")
            raise
        self.collect(wait=True)
