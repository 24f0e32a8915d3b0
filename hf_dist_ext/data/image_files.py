"""Columns with names of image files become columns of pictures, each of which is opened when its row is read.

(1) A name stays below `image_folder`: one that is absolute or climbs out of the folder is an error, in every task
(2) Every file of a dataset that is not a stream must exist: `RowCheck` looks for it before a model is built
(3) Names become paths, and paths become `datasets` images
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from hf_dist_ext.data.columns import map_stored, with_features
from hf_dist_ext.data.row_check import RowCheck
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig


def require_pillow() -> None:
    """Raises UsageError without it."""
    if importlib.util.find_spec("PIL") is None:
        raise UsageError("pictures need Pillow, which is not installed. Run: pip install 'hf_dist_ext[image]'")


def image_path(name: str, folder: str | None) -> str:  # (1)
    """The path of a name in the data. Without a folder the name starts in the current one, and may be absolute."""
    if not name:
        raise UsageError("the name of the image file is empty. Remove the row.")
    if folder is None:
        return os.path.abspath(os.path.expanduser(name))
    root = os.path.abspath(folder)
    # Without "..": a link inside of the folder may lead out of it, since the data cannot have made it.
    path = os.path.normpath(os.path.join(root, name))
    if os.path.commonpath([root, path]) != root:
        raise UsageError(
            f'the image file "{name}" is outside of image_folder="{folder}". Name a file inside of it, or set '
            "image_folder to a folder that all of them are in."
        )
    return path


def find_image(name: str | None, folder: str | None) -> str:
    """The path of an image file that exists. Raises UsageError."""
    path = image_path(name or "", folder)
    if not os.path.isfile(path):
        hint = "Check image_folder." if folder else "Set image_folder to the folder that the names start in."
        raise UsageError(f"there is no image file {path}. {hint}")
    return path


def with_images(dataset: Any, sources: Mapping[str, Any], run: RunConfig, check: RowCheck) -> Any:
    """The dataset with the columns behind `run.image_columns`, and those of images beside texts, as pictures.

    `sources` come from `resolve_columns`.
    """
    folder = run.image_folder and os.path.abspath(os.path.expanduser(run.image_folder))
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f'image_folder="{run.image_folder}" is no folder. Paths start at {Path.cwd()}.')
    for column in run.image_columns or ():
        if column not in sources:
            raise UsageError(f'image_columns has "{column}", which is no column of this run: {", ".join(sources)}.')
        if isinstance(sources[column], list):
            raise UsageError(f'columns["{column}"] is a list; a column of images is one column of the dataset.')
    beside_texts = [
        source["image"] for source in sources.values() if isinstance(source, Mapping) and "image" in source
    ]
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image) and not feature.decode:
            dataset = dataset.cast_column(name, datasets.Image(mode=feature.mode))
    named = [sources[column] for column in run.image_columns or () if isinstance(sources[column], str)]
    for source in dict.fromkeys([*beside_texts, *named]):
        dataset = _with_pictures(dataset, source, folder, check, may_lack=source not in named)
    return dataset


def _with_pictures(dataset: Any, source: str, folder: str | None, check: RowCheck, may_lack: bool) -> Any:
    """One column as pictures; `may_lack`: a row may have none."""
    feature = (dataset.features or {}).get(source)
    if isinstance(feature, datasets.Image):
        return dataset
    if isinstance(feature, datasets.Value) and "binary" in feature.dtype:  # the files themselves
        return dataset.cast_column(source, datasets.Image())
    if isinstance(feature, datasets.Value) and "string" not in feature.dtype:
        raise UsageError(f'{check.name}, column "{source}" holds {feature.dtype}, not names of image files.')
    where = None
    if isinstance(dataset, Dataset):
        check.rows(dataset[source], lambda file: (file or not may_lack) and find_image(file, folder), source)  # (2)
    else:
        dataset, where = with_features(dataset), f'{check.name}, column "{source}"'
    # (3); the places where names begin that have no folder: by them the cache of `datasets` tells paths apart
    options = {"column": source, "folder": folder, "may_lack": may_lack, "where": where}
    options["start"] = (os.getcwd(), os.path.expanduser("~"))
    features = datasets.Features({**dataset.features, source: datasets.Image()})
    return map_stored(dataset, _paths, features, fn_kwargs=options)


def _paths(
    rows: dict[str, list], column: str, folder: str | None, may_lack: bool, where: str | None, start: tuple
) -> dict[str, list]:
    return {column: [_path(file or "", folder, where) if file or not may_lack else None for file in rows[column]]}


def _path(file: str, folder: str | None, where: str | None) -> str:
    """`where`: of rows that nobody has looked at before. Else a bad one was noted, and max_bad_rows lets it pass: it
    keeps a name that no file has, and so cannot be read."""
    try:
        return image_path(file, folder)
    except UsageError as error:
        if where is not None:
            raise UsageError(f"{where}: {error}") from None
        return os.path.join(os.path.abspath(folder or ""), "outside-of-image-folder", os.path.basename(file))
