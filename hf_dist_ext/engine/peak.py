"""How much memory a part of a step takes: what an accelerator allocates, or on a CPU what autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


def free_bytes(device: torch.device) -> int:
    """What torch may still allocate: free on the device, and reserved by torch but not in use."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


class Peak:
    """Bytes held since a beginning: `peak()` the most since the last `restart()`, `now()` at this moment."""

    def __init__(
        self,
        allocated: Callable[[], int],
        most: Callable[[], int],
        restart: Callable[[], None],
        reserved: Callable[[], int] = int,
    ):
        self._allocated, self._most, self._restart, self._reserved = allocated, most, restart, reserved
        self._restart()
        self._start = self._highest = allocated()

    def __call__(self) -> int:
        return self._most() - self._start

    def now(self) -> int:
        return self._allocated() - self._start

    def restart(self) -> int:
        """Gives `now()`."""
        self._highest = max(self._highest, self._most())
        self._restart()
        return self.now()

    def wasted(self) -> int:
        """Bytes that an allocator has reserved since the beginning beyond the most that was held at once: pieces
        between tensors, into which no other one fitted."""
        return max(0, self._reserved() - max(self._highest, self._most()))


@contextmanager
def peak_bytes(device: torch.device, known: Iterable[torch.Tensor] = ()) -> Iterator[Peak]:
    """Says how many bytes were held at most since entering: allocated on an accelerator; on a CPU saved for backward,
    recomputed activations of checkpointing included, `known` not."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.empty_cache()  # of other parts of a run, whose pieces are none of this one's
        yield Peak(
            lambda: module.memory_allocated(device),
            lambda: module.max_memory_allocated(device),
            lambda: module.reset_peak_memory_stats(device),
            lambda: module.memory_reserved(device),
        )
        return
    of_known = {_storage(tensor) for tensor in known}
    held: dict[int, int] = {}  # storage -> how often it is saved
    now = most = 0

    def restart() -> None:
        nonlocal most
        most = now

    class Saved:
        def __init__(self, tensor: torch.Tensor):
            nonlocal now, most
            # with its graph, it would keep itself alive where no backward comes
            self.tensor, self.key = tensor.detach(), _storage(tensor)
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
        # FSDP2 gathers parameters while they compute, and frees that memory while a graph still names it.
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)
        return tensor if is_weight or _storage(tensor) in of_known else Saved(tensor)

    checkpoint: Any = torch.utils.checkpoint
    hook: Any = checkpoint._recomputation_hook

    class Counting(hook):
        """Non-reentrant checkpointing runs a layer again under hooks of its own, so ours see nothing of it (torch
        2.13). Remove when torch calls hooks inside hooks."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            inner, counted = self.pack_hook, []

            def pack_again(tensor: torch.Tensor):
                counted.append(pack(tensor.detach()))  # with its graph, it would keep itself alive
                return inner(tensor)

            self.pack_hook = pack_again

    checkpoint._recomputation_hook = Counting
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: getattr(saved, "tensor", saved)):
            yield Peak(lambda: now, lambda: most, restart)
    finally:
        checkpoint._recomputation_hook = hook


def _storage(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor that wraps another one has no memory of its own
        (name, *_), _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, name)
    return tensor.untyped_storage().data_ptr()
