"""Columns of image file names -> columns of pictures, which are opened when their row is read.

(1) every file of a dataset that is not a stream must exist: checked before a model is built
(2) names become paths below `image_folder`, paths become `datasets` images
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from .config import RunConfig
from .errors import UsageError


def with_images(dataset: Any, sources: dict[str, str | list[str]], run: RunConfig, name: str) -> Any:
    """The dataset with the columns behind `run.image_columns` as pictures; `sources` as data.resolve_columns gives."""
    if run.image_folder is not None and not os.path.isdir(run.image_folder):
        raise UsageError(f'image_folder="{run.image_folder}" is no folder. Paths start at {Path.cwd()}.')
    for column in run.image_columns or ():
        if column not in sources:
            raise UsageError(f'image_columns has "{column}", which is no column of this run: {", ".join(sources)}.')
        source = sources[column]
        if not isinstance(source, str):
            raise UsageError(f'columns["{column}"] is a list; a column of images is one column of the dataset.')
        feature = (dataset.features or {}).get(source)
        if isinstance(feature, datasets.Image):
            continue
        if isinstance(feature, datasets.Value) and "string" not in feature.dtype:
            raise UsageError(f'{name}, column "{source}" holds {feature.dtype}, not names of image files.')
        if isinstance(dataset, Dataset):
            _check_files(dataset, source, run.image_folder, name)
        join = {"column": source, "folder": run.image_folder or ""}
        dataset = dataset.map(_join, fn_kwargs=join, batched=True).cast_column(source, datasets.Image())  # (2)
    return dataset


def _check_files(dataset: Dataset, column: str, folder: str | None, name: str) -> None:  # (1)
    for row, file in enumerate(dataset[column]):
        path = os.path.join(folder or "", file or "")
        if not file or not os.path.isfile(path):
            found = f"there is no image file {path}" if file else "is empty"
            hint = "Check image_folder." if folder else "Set image_folder to the folder that the names start in."
            raise UsageError(f'{name}, row {row} (counted from 0), column "{column}": {found}. {hint}')


def _join(rows: dict[str, list], column: str, folder: str) -> dict[str, list]:
    return {column: [os.path.join(folder, file) for file in rows[column]]}
