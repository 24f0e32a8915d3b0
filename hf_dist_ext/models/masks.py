"""Masks of padded rows, without asking the device whether any row is padded.

transformers reads every mask back to the host, to run attention without one, in a faster kernel, where no row is
padded. So the host waits for the device in every forward. Whoever cut the chunk knows the answer (`Chunk.is_full`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import masking_utils

ASKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # (mask of real tokens or None, ...)


@contextmanager
def padding_is_known(is_full: bool | None) -> Iterator[None]:
    """Around a forward. `is_full`: whether none of its rows is padded; None: transformers looks."""
    theirs = {name: getattr(masking_utils, name) for name in ASKS} if is_full is not None else {}
    try:
        for name, function in theirs.items():
            setattr(masking_utils, name, functools.partial(_answered, function, is_full))
        yield
    finally:
        for name, function in theirs.items():
            setattr(masking_utils, name, function)


def _answered(theirs: Callable, is_full: bool, padding_mask: Any, *given: Any, **more: Any) -> bool:
    """Whether the mask can be left out."""
    if padding_mask is None or is_full:
        return theirs(None, *given, **more)
    return False
