"""What the first process to come makes in `datasets`' cache folder, and the others and later runs find there.

(1) It has its name only once it is whole and on the disk, so that neither a kill nor a power cut leaves half of one
(2) One that cannot be read is made again
(3) Who waits for its maker gives signs of life: making it may take longer than a process may stand still
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import datasets
import pyarrow as pa
from filelock import FileLock, Timeout
from transformers.utils import logging

from hf_dist_ext.failures import activity

logger = logging.get_logger(__name__)
Found = TypeVar("Found")

SECONDS_BETWEEN_SIGNS = 5.0


def kept_file(name: str, read: Callable[[Path], Found], make: Callable[[Path], object]) -> Found:
    """What `read(path)` gives; it raises OSError or ValueError where a file or folder is not as `make(path)` makes it.

    Raises OSError where nothing can be written.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE, "hf_dist_ext", name)
    if (found := _whole(path, read)) is None:  # else perhaps of others, in a folder that can only be read
        path.parent.mkdir(parents=True, exist_ok=True)
        with _waited_for(FileLock(f"{path}.lock")):  # dropped by the system when its holder dies
            if (found := _whole(path, read)) is None:
                _make(path, make)
                found = read(path)
    return found


def _whole(path: Path, read: Callable[[Path], Found]) -> Found | None:
    try:
        return read(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        if path.exists():
            logger.warning_once(f"{path} cannot be read ({error}), and is made again.")
        return None


def _make(path: Path, make: Callable[[Path], object]) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    for old in (path, unfinished):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    make(unfinished)
    for file in [unfinished, *unfinished.rglob("*")]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    os.replace(unfinished, path)


def _waited_for(lock: FileLock) -> AbstractContextManager:
    while True:
        try:
            return lock.acquire(timeout=SECONDS_BETWEEN_SIGNS)
        except Timeout:
            activity.touch()
