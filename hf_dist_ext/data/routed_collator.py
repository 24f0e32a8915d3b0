"""`ContrastiveCollator` where columns have tokenizers of their own: those of a Router's two routes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dist_ext.data.collator import ContrastiveCollator, ensure_padding


@dataclass(eq=False)
class RoutedCollator(ContrastiveCollator):
    """`tokenizers`: of every column; `tokenizer` is one of them."""

    tokenizers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        for tokenizer in self.tokenizers.values():
            ensure_padding(tokenizer)

    def text_features(self, column: str, texts: list[str]) -> dict[str, torch.Tensor]:
        one = copy(self)
        one.tokenizer = self.tokenizers[column]
        return ContrastiveCollator.text_features(one, column, texts)
