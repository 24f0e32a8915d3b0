"""A task of the package `mteb` with its data from a folder here, in the place of the hub."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from hf_dist_ext.data.load import path_of, place_of
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
        hub_id, folder = task.metadata.dataset["path"], path_of(options.path)
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder. Give a clone of {hub_id}, the task's dataset on the hub.")
        of_folder = task.metadata.dataset | {"path": place_of(options.path)}
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
    _check_columns(task, folder)
    return MtebData(options, task)


def _check_columns(task: Any, folder: Path) -> None:
    """UsageError for a split that is not there, or a column that mteb would miss only when it evaluates."""
    name, evaluated = task.metadata.name, task.eval_splits
    subsets = [task.dataset.get(subset, task.dataset) for subset in task.hf_subsets]
    if missing := [split for split in evaluated for subset in subsets if split not in subset]:
        raise UsageError(
            f'{folder} has no split "{missing[0]}"; the task {name} is evaluated on {", ".join(evaluated)}. Give one '
            'as "split", or the missing files.'
        )
    trained = getattr(task, "train_split", None)  # a classifier's
    if trained is not None and any(trained not in subset for subset in subsets):
        raise UsageError(
            f'{folder} has no split "{trained}", on which the task {name} trains a classifier. Add its files.'
        )
    for split in dict.fromkeys([*evaluated, trained]):
        for rows in [subset[split] for subset in subsets if split is not None]:
            tables = {"": rows} if isinstance(rows, datasets.Dataset) else rows
            for kind, needed in _columns(task, tables).items():
                if missing := [column for column in needed if column not in tables[kind].column_names]:
                    where = f'{kind or "the"} rows of split "{split}"'
                    raise UsageError(
                        f'{folder}: {where} have no column "{missing[0]}"; the task {name} reads '
                        f"{', '.join(needed)}. Columns: {', '.join(tables[kind].column_names)}."
                    )


def _columns(task: Any, tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """What mteb 2 reads of each of the tables of a split: those of a corpus, or "" for the only one."""
    if "corpus" in tables:
        return {"corpus": ["id", "text"], "queries": ["id", "text"]}
    if "" not in tables:
        return {}
    attributes = [name for name in dir(type(task)) if name.endswith(("column_name", "column_names"))]
    values = [getattr(task, name) for name in attributes]
    named = [name for value in values for name in ([value] if isinstance(value, str) else value)]
    if task.metadata.type == "BitextMining" and not task.parallel_subsets:
        named = ["sentence1", "sentence2"]
    return {"": named + ["score"] * (task.metadata.type == "STS")}


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
