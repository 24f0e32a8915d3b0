"""The errors a user is meant to read: what was given or what happened, why it cannot be, what to do.

`UsageError` is a `ValueError`, so library users catch it as such; `scripts/train_hf.py` and `hf-dist` print it as one
message from one rank, without a traceback, and exit with their `exit_code`. The module imports nothing of the package,
so every group of files may raise them.
"""

import difflib
import re
from collections.abc import Iterable


class UsageError(ValueError):
    """Bad input (a configuration, a dataset, a model, a checkpoint); the message ends with the remedy."""

    exit_code = 2


class RunError(RuntimeError):
    """A run that cannot go on, as all its ranks agree: what happened, at which step, and what to do."""

    exit_code = 1


class StorageError(RunError):
    """Files that could not be read for a while: the same command may be started again later."""

    exit_code = 74  # EX_IOERR


def in_short(error: UsageError | RunError) -> UsageError | RunError:
    """An error of a loader worker without the worker's traceback around it."""
    kind = type(error)
    if not str(error).startswith(f"Caught {kind.__name__}"):
        return error
    *_, last = re.split(rf"^[\w.]*{kind.__name__}: ", str(error), flags=re.MULTILINE)
    return kind(last.strip())


def closest(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is most like `name`, for the end of a message; "": none is clearly like it,
    as a wrong hint is worse than none."""
    near = difflib.get_close_matches(name, [*known], 1, 0.8)
    return f' Closest: "{near[0]}".' if near else ""


def bytes_in_words(count: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
