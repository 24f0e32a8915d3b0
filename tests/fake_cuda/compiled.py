"""What inductor would run on the fake device: it plans its kernels there as on a GPU, and none of them is made.

A graph that is run counts as the kernels that inductor's scheduler has fused it into. A matrix product takes the time
that `FakeDevice` gives it, any other kernel that of the bytes that it reads and writes, of a table only the rows that
it picks. inductor's patterns are left out (it would try them out on a GPU): it makes a few kernels less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo import device_interface
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, config, ir, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes import fuse_attention, joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils.flop_counter import flop_registry

from tests.fake_cuda.device import LAUNCH, MEMORY, PRODUCTS, FakeDevice


def prepare() -> None:
    """inductor asks what the device can do, and for Triton, which it needs for making kernels alone."""
    properties = torch.cuda.get_device_properties(0)
    properties.gcnArchName, properties.is_integrated = "", False
    properties.shared_memory_per_block, properties.shared_memory_per_block_optin = 49152, 232448
    for interface in (device_interface.CudaInterface, device_interface.CudaInterface.Worker):
        interface.get_device_properties = staticmethod(torch.cuda.get_device_properties)
    device_interface.CudaInterface.get_compute_capability = staticmethod(lambda *given: 90)
    scheduler.has_triton = lambda *given: True
    fuse_attention._sfdp_init = joint_graph.lazy_init = post_grad.lazy_init = lambda *given, **more: None
    config.pattern_matcher = config.joint_graph_constant_folding = config.fx_graph_cache = False


def backend(device: FakeDevice) -> Callable:
    """For `torch.compile`, inside of the device's mode. A graph's kernels are counted whenever it runs."""

    def of_graph(module: Any, inputs: Sequence[Any], **options: Any) -> Callable:
        nodes = _planned(module, inputs, options.get("is_inference", False), options.get("is_backward", False))
        seconds = sum(max(num_bytes / MEMORY, LAUNCH) for num_bytes in nodes if num_bytes is not None)

        def run(*given: Any) -> Any:
            before, products, kernels = device.seconds, device.products, Counter(device.kernels)
            found = module(*given)
            device.seconds = before + device.products - products + seconds
            device.kernels = kernels + Counter({"compiled": len(nodes)})
            return found

        return make_boxed_func(run)

    return lambda module, inputs: compile_fx.compile_fx(module, inputs, inner_compile=of_graph)


def _planned(module: Any, inputs: Sequence[Any], is_inference: bool, is_backward: bool) -> list[int | None]:
    """Bytes of every kernel, None for matrix products and attention. As torch/_inductor/compile_fx.py does it before
    it writes code (torch 2.13)."""
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        fake = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx.record_original_output_strides(module)
    with V.set_fake_mode(fake):
        compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
        graph = GraphLowering(
            module, example_inputs=inputs, shape_env=fake.shape_env, is_inference=is_inference, is_backward=is_backward
        )
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            return [_bytes_of(node) for node in graph.scheduler.nodes if _is_kernel(node)]


def _is_kernel(node: scheduler.BaseSchedulerNode) -> bool:
    """Not one of the results of a kernel that has several."""
    return not isinstance(node, scheduler.NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)


def _bytes_of(node: scheduler.BaseSchedulerNode) -> int | None:
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        operator = node.node.op_overload
        if operator._overloadpacket in flop_registry or operator._schema.name.split("::")[1] in PRODUCTS:
            return None
    found = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    picked: Counter[str] = Counter()
    for dep in {dep for one in node.get_nodes() for dep in one.read_writes.reads}:
        if isinstance(dep, MemoryDep) and dep.is_indirect():
            numel = V.graph.sizevars.optimization_hint(dep.get_numel(), fallback=0)
            picked[dep.name] += numel * V.graph.get_dtype(dep.name).itemsize
    return sum(min(num_bytes, picked.get(name, num_bytes)) for name, num_bytes in found.items())


def costs_of(device: FakeDevice, model: Callable, *runs: Callable[[Callable], Any]) -> list[dict[str, float]]:
    """Kernels, seconds and products of each run, which gets the compiled model."""
    from hf_dist_ext.training import compiling

    prepare()
    torch._dynamo.reset()
    compiling.prepare(SimpleNamespace(), TorchDynamoPlugin(backend="inductor"))
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else the rest would run, and count, uncompiled
    made = torch.compile(model, backend=backend(device), dynamic=True)
    found = []
    # Inside of a mode that is not torch's own, dynamo leaves everything uncompiled.
    with device, mock.patch.object(FakeDevice, "is_infra_mode", classmethod(lambda kind: True)):
        for run in runs:
            device.reset()
            run(made)
            costs = {"launched": device.kernels.total(), "seconds": device.seconds, "products": device.products}
            found.append(costs)
    return found


def chunk_costs(device: FakeDevice, step: Any, chunk: Any) -> list[dict[str, float]]:
    """Of a forward without a graph, and of a forward with its backward."""

    def encode(model: torch.nn.Module) -> torch.Tensor:
        with step.run.precision():
            return step.sizes.embedder.call(model, chunk.features, chunk.column, None)

    def forward(model: torch.nn.Module) -> None:
        with torch.no_grad():
            encode(model)

    with device:  # a chunk after the first adds to the gradients that are there
        for parameter in step.run.bare_model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return costs_of(device, step.run.bare_model, forward, lambda model: encode(model).sum().backward())
