"""Several outputs per row of all ranks: of token vectors the real ones travel, and no padding.

A mapping of outputs (engine/outputs.py) may hold a "mask" (B, T). Of its tensors of three axes, (B, T, D), only what
the mask marks as real is sent:

(1) every row's number of real entries; how many a rank sends in all, and its longest row, the ranks tell each other
    between their CPUs. Where the host knows a row's tokens, and these are its entries, no device is waited for; else
    the two numbers are read back
(2) the real entries of all rows end to end
(3) they are laid into rows again, at the front, as wide as the longest row of all ranks

Letters: B own rows, N all ranks' rows, T entries of the second axis, n real entries of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_dist_ext.engine.real_tokens import places_of
from hf_dist_ext.engine.rows import moved

MASK = "mask"


class GatheredOutputs(Mapping):
    """key -> (N, ...), differentiable. Each is gathered when it is first asked for, what the mask is of at once.

    gather: (entries of this rank, the number of entries of each rank) -> those of all, as `Rows.gather`.
    exchange: numbers of this rank's host -> those of each rank.
    lengths: (B,) real entries of every own row; None: the mask tells.
    """

    def __init__(
        self,
        gather: Callable[[Tensor, Sequence[int]], Tensor],
        own: Mapping[str, Tensor],
        counts: Sequence[int],
        exchange: Callable[[list[int]], list[list[int]]],
        lengths: np.ndarray | None = None,
    ):
        self._gather, self._own, self._counts = gather, own, counts
        self._exchange, self._lengths = exchange, lengths
        self._gathered: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._gathered:
            if key in (masked := self._masked()):
                self._gather_masked(masked)
            else:
                self._gathered[key] = self._gather(self._own[key], self._counts)
        return self._gathered[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def _masked(self) -> list[str]:
        return [key for key, one in self._own.items() if key == MASK or one.dim() > 2] if MASK in self._own else []

    def _gather_masked(self, masked: list[str]) -> None:
        is_real = self._own[MASK].bool()  # (B, T)
        lengths = is_real.sum(dim=1)  # (B,)
        if self._lengths is None:
            longest = torch.cat([lengths, lengths.new_zeros(1)]).amax()
            numbers = torch.stack([lengths.sum(), longest]).tolist()
        else:
            known = moved(self._lengths, lengths.device)
            torch._assert_async((known == lengths).all(), "a row's outputs are not one per real token of it")
            numbers = [int(self._lengths.sum()), int(self._lengths.max(initial=0))]
        of_rank, widths = map(list, zip(*self._exchange(numbers), strict=True))
        with torch.no_grad():
            lengths = self._gather(lengths, self._counts)  # (1): (N,)
        width = max(widths) or is_real.shape[1]
        real = torch.arange(width, device=lengths.device) < lengths[:, None]  # (N, T)
        own, places = places_of(is_real, numbers[0]), places_of(real, sum(of_rank))
        self._gathered[MASK] = real
        for key in (one for one in masked if one != MASK):
            entries = self._own[key].flatten(0, 1).index_select(0, own)
            everyone = self._gather(entries, of_rank) if sum(of_rank) else entries  # (2): (n, ...)
            empty = everyone.new_zeros(real.numel(), *everyone.shape[1:])
            self._gathered[key] = empty.index_copy(0, places, everyone).unflatten(0, real.shape)  # (3)
