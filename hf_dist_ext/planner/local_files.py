"""What lies here of a run: files of its model, in a folder or the hub's cache, and rows of its data files.

Training reads every row, with `datasets`, whose import alone takes seconds; a plan reads some rows of a file.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
UNREADABLE = (OSError, ValueError, csv.Error)
LARGEST_JSON = 2**28  # bytes of a file that is one JSON list, and is read whole
LARGEST_LINES = 2**24  # and of a file of lines


# ---- of the model ----


def config_file(name_or_path: str, revision: str | None = None) -> Path:
    """The config.json of a model's backbone, fetched from the hub where it is not here. Raises UsageError: there is
    none."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        return _cached(name_or_path, "config.json", revision) or _fetched(name_or_path, revision)
    modules = folder / "modules.json"  # sentence-transformers may keep the backbone in a folder of its own
    if modules.is_file() and not (folder / "config.json").is_file():
        folder = folder / json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
    if not (folder / "config.json").is_file():
        raise UsageError(f'model "{name_or_path}" has no config.json, so its size is not known. Give a model folder.')
    return folder / "config.json"


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # Asks once: without a connection a download asks six times, over 25 seconds.
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # offline, no such model, gated: huggingface_hub has a class for each
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        why = " ".join(str(error).split())[:160]
        raise UsageError(
            f'the config.json of "{name}" is neither in the hub cache nor to be had{offline}: {why}. '
            "Fetch it once with a connection, or give model_config or a folder."
        ) from None


def _cached(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub model that was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file, revision=revision) if name.count("/") < 2 else None
    return Path(path) if isinstance(path, str) else None


def model_file(name_or_path: str, file: str, revision: str | None) -> Path | None:
    """A file of a model's folder, or of a hub model that was fetched before; None: it is not here."""
    if not name_or_path:
        return None
    path = Path(name_or_path, file) if Path(name_or_path).is_dir() else _cached(name_or_path, file, revision)
    return path if path is not None and path.is_file() else None


def processor_file(name_or_path: str, revision: str | None) -> Path | None:
    """Where the sizes of the model's pictures stand."""
    found = (model_file(name_or_path, name, revision) for name in PROCESSORS)
    return next((path for path in found if path is not None), None)


# ---- of the data ----


def files_of(name: str | None, split: str) -> list[Path]:
    """The data files that `dataset_name` names here; of a folder those of the split, where some are called so."""
    path = Path(name or "").expanduser()
    if path.is_file():
        return [path] if path.suffix in ENDINGS else []
    if not name or not path.is_dir():
        return []
    files = sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())
    return [file for file in files if split in file.stem] or files


def rows_of(path: Path, count: int) -> tuple[list[Mapping[str, Any]], bool]:
    """(about so many rows, from all over a file, of a CSV file the first ones; whether it has others)"""
    rows, total = _rows_and_total(path, count)
    return [row for row in rows if isinstance(row, Mapping)], len(rows) < total


def _rows_and_total(path: Path, count: int) -> tuple[Sequence[Any], float]:
    if path.suffix == ".parquet":
        return _of_parquet(path, count)
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(islice(csv.DictReader(file), count + 1))
        return rows[:count], len(rows)
    with path.open("rb") as file:
        size = path.stat().st_size
        if file.read(4).removeprefix(b"\xef\xbb\xbf")[:1] == b"[":
            of_file = json.loads(path.read_text(encoding="utf-8-sig")) if size < LARGEST_JSON else []
            return _spread(of_file, count), len(of_file) if size < LARGEST_JSON else float("inf")
        file.seek(0)
        if size < LARGEST_LINES:
            lines = [line for line in file if line.strip()]
            return [json.loads(line) for line in _spread(lines, count)], len(lines)
        found = []
        for i in range(count):  # of a large one the line that follows each of `count` places
            file.seek(size * i // count)
            if i:
                file.readline()
            found += [line] if (line := file.readline().strip()) else []
        return [json.loads(line) for line in found], float("inf")


def _of_parquet(path: Path, count: int) -> tuple[Sequence[Any], float]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    groups, found = _spread(range(file.num_row_groups), 8), []
    for group in groups:
        rows = file.read_row_group(group)
        found += rows.take(list(_spread(range(rows.num_rows), -(-count // len(groups))))).to_pylist()
    return found, file.metadata.num_rows


def _spread(rows: Sequence[Any], count: int) -> Sequence[Any]:
    return rows[:: max(1, -(-len(rows) // count))]
