"""What bounds a chunk, and the few shapes that chunks have where every shape costs a compilation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_dist_ext import policy


@dataclass(frozen=True)
class ChunkLimits:
    """What bounds a chunk: rows, tokens (rows x width, padding included), image patches, or nothing (one chunk).

    `packs`: text rows go through the model end to end, without padding, so that tokens are real ones. `has_buckets`:
    padded chunks have few shapes (`width`, `rows`), within the other limits.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    width_multiple: int = 8
    max_patches: int | None = None
    packs: bool = False
    has_buckets: bool = False

    def width(self, tokens: int) -> int:
        """Of a chunk whose longest row has so many tokens."""
        if self.has_buckets:
            return policy.width_in_buckets(tokens, self.width_multiple)
        return -(-max(1, tokens) // self.width_multiple) * self.width_multiple

    def rows(self, rows: int, width: int) -> int:
        """Rows that are computed for so many: with buckets all that fit into a chunk, three fourths of these, a half,
        three eighths, ... and two at least, since a graph for one row is another one."""
        given = (self.max_rows, None if self.max_tokens is None else self.max_tokens // max(1, width))
        bounds = [size for size in given if size is not None]
        if not (self.has_buckets and bounds):
            return rows
        bucket = min(bounds)
        while bucket > 2 and (half := -(-bucket // 2)) >= rows:
            bucket = half
        fourths = -(-3 * bucket // 4)
        return max(rows, fourths if 1 < fourths >= rows else bucket)

    @property
    def is_bounded(self) -> bool:
        return not (self.max_rows is None and self.max_tokens is None and self.max_patches is None)

    def scaled(self, factor: float) -> ChunkLimits:
        """So many times the rows, tokens and patches, rounded down, at least one of each."""
        sizes = {name: getattr(self, name) for name in ("max_rows", "max_tokens", "max_patches")}
        scaled: dict[str, Any] = {name: max(1, int(n * factor)) for name, n in sizes.items() if n is not None}
        return replace(self, **scaled)
