"""Collectives and bytes sent per optimizer step, and a rough time for them: what tells strategies apart that all fit.

(1) DDP: one all-reduce of what trains, whatever the number of chunks; less with a hook that compresses
    (planner/knobs.py)
(2) FSDP "speed": every unit is gathered once and reduced once per step; "memory": three gathers per
    chunk and layer (pass without a graph, replay, its backward), one reduction per chunk and unit
(3) tensor parallelism: two all-reduces of the activations per layer and forward, two per backward
(4) the loss over embeddings: three small all-gathers and a reduce-scatter per micro-batch
(5) seconds = bytes / bandwidth + arithmetic / speed, with the round figures below; they only rank strategies

Counts agree with what tests/distributed counts on real processes. Letters: W devices, S that share one copy, n chunks,
U units (layers and root), A micro-batches. A ring sends (W-1)/W of the data per gather or scatter, twice that per
all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_dist_ext.planner.catalog import Hardware, Strategy, shard_count, tensor_parallel_size
from hf_dist_ext.planner.knobs import sent_by_hook
from hf_dist_ext.planner.memory import (
    Model,
    Settings,
    encodes_once,
    is_cut,
    model_of,
    num_backwards,
    reduced_bytes,
    reduces_once,
    whole_bytes,
)
from hf_dist_ext.planner.workload import Workload

# Bytes per second that a device sends, well below the data sheets; between machines "ethernet" counts.
BANDWIDTH = {"nvlink": 150e9, "pcie": 12e9, "ethernet": 3e9}
HOST_BANDWIDTH = 12e9  # device to CPU memory
HOST_OPTIMIZER = 1e9  # elements per second that a CPU process updates
ARITHMETIC = {2: 120e12, 4: 20e12}  # multiply-adds count two; by bytes of the computing precision
LATENCY = 30e-6  # of one collective


@dataclass
class Traffic:
    """Of one optimizer step and one device. `bytes` are those sent inside and between machines. `reduction_seconds`:
    of DDP's gradients as they are, `compressed_seconds` as the run's hook sends them (else as half precision)."""

    collectives: dict[str, int] = field(default_factory=dict)
    bytes: float = 0.0
    seconds: float = 0.0
    arithmetic_seconds: float = 0.0
    reduction_seconds: float = 0.0
    compressed_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "collectives": self.collectives,
            "bytes": round(self.bytes),
            "communication_seconds": round(self.seconds, 6),
            "arithmetic_seconds": round(self.arithmetic_seconds, 6),
        }


def traffic(work: Workload, strategy: Strategy, hardware: Hardware, settings: Settings) -> Traffic:
    """Collectives, bytes and seconds of one optimizer step."""
    found = Traffic()
    parts = tensor_parallel_size(work, hardware) if strategy.is_tensor_parallel else 1
    world = 1 if strategy.name == "single" else hardware.num_devices // parts
    inside = BANDWIDTH[hardware.interconnect]
    across = BANDWIDTH["ethernet"] if hardware.num_nodes > 1 else inside
    computes_in = work.compute_bytes
    model = model_of(work, parts, work.knobs.min_num_params or 0)
    chunks = work.num_chunks(settings.chunk_rows) if is_cut(work, settings) else len(work.columns)

    def send(kind: str, count: float, size: float, members: int, bandwidth: float) -> None:
        if members < 2 or not count:
            return
        found.collectives[kind] = found.collectives.get(kind, 0) + round(count)
        share = (members - 1) / members * (2 if kind == "all_reduce" else 1)
        found.bytes += size * share
        found.seconds += size * share / bandwidth + count * LATENCY

    if parts > 1:
        _tensor_parallel(work, settings, parts, model, send, inside)
    shards = shard_count(strategy, work, hardware)
    if not strategy.shards:
        parameters, knobs = work.parameters().values(), work.knobs  # (1)
        sent = sent_by_hook(knobs.hook, knobs.hook_rank, parameters)
        send("all_reduce", 1, sent, world, across)
        ring = 2 * (world - 1) / world / across
        found.reduction_seconds = model.whole.trained_stored * ring
        found.compressed_seconds = (sent if knobs.hook else sent_by_hook("fp16", 1, parameters)) * ring
    elif "w" in strategy.shards:
        link = inside if strategy.is_hybrid else across
        once = reduces_once(work, strategy, model, hardware, settings)
        _sharded(work, strategy, settings, model, shards, chunks, send, link, once)
        if strategy.is_hybrid:
            send("all_reduce", 1, model.whole.trained * 4 / shards, hardware.num_nodes, across)
    else:  # ZeRO-1 and 2: gradients to their owners, updated weights back
        is_once = "g" not in strategy.shards or reduces_once(work, strategy, model, hardware, settings)
        times = 1 if is_once else num_backwards(work, settings)
        send("reduce_scatter", times, times * model.whole.trained * computes_in, shards, across)
        send("all_gather", 1, model.whole.trained * computes_in, shards, across)
    if work.is_embedding and world > 1:  # (4)
        rows = sum(column.rows for column in work.columns[1:]) * world
        size = rows * work.embedding_dim * 4 * work.accumulation
        send("all_gather", 3 * work.accumulation, size, world, across)
        send("reduce_scatter", work.accumulation, size, world, across)
    if strategy.offloads:
        moved = model.whole.elements * computes_in / shards * chunks + model.whole.trained * 4 / shards
        found.seconds += moved / HOST_BANDWIDTH + model.whole.trained / shards / HOST_OPTIMIZER
    found.arithmetic_seconds = arithmetic(work, settings, parts) / ARITHMETIC[min(computes_in, 4)]
    return found


def _sharded(
    work: Workload,
    strategy: Strategy,
    settings: Settings,
    model: Model,
    shards: int,
    chunks: int,
    send: Any,
    bandwidth: float,
    once: bool,
) -> None:
    """(2); `once`: gradients are reduced once all the same (ZeRO-3)."""
    layers = model.layers

    def weight(unit: Any) -> float:
        return whole_bytes(work, strategy, unit)

    gathered = [unit for unit in layers if weight(unit)]
    root = weight(model.root)
    reduced = sum(1 for unit in [*layers, model.root] if unit.trained)
    size = sum(map(weight, gathered))
    reduced_size = reduced_bytes(work, strategy, model.whole)
    if strategy.keeps_whole:
        times = 1 if work.is_embedding else work.accumulation  # only our step keeps them over micro-batches
        send("all_gather", times * (len(gathered) + bool(root)), times * (size + root), shards, bandwidth)
        send("reduce_scatter", times * reduced, times * reduced_size, shards, bandwidth)
        return
    runs = backwards = chunks * work.accumulation
    passes = 3 if is_cut(work, settings) else 2  # the root stays whole from a forward to its backward
    if encodes_once(work, settings):  # the projection alone has a backward, once
        passes, backwards = 0 if work.reads_features else 1, work.accumulation
    if once:
        backwards = 1
    send("all_gather", runs * (passes * len(gathered) + bool(root)), runs * (passes * size + root), shards, bandwidth)
    send("reduce_scatter", backwards * reduced, backwards * reduced_size, shards, bandwidth)


def _tensor_parallel(
    work: Workload, settings: Settings, parts: int, model: Model, send: Any, bandwidth: float
) -> None:
    """(3)"""
    width = (work.config.get("text_config") or work.config)["hidden_size"]
    computes_in = work.compute_bytes
    passes = 3 if is_cut(work, settings) else 2  # forwards, and a backward that sends as much as a forward
    passes += settings.is_checkpointed
    for column in work.columns:
        rows = work.rows_of_chunk(column.length, settings.chunk_rows) if is_cut(work, settings) else column.rows
        chunks = -(-column.rows // rows) * work.accumulation
        size = column.rows * work.accumulation * column.length * width * computes_in
        count = 2 * len(model.layers) * passes
        send("all_reduce", count * chunks, count * size, parts, bandwidth)


def arithmetic(work: Workload, settings: Settings, parts: int = 1) -> float:
    """Floating-point operations of one device's step: forwards, backward, and what is computed again."""
    total = 0.0
    for column in work.columns:
        cost = work.work(column, "nothing", parts)
        runs_again = cost.backward > 0 and not encodes_once(work, settings)
        forwards = 1 + (is_cut(work, settings) + settings.is_checkpointed) * runs_again
        total += 2 * column.rows * work.accumulation * (forwards * cost.forward + cost.backward)
    return total
