"""A device whose memory is what a formula says, for runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_dist_ext.engine.budget import MARGIN

CUDA = torch.device("cuda")


class Formula:
    """Stands in for torch.cuda: memory is what a formula says of the chunks that ran and of the gradients there are.

    Weights and (after the first update) an optimizer's state lie there always. A chunk with a graph holds `fixed`
    bytes and `per_token`, and its backward leaves the gradients; the loss holds `of_loss`. A chunk without a graph
    holds `without_graph` per token.
    """

    def __init__(self, model: nn.Module, total: int, fixed: int, per_token: int, of_loss: int, without_graph: int = 0):
        self.model, self.total = model, total
        self.fixed, self.per_token, self.of_loss, self.without_graph = fixed, per_token, of_loss, without_graph
        self.state = self.most = 0
        self.embeddings = 0

    def bytes_of(self, tensors) -> int:
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    def memory_allocated(self, device=None) -> int:
        parameters = list(self.model.parameters())
        return self.bytes_of(parameters) + self.bytes_of(p.grad for p in parameters) + self.state + self.embeddings

    def hold(self, held: int) -> None:
        self.most = max(self.most, self.memory_allocated() + held)

    def chunk(self, tokens: int) -> int:
        """Bytes beside what lies there; new gradients are made meanwhile."""
        if not torch.is_grad_enabled():
            self.hold(self.fixed + self.without_graph * tokens)
            return 0
        missing = self.bytes_of(p for p in self.model.parameters() if p.grad is None)
        held = self.fixed + self.per_token * tokens
        self.hold(held + missing // 2)
        return held

    def max_memory_allocated(self, device=None) -> int:
        return max(self.most, self.memory_allocated())

    def reset_peak_memory_stats(self, device=None) -> None:
        self.most = self.memory_allocated()

    memory_reserved = memory_allocated

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self.total - self.memory_allocated(), self.total

    def get_device_name(self, device=None) -> str:
        return "a formula"


@contextmanager
def with_memory(trainer: Any, tokens: int) -> Iterator[Formula]:
    """The trainer, which runs on a CPU, finds sizes on a `Formula` with room for so many tokens."""
    model, sizes, args = trainer.bare_model, trainer.step.sizes, trainer.args
    device = Formula(model, total=0, fixed=10_000, per_token=500, of_loss=0)
    weights = device.bytes_of(model.parameters())
    device.total = weights + int((weights + device.fixed + device.per_token * tokens) / (1 - MARGIN)) + 1

    def tell(module: nn.Module, given: tuple, named: dict) -> None:
        features = {**(given[0] if given and isinstance(given[0], Mapping) else {}), **named}
        device.chunk(features["input_ids"].numel())

    with mock.patch.object(type(args), "device", CUDA):
        sizes.budget = sizes._make_budget()
    handle, plain = model.register_forward_pre_hook(tell, with_kwargs=True), torch.get_device_module
    with mock.patch.object(torch, "get_device_module", lambda of=None: device if of == CUDA else plain(of)):
        yield device
    handle.remove()
