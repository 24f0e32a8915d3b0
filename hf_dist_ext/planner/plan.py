"""A plan: what every strategy would need for a run on a machine, the one that is recommended, and what it changes.

planner/choose.py makes plans, planner/reasons.py says why, planner/report.py prints them.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_dist_ext.planner import memory, pipelines
from hf_dist_ext.planner import traffic as on_links
from hf_dist_ext.planner.catalog import Hardware, StrategySpec
from hf_dist_ext.planner.memory import Bytes, Case, model_of
from hf_dist_ext.planner.pipelines import Staged
from hf_dist_ext.planner.traffic import Traffic
from hf_dist_ext.planner.workload import Workload
from hf_dist_ext.run.presets import find_preset

SPREAD_BY = ("accelerate_config", "gradient_cache_fsdp", "frozen_parts_fsdp", "pipeline_parallel_size")
MOST_ROWS = 2**20  # of a device's batch, that are tried


@dataclass(frozen=True, eq=False)
class Estimate(Case):
    """What a step takes of a device, and how long."""

    @functools.cached_property
    def needed(self) -> Bytes:
        owner = pipelines if self.strategy.pipeline else memory
        return owner.estimate(self)

    @functools.cached_property
    def traffic(self) -> Traffic:
        owner = pipelines if self.strategy.pipeline else on_links
        return owner.traffic(self)

    @property
    def turns(self) -> int:
        """Steps that do what one step of devices with rows of their own does."""
        pipeline, is_alone = self.strategy.pipeline, self.strategy.name == "single"
        return self.hardware.num_devices if is_alone else pipeline.devices if pipeline else self.parts

    @functools.cached_property
    def seconds(self) -> float:
        """Of so many steps. Arithmetic takes longer in small chunks."""
        waiting = 1 + self.hardware.half_speed_tokens / (self.rows_at_once * self.work.longest)
        return (self.traffic.seconds + self.traffic.arithmetic_seconds * waiting) * self.turns

    @property
    def fits(self) -> bool:
        return self.hardware.holds(self.needed.total, self.needed.host)

    def with_settings(self, **changes: Any) -> Estimate:
        return replace(self, settings=replace(self.settings, **changes))


@dataclass
class Option:
    """One strategy: as the run stands (`given`), and with what makes it fit (`fitted`; None: nothing does)."""

    preset: str
    why_not: str  # "" when it can be chosen
    given: Estimate
    least: Bytes  # of all that was tried
    fitted: Estimate | None = None
    found: Bytes | None = None  # where the run finds its chunk size itself: with that
    needs_chunk: bool = False  # where the run has none: as it stands it is refused

    @property
    def pipeline(self) -> Staged | None:
        """Its figures with the settings that fit, else as the run stands."""
        return Staged(self.fitted or self.given) if self.strategy.pipeline else None

    @property
    def strategy(self) -> StrategySpec:
        return self.given.strategy

    @property
    def seconds(self) -> float:
        return self.fitted.seconds if self.fitted else float("inf")

    @property
    def sent(self) -> Traffic:
        """With what makes it fit; as the run stands where nothing does."""
        return (self.fitted or self.given).traffic

    @property
    def sending(self) -> float:
        """Of `seconds`."""
        return self.fitted.traffic.seconds * self.fitted.turns if self.fitted else 0.0

    @property
    def bytes(self) -> Bytes:
        """As the run stands."""
        return self.found or self.given.needed

    @property
    def fits(self) -> bool:
        return not self.needs_chunk and self.given.hardware.holds(self.bytes.total, self.bytes.host)

    @property
    def shown(self) -> Bytes:
        """With what makes it fit; as the run stands where nothing does."""
        return self.fitted.needed if self.fitted else self.bytes

    @property
    def is_last_resort(self) -> bool:
        """The CPU holds what the devices do not: no easier than smaller chunks. Nor are groups of devices that share
        rows, of which fewer then meet in the loss."""
        return self.strategy.offloads or self.strategy.is_tensor_parallel

    def activations(self, is_checkpointed: bool) -> float:
        """As the run stands, but for checkpointing."""
        return self.given.with_settings(is_checkpointed=is_checkpointed).needed.activations

    def as_dict(self) -> dict[str, Any]:
        fitted = self.fitted and {
            "chunk_rows": self.fitted.settings.chunk_rows,
            "checkpointing": self.fitted.settings.is_checkpointed,
            "per_device_batch": self.fitted.work.batch,
            "optimizer": self.fitted.work.optimizer,
            "bytes": self.fitted.needed.as_dict(),
            "seconds_per_step": round(self.seconds, 6),
        }
        return {
            "strategy": self.strategy.name,
            "preset": self.preset,
            "can_be_chosen": not self.why_not,
            "why_not": self.why_not or None,
            "fits": self.fits,
            "headroom": round(self.given.hardware.memory_bytes - self.bytes.total),
            "bytes": self.bytes.as_dict(),
            "activations_with_checkpointing": round(self.activations(True)),
            "activations_without_checkpointing": round(self.activations(False)),
            "per_step": self.given.traffic.as_dict(),
            "made_to_fit": fitted,
            "pipeline": self.pipeline and self.pipeline.as_dict(),
        }


@dataclass(frozen=True)
class Most:
    """The largest that fit with the other settings of the plan; None where there is nothing of the kind."""

    chunk_rows: int | None
    batch: int | None  # rows of a device, MOST_ROWS where no limit was met


@dataclass(frozen=True)
class Time:
    """`rows_per_second`: of all devices. `hours` and `price`: None where the number of steps or the price is not
    known."""

    seconds: float  # of a step
    rows_per_second: float
    tokens_per_second: float  # of rows as long as they may be
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
    larger: Estimate | None = None  # with wider chunks that fit too
    most: Most | None = None
    enough: Plan | None = None  # where nothing fits: of so many more devices that something does

    @property
    def time(self) -> Time:
        """Of the best. A step is as many rows as all devices take with rows of their own, whoever shares them."""
        assert self.best is not None
        work, seconds, devices = self.work, self.best.seconds, self.hardware.num_devices
        rows = work.batch * work.accumulation * devices
        tokens = sum(one.rows * one.length for one in work.columns) / work.batch
        fitted = self.best.fitted or self.best.given
        steps = (work.given.get("max_steps") or 0) / fitted.turns  # the run's own steps are of rows that devices share
        if steps <= 0 and self.num_rows:
            steps = self.num_rows / rows * (work.given.get("num_train_epochs") or 3)  # transformers' own number
        hours = steps * seconds / 3600 if steps > 0 else None
        price = hours * self.price_per_hour * devices if hours and self.price_per_hour else None
        return Time(seconds, rows / seconds, rows / seconds * tokens, hours, price)

    @property
    def command(self) -> str:
        """What runs the plan, from the folder of the run file; RUN.json stands for a run whose file has no name."""
        best, hardware = self.best, self.hardware
        assert best is not None
        path = "RUN.json" if self.run is None else self.run.path
        fields = {} if self.stages else {k: v for k, v in self.changes.items() if k != "accelerate_config"}
        words = "".join(f" {word}" for word in _without(self.overrides, fields))
        values = {k: value if isinstance(value, str) else json.dumps(value) for k, value in fields.items()}
        words += "".join(f" --{name} {value}" for name, value in values.items())
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
        """Weights (of a model with frozen parts, those that train), and the optimizer's state."""
        whole = model_of(self.best.fitted.work if self.best and self.best.fitted else self.work).whole
        frozen = 0.0 if whole.trained < whole.elements else whole.frozen_stored
        return whole.trained_stored + frozen + whole.optimizer

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
            "larger_chunks": self.larger
            and {
                "chunk_rows": self.larger.settings.chunk_rows,
                "needed": self.larger.needed.total,
                "seconds": self.larger.seconds,
                "sent": self.larger.traffic.bytes,
            },
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
    work, fitted, changes = plan.work, best.fitted, dict(plan.presumed)
    if fitted is None:
        return {}
    if plan.hardware.num_devices > 1 or best.strategy.name != "single":
        changes["accelerate_config"] = best.preset
    is_plain = best.strategy.name in ("FSDP speed", "FSDP memory")
    if is_plain and work.is_embedding and work.fsdp_mode == "auto":
        changes["gradient_cache_fsdp"] = "speed" if best.strategy.keeps_whole else "memory"
    if best.strategy.name == "FSDP frozen whole" and best.preset == "multi_gpu_fsdp":
        changes["frozen_parts_fsdp"] = "replicate"
    if fitted.settings.is_checkpointed and not work.is_checkpointed:
        changes["gradient_checkpointing"] = True
    if pipeline := best.strategy.pipeline:
        changes["pipeline_parallel_size"] = pipeline.ranks
    if fitted.settings.chunk_rows is not None and (pipeline or not work.finds_chunk):
        changes |= work.chunk_fields(fitted.settings.chunk_rows)
    if fitted.work.optimizer != work.optimizer:
        changes["optim"] = fitted.work.optimizer
    if (batch := fitted.work.batch) != work.batch:
        changes["per_device_train_batch_size"] = batch
        changes["gradient_accumulation_steps"] = work.accumulation * -(-work.batch // batch)
    return changes
