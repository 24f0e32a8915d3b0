"""How many bytes autograd saves for a backward, at most at one time: what activations take on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_bytes(known: Iterable[torch.Tensor]) -> Iterator[Callable[[], int]]:
    """Every storage counts once, and those of `known` do not."""
    of_known = {tensor.untyped_storage().data_ptr() for tensor in known}
    held: dict[int, int] = {}  # storage -> how often it is saved
    now = most = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor):
            nonlocal now, most
            self.tensor, self.key = tensor.detach(), tensor.untyped_storage().data_ptr()
            held[self.key] = held.get(self.key, 0) + 1
            if held[self.key] == 1:
                now += tensor.untyped_storage().nbytes()
                most = max(most, now)

        def __del__(self):
            nonlocal now
            held[self.key] -= 1
            if not held[self.key]:
                now -= self.tensor.untyped_storage().nbytes()

    def pack(tensor: torch.Tensor):
        return tensor if tensor.untyped_storage().data_ptr() in of_known else Saved(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.tensor if isinstance(x, Saved) else x):
        yield lambda: most
