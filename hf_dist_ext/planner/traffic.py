"""Collectives and bytes sent per optimizer step, and a rough time for them: what tells strategies apart that all fit.

DDP sends one all-reduce of what trains, whatever the number of chunks; less with a hook that compresses. FSDP "speed"
gathers and reduces every unit once per step; "memory" gathers thrice per chunk and layer (pass without a graph,
replay, its backward) and reduces once per chunk and unit. A loss over embeddings sends three small all-gathers and a
reduce-scatter per micro-batch. Seconds are bytes / bandwidth + arithmetic / speed, with
the round figures below; they only rank strategies.

Counts agree with what tests/distributed counts on real processes. A ring of W devices sends (W-1)/W of the data per
gather or scatter, twice that per all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hf_dist_ext.planner.catalog import NETWORK, Hardware
from hf_dist_ext.planner.devices import CARDS
from hf_dist_ext.planner.memory import Case, sent_by_hook
from hf_dist_ext.planner.workload import Workload

# Bytes per second that a device sends inside a machine, well below the data sheets; what a machine sends to others is
# shared by its devices.
BANDWIDTH = {"nvlink": 150e9, "pcie": 12e9, "ethernet": NETWORK}
HOST_BANDWIDTH = 12e9  # device to CPU memory
HOST_OPTIMIZER = 1e9  # elements per second that a CPU process updates
ARITHMETIC = {2: 120e12, 4: 20e12}  # multiply-adds count two; by bytes of the computing precision
LATENCY = 30e-6  # of one collective


@dataclass(frozen=True)
class Links:
    """Those that a group of devices has: bytes per second of a device inside its machine, and of a machine to others;
    over how many machines the group goes, and how many such groups send from a machine at once."""

    inside: float
    between: float
    machines: int = 1
    groups: int = 1

    def seconds(self, kind: str, size: float, members: int) -> float:
        """First inside the machines, then between them, where a machine has each byte once."""
        if kind == "send":
            return size / (self.inside if self.machines == 1 else self.between)
        here = members / self.machines
        times = 2 if kind == "all_reduce" else 1
        inside = (here - 1) / here * size / self.inside
        return times * (inside + (self.machines - 1) / self.machines * size * self.groups / self.between)


@dataclass
class Traffic:
    """Of one optimizer step and one device. `bytes` are those sent inside and between machines. `reduction_seconds`:
    of DDP's gradients as they are, `compressed_seconds` as the run's hook sends them (else as half precision)."""

    collectives: dict[str, int] = field(default_factory=dict)
    bytes: float = 0.0
    seconds: float = 0.0
    arithmetic_seconds: float = 0.0
    arithmetic: float = 0.0  # floating-point operations, without waiting
    reduction_seconds: float = 0.0
    compressed_seconds: float = 0.0

    def send(self, kind: str, count: float, size: float, members: int, links: Links) -> None:
        """Collectives among so many devices, `size` bytes together; a "send" goes to one other device."""
        if members < 2 or not count:
            return
        self.collectives[kind] = self.collectives.get(kind, 0) + round(count)
        share = 1.0 if kind == "send" else (members - 1) / members * (2 if kind == "all_reduce" else 1)
        self.bytes += size * share
        self.seconds += links.seconds(kind, size, members) + count * LATENCY

    def send_embeddings(self, work: Workload, world: int, links: Links) -> None:
        """For a loss over the rows of all devices that have rows of their own."""
        if work.is_embedding and work.sees_all_rows:
            size = work.vectors(work.columns[1:]) * world * work.embedding_dim * 4 * work.accumulation
            self.send("all_gather", 3 * work.accumulation, size, world, links)
            self.send("reduce_scatter", work.accumulation, size, world, links)

    def as_dict(self) -> dict[str, Any]:
        return {
            "collectives": self.collectives,
            "bytes": round(self.bytes),
            "communication_seconds": round(self.seconds, 6),
            "arithmetic_seconds": round(self.arithmetic_seconds, 6),
        }


def traffic(case: Case) -> Traffic:
    """Collectives, bytes and seconds of one optimizer step."""
    work, strategy, hardware, sums = case.work, case.strategy, case.hardware, Traffic()
    parts, shards, whole, send = case.parts, case.shards, case.model.whole, sums.send
    world = 1 if strategy.name == "single" else hardware.num_devices // parts
    inside, across = links_of(hardware)
    computes_in, hook = work.compute_bytes, work.given.get("ddp_comm_hook")
    if parts > 1:
        send("all_reduce", *inside_layers(case, len(case.model.layers)), parts, inside)
    if not strategy.shards:
        sent = sent_by_hook(work, hook)
        kind, size = ("all_gather", sent * world) if hook == "top_k" else ("all_reduce", sent)
        send(kind, 1, size, world, across)
        sums.reduction_seconds = across.seconds("all_reduce", whole.trained_stored, world)
        sums.compressed_seconds = across.seconds(kind, size if hook else sent_by_hook(work, "fp16"), world)
    elif "w" in strategy.shards:
        link = inside if shards <= hardware.per_node else across
        gathers, reductions = _sharded(case)
        send("all_gather", *gathers, shards, link)
        send("reduce_scatter", *reductions, shards, link)
        if strategy.is_hybrid:
            copies = hardware.num_devices // shards
            send("all_reduce", 1, whole.trained * 4 / shards, copies, between_copies(hardware, shards))
    else:  # ZeRO-1 and 2: gradients to their owners, updated weights back
        times = 1 if case.reduces_once or "g" not in strategy.shards else case.num_backwards
        send("reduce_scatter", times, times * whole.trained * computes_in, shards, across)
        send("all_gather", 1, whole.trained * computes_in, shards, across)
    sums.send_embeddings(work, world, across)
    if strategy.offloads:
        passes = 1 if strategy.keeps_whole else case.num_chunks
        moved = whole.elements * computes_in / shards * passes + whole.trained * 4 / shards
        sums.seconds += moved / HOST_BANDWIDTH + whole.trained / shards / HOST_OPTIMIZER
    sums.arithmetic = arithmetic(case)
    sums.arithmetic_seconds = sums.arithmetic / speed(hardware, computes_in)
    return sums


def speed(hardware: Hardware, item: int) -> float:
    """Operations per second, of which a multiply-add is two, with so many bytes per element."""
    if hardware.reached is not None:
        return hardware.reached
    return CARDS[hardware.card].speed(item) if hardware.card else ARITHMETIC[min(item, 4)]


def links_of(hardware: Hardware) -> tuple[Links, Links]:
    """Of groups inside a machine, and of all devices together."""
    inside = Links(BANDWIDTH[hardware.interconnect], hardware.network)
    return inside, replace(inside, machines=hardware.num_nodes)


def between_copies(hardware: Hardware, devices: int) -> Links:
    """Of devices that have the same part of copies, which neighbouring `devices` make: a machine's devices are in as
    many such groups as a copy has devices there."""
    inside, _ = links_of(hardware)
    machines = min(hardware.num_nodes, hardware.num_devices // devices)
    return replace(inside, machines=machines, groups=min(devices, hardware.per_node))


Sent = tuple[float, float]  # how many collectives, and their bytes together


def _sharded(case: Case) -> tuple[Sent, Sent]:
    """Gathers of weights and reductions of gradients."""
    work, model = case.work, case.model
    root, *layers = map(case.whole_bytes, (model.root, *model.layers))
    num_gathered, size = sum(1 for layer in layers if layer), sum(layers)
    num_reduced = sum(1 for unit in [*model.layers, model.root] if unit.trained)
    passes = 3 if case.is_chunked else 2  # the root stays whole from a forward to its backward
    runs = backwards = case.num_chunks * work.accumulation
    if case.strategy.keeps_whole:  # only our step keeps them over micro-batches
        passes, runs = 1, 1 if work.is_embedding else work.accumulation
        backwards = runs
    elif case.encodes_once:  # the projection alone has a backward, once
        passes, backwards = 0 if work.reads_features else 1, work.accumulation
    if case.reduces_once:  # ZeRO-3
        backwards = 1
    gathers = runs * (passes * num_gathered + bool(root)), runs * (passes * size + root)
    return gathers, (backwards * num_reduced, backwards * case.reduced_bytes(model.whole))


def inside_layers(case: Case, num_layers: int) -> Sent:
    """All-reduces of activations under tensor parallelism: two per layer and forward, and as many per backward."""
    work = case.work
    width = (work.config.get("text_config") or work.config)["hidden_size"]
    passes = (3 if case.is_chunked else 2) + case.settings.is_checkpointed
    times = 2 * num_layers * passes * work.accumulation
    size = sum(column.rows * column.length for column in work.columns) * width * work.compute_bytes
    return times * work.num_chunks(case.settings.chunk_rows), times * size


def arithmetic(case: Case) -> float:
    """Floating-point operations of one device's step: forwards, backward, and what is computed again."""
    work, total = case.work, 0.0
    for column in work.columns:
        cost = work.work(column, "nothing", case.parts)
        runs_again = cost.backward > 0 and not case.encodes_once
        forwards = 1 + (case.is_chunked + case.settings.is_checkpointed) * runs_again
        total += 2 * column.rows * work.accumulation * (forwards * cost.forward + cost.backward)
    return total
