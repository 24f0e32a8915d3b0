"""A plan: what every strategy would need for a run on a machine, the one that is recommended, and what it changes.

planner/choose.py makes plans, planner/reasons.py says why, planner/report.py prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dist_ext.planner.catalog import Hardware, Strategy
from hf_dist_ext.planner.memory import Bytes, Settings, model_of
from hf_dist_ext.planner.pipelines import Facts, facts_of
from hf_dist_ext.planner.traffic import Traffic
from hf_dist_ext.planner.workload import Workload


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
    memory_bytes: float
    turns: int  # steps that do what one step of devices with rows of their own does
    settings: Settings | None = None  # None: nothing makes it fit
    batch: int = 0
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
        return self.given.total <= self.memory_bytes

    @property
    def is_last_resort(self) -> bool:
        """The CPU holds what the devices do not: no easier than smaller chunks. Nor are groups of devices that share
        rows, of which fewer then meet in the loss."""
        return self.strategy.preset.endswith("_offload") or self.strategy.is_tensor_parallel

    @property
    def headroom(self) -> float:
        return self.memory_bytes - self.given.total

    def as_dict(self) -> dict[str, Any]:
        fitted = self.settings and {
            "chunk_rows": self.settings.chunk_rows,
            "checkpointing": self.settings.is_checkpointed,
            "per_device_batch": self.batch,
            "bytes": self.fitted.as_dict(),
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


@dataclass
class Plan:
    work: Workload
    hardware: Hardware
    options: list[Option]
    best: Option | None
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the run file to set
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trace: dict[str, Any] | None = None
    run: Any = None  # the run that was planned: of several stages, the one that needs most
    stages: list[dict[str, Any]] = field(default_factory=list)

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.strategy.name == name), None)

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
            },
            "recommended": best and {"strategy": best.strategy.name, "preset": best.preset, "set": self.changes},
            "reasons": self.reasons,
            "notes": self.notes,
            "stage": self.run.name if self.stages else None,
            "stages": self.stages,
            "strategies": [option.as_dict() for option in self.options],
            "trace": self.trace,
        }


def changes_for(plan: Plan, best: Option) -> dict[str, Any]:
    """Fields of the run file that an option needs set."""
    work, settings, changes = plan.work, best.settings, {}
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
        changes["gradient_cache_chunk_size"] = settings.chunk_rows
    if best.batch != work.batch:
        changes["per_device_train_batch_size"] = best.batch
        changes["gradient_accumulation_steps"] = work.accumulation * -(-work.batch // best.batch)
    return changes
