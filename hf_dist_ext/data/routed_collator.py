"""`ContrastiveCollator` where columns have tokenizers of their own: those of a Router's two routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dist_ext.data.collator import ContrastiveCollator, ensure_padding


@dataclass(eq=False)
class RoutedCollator(ContrastiveCollator):
    """`tokenizers`: of every column; `tokenizer` is one of them."""

    tokenizers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        for tokenizer in self.tokenizers.values():
            ensure_padding(tokenizer)

    def tokenizer_of(self, column: str) -> Any:
        return self.tokenizers[column]
