"""Files over a network may not answer for a while: reading is tried again, with growing waits, before a run gives up.

A failure that lasts is a `StorageError`. Nothing is wrong with the data then, so the command exits with a code of its
own, 74, and a batch system may start the same command later (scripts/slurm/train.sbatch does).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transformers.utils import logging

from hf_dist_ext.errors import StorageError

logger = logging.get_logger(__name__)
Found = TypeVar("Found")

WAITS = (1, 2, 4, 8, 16, 32)  # seconds before each further try
PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOLINK,
    errno.ENOTCONN, errno.ESHUTDOWN, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED,
    getattr(errno, "EREMOTEIO", errno.EIO),  # not on macOS
}  # fmt: skip


def reserve(path: Path, num_bytes: int) -> None:
    """Room on the disk for the first bytes of a file. Where it is full this is an OSError, and in a map of the file a
    signal (SIGBUS). macOS has no such call."""
    if hasattr(os, "posix_fallocate"):
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)


def is_passing(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is of a storage that may answer later."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, TimeoutError | ConnectionError):
            return True
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def with_retries(read: Callable[[], Found], what: str) -> Found:
    """Gives what `read()` gives, and calls it again after an error that may pass. `what` names in words what is read.

    Raises StorageError when the error lasts.
    """
    for wait in (*WAITS, None):
        try:
            return read()
        except Exception as error:
            if isinstance(error, StorageError) or not is_passing(error):
                raise
            if wait is None:
                raise StorageError(
                    f"{what} could not be read in {len(WAITS) + 1} tries over {sum(WAITS)} s: "
                    f"{type(error).__name__}: {error}. Look at the file system or the network, then start the same "
                    "command again."
                ) from error
            logger.warning(f"{what} can not be read now ({type(error).__name__}: {error}); again in {wait} s.")
            time.sleep(wait)
