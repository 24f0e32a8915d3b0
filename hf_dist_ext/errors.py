"""The one error a user is meant to read: what was given, why it cannot be, what to do.

It is a `ValueError`, so library users catch it as such; `scripts/train_hf.py` and `hf-dist` print it as one message
from one rank, without a traceback, and exit with code 2. It imports nothing, so every group of files may raise it.
"""


class UsageError(ValueError):
    """Bad input (a configuration, a dataset, a model, a checkpoint); the message ends with the remedy."""
