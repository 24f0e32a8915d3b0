"""What processes do together, whatever the strategy.

Processes on a machine without an accelerator become a gloo group, FSDP included. All ranks tell each other small
numbers and texts, decide by the memory that all have, and leave together. Rows travel in `gathering.py`. W is the
number of ranks.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from hf_dist_ext import launched, policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import collective_timeout

# ---- processes without an accelerator ----


def processes_here() -> int:
    """Processes of this run on this machine, as its launcher says."""
    return launched.processes_here(world_size())


def must_use_cpu() -> bool:
    """Several processes and no accelerator: without `use_cpu` every rank would train alone into one output_dir. Not
    for DeepSpeed, which finds the CPU itself and which accelerate drops, silently, once `use_cpu` is set."""
    is_cpu = launched.uses_cpu() or not has_accelerator()
    return launched.processes() > 1 and is_cpu and not launched.uses_deepspeed()


def has_accelerator() -> bool:
    """A device that processes can share work over; Apple's is visible to one process only."""
    return torch.accelerator.is_available() and torch.accelerator.current_accelerator().type != "mps"


@contextmanager
def sharded_on_cpu(has_mesh: bool = False) -> Iterator[None]:
    """Around the making of an `Accelerator`: let FSDP2 be FSDP2 on gloo, and take a mesh of processes (`has_mesh`).

    accelerate 1.15 (state.py, AcceleratorState.__init__) looks at FSDP only when the distributed type is one of the
    accelerators' and otherwise trains DDP without a word; ParallelismConfig refuses MULTI_CPU. Remove when MULTI_CPU
    reaches the first and passes the second; tests/distributed/test_upstream.py tells.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    wants_fsdp = launched.uses_fsdp()
    state = PartialState._shared_state
    if (wants_fsdp or has_mesh) and state.get("distributed_type") == DistributedType.MULTI_CPU:
        if wants_fsdp and launched.fsdp_setting("version", "2") == "1":
            raise UsageError("FSDP version 1 does not run without an accelerator; set fsdp_version: 2 in the YAML.")
        state["distributed_type"] = DistributedType.MULTI_GPU
    yield


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


# ---- what ranks say ----

# torch 2.13 renamed both and warns about the old names; below that only the old ones exist.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


AT_ONCE = 31  # numbers that ranks exchange whatever the lengths of their lists
_OF_CPUS: dict[Any, Any] = {}  # the default group -> one of the same ranks over gloo
_TOKENS: dict[Any, int] = {}  # the default group -> what rank 0 has drawn for it


def exchange(numbers: list[int]) -> list[list[int]]:
    """Every rank's list of integers, in rank order: one small all-gather between CPUs, while an accelerator goes on
    with what is in its queue. The lists may differ in length; a long one takes a second all-gather."""
    if world_size() == 1:
        return [numbers]
    first = _exchange_alike([len(numbers), *numbers[:AT_ONCE], *[0] * (AT_ONCE - len(numbers))])
    lengths = [row[0] for row in first]
    rest = [[]] * len(first)
    if (longest := max(lengths)) > AT_ONCE:
        rest = _exchange_alike([*numbers[AT_ONCE:], *[0] * (longest - max(len(numbers), AT_ONCE))])
    return [[*head, *tail][:length] for length, (_, *head), tail in zip(lengths, first, rest, strict=True)]


def smallest(number: int) -> int:
    """Of all ranks' numbers. Every rank must call it."""
    return min(own for (own,) in exchange([number]))


def _exchange_alike(numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64)
    everyone = mine.new_empty(world_size() * len(numbers))
    all_gather(everyone, mine, group=_group_of_cpus())
    return everyone.view(world_size(), -1).tolist()


def _group_of_cpus() -> Any:
    """None: the default group, which is one of CPUs. Every rank comes here first with its first `exchange`."""
    if dist.get_backend() == "gloo":
        return None
    if (world := dist.group.WORLD) not in _OF_CPUS:
        _OF_CPUS.clear()  # of a group that was destroyed
        _OF_CPUS[world] = dist.new_group(backend="gloo", timeout=collective_timeout())
    return _OF_CPUS[world]


def store_of_group() -> Any:
    """A connection of the caller's own to the group's store, with keys that no other group has: the store outlives a
    group where a launcher restarts processes or takes in a machine. None: one process. Every rank must call it."""
    if world_size() == 1:
        return None
    if (world := dist.group.WORLD) not in _TOKENS:
        _TOKENS.clear()
        _TOKENS[world] = exchange([random.SystemRandom().getrandbits(60)])[0][0]
    return dist.PrefixStore(f"hf_dist/{_TOKENS[world]}", dist.distributed_c10d._get_default_store().clone())


def exchange_later(numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to gather every rank's small tensor (n,); the function it gives waits and returns all of them, (W, n)."""
    if world_size() == 1:
        return lambda: numbers.unsqueeze(0)
    everyone = numbers.new_empty(world_size() * len(numbers))
    work = all_gather(everyone, numbers, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return everyone.view(world_size(), -1)

    return wait


def everyones(content: Any) -> list[Any]:
    """What every rank says, in rank order: anything that can be pickled. Slow. Every rank must call it."""
    if world_size() == 1:
        return [content]
    said: list[Any] = [None] * world_size()
    dist.all_gather_object(said, content, group=_group_of_cpus())
    return said


def texts_of(text: str, ranks: Iterable[int]) -> list[str]:
    """What the given ranks (none: rank 0) say, in words, on every rank. Slow; for reports. Every rank must call it."""
    if world_size() == 1:
        return [text]
    everyone = everyones(text)
    return [f"rank {rank}: {everyone[rank]}" for rank in list(ranks) or [0]]


def told_by_first(content: Any = None) -> Any:
    """What rank 0 says, on every rank: anything that can be pickled. Every rank must call it."""
    if world_size() == 1:
        return content
    said = [content]
    with torch.inference_mode(False):  # torch writes into tensors that it makes for it
        dist.broadcast_object_list(said, src=0, group=_group_of_cpus())
    return said[0]


@torch.no_grad()
def take_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Every rank's tensors become those of rank 0, such as weights that ranks have drawn. Every rank must call it."""
    for tensor in tensors if world_size() > 1 else ():
        dist.broadcast(tensor, src=0)


def random_state(device: torch.device) -> bytes:
    """That of this process: what it will draw next, on the CPU and the device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return b"".join(state.numpy().tobytes() for state in states)


# ---- the norm of gradients of which ranks have parts and copies ----


@torch.no_grad()
def clip(of_copies: Mapping[int, Sequence[torch.Tensor]], max_norm: float, device: torch.device) -> torch.Tensor:
    """Scale the gradients that this rank holds down to `max_norm` (inf: not at all); returns the norm of all ranks',
    a float64 scalar. One all-reduce; every rank calls it.

    of_copies: on how many ranks an element lies -> the parts that this rank holds of gradients that lie so.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in of_copies.items():
        total += torch.nn.utils.get_total_norm(gradients).to(total) ** 2 / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grads_with_norm_
    for gradient in chain.from_iterable(of_copies.values()) if max_norm != float("inf") else ():
        gradient.mul_(factor.to(gradient))  # under cpu_offload some lie on the CPU
    return norm


# ---- memory ----


def choose_mode(needed: float) -> str:
    """ "speed" when so many bytes are under a quarter of the memory free on every rank, else "memory". Without an
    accelerator: "speed"."""
    if not torch.accelerator.is_available():
        return "speed"
    device = torch.accelerator.current_accelerator()
    free, _ = torch.get_device_module(device).mem_get_info()
    return "speed" if needed < policy.KEPT_WHOLE_SHARE * smallest(free) else "memory"


# ---- the end of a process ----


def leave_together() -> None:
    """At the end of a script, on every rank: gloo aborts a process whose peers have left while its threads still talk
    to them, and the groups of a mesh live until they are collected."""
    _OF_CPUS.clear()
    _TOKENS.clear()
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
