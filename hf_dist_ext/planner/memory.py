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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import GIB, STRATEGIES, Hardware, StrategySpec, tensor_parallel_size
from hf_dist_ext.planner.forward import TEMPORARY_VALUES, Cost, Parameter
from hf_dist_ext.planner.workload import BatchColumn, Cast, Work, Workload

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
        """Of a micro-batch and device. A column travels to other devices while others are encoded, as
        training/sizes.py decides. With weights that are gathered only columns of several towers do, which have chunks
        of their own anyway."""
        is_shared = self.hardware.num_devices > 1 and self.strategy.name != "single" and self.work.sees_all_rows
        return self.work.num_chunks(self.settings.chunk_rows, is_shared and "w" not in self.strategy.shards)

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
    """Peak bytes of one device."""
    work, strategy, hardware = case.work, case.strategy, case.hardware
    whole, shards = case.model.whole, case.shards
    of_state = shards if "o" in strategy.shards else 1
    # Under FSDP and DeepSpeed the weights that compute are half precision already, so autocast copies none.
    casts_itself = "w" in strategy.shards or strategy.is_deepspeed
    of_chunk = held(case)
    needed = (_deepspeed if strategy.is_deepspeed else _fsdp if strategy.shards else _replicated)(case)
    if not strategy.is_deepspeed:
        needed.weights += of_chunk.casts
    # The gradient of the largest matrix is whole before it is added to what earlier chunks left.
    needed.activations = max(of_chunk.activations, 0 if casts_itself else whole.largest_trained)
    needed.embeddings = loss_bytes(work, hardware.num_devices // case.parts)
    needed.optimizer = whole.optimizer / of_state
    if strategy.name != "DDP" and not strategy.is_deepspeed:  # there what is not used has a gradient of zero
        needed.gradients -= whole.unused_stored / shards
        needed.optimizer -= whole.unused_optimizer / shards
    needed.scratch = scratch_bytes(work, whole.trained / of_state)
    if strategy.offloads:  # shards and state live on the CPU, one unit's gradients at a time on the device
        needed.host += needed.master_weights + needed.gradients / (shards if case.reduces_once else 1)
        needed.host += needed.optimizer
        needed.master_weights = needed.optimizer = needed.scratch = 0.0
        largest = max(case.model.units.values(), key=lambda unit: unit.trained, default=whole)
        needed.gradients = case.reduced_bytes(whole if case.reduces_once else largest)
    needed.framework = framework_bytes(needed, hardware.num_devices == 1 or strategy.name == "single")
    return needed


def scratch_bytes(work: Workload, trained: float) -> float:
    """Of optimizers that update all parameters together."""
    return trained * 4 if work.optimizer in ("adamw_torch", "adafactor", "adamw_anyprecision") else 0.0


def framework_bytes(needed: Bytes, is_alone: bool) -> float:
    """Beside what is needed for a step."""
    return CONTEXT_BYTES + (0 if is_alone else COMMUNICATOR_BYTES) + FRAGMENTATION * needed.total


def _replicated(case: Case) -> Bytes:
    """Everything on each device; DDP's buckets, and what its hook keeps."""
    work, whole = case.work, case.model.whole
    needed = copy_bytes(work, [whole])
    needed.weights += whole.largest_unpacked
    if case.strategy.name == "DDP":
        needed.buffers = 0.0 if work.given.get("ddp_gradient_as_bucket_view") else whole.trained_stored
        needed.buffers += kept_by_hook(work, case.hardware.num_devices)
    return needed


def copy_bytes(work: Workload, units: Sequence[ParameterSums]) -> Bytes:
    """Of weights, gradients and state that no device shares with others."""
    stored, trained = sum(unit.trained_stored for unit in units), sum(unit.trained for unit in units)
    has_masters = stored > trained * work.compute_bytes
    return Bytes(
        weights=sum(unit.frozen_stored for unit in units) + (0.0 if has_masters else stored),
        master_weights=stored if has_masters else 0.0,
        gradients=stored,
        optimizer=sum(unit.optimizer for unit in units),
    )


def _fsdp(case: Case) -> Bytes:
    """Shards; whole units in the computing precision: all (speed), or the root and two layers; buffers."""
    strategy, model, shards, needed = case.strategy, case.model, case.shards, Bytes()
    whole, is_half = model.whole, case.work.autocast_bytes is not None
    stored = whole.trained * 4 if is_half else whole.trained_stored
    root, *units = map(case.whole_bytes, (model.root, *model.layers))
    largest = max(units, default=0.0)
    reduced = max(map(case.reduced_bytes, model.units.values()), default=0.0)
    needed.weights = root + (sum(units) if strategy.keeps_whole else min(sum(units), 2 * largest))
    resting = 0 if is_half else stored / shards
    if strategy.replicates_frozen:  # FSDP never moves them
        needed.weights += whole.frozen_stored
    else:
        resting += whole.frozen_stored / shards
    if strategy.offloads:
        needed.host = resting
    else:
        needed.weights += resting
    needed.master_weights = stored / shards if is_half else 0.0
    needed.gradients = stored / shards + (case.reduced_bytes(whole) if strategy.keeps_whole else 0.0)
    # all-gather: flat output before it is copied out; reduce-scatter: its input, and the next unit's
    needed.buffers = max(largest, root) + (1 if strategy.keeps_whole else 2) * reduced
    needed.buffers += stored / shards if strategy.is_hybrid else 0.0
    return needed


def _deepspeed(case: Case) -> Bytes:
    """Weights in the computing precision, float32 masters in partitions, gradients whole (1) or in partitions."""
    strategy, model, shards, needed = case.strategy, case.model, case.shards, Bytes()
    whole, computes_in = model.whole, case.work.compute_bytes
    needed.weights = whole.elements * computes_in
    if "w" in strategy.shards:
        root, *units = map(case.whole_bytes, (model.root, *model.layers))
        resting = needed.weights / shards
        needed.weights = root + min(sum(units), 2 * max(units, default=0.0)) + (0 if strategy.offloads else resting)
        needed.host = resting if strategy.offloads else 0.0
    needed.master_weights = whole.trained * 4 / shards
    is_shared = "g" in strategy.shards and not case.reduces_once
    needed.gradients = whole.trained * computes_in / (shards if is_shared else 1)
    needed.buffers = 2 * min(whole.trained, 2e8) * computes_in  # of two buckets
    return needed


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


def held(case: Case) -> Cost:
    """The peak of what autograd holds. Chunks of one tower run one after the other, the last of every tower together,
    of a vision-language model one with pictures and one without; without chunks all columns' graphs are alive at once.
    """
    of_tower: dict[tuple[str, bool], Cost] = {}
    cut, settings = case.is_chunked, case.settings
    work = case.work if case.strategy.is_deepspeed else case.work.packed  # DeepSpeed's chunks are padded always
    for column in work.columns:
        cost = work.work(column, case.cast, case.parts)
        if case.encodes_once:
            _hold_features(of_tower, column, cost, work, settings)
            continue
        rows = work.held_rows(column, settings.chunk_rows) if cut else column.rows
        graphs = kept_graphs(work) if cut else 1  # kept graphs are gone before the others are replayed
        of_row = cost.checkpointed if settings.is_checkpointed else cost.plain
        of_column = Cost(rows * of_row.saved * graphs, of_row.casts * graphs, rows * of_row.temporary)
        tower = column.tower, column.images > 0
        before = of_tower.get(tower, Cost())
        if cut:
            wide = _without_graph(column, rows, cost, work, settings)
            of_column.temporary = max(of_column.temporary, wide - of_column.saved)
            of_tower[tower] = max(before, of_column, key=lambda one: one.activations)
        else:
            of_tower[tower] = _sum([before, of_column])
    return _sum(of_tower.values())


def kept_graphs(work: Workload) -> int:
    keep = work.given.get("gradient_cache_keep_graph", 0)
    return max(1, keep) if isinstance(keep, int) else 1


def _sum(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip(*map(astuple, costs), strict=True)))


def _without_graph(column: BatchColumn, rows: float, cost: Work, work: Workload, settings: Settings) -> float:
    """Of the pass without a graph, which takes wider chunks."""
    wide = min(rows * work.widening(settings.is_checkpointed), work.rows_beside(column))
    return wide * cost.largest * TEMPORARY_VALUES


EVERY = "", False


def _hold_features(
    of_tower: dict[tuple[str, bool], Cost], column: BatchColumn, cost: Work, work: Workload, settings: Settings
) -> None:
    """Over a frozen backbone: chunks are encoded without a graph and pooled; the pooled vectors of all columns then go
    through the projection together, with one graph. `cost.plain` is the projection's, its input included."""
    rows = work.held_rows(column, settings.chunk_rows)
    before = of_tower.get(EVERY, Cost())
    saved = before.saved + column.rows * cost.plain.saved
    # alone on the device before there is a graph
    forward = 0.0 if work.reads_features else _without_graph(column, rows, cost, work, settings)
    of_tower[EVERY] = Cost(saved, before.casts, max(0.0, max(before.activations, forward) - saved))


def loss_bytes(work: Workload, world: int) -> float:
    """The loss stage: linear in the batch, and where several devices gather candidates in everyone's rows; a tile of
    scores."""
    if not work.is_embedding:
        return 0.0
    vectors, world = work.vectors(work.columns), world if work.sees_all_rows else 1
    if work.candidates_go_round(world):
        counts = [[column.rows] * world for column in work.columns]
        of_batch = 4 * vectors * work.embedding_dim  # as chunks gave them
        options = {"is_symmetric": work.is_symmetric, "has_bf16_products": work.has_bf16_products}
        return of_batch + policy.ring_bytes(counts, work.embedding_dim, **options)
    candidates = sum(column.rows for column in work.columns[1:]) * world
    anchors = work.batch if work.has_tiled_loss else work.batch * world
    options = {"is_tiled": work.has_tiled_loss, "has_bf16_products": work.has_bf16_products}
    size = policy.loss_stage_bytes(vectors, vectors * world, anchors, candidates, work.embedding_dim, **options)
    longest = max(column.length for column in work.columns) if work.leaves_tokens else 0
    return size + policy.token_products_bytes(candidates, longest)
