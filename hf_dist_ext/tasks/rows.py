"""Rows of a file, or the pictures below a folder, as `hf-dist encode` and `hf-dist search` read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_dist_ext.data.columns import columns_of, require_column
from hf_dist_ext.data.image_files import require_pillow
from hf_dist_ext.data.load import FILE_FORMATS, as_named, loading_errors, open_here, refuse_bytes
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.errors import UsageError

ID_COLUMNS = ("_id", "id")


@dataclass(frozen=True)
class StoredRows:
    """`take(first, end)` gives texts or PIL images, `ids(first, end)` what tells rows apart, called `id_name`: of
    pictures their paths."""

    count: int
    take: Callable[[int, int], list]
    id_name: str
    ids: Callable[[int, int], Any]
    are_pictures: bool = False


def read_rows(
    path: Path, column: str | None = None, id_column: str | None = None, may_lack: bool = False
) -> StoredRows:
    """A data file, the lines of a text file, or every picture below a folder. `may_lack`: a row may have no text."""
    if path.is_dir():
        if column is not None or id_column is not None:
            raise UsageError(f"{path} is a folder of pictures and has no columns. Leave --column and --id_column out.")
        paths = _pictures_below(path)
        return StoredRows(
            len(paths),
            lambda first, end: [open_picture(Path(one)) for one in paths[first:end]],
            "path",
            lambda first, end: paths[first:end],
            are_pictures=True,
        )
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file or folder. Paths start at {Path.cwd()}.")
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    is_data = bool(suffixes) and suffixes[-1] in FILE_FORMATS
    if not is_data and (column is not None or id_column is not None):
        raise UsageError(f"{path} is read as lines of text and has no columns. Leave --column and --id_column out.")
    with loading_errors(str(path)):
        if is_data:
            rows = open_here(path, streaming=False)["train"]
        else:
            files = as_named([str(path.absolute())])
            rows = datasets.load_dataset("text", data_files=files, encoding="utf-8-sig")["train"]
    if id_column is not None:
        require_column(id_column, columns_of(rows), str(path), "--id_column")
    ids_named = [name for name in columns_of(rows) if name in (id_column, *ID_COLUMNS) and name != column]
    id_column = id_column or next((name for name in ID_COLUMNS if name in ids_named), None)
    column = column_of_texts(rows.remove_columns(ids_named), column, str(path))
    texts = rows.select_columns([column])
    refuse_bytes(rows, filter(None, (column, id_column)), str(path))
    if not may_lack and len(nulls := np.flatnonzero(texts.data.column(column).is_null())):
        raise UsageError(
            f'{path}, row {nulls[0]} (counted from 0): column "{column}" is null. Give every row a text, or remove it.'
        )
    numbers, ids = np.arange(len(rows)), None if id_column is None else rows.select_columns([id_column])
    return StoredRows(
        len(rows),
        lambda first, end: texts[first:end][column],
        id_column or "row",
        lambda first, end: numbers[first:end] if ids is None else ids[first:end][id_column],
    )


def column_of_texts(rows: Any, column: str | None, where: str) -> str:
    named = [name for name in columns_of(rows) if column_kind(rows.features[name]) == "text"]
    if column is None and len(named) != 1 or column is not None and column not in named:
        raise UsageError(f"{where} has the text columns {', '.join(named) or 'none'}. Name one as --column.")
    return column or named[0]


def _pictures_below(folder: Path) -> list[str]:
    require_pillow()
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())
    if not paths:
        raise UsageError(f"there is no picture below {folder}. Give a folder with image files.")
    return [str(path) for path in paths]


def open_picture(path: Path) -> Any:
    from PIL import Image

    try:
        return Image.open(path).convert("RGB")
    except OSError as error:  # Pillow's "cannot identify image file" is one
        raise UsageError(f"the picture {path} cannot be read: {error}. Remove it or give another.") from error
