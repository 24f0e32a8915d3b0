"""The tokens of some texts, end to end and without padding, and the texts that carry theirs with them.

A `TokenizedText` is a text: whatever takes texts takes it, and a text that is made of it (a slice, a lower-case copy)
is a plain one again, whose tokens nobody knows. Letters: R texts, N tokens of all, T tokens of the longest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# What a tokenizer gives per token, and with which type it is kept. The attention mask follows from lengths.
KEPT = {"input_ids": np.int32, "token_type_ids": np.uint8}
MASK = "attention_mask"


class TokenizedText(str):
    """`tokens`: key -> (tokens of this text,), as a collator's tokenizer gives them for its prompt and length."""

    tokens: Mapping[str, np.ndarray]

    def __new__(cls, text: str, tokens: Mapping[str, np.ndarray]):
        made = super().__new__(cls, text)
        made.tokens = tokens
        return made


@dataclass
class Tokens:
    """`values`: key -> (N,). `lengths`: (R,)."""

    values: dict[str, np.ndarray]
    lengths: np.ndarray

    @classmethod
    def of_texts(cls, texts: Sequence[TokenizedText]) -> Tokens:
        keys = texts[0].tokens.keys()
        values = {key: np.concatenate([text.tokens[key] for text in texts]) for key in keys}
        lengths = np.fromiter((len(text.tokens["input_ids"]) for text in texts), np.int64, len(texts))
        return cls(values, lengths)

    def padded(self, fill: Mapping[str, int], side: str) -> dict[str, torch.Tensor]:
        """key -> (R, T) int64, the attention mask included."""
        width = int(self.lengths.max(initial=0))
        place, lengths = np.arange(width), self.lengths[:, None]
        is_real = place >= width - lengths if side == "left" else place < lengths  # (R, T)
        features = {}
        for key, values in self.values.items():
            table = np.full(is_real.shape, fill[key], dtype=np.int64)
            table[is_real] = values
            features[key] = torch.from_numpy(table)
        return features | {MASK: torch.from_numpy(is_real.astype(np.int64))}

    def flat(self, fill: Mapping[str, int], side: str) -> dict[str, Any]:
        """The same as features that take the memory of the real tokens; engine/flat.py tells what they are."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        known = {"lengths": self.lengths, "width": int(self.lengths.max(initial=0)), "pads_left": side == "left"}
        values = {key: torch.from_numpy(values) for key, values in self.values.items()}
        return values | {"offsets": torch.from_numpy(offsets), "flat": known | {"fill": dict(fill)}}


def without_rows(features: Mapping[str, Any]) -> dict[str, Any]:
    """Features of the same kind, of no row."""
    if (known := features.get("flat")) is None:
        return {name: value[:0] for name, value in features.items()}
    known, offsets = known | {"lengths": known["lengths"][:0]}, features["offsets"][:1]
    return {name: features[name][:0] for name in KEPT if name in features} | {"offsets": offsets, "flat": known}


def tokens_depend_on(tokenizer: Any) -> list | None:
    """All that a text's tokens depend on; None where that is not known, or they may be others each time."""
    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        return None
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"].get("dropout"):
        return None
    for of_last_call in ("padding", "truncation"):
        backend.pop(of_last_call)
    split = getattr(tokenizer, "split_special_tokens", None)
    return [type(tokenizer).__name__, tokenizer.model_input_names, tokenizer.truncation_side, split, backend]


# ---- the threads of a tokenizer ----

# Read by the tokenizers library, which takes it as "false"; a user would write that word.
_OFF, _VARIABLE = "off", "TOKENIZERS_PARALLELISM"
_IMPORTED_BY = os.getpid()


def silence_threads() -> None:
    """No thread of a tokenizer runs outside of `threads_of_tokenizer`, unless the user has said otherwise: after one
    has, the library warns at every fork, such as that of a loader's worker."""
    os.environ.setdefault(_VARIABLE, _OFF)


@contextmanager
def threads_of_tokenizer() -> Iterator[None]:
    """Inside, texts are tokenized by as many threads as there are cores. Not in a loader's worker, beside which others
    work already, nor in any forked process, which has no threads; and not where the user has decided."""
    is_forked = os.getpid() != _IMPORTED_BY or multiprocessing.parent_process() is not None
    if is_forked or os.environ.get(_VARIABLE) != _OFF:
        yield
        return
    os.environ[_VARIABLE] = "true"
    try:
        yield
    finally:
        os.environ[_VARIABLE] = _OFF
