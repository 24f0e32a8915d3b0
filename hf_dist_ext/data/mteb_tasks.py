"""A task of the package `mteb` with its data from a folder here, in the place of the hub."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.evaluations import Mteb


@dataclass(eq=False)
class MtebData:
    """`task`: of mteb, with its data loaded."""

    options: Mteb
    task: Any


def read_mteb(options: Mteb) -> MtebData:
    with seeds_of_its_own():
        task = _task(options)
        hub_id, folder = task.metadata.dataset["path"], Path(options.path).expanduser()
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder. Give a clone of {hub_id}, the task's dataset on the hub.")
        of_folder = task.metadata.dataset | {"path": str(folder.resolve())}
        task.metadata = task.metadata.model_copy(update={"dataset": of_folder})
        try:
            task.load_data()
        except (
            datasets.exceptions.DatasetsError,
            pa.ArrowException,
            OSError,
            ValueError,
            RuntimeError,
            KeyError,
        ) as error:
            reason = " ".join(str(error.__cause__ or error).split())[:300].rstrip(".")
            raise UsageError(
                f"mteb could not load the task {options.task} from {folder}: {reason}. The folder must be laid out as "
                f"{hub_id}, the task's dataset on the hub."
            ) from error
    subsets = [task.dataset.get(name, task.dataset) for name in task.hf_subsets]
    if missing := [split for split in task.eval_splits for subset in subsets if split not in subset]:
        raise UsageError(
            f'{folder} has no split "{missing[0]}"; the task {options.task} is evaluated on '
            f'{", ".join(task.eval_splits)}. Give one as "split", or the missing files.'
        )
    return MtebData(options, task)


def _task(options: Mteb) -> Any:
    import mteb
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    try:
        task = mteb.get_task(options.task)
    except KeyError as error:
        raise UsageError(f"mteb has no such task: {error.args[0].removeprefix('KeyError: ')}") from error
    if isinstance(task, AbsTaskAggregate):
        parts = [part.metadata.name for part in task.tasks]
        raise UsageError(
            f"the task {options.task} is the mean of {len(parts)} with datasets of their own. Give each an entry: "
            f"{', '.join(parts)}."
        )
    if (kinds := sorted(task.metadata.modalities)) != ["text"]:
        raise UsageError(f"the task {options.task} is about {' and '.join(kinds)}; only tasks of texts are run.")
    if options.split is not None:
        if options.split not in task.eval_splits:
            raise UsageError(
                f'the task {options.task} has the splits {", ".join(task.eval_splits)}, not "{options.split}".'
            )
        task.filter_eval_splits([options.split])
    return task


@contextmanager
def seeds_of_its_own() -> Iterator[None]:
    """mteb seeds Python, numpy and torch with numbers of its own; the states are put back."""
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
