"""Columns with names of image files become columns of pictures, each of which is opened when its row is read.

(1) A name stays below `image_folder`: one that is absolute or climbs out of the folder is an error, in every task
(2) Every file of a dataset that is not a stream must exist: `RowCheck` looks for it before a model is built
(3) Names become paths, and paths become `datasets` images
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset

from hf_dist_ext.data.row_check import RowCheck
from hf_dist_ext.data.storage import with_retries
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig


def require_pillow() -> None:
    """Raises UsageError without it."""
    if importlib.util.find_spec("PIL") is None:
        raise UsageError("pictures need Pillow, which is not installed. Run: pip install 'hf_dist_ext[image]'")


def image_path(name: str, folder: str | None) -> str:  # (1)
    """The path of a name in the data. Without a folder the name starts in the current one, and may be absolute."""
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
    if not name:
        raise UsageError("the name of the image file is empty. Remove the row.")
    path = image_path(name, folder)
    if not with_retries(lambda: _is_file(path), path):
        hint = "Check image_folder." if folder else "Set image_folder to the folder that the names start in."
        raise UsageError(f"there is no image file {path}. {hint}")
    return path


def _is_file(path: str) -> bool:
    """As `os.path.isfile`, which however mistakes a file system that does not answer for a missing file."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


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
    if not isinstance(dataset, Dataset):
        return _stream_with_images(dataset, source, folder, check.name, may_lack)
    check.rows(dataset[source], lambda file: (file or not may_lack) and find_image(file, folder), source)  # (2)
    join = {"column": source, "folder": folder, "may_lack": may_lack}
    join["start"] = (os.getcwd(), os.path.expanduser("~"))
    return dataset.map(_join, fn_kwargs=join, batched=True).cast_column(source, datasets.Image())  # (3)


def _join(rows: dict[str, list], column: str, folder: str | None, may_lack: bool, start: tuple) -> dict[str, list]:
    """`start`: where names begin that have no folder, by which the cache of `datasets` tells their paths apart."""
    return {column: [_joined(file, folder) if file or not may_lack else None for file in rows[column]]}


def _joined(file: str | None, folder: str | None) -> str:
    """A bad row that max_bad_rows lets pass is one that cannot be read: it keeps a name that no file has."""
    try:
        return image_path(file or "", folder)
    except UsageError:
        return os.path.join(os.path.abspath(folder or ""), "outside-of-image-folder", os.path.basename(file or ""))


def _stream_with_images(stream: Any, column: str, folder: str | None, name: str, may_lack: bool) -> Any:
    if not stream.features:
        stream = stream._resolve_features()
    features = datasets.Features({**stream.features, column: datasets.Image(decode=False)})
    # Through Arrow: after a map() over rows `datasets` would not decode.
    joined = stream.with_format("arrow").map(
        _join_table,
        batched=True,
        features=features,
        fn_kwargs={"column": column, "folder": folder, "name": name, "may_lack": may_lack},
    )
    return joined.with_format(None).decode(num_threads=0)


def _join_table(table: pa.Table, column: str, folder: str | None, name: str, may_lack: bool) -> pa.Table:
    pictures = []
    for file in table.column(column).to_pylist():
        if may_lack and not file:
            pictures.append(None)
            continue
        try:
            pictures.append({"bytes": None, "path": image_path(file or "", folder)})
        except UsageError as error:
            raise UsageError(f'{name}, column "{column}": {error}') from None
    found = pa.array(pictures, type=datasets.Image.pa_type)
    return table.set_column(table.column_names.index(column), column, found)
