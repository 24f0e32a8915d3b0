"""A CUDA device for a torch without one: tensors on it have shapes, types and gradients, and no values.

Import this module before torch, in a process of its own, with FAKE_CUDA_LIBRARY naming what `build.py` has compiled of
`device.cpp`. The host computes for real. Whatever touches the device goes through `FakeDevice`, which notes

    reads      places where the host waits for the device: a value is read, or something is copied back
    copies     to the device that make the host wait: from pageable memory, or without non_blocking
    kernels    launched, by name: one for each operator that makes or changes a tensor of the device
    casts      of parameters, by id: copies in another type

An operator that gets tensors of both devices raises the error that CUDA raises. What it can not show: numbers,
streams, races, the allocator, and what the kernels of a library cost.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

DEVICE = torch.device("cuda", 0)
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh",
             "_unsafe_view", "_reshape_alias", "set_", "resize_", "record_stream"}  # fmt: skip


class FakeDevice(TorchDispatchMode):
    """Around all that a process does with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.drawn = 0  # kernels that drew random numbers
        self.reset()

    def reset(self) -> None:
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.casts: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked of a tensor without values, ten times for each kernel
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operators on its parts come here
        given = list(_tensors((args, kwargs)))
        asked = kwargs.get("device")
        if not (any(one.is_cuda for one in given) or (asked is not None and torch.device(asked).type == "cuda")):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in READS and given[0].is_cuda:
            self.reads[f"{name} {place()}"] += 1
            if name == "_local_scalar_dense":
                return _zero(given[0].dtype)
            if name == "equal":
                return True
        with self.fake:
            without = args, kwargs
            if not all(isinstance(one, FakeTensor) for one in given):
                without = tree_map_only(torch.Tensor, self._without_values, without)
            made = func(*without[0], **without[1])
        results = list(_tensors(made))
        if name in ("_to_copy", "copy_"):
            self._note_copy(name, given, results, args, kwargs)
        if not any(one.is_cuda for one in results or given):
            return tree_map_only(FakeTensor, lambda one: torch.zeros(one.shape, dtype=one.dtype), made)
        if not func.is_view and name not in NO_KERNEL:
            self.kernels[name] += 1
            self.drawn += torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs)
        return made

    @staticmethod
    def _without_values(one: torch.Tensor) -> torch.Tensor:
        if isinstance(one, FakeTensor):
            return one
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)

    def _note_copy(self, name: str, given: list, results: list, args: tuple, kwargs: dict) -> None:
        source, target = (given[1], given[0]) if name == "copy_" and len(given) > 1 else (given[0], results[0])
        waits = not (args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False))
        if source.is_cuda and not target.is_cuda:
            self.reads[f"copy to the host {place()}"] += 1
        elif target.is_cuda and not source.is_cuda and source.numel() and (waits or not source.is_pinned()):
            kind = "blocking" if waits else "pageable"
            self.copies[f"{kind} {place()}"] += 1
        elif source.is_cuda and isinstance(source, torch.nn.Parameter) and source.dtype != results[0].dtype:
            self.casts[id(source)] += name == "_to_copy"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those of an operator's arguments or results; several times as fast as torch's trees."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _zero(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether it does so: an operator with a probability of zero does not."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            return bool(args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


def place() -> str:
    """File and function of the innermost line outside of torch and of this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__:
            return f"{re.split('site-packages/|/(?=hf_dist_ext/|tests/)', name)[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class Stream:
    """Also an event."""

    device, stream_id, cuda_stream, device_index = DEVICE, 0, 0, 0

    def __init__(self, *given: Any, **more: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **more: 0.0 if name == "elapsed_time" else True if name == "query" else self

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


def install() -> FakeDevice:
    """torch.cuda says that there is a device. The mode is left to be entered."""
    device, cuda = FakeDevice(), torch.cuda
    properties = SimpleNamespace(
        name="fake", total_memory=140 * 2**30, major=9, minor=0, multi_processor_count=132, uuid="0",
        L2_cache_size=2**25, regs_per_multiprocessor=2**16, max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip
    said = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "_lazy_init": None,
        "set_device": None, "get_device_capability": (9, 0), "get_device_name": "fake", "is_bf16_supported": True,
        "get_device_properties": properties, "mem_get_info": (120 * 2**30, 140 * 2**30), "empty_cache": None,
        "manual_seed": None, "manual_seed_all": None, "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None, "memory_stats": {},
        "current_stream": Stream(), "default_stream": Stream(), "set_stream": None, "ipc_collect": None,
        "is_current_stream_capturing": False, "can_device_access_peer": False, "_maybe_exchange_device": 0,
        "_exchange_device": 0,
    }  # fmt: skip
    for name, value in said.items():
        setattr(cuda, name, lambda *given, value=value, **more: value)
    cuda.Stream = cuda.Event = torch.Stream = torch.Event = Stream
    cuda.stream = lambda stream: nullcontext()
    cuda.device = cuda.device_of = lambda *given: nullcontext()
    cuda.synchronize = lambda *given: device.reads.update([f"synchronize {place()}"])
    cuda.get_rng_state = lambda *given: torch.tensor([device.drawn])
    cuda.set_rng_state = lambda state, *given, **more: setattr(device, "drawn", int(state))
    torch.nn.Module._apply = _moved
    FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()  # one copy, as torch makes of a device's tensor
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _made_on_host(getattr(torch, name)))
    return device


def _made_on_host(make: Callable) -> Callable:
    """Of values of the host: torch makes it there, and copies it to the device from pageable memory."""

    def made(*given: Any, device: Any = None, requires_grad: bool = False, **more: Any) -> torch.Tensor:
        there = make(*given, **more)
        there = there if device is None else there.to(device)
        return there.requires_grad_() if requires_grad else there

    return made


def _moved(module: torch.nn.Module, move: Callable, recurse: bool = True) -> torch.nn.Module:
    """Module._apply, which can not write a tensor without values into a parameter of the host. Tied weights stay
    tied."""
    for child in module.children() if recurse else ():
        child._apply(move)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            there = getattr(parameter, "moved_to", None)
            there = move(parameter.data) if there is None else there
        if type(there) is type(parameter.data):
            parameter.data = there
        elif not isinstance(there, torch.nn.Parameter):
            there = parameter.moved_to = torch.nn.Parameter(there, parameter.requires_grad)
        module._parameters[name] = there if isinstance(there, torch.nn.Parameter) else parameter
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else move(buffer)
    return module
