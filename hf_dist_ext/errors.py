"""The errors a user is meant to read: what was given or what happened, why it cannot be, what to do.

`UsageError` is a `ValueError`, so library users catch it as such; `scripts/train_hf.py` and `hf-dist` print it as one
message from one rank, without a traceback, and exit with code 2. `RunError` is printed alike, with exit code 1. The
module imports nothing, so every group of files may raise them.
"""


class UsageError(ValueError):
    """Bad input (a configuration, a dataset, a model, a checkpoint); the message ends with the remedy."""


class RunError(RuntimeError):
    """A run that cannot go on, as all its ranks agree: what happened, at which step, and what to do."""
