"""A plan: what every strategy would need for a run on a machine, the one that is recommended, and what it changes.

planner/choose.py makes plans, planner/reasons.py says why, planner/report.py prints them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_dist_ext.planner.catalog import Hardware, Strategy
from hf_dist_ext.planner.memory import Bytes, Settings, model_of
from hf_dist_ext.planner.pipelines import Facts, facts_of
from hf_dist_ext.planner.traffic import Traffic
from hf_dist_ext.planner.workload import Workload
from hf_dist_ext.run.presets import find_preset

SPREAD_BY = ("accelerate_config", "gradient_cache_fsdp", "frozen_parts_fsdp", "pipeline_parallel_size")
MOST_ROWS = 2**20  # of a device's batch, that are tried


@dataclass
class Option:
    """One strategy: as the run stands (`given`), with the other checkpointing, and with what makes it fit."""

    strategy: Strategy
    preset: str
    why_not: str  # "" when it can be chosen
    given: Bytes
    checkpointed: Bytes
    unchecked: Bytes
    traffic: Traffic
    hardware: Hardware
    turns: int  # steps that do what one step of devices with rows of their own does
    least: Bytes  # of all that was tried
    given_seconds: float  # of a step, as the run stands
    settings: Settings | None = None  # None: nothing makes it fit
    batch: int = 0
    optimizer: str = ""  # that fits
    fitted: Bytes | None = None
    sent: Traffic | None = None  # as fitted
    seconds: float = float("inf")
    pipeline: Facts | None = None

    def add_pipeline(self, work: Workload, hardware: Hardware) -> None:
        """Its figures with the settings that fit, else as the run stands."""
        settings = self.settings or Settings(is_checkpointed=work.is_checkpointed)
        self.pipeline = facts_of(work, self.strategy.pipeline, hardware, settings)

    @property
    def sending(self) -> float:
        """Of `seconds`."""
        return 0.0 if self.sent is None else self.sent.seconds * self.turns

    @property
    def fits(self) -> bool:
        return self.hardware.holds(self.given.total, self.given.host)

    @property
    def shown(self) -> Bytes:
        """With what makes it fit; as the run stands where nothing does."""
        return self.fitted or self.given

    @property
    def is_last_resort(self) -> bool:
        """The CPU holds what the devices do not: no easier than smaller chunks. Nor are groups of devices that share
        rows, of which fewer then meet in the loss."""
        return self.strategy.offloads or self.strategy.is_tensor_parallel

    @property
    def headroom(self) -> float:
        return self.hardware.memory_bytes - self.given.total

    def as_dict(self) -> dict[str, Any]:
        fitted = self.settings and {
            "chunk_rows": self.settings.chunk_rows,
            "checkpointing": self.settings.is_checkpointed,
            "per_device_batch": self.batch,
            "optimizer": self.optimizer,
            "bytes": self.fitted.as_dict(),
            "seconds_per_step": round(self.seconds, 6),
        }
        return {
            "strategy": self.strategy.name,
            "preset": self.preset,
            "can_be_chosen": not self.why_not,
            "why_not": self.why_not or None,
            "fits": self.fits,
            "headroom": round(self.headroom),
            "bytes": self.given.as_dict(),
            "activations_with_checkpointing": round(self.checkpointed.activations),
            "activations_without_checkpointing": round(self.unchecked.activations),
            "per_step": self.traffic.as_dict(),
            "made_to_fit": fitted,
            "pipeline": self.pipeline and self.pipeline.as_dict(),
        }


def waits_for_links(options: Sequence[Option]) -> bool:
    """Whether the quickest of them sends longer than it computes."""
    quickest = min(options, key=lambda option: option.seconds, default=None)
    return quickest is not None and quickest.sending > quickest.seconds / 2


@dataclass(frozen=True)
class Larger:
    """Wider chunks that fit too: bytes of a device, seconds of a step, bytes that a device sends in it."""

    chunk_rows: int  # of the longest rows
    needed: float
    seconds: float
    sent: float


@dataclass(frozen=True)
class Most:
    """The largest that fit with the other settings of the plan; None where there is nothing of the kind."""

    chunk_rows: int | None
    batch: int | None  # rows of a device, MOST_ROWS where no limit was met


def checkpoint_bytes(work: Workload) -> float:
    """Of a checkpoint: weights (of a model with frozen parts, those that train), and the optimizer's state."""
    whole = model_of(work).whole
    frozen = 0.0 if whole.trained < whole.elements else whole.frozen_stored
    return whole.trained_stored + frozen + whole.optimizer


@dataclass(frozen=True)
class Time:
    """`rows_per_second`: of all devices. `hours` and `price`: None where the number of steps or the price is not
    known."""

    seconds: float  # of a step
    rows_per_second: float
    tokens_per_second: float  # at the usual lengths, or at the greatest where the data is not here
    hours: float | None
    price: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {
            "seconds_per_step": round(self.seconds, 6),
            "rows_per_second": round(self.rows_per_second, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "hours": self.hours and round(self.hours, 3),
            "price": self.price and round(self.price, 2),
        }


def time_of(plan: Plan, option: Option) -> Time:
    """A step is as many rows as all devices take with rows of their own, whoever shares them."""
    work, hardware = plan.work, plan.hardware
    rows = work.batch * work.accumulation * hardware.num_devices
    tokens = sum(one.rows * one.usual for one in work.columns) / work.batch
    given = plan.run.given if plan.run is not None else {}
    steps = given.get("max_steps") or 0
    if steps <= 0 and plan.num_rows:
        steps = plan.num_rows / rows * (given.get("num_train_epochs") or 3)  # transformers' own number
    hours = steps * option.seconds / 3600 if steps > 0 else None
    price = hours * plan.price_per_hour * hardware.num_devices if hours and plan.price_per_hour else None
    return Time(option.seconds, rows / option.seconds, rows / option.seconds * tokens, hours, price)


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass
class Plan:
    work: Workload
    hardware: Hardware
    options: list[Option]
    best: Option | None
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the run file to set
    presumed: dict[str, Any] = field(default_factory=dict)  # those among them with which every option is counted
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    run: Any = None  # the run that was planned: of several stages, the one that needs most
    stages: list[dict[str, Any]] = field(default_factory=list)

    num_rows: int | None = None  # of the dataset
    price_per_hour: float | None = None  # of one device
    overrides: Sequence[str] = ()  # of the run file, as the command had them
    larger: Larger | None = None
    most: Most | None = None
    enough: Plan | None = None  # where nothing fits: of so many more devices that something does
    levers: dict[str, float] = field(default_factory=dict)  # a change -> bytes of a device that it would save

    @property
    def time(self) -> Time:
        assert self.best is not None
        return time_of(self, self.best)

    @property
    def command(self) -> str:
        """What runs the plan, from the folder of the run file; RUN.json stands for a run whose file has no name."""
        best, hardware = self.best, self.hardware
        assert best is not None
        path = "RUN.json" if self.run is None else self.run.path
        fields = {} if self.stages else {k: v for k, v in self.changes.items() if k != "accelerate_config"}
        words = "".join(f" {word}" for word in _without(self.overrides, fields))
        words += "".join(f" --{name} {_as_word(value)}" for name, value in fields.items())
        pipeline = best.strategy.pipeline
        if hardware.num_nodes == 1 and not (pipeline and pipeline.parts > 1):
            preset = f" --accelerate_config {best.preset}" if "accelerate_config" in self.changes else ""
            number = f" --num_processes {hardware.num_devices}" if preset else ""
            return f"hf-dist train {path}{preset}{number}{words}"
        machines = f" --num_machines {hardware.num_nodes} --machine_rank N --main_process_ip ADDRESS"
        machines += " --main_process_port PORT"
        groups = ""
        if best.strategy.is_hybrid and best.preset.endswith("_hsdp"):
            copies = hardware.num_devices // hardware.per_node
            groups = f" --parallelism_config_dp_replicate_size {copies}"
            groups += f" --parallelism_config_dp_shard_size {hardware.per_node}"
        if pipeline and pipeline.parts > 1:
            groups = f" --parallelism_config_tp_size {pipeline.parts}"
        preset = Path("configs/accelerate", f"{best.preset}.yaml")  # of a clone, else the installed one
        preset = preset if preset.is_file() else find_preset(best.preset)
        script = "scripts/train_hf.py" if Path("scripts/train_hf.py").is_file() else "--module hf_dist_ext.train"
        return (
            f"accelerate launch --config_file {shlex.quote(str(preset))}"
            f"{machines if hardware.num_nodes > 1 else ''} --num_processes {hardware.num_devices}{groups} "
            f"{script} --config {path}{words}"
        )

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.strategy.name == name), None)

    @property
    def checkpoint_bytes(self) -> float:
        optimizer = self.best.optimizer if self.best is not None else self.work.optimizer
        return checkpoint_bytes(replace(self.work, optimizer=optimizer))

    @property
    def parameters(self) -> float:
        return model_of(self.work).whole.elements

    @property
    def simplest(self) -> Option:
        return self.option("DDP") or self.options[0]

    def as_dict(self) -> dict[str, Any]:
        model, best, hardware = model_of(self.work).whole, self.best, self.hardware
        return {
            "model_type": self.work.config["model_type"],
            "parameters": int(model.elements),
            "trained_parameters": int(model.trained),
            "hardware": {
                "num_devices": hardware.num_devices,
                "num_nodes": hardware.num_nodes,
                "device_memory": round(hardware.memory_bytes),
                "interconnect": hardware.interconnect,
                "network_bytes_per_second": round(hardware.network),
                "host_memory": round(hardware.host_bytes),
                "device": hardware.card,
            },
            "recommended": best
            and {
                "strategy": best.strategy.name,
                "preset": best.preset,
                "set": self.changes,
                "command": self.command,
                "time": self.time.as_dict(),
            },
            "levers": {what: round(size) for what, size in self.levers.items()},
            "larger_chunks": self.larger and vars(self.larger),
            "largest": self.most and asdict(self.most),
            "checkpoint_bytes": round(self.checkpoint_bytes),
            "enough_devices": self.enough and self.enough.hardware.num_devices,
            "reasons": self.reasons,
            "notes": self.notes,
            "stage": self.run.name if self.stages else None,
            "stages": self.stages,
            "strategies": [option.as_dict() | {"set": changes_for(self, option)} for option in self.options],
        }


def _without(overrides: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """A command line's words without the options of these names, which have a value each."""
    kept, names, before = [], tuple(f"--{name}" for name in fields), ""
    for word in overrides:
        is_value = before in names and not word.startswith("--")
        if word.partition("=")[0] not in names and not is_value:
            kept.append(word)
        before = word
    return kept


def changes_to_fit(plan: Plan, option: Option) -> dict[str, Any]:
    """Those of `changes_for` that do not say how the run is spread."""
    return {name: value for name, value in changes_for(plan, option).items() if name not in SPREAD_BY}


def changes_for(plan: Plan, best: Option) -> dict[str, Any]:
    """Fields of the run file that an option needs set."""
    work, settings, changes = plan.work, best.settings, dict(plan.presumed)
    if settings is None:
        return {}
    if plan.hardware.num_devices > 1 or best.strategy.name != "single":
        changes["accelerate_config"] = best.preset
    is_plain = best.strategy.name in ("FSDP speed", "FSDP memory")
    if is_plain and work.is_embedding and work.fsdp_mode == "auto":
        changes["gradient_cache_fsdp"] = "speed" if best.strategy.keeps_whole else "memory"
    if best.strategy.name == "FSDP frozen whole" and best.preset == "multi_gpu_fsdp":
        changes["frozen_parts_fsdp"] = "replicate"
    if settings.is_checkpointed and not work.is_checkpointed:
        changes["gradient_checkpointing"] = True
    if pipeline := best.strategy.pipeline:
        changes["pipeline_parallel_size"] = pipeline.ranks
    if settings.chunk_rows is not None and (pipeline or not work.finds_chunk):
        changes |= work.chunk_fields(settings.chunk_rows)
    if best.optimizer != work.optimizer:
        changes["optim"] = best.optimizer
    if best.batch != work.batch:
        changes["per_device_train_batch_size"] = best.batch
        changes["gradient_accumulation_steps"] = work.accumulation * -(-work.batch // best.batch)
    return changes
