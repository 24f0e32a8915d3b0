"""Ways to spread a run over devices, and what the fields of the run file make of them.

A `StrategySpec` says what is split over devices and what is whole when, `Hardware` what the devices are. `adapted`
gives a strategy as a run would have it (offload, frozen parts left whole), `refusal` says why it does not go with a
field.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_dist_ext import policy
from hf_dist_ext.planner.workload import Workload

GIB = 2**30
PER_NODE = 8  # devices of the usual machine
MARGIN = 0.08  # of a device's memory that a plan leaves free: its figures are bounds, but for what nobody measured
NETWORK = 3e9  # bytes per second that a machine sends to others where nobody says: 25 Gbit/s


@dataclass(frozen=True)
class PipelineShape:
    """Consecutive devices that hold the same rows: `ranks` with stages of their own, each shared by `parts` devices
    (tensor parallelism)."""

    ranks: int
    schedule: str
    per_rank: int  # stages
    split: tuple[int, ...] | None = None  # first layers of all stages but the first; None: by work
    parts: int = 1

    @property
    def stages_of_ranks(self) -> list[list[int]]:
        return [policy.stages_of_rank(rank, self.ranks, self.per_rank) for rank in range(self.ranks)]

    @property
    def num_stages(self) -> int:
        return self.ranks * self.per_rank

    @property
    def devices(self) -> int:
        return self.ranks * self.parts


@dataclass(frozen=True)
class StrategySpec:
    """How a run is spread. `shards`: what is split over devices: "" nothing, "o" optimizer state, "og" gradients too,
    "ogw" weights too. `keeps_whole`: gathered weights and gradients stay from chunk to chunk (speed)."""

    name: str
    preset: str
    shards: str = ""
    is_deepspeed: bool = False
    keeps_whole: bool = False
    replicates_frozen: bool = False
    is_hybrid: bool = False  # sharded inside a machine, copies between machines
    offloads: bool = False
    is_tensor_parallel: bool = False
    pipeline: PipelineShape | None = None
    in_words: str = ""


_FROZEN_WHOLE = "what trains is sharded, what is frozen is whole"
_HYBRID, _ON_CPU = "sharded in a machine, copies between them", "weights and state on the CPU"
STRATEGIES = (
    StrategySpec("single", "single_gpu", in_words="one device"),
    StrategySpec("DDP", "multi_gpu_ddp", in_words="every device has everything"),
    StrategySpec("FSDP speed", "multi_gpu_fsdp", "ogw", keeps_whole=True, in_words="weights gathered once per step"),
    StrategySpec("FSDP memory", "multi_gpu_fsdp", "ogw", in_words="weights gathered layer by layer"),
    StrategySpec(
        "FSDP frozen whole", "multi_gpu_fsdp_frozen_replicated", "ogw", replicates_frozen=True, in_words=_FROZEN_WHOLE
    ),
    StrategySpec("HSDP", "multi_gpu_hsdp", "ogw", is_hybrid=True, in_words=_HYBRID),
    StrategySpec("FSDP offload", "multi_gpu_fsdp_offload", "ogw", offloads=True, in_words=_ON_CPU),
    StrategySpec("ZeRO-1", "deepspeed_zero1", "o", is_deepspeed=True, in_words="optimizer state sharded"),
    StrategySpec("ZeRO-2", "deepspeed_zero2", "og", is_deepspeed=True, in_words="gradients sharded too"),
    StrategySpec("ZeRO-3", "deepspeed_zero3", "ogw", is_deepspeed=True, in_words="weights sharded too"),
    StrategySpec(
        "ZeRO-3 offload", "deepspeed_zero3_offload", "ogw", is_deepspeed=True, offloads=True, in_words="on the CPU"
    ),
    StrategySpec(
        "TP", "multi_gpu_tp", "ogw", is_tensor_parallel=True, in_words="each layer split in groups, FSDP over them"
    ),
)

TENSOR_PARALLEL_GROUP = 2  # of the presets multi_gpu_tp and multi_gpu_3d
PIPELINE_PRESETS = ("multi_gpu_pp", "multi_gpu_3d")  # of whole layers, of layers that are split too


@dataclass(frozen=True)
class Hardware:
    """`num_devices` over all machines; `memory_bytes` per device, `host_bytes` of a machine's own memory, `network` in
    bytes per second that a machine sends to others. `card`: its name in planner/devices.py."""

    num_devices: int = 1
    memory_bytes: float = 80 * GIB
    num_nodes: int = 1
    interconnect: str = "nvlink"
    memory_is_assumed: bool = False  # no device is here, and none was named
    nodes_are_assumed: bool = False  # more devices than a machine has, and nobody says how many machines
    given_host_bytes: float | None = None
    network: float = NETWORK
    card: str | None = None
    reached: float | None = None  # operations per second of a device, where somebody measured them

    @property
    def half_speed_tokens(self) -> int:
        """A chunk of few tokens leaves an accelerator waiting: with so many it runs at half speed."""
        return 0 if self.card == "cpu" else 512

    @property
    def per_node(self) -> int:
        return max(1, self.num_devices // self.num_nodes)

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may fill."""
        return (1 - MARGIN) * self.memory_bytes

    def holds(self, needed: float, host: float) -> bool:
        """Bytes of one device, and of its machine's memory, which its devices share."""
        return needed <= self.usable and host * self.per_node <= self.host_bytes

    @property
    def host_bytes(self) -> float:
        """Where it is not given: twice what the machine's devices have, as servers mostly do, or 64 GiB."""
        return self.given_host_bytes or max(64 * GIB, 2 * self.per_node * self.memory_bytes)


def tensor_parallel_size(strategy: StrategySpec, work: Workload, hardware: Hardware) -> int:
    """The preset's groups where layers can be split over them; 1: layers are whole."""
    if strategy.pipeline is not None:
        return strategy.pipeline.parts
    is_split = strategy.is_tensor_parallel and splits_layers(work, hardware, TENSOR_PARALLEL_GROUP)
    return TENSOR_PARALLEL_GROUP if is_split else 1


def splits_layers(work: Workload, hardware: Hardware, parts: int) -> bool:
    """Whether the model's layers and the devices of a machine can be dealt to groups of so many."""
    return parts in work.sizes_to_split and hardware.per_node % parts == 0


def is_fsdp(strategy: StrategySpec) -> bool:
    return "w" in strategy.shards and not strategy.is_deepspeed and not strategy.is_tensor_parallel


def can_leave_frozen_whole(work: Workload) -> bool:
    """By freezing fields; adapters leave nothing whole."""
    freezes = work.given.get("trainable_modules") or work.given.get("frozen_modules")
    return bool(freezes) and work.given.get("frozen_parts_fsdp") != "shard"


def leaves_frozen_whole(work: Workload, hardware: Hardware) -> bool:
    """Whether FSDP does so by the run's own fields (frozen_parts_fsdp)."""
    frozen = sum(one.elements * one.item for one in work.parameters().values() if not one.trains)
    is_small = frozen <= policy.KEPT_WHOLE_SHARE * hardware.memory_bytes
    return can_leave_frozen_whole(work) and (work.given.get("frozen_parts_fsdp") == "replicate" or is_small)


def adapted(strategy: StrategySpec, work: Workload, hardware: Hardware) -> StrategySpec:
    """As the run's own fields have it."""
    # What keeps weights whole between chunks does so in every way that has FSDP2's units (strategies/sharded.py).
    has_units = "w" in strategy.shards and not strategy.is_deepspeed
    if strategy.is_tensor_parallel:  # one group alone has none
        has_units = hardware.num_devices > tensor_parallel_size(strategy, work, hardware)
    if has_units and work.is_embedding and work.fsdp_mode == "speed":
        strategy = replace(strategy, keeps_whole=True)
    if not is_fsdp(strategy):
        return strategy
    has_groups = strategy.is_hybrid and work.given.get("sharding") == "HYBRID_SHARD"
    return replace(
        strategy,
        # the run file makes the groups, over whatever number of devices there are
        preset="multi_gpu_fsdp" if has_groups else strategy.preset,
        offloads=strategy.offloads or bool(work.given.get("cpu_offload")),
        replicates_frozen=strategy.replicates_frozen or leaves_frozen_whole(work, hardware),
    )


def refusal(strategy: StrategySpec, work: Workload, hardware: Hardware) -> str:
    """ "" where every field of the run file has a meaning."""
    sharding, of_ddp = work.given.get("sharding"), [name for name in policy.DDP_FIELDS if work.given.get(name)]
    if work.is_in_4_bits and (strategy.shards or strategy.pipeline):
        return "load_in_4bit keeps the base whole in every process"
    if tensor_parallel_size(strategy, work, hardware) > 1 and work.optimizer not in policy.SPLIT_OPTIMIZERS:
        return f"split layers do not go with optim={work.optimizer}"
    if strategy.is_deepspeed and (reason := _not_under_deepspeed(strategy, work)):
        return reason
    if of_ddp and strategy.name != "DDP":
        return f"{of_ddp[0]} is for DDP"
    if not is_fsdp(strategy):
        given = [name for name in policy.FSDP_FIELDS if work.given.get(name) is not None]
        alone = [name for name in given if not (name == "sharding" and sharding == "NO_SHARD")]
        return f"{alone[0]} has no meaning without FSDP" if alone else ""
    if sharding == "NO_SHARD":
        return 'sharding="NO_SHARD" makes it DDP'
    if sharding == "HYBRID_SHARD":
        group = work.given.get("sharding_group_size") or hardware.per_node
        if not strategy.is_hybrid:
            return 'sharding="HYBRID_SHARD" makes groups'
        if hardware.num_devices % group or group in (1, hardware.num_devices):
            return f"{hardware.num_devices} devices in groups of {group} are not two or more groups of two or more"
    elif sharding is not None and strategy.is_hybrid:
        return f'sharding="{sharding}" shards over all devices'
    return "cpu_offload is false" if work.given.get("cpu_offload") is False and strategy.offloads else ""


def _not_under_deepspeed(strategy: StrategySpec, work: Workload) -> str:
    """As strategies/zero.py and checkpoints/async_save.py refuse it."""
    if work.given.get("save_async"):
        return "save_async does not go with DeepSpeed"
    if not work.is_embedding:
        return ""
    keep = work.given.get("gradient_cache_keep_graph")
    if keep == "auto" or work.finds_chunk:
        return "DeepSpeed takes no automatic chunk size or number of graphs: give numbers"
    if "w" in strategy.shards and keep:
        return "ZeRO-3 keeps no graphs (gradient_cache_keep_graph)"
    if strategy.offloads and work.given.get("learnable_temperature"):
        return "learnable_temperature does not go with DeepSpeed's offloading"
    return ""
