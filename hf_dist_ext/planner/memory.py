"""Bytes per device for every way to spread a run.

`estimate` adds up what a model has (planner/workload.py) as a `StrategySpec` splits it (planner/catalog.py): weights,
master weights, gradients, optimizer, activations of a chunk, embeddings of the batch, buffers of the collectives, the
framework; the optimizer's own scratch counts only while no activation lives.

Under autocast "weights" are the copies that compute (and what is frozen), "master weights" the float32 ones behind
them; with a loss over embeddings FSDP's copies are half precision where autocast's would be (strategies/fsdp.py). S
devices share one copy of what is sharded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import GIB, STRATEGIES, Hardware, StrategySpec, tensor_parallel_size
from hf_dist_ext.planner.forward import TEMPORARY_VALUES, Cost, Parameter
from hf_dist_ext.planner.workload import BatchColumn, Cast, Workload

# What is not a tensor of ours: the device's context and libraries, a communicator's buffers, and a share that the
# allocator can not use. Measured by nobody here: no GPU was at hand.
CONTEXT_BYTES = 0.75 * GIB
COMMUNICATOR_BYTES = 0.4 * GIB
FRAGMENTATION = 0.03
SPARSE = ("top_k", "random_k")  # hooks of DDP that send some elements


@dataclass(frozen=True)
class Settings:
    """What may be changed to make a run fit."""

    chunk_rows: int | None = None  # of the longest rows; None: as the run says
    is_checkpointed: bool = False


@dataclass
class Bytes:
    """Per device. `host`: on the CPU, per process. `scratch`: the optimizer's, after the activations are gone."""

    weights: float = 0.0
    master_weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    embeddings: float = 0.0
    buffers: float = 0.0
    framework: float = 0.0
    scratch: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        lasting = self.weights + self.master_weights + self.gradients + self.optimizer + self.buffers + self.framework
        return lasting + max(self.activations + self.embeddings, self.scratch)

    def as_dict(self) -> dict[str, int]:
        return {name: round(value) for name, value in asdict(self).items()} | {"total": round(self.total)}


@dataclass
class ParameterSums:
    """Sums over parameters. Elements; `..._stored` in bytes, `gathered...` in those that FSDP makes whole.
    `largest_unpacked`: bytes of a matrix in 4 bits while it is multiplied; `unused...`: of what trains and gets no
    gradient, as the layers of a tower behind the one that is read."""

    elements: float = 0.0
    trained: float = 0.0
    trained_stored: float = 0.0
    frozen_stored: float = 0.0
    optimizer: float = 0.0
    largest_trained: float = 0.0
    gathered: float = 0.0
    gathered_trained: float = 0.0
    largest_unpacked: float = 0.0
    unused_stored: float = 0.0
    unused_optimizer: float = 0.0
    optimizer_wide: float = 0.0  # of what trains in float32, in whatever it is stored
    unused_optimizer_wide: float = 0.0

    @property
    def stored(self) -> float:
        return self.trained_stored + self.frozen_stored

    def add(self, parameter: Parameter, work: Workload) -> None:
        self.elements += parameter.elements
        stored, gathered = parameter.elements * parameter.item, parameter.elements * work.gathered_item(parameter)
        self.gathered += gathered
        self.gathered_trained += gathered * parameter.trains
        if parameter.trains:
            self.trained += parameter.elements
            self.trained_stored += stored
            state = policy.optimizer_bytes(work.optimizer, parameter.elements, parameter.item, parameter.columns)
            self.optimizer += state
            self.unused_stored += 0.0 if parameter.gets_gradient else stored
            self.unused_optimizer += 0.0 if parameter.gets_gradient else state
            item = max(4, parameter.item)
            wide = policy.optimizer_bytes(work.optimizer, parameter.elements, item, parameter.columns)
            self.optimizer_wide += wide
            self.unused_optimizer_wide += 0.0 if parameter.gets_gradient else wide
            self.largest_trained = max(self.largest_trained, stored)
        else:
            self.frozen_stored += stored
            unpacked = parameter.elements * work.compute_bytes * parameter.is_packed
            self.largest_unpacked = max(self.largest_unpacked, unpacked)


@dataclass
class Model:
    """All parameters, and unit by unit: the layers, and under None what belongs to no layer (FSDP's root)."""

    whole: ParameterSums = field(default_factory=ParameterSums)
    units: dict[str | None, ParameterSums] = field(default_factory=dict)

    def add(self, parameter: Parameter, unit: str | None, work: Workload) -> None:
        self.whole.add(parameter, work)
        self.units.setdefault(unit, ParameterSums()).add(parameter, work)

    @property
    def root(self) -> ParameterSums:
        return self.units.get(None, ParameterSums())

    @property
    def layers(self) -> list[ParameterSums]:
        return [unit for name, unit in self.units.items() if name is not None]


@functools.lru_cache(maxsize=32)  # of the few workloads of a plan
def model_of(work: Workload, tensor_parallel: int = 1, min_num_params: int = 0) -> Model:
    """`min_num_params`: layers with fewer parameters are no unit of their own."""
    model, parameters = Model(), work.parameters(tensor_parallel).values()
    counts: dict[str | None, float] = {}
    for parameter in parameters:
        counts[parameter.layer] = counts.get(parameter.layer, 0) + parameter.elements
    for parameter in parameters:
        model.add(parameter, parameter.layer if counts[parameter.layer] >= min_num_params else None, work)
    return model


@dataclass(frozen=True, eq=False)
class Case:
    """A run as a strategy spreads it over devices, with the settings that make it fit."""

    work: Workload
    strategy: StrategySpec = STRATEGIES[0]
    hardware: Hardware = Hardware()
    settings: Settings = Settings()

    @property
    def is_chunked(self) -> bool:
        """Whether the batch goes through in chunks: the run has a gradient cache, or the settings give it one."""
        return self.work.is_cached or self.settings.chunk_rows is not None

    @property
    def encodes_once(self) -> bool:
        """Whether a frozen backbone runs once per step, or never; the projection goes on from its pooled vectors."""
        return self.work.reads_features or (self.work.has_frozen_backbone and self.is_chunked)

    @property
    def rows_at_once(self) -> int:
        """Of the longest rows: of a chunk, or of the batch."""
        work = self.work
        chunk = self.settings.chunk_rows
        return work.rows_of_chunk(work.longest_column, chunk) if self.is_chunked else work.batch

    @property
    def cast(self) -> Cast:
        """The weights that the strategy hands to a forward in the precision of the computation."""
        if self.strategy.is_tensor_parallel:
            return "nothing"
        if self.strategy.is_deepspeed:
            return "all"
        return self.work.gathered_as if "w" in self.strategy.shards else "nothing"

    @functools.cached_property
    def parts(self) -> int:
        """Devices that share a layer."""
        return tensor_parallel_size(self.strategy, self.work, self.hardware)

    @functools.cached_property
    def model(self) -> Model:
        return model_of(self.work, self.parts, self.work.given.get("min_num_params") or 0)

    @functools.cached_property
    def shards(self) -> int:
        """Devices that share one copy of what is sharded."""
        if self.strategy.is_hybrid:
            return self.work.given.get("sharding_group_size") or self.hardware.per_node
        return max(1, self.hardware.num_devices // self.parts) if self.strategy.shards else 1

    @functools.cached_property
    def num_chunks(self) -> int:
        """Of a micro-batch and device."""
        return self.work.num_chunks(self.settings.chunk_rows)

    @functools.cached_property
    def num_backwards(self) -> int:
        """Of one update."""
        return self.work.accumulation * (self.num_chunks if self.is_chunked and not self.encodes_once else 1)

    @functools.cached_property
    def reduces_once(self) -> bool:
        """ZeRO-2 and 3: whether gradients stay whole until the one reduction of an update (strategies/zero.py)."""
        work = self.work
        if not self.strategy.is_deepspeed or "g" not in self.strategy.shards or self.num_backwards == 1:
            return False
        if work.fsdp_mode != "auto" or not work.is_embedding:
            return work.is_embedding and work.fsdp_mode == "speed"
        whole = self.model.whole.trained * work.compute_bytes
        return whole < policy.KEPT_WHOLE_SHARE * self.hardware.memory_bytes

    def whole_bytes(self, unit: ParameterSums) -> float:
        """Of a sharded unit's weights while they are whole."""
        if self.strategy.is_deepspeed:
            return unit.elements * self.work.compute_bytes
        if self.strategy.is_tensor_parallel:
            return unit.stored  # transformers gathers what is stored, and autocast casts it
        return unit.gathered_trained if self.strategy.replicates_frozen else unit.gathered

    def reduced_bytes(self, unit: ParameterSums) -> float:
        """Of a sharded unit's gradients as they are reduced, and as they wait for it."""
        if self.strategy.is_tensor_parallel:
            return unit.trained_stored
        return unit.trained * (self.work.compute_bytes if self.strategy.is_deepspeed else self.work.reduced_item)


def estimate(case: Case) -> Bytes:
    """Peak bytes of one device: what it has of weights and state, and whole units of them while they compute."""
    work, strategy, hardware, model, shards = case.work, case.strategy, case.hardware, case.model, case.shards
    whole, of_chunk, gathers = model.whole, activation_cost(case), "w" in strategy.shards
    is_waiting = strategy.is_deepspeed and case.reduces_once  # gradients are whole until the update's one reduction
    needed = state_bytes(work, whole, strategy, shards, is_waiting)
    if not (strategy.name == "DDP" or strategy.is_deepspeed):  # there what is not used has a gradient of zero
        needed.gradients -= whole.unused_stored / shards
        unused = whole.unused_optimizer_wide if trains_in_float32(work, strategy) else whole.unused_optimizer
        needed.optimizer -= unused / shards
    needed.scratch = scratch_bytes(work, whole.trained / (shards if strategy.shards else 1))
    if strategy.offloads:  # shards and state live on the CPU, one unit's gradients at a time on the device
        stay = whole.frozen_stored if strategy.replicates_frozen else 0.0
        needed.host = needed.weights - stay + needed.master_weights + needed.optimizer
        needed.host += needed.gradients / (shards if is_waiting else 1)
        needed.weights, needed.master_weights, needed.optimizer, needed.scratch = stay, 0.0, 0.0, 0.0
        largest = max(model.units.values(), key=lambda unit: unit.trained, default=whole)
        needed.gradients = case.reduced_bytes(whole if is_waiting else largest)
    needed.gradients += case.reduced_bytes(whole) if strategy.keeps_whole else 0.0
    if gathers:
        root, *units = map(case.whole_bytes, (model.root, *model.layers))
        widest = max(units, default=0.0)
        needed.weights += root + (sum(units) if strategy.keeps_whole else min(sum(units), 2 * widest))
    if strategy.is_deepspeed:
        needed.buffers = 2 * min(whole.trained, 2e8) * work.compute_bytes  # of two buckets
    elif gathers:
        # all-gather: flat output before it is copied out; reduce-scatter: its input, and the next unit's
        reduced = max(map(case.reduced_bytes, model.units.values()), default=0.0)
        needed.buffers = max(widest, root) + (1 if strategy.keeps_whole else 2) * reduced
        needed.buffers += wide_bytes(work, whole, strategy) / shards if strategy.is_hybrid else 0.0
    else:
        needed.weights += whole.largest_unpacked
        if strategy.name == "DDP":
            needed.buffers = 0.0 if work.given.get("ddp_gradient_as_bucket_view") else whole.trained_stored
            needed.buffers += kept_by_hook(work, hardware.num_devices)
    # Under FSDP and DeepSpeed the weights that compute are half precision already, so autocast copies none. Else the
    # gradient of the largest matrix is whole before it is added to what earlier chunks left.
    needed.weights += 0.0 if strategy.is_deepspeed else of_chunk.casts
    own = 0.0 if gathers or strategy.is_deepspeed else whole.largest_trained
    needed.activations = max(of_chunk.activations, own)
    needed.embeddings = loss_bytes(work, hardware.num_devices // case.parts)
    needed.framework = framework_bytes(needed, hardware.num_devices == 1 or strategy.name == "single")
    return needed


def scratch_bytes(work: Workload, trained: float) -> float:
    """Of optimizers that update all parameters together."""
    return trained * 4 if work.optimizer in ("adamw_torch", "adafactor", "adamw_anyprecision") else 0.0


def framework_bytes(needed: Bytes, is_alone: bool) -> float:
    """Beside what is needed for a step."""
    return CONTEXT_BYTES + (0 if is_alone else COMMUNICATOR_BYTES) + FRAGMENTATION * needed.total


def wide_bytes(work: Workload, whole: ParameterSums, strategy: StrategySpec) -> float:
    """Of trained weights as the optimizer has them, which are their gradients' too."""
    return whole.trained * 4 if strategy.shards and work.autocast_bytes else whole.trained_stored


def trains_in_float32(work: Workload, strategy: StrategySpec) -> bool:
    """DeepSpeed's masters are, and what accelerate shards under mixed precision, in whatever it was loaded."""
    return strategy.is_deepspeed or bool(strategy.shards and work.autocast_bytes)


def state_bytes(
    work: Workload, whole: ParameterSums, strategy: StrategySpec, over: int, keeps_gradients: bool = False
) -> Bytes:
    """Of weights, master weights, gradients and optimizer, each divided over so many devices where the strategy
    shards it. `keeps_gradients`: they are not."""
    computes_in, wide = work.compute_bytes, wide_bytes(work, whole, strategy)
    frozen, masters, gradients = whole.frozen_stored, wide if wide > whole.trained * computes_in else 0.0, wide
    weights = wide - masters
    if strategy.is_deepspeed:  # all in the computing precision, with float32 behind what trains
        frozen, weights = 0.0, whole.elements * computes_in
        masters, gradients = whole.trained * 4, whole.trained * computes_in
    of_state, of_gradients, of_weights = (over if part in strategy.shards else 1 for part in "ogw")
    return Bytes(
        weights=weights / of_weights + frozen / (1 if strategy.replicates_frozen else of_weights),
        master_weights=masters / of_state,
        gradients=gradients / (1 if keeps_gradients else of_gradients),
        optimizer=(whole.optimizer_wide if trains_in_float32(work, strategy) else whole.optimizer) / of_state,
    )


# ---- hooks of DDP ----


def sent_by_hook(work: Workload, hook: str | None) -> float:
    """Bytes of the trained parameters' gradients that a process hands to DDP's collective: a reduction, or with top_k
    a gather of what all processes hand over."""
    trained = [one for one in work.parameters().values() if one.trains]
    if hook in ("fp16", "bf16"):
        return sum(2 * one.elements for one in trained)
    if hook in SPARSE:
        place, share = 4 * (hook == "top_k"), work.given.get("ddp_compression_ratio") or policy.SENT_SHARE
        return sum(math.ceil(share * one.elements) * (one.item + place) for one in trained)
    rank = (work.given.get("ddp_power_sgd_rank") or 1) if hook else None
    return sum(_factors(one, rank) * one.item for one in trained)


def _factors(parameter: Parameter, rank: int | None) -> float:
    """Elements that PowerSGD sends: a matrix is sent whole where its factors are not half as large."""
    if not parameter.columns or rank is None:
        return parameter.elements
    rows = parameter.elements / parameter.columns
    factors = (rows + parameter.columns) * min(rank, rows, parameter.columns)
    return factors if 2 * factors < parameter.elements else parameter.elements


def kept_by_hook(work: Workload, world: int) -> float:
    """Bytes beside DDP's buckets: what is sent, and gathered (fp16 and bf16: a copy of half the size; PowerSGD: two
    factors of each large matrix), and what a lossy hook has left out."""
    if (hook := work.given.get("ddp_comm_hook")) is None:
        return 0.0
    left_out = 0.0 if hook in ("fp16", "bf16") else sent_by_hook(work, None)
    return left_out + sent_by_hook(work, hook) * (1 + world * (hook == "top_k"))


# ---- activations ----


def activation_cost(case: Case) -> Cost:
    """The peak of what autograd holds. Chunks of one tower run one after the other, the last of every tower together,
    of a vision-language model one with pictures and one without; without chunks all columns' graphs are alive at once.

    Over a frozen backbone chunks are encoded without a graph and pooled; the pooled vectors of all columns then go
    through the projection together, with one graph: `plain` is the projection's cost, its input included.
    """
    of_tower: dict[tuple[str, bool], Cost] = {}
    cut, settings = case.is_chunked, case.settings
    work = case.work if case.strategy.is_deepspeed else case.work.packed  # DeepSpeed's chunks are padded always
    costs = {column: work.work(column, case.cast, case.parts) for column in work.columns}

    def without_graph(column: BatchColumn) -> float:
        """Of the pass that takes wider chunks."""
        wide = work.held_rows(column, settings.chunk_rows) * work.widening(settings.is_checkpointed)
        return min(wide, work.rows_beside(column)) * costs[column].largest * TEMPORARY_VALUES

    if case.encodes_once:  # alone on the device before there is a graph
        saved = sum(column.rows * cost.plain.saved for column, cost in costs.items())
        forward = 0.0 if work.reads_features else max(map(without_graph, work.columns))
        return Cost(saved, 0.0, max(0.0, forward - saved))
    for column, cost in costs.items():
        rows = work.held_rows(column, settings.chunk_rows) if cut else column.rows
        graphs = kept_graphs(work) if cut else 1  # kept graphs are gone before the others are replayed
        of_row = cost.checkpointed if settings.is_checkpointed else cost.plain
        of_column = Cost(rows * of_row.saved * graphs, of_row.casts * graphs, rows * of_row.temporary)
        tower = column.tower, column.images > 0
        before = of_tower.get(tower, Cost())
        if cut:
            of_column.temporary = max(of_column.temporary, without_graph(column) - of_column.saved)
            of_tower[tower] = max(before, of_column, key=lambda one: one.activations)
        else:
            of_tower[tower] = summed([before, of_column])
    return summed(of_tower.values())


def kept_graphs(work: Workload) -> int:
    keep = work.given.get("gradient_cache_keep_graph", 0)
    return max(1, keep) if isinstance(keep, int) else 1


def summed(parts: Iterable[Any]) -> Any:
    """Of several costs, or sums over parameters, one with the sum of every field."""
    first, *others = parts
    return type(first)(*map(sum, zip(*map(astuple, (first, *others)), strict=True)))


def loss_bytes(work: Workload, world: int) -> float:
    """The loss stage: linear in the batch, and where several devices gather candidates in everyone's rows; a tile of
    scores."""
    if not work.is_embedding:
        return 0.0
    vectors, world = work.vectors(work.columns), world if work.sees_all_rows else 1
    candidates = sum(column.rows for column in work.columns[1:]) * world
    anchors = work.batch if work.has_tiled_loss else work.batch * world
    numbers = vectors, vectors * world, anchors, candidates, work.embedding_dim
    size = policy.loss_stage_bytes(*numbers, is_tiled=work.has_tiled_loss)
    longest = max(column.length for column in work.columns) if work.leaves_tokens else 0
    return size + policy.token_products_bytes(candidates, longest)
