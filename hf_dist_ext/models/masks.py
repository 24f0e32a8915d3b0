"""Masks of padded rows, without asking the device whether any row is padded.

transformers reads every mask back to the host, to run attention without one, in a faster kernel, where no row is
padded. So the host waits for the device in every forward. Whoever cut the chunk knows the answer (`Chunk.is_full`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers import masking_utils

from hf_dist_ext.strategies.base import meanwhile

ASKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # (mask of real tokens or None, ...)


def padding_is_known(is_full: bool | None) -> AbstractContextManager:
    """Around a forward. `is_full`: whether none of its rows is padded; None: transformers looks."""
    asks = () if is_full is None else ASKS
    answers = {name: functools.partial(_answered, getattr(masking_utils, name), is_full) for name in asks}
    return meanwhile(masking_utils, **answers)


def _answered(theirs: Callable, is_full: bool, padding_mask: Any, *given: Any, **more: Any) -> bool:
    """Whether the mask can be left out."""
    if padding_mask is None or is_full:
        return theirs(None, *given, **more)
    return False
