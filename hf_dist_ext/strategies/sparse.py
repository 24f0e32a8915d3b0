"""Gradients of which DDP sends a part, `top_k` and `random_k`; what is not sent is kept for the next update.

For every parameter of n elements, of which k = ceil(ratio * n) are sent:

(1) a = gradient + what earlier updates left out (error feedback, https://huggingface.co/papers/1809.07599)
(2) choose k elements: the largest of this process (top_k), or one out of each of k equal parts, drawn alike on all
    processes (random_k)
(3) the gradient becomes the mean over processes of what each has sent, zero elsewhere; a without its sent elements is
    left out

top_k gathers everybody's elements and their places. random_k has the same places everywhere, so that values alone are
reduced. DDP puts several parameters into one message; what is chosen does not depend on which, nor on the order of
messages, so a resumed run goes on exactly. `LeftOut` is each process's own, and part of a checkpoint.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_dist_ext.strategies import collectives

HOOKS = ("top_k", "random_k")


class LeftOut:
    """What the hook remembers.

    Args:
        model: inside its wrapper; its parameters are known by name.
        hook: one of HOOKS.
        ratio: the share of elements that is sent, in (0, 1].
        seed: of random_k.

    Attributes:
        updates: so many were sent.
        errors: name -> what was left out of the parameter's gradients, flat, in the gradient's dtype.
    """

    def __init__(self, model: nn.Module, hook: str, ratio: float, seed: int):
        self.hook, self.ratio, self.seed = hook, ratio, seed
        self.begin()
        self._names = {id(p): (i, name) for i, (name, p) in enumerate(model.named_parameters())}

    def begin(self) -> None:
        """Of a training."""
        self.updates = 0
        self.errors: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """After an update that is left out because it is not finite: what its gradients left out may be as bad."""
        self.errors.clear()

    def content(self, world_size: int) -> dict[str, Any]:
        """For a checkpoint."""
        return {"errors": dict(self.errors), "updates": self.updates} | self._kind(world_size)

    def read(self, content: Mapping[str, Any], world_size: int) -> str:
        """Go on from a checkpoint's `content`. Where that is of another run: in words what it is of, and nothing is
        taken."""
        kind = self._kind(world_size)
        saved = {name: content.get(name) for name in kind}
        if saved != kind:
            changed = [name for name in kind if saved[name] != kind[name]]
            return ", ".join(f"{name}={saved[name]!r} (now {kind[name]!r})" for name in changed)
        self.errors, self.updates = dict(content["errors"]), content["updates"]
        return ""

    def _kind(self, world_size: int) -> dict[str, Any]:
        return {"ddp_comm_hook": self.hook, "ddp_compression_ratio": self.ratio, "world_size": world_size}

    def error_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """What was left out of a parameter's gradients so far. `gradient`: flat, says what a new one looks like."""
        _, name = self._names[id(parameter)]
        if name not in self.errors:
            self.errors[name] = torch.zeros_like(gradient)
        return self.errors[name]

    def places(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """(2): k places in a flat gradient, int64."""
        size = len(gradient)
        count = math.ceil(self.ratio * size)
        if self.hook == "top_k":
            return gradient.abs().topk(count, sorted=False).indices
        number, _ = self._names[id(parameter)]
        draw = torch.Generator(gradient.device)
        draw.manual_seed(hash((self.seed, self.updates, number)) % 2**63)
        begins = torch.arange(count + 1, device=gradient.device) * size // count
        shares = torch.rand(count, generator=draw, device=gradient.device, dtype=torch.float64)
        return begins[:-1] + (shares * begins.diff()).long()


def hook(state: LeftOut, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`, which looks at these annotations: they must not be strings."""
    buffer, all_values, all_places, offset = bucket.buffer(), [], [], 0
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        flat = gradient.view(-1)
        if not len(flat):
            continue
        error = state.error_of(parameter, flat)
        flat += error
        places = state.places(parameter, flat)
        values = flat[places]
        if state.hook == "random_k":
            values += 0 * flat.abs().max()  # what is not finite must reach all processes, drawn or not
        error.copy_(flat)
        error[places] = 0
        all_values.append(values)
        all_places.append(places + offset)
        offset += len(flat)
    if bucket.is_last():
        state.updates += 1
    values, places = torch.cat(all_values) / dist.get_world_size(), torch.cat(all_places)
    buffer.zero_()
    if state.hook == "random_k":
        reduced = dist.all_reduce(values, async_op=True).get_future()

        def spread(done: Any) -> torch.Tensor:
            if places.device.type != "cpu":  # it runs on a stream of its own, which torch tells of `values` only
                places.record_stream(torch.accelerator.current_stream())
            return buffer.index_copy_(0, places, done.value()[0])

        return reduced.then(spread)
    places = places.int() if len(buffer) < 2**31 else places
    parts = [_bytes(places), _bytes(values)]
    lengths, message = [len(part) for part in parts], torch.cat(parts)
    everyone = message.new_empty(dist.get_world_size() * len(message))
    gathered = collectives.all_gather(everyone, message, async_op=True).get_future()

    def add_up(_: Any) -> torch.Tensor:
        for one in everyone.split(len(message)):  # one after the other, so that the sum is the same on all processes
            at, theirs = one.split(lengths)
            at, theirs = at[: places.nbytes].view(places.dtype), theirs[: values.nbytes].view(values.dtype)
            buffer.index_add_(0, at.long(), theirs)
        return buffer

    return gathered.then(add_up)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Filled up to a multiple of 8, so that any dtype may stand behind them."""
    return nn.functional.pad(tensor.view(torch.uint8), (0, -tensor.nbytes % 8))
