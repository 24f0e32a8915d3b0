"""A run and a machine -> which strategy, preset, chunk size and checkpointing, with the reasons in sentences.

    plan = make_plan(run, Hardware(num_devices=8, memory_bytes=80 * GIB))
    plan.best.strategy.preset, plan.changes, plan.reasons

(1) every strategy is estimated with the run's own settings: memory.py for bytes, traffic.py for collectives
(2) what does not fit is tried with smaller chunks, with checkpointing, with both (or a smaller batch and more
    accumulation where there is no gradient cache to use)
(3) of what fits and has a preset, the one whose step is shortest wins: arithmetic plus communication; what fits as the
    run stands comes before what needs changes
(4) boundaries follow from these numbers; nothing here knows how large a "large" model is

It loads no weights and imports no torch: a laptop plans for a model that it could never hold.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_dist_ext.architectures import is_known
from hf_dist_ext.errors import UsageError
from hf_dist_ext.memory import (
    GIB,
    STRATEGIES,
    Bytes,
    Hardware,
    Settings,
    Strategy,
    estimate,
    is_cut,
    is_known_optimizer,
    model_of,
    tensor_parallel_size,
)
from hf_dist_ext.presets import presets
from hf_dist_ext.shape_config import read_model_config
from hf_dist_ext.traffic import Traffic, traffic
from hf_dist_ext.workload import TracedWorkload, Workload, with_batch, workload_of

# A chunk of few tokens leaves a device waiting: with this many it runs at half speed.
HALF_SPEED_TOKENS = 512
NEARLY = 1.1  # steps that differ by less are equally long: the figures are rough


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
    settings: Settings | None = None  # None: nothing makes it fit
    batch: int = 0
    fitted: Bytes | None = None
    seconds: float = float("inf")

    @property
    def fits(self) -> bool:
        return self.given.total <= self.memory_bytes

    @property
    def headroom(self) -> float:
        return self.memory_bytes - self.given.total

    def as_dict(self) -> dict[str, Any]:
        fitted = None
        if self.settings is not None and self.fitted is not None:
            fitted = {
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
        }


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

    def as_dict(self) -> dict[str, Any]:
        model = model_of(self.work).whole
        return {
            "model_type": self.work.config["model_type"],
            "parameters": int(model.elements),
            "trained_parameters": int(model.trained),
            "hardware": {
                "num_devices": self.hardware.num_devices,
                "num_nodes": self.hardware.num_nodes,
                "device_memory": round(self.hardware.memory_bytes),
                "interconnect": self.hardware.interconnect,
            },
            "recommended": None
            if self.best is None
            else {"strategy": self.best.strategy.name, "preset": self.best.preset, "set": self.changes},
            "reasons": self.reasons,
            "notes": self.notes,
            "strategies": [option.as_dict() for option in self.options],
            "trace": self.trace,
        }


def make_plan(run: Any, hardware: Hardware, available: Collection[str] | None = None) -> Plan:
    """The plan of a parsed run (`config.Run`). `available`: presets to choose from, those of this package by default.

    Raises UsageError where the model's configuration is not to be had or its family is unknown.
    """
    config = run.run
    shape = read_model_config(config.model_config, config.model_name_or_path, config.model_revision)
    work = workload_of(run, shape)
    if not is_known(shape):
        note = f"model_type {shape['model_type']} has no closed form here: counted by a trace of torch."
        found = run_trace(run, "--shape")
        work = TracedWorkload(**vars(work) | {"notes": (*work.notes, note)}, found=found)
    return plan_workload(work, hardware, available)


def run_trace(run: Any, *options: str) -> dict[str, Any]:
    """memory_trace.py in a process of its own, on what the run resolved to. Raises UsageError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        path.write_text(json.dumps(run.given), encoding="utf-8")
        command = [sys.executable, "-m", "hf_dist_ext.memory_trace", "--config", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UsageError(lines[-1].removeprefix("error: "))
    return json.loads(done.stdout.splitlines()[-1])


def plan_workload(work: Workload, hardware: Hardware, available: Collection[str] | None = None) -> Plan:
    available = set(presets()) if available is None else set(available)
    options = [
        _option(work, strategy, hardware, available)
        for strategy in STRATEGIES
        if _has_meaning(strategy, work, hardware)
    ]
    best = _best(options)
    plan = Plan(work, hardware, options, best, notes=list(work.notes))
    if not is_known_optimizer(work.optimizer):
        plan.notes.append(f'optim "{work.optimizer}" is not known here: counted as AdamW, 8 bytes per parameter.')
    whole = model_of(work).whole
    if whole.trained and whole.trained_stored < 4 * whole.trained:
        plan.notes.append(
            "what trains is stored in half precision on one device and under DDP: small updates are lost."
        )
    _explain(plan)
    return plan


def _has_meaning(strategy: Strategy, work: Workload, hardware: Hardware) -> bool:
    if strategy.name == "single":
        return True
    if hardware.num_devices == 1:
        return strategy.offloads
    if strategy.replicates_frozen:
        return work.is_frozen and work.replicates_frozen != "shard"
    if strategy.is_hybrid:
        return hardware.num_nodes > 1
    if strategy.is_tensor_parallel:
        return tensor_parallel_size(work, hardware) > 1 and not isinstance(work, TracedWorkload)
    if strategy.preset == "multi_gpu_fsdp" and work.fsdp_mode != "auto":
        return strategy.keeps_whole == (work.fsdp_mode == "speed")
    return not strategy.keeps_whole or work.is_embedding  # without our loss nothing keeps weights whole


def _preset(strategy: Strategy, hardware: Hardware, available: Collection[str]) -> str:
    for_nodes = {"multi_gpu_ddp": "multi_node_ddp", "multi_gpu_hsdp": "multi_node_hsdp"}.get(strategy.preset)
    if hardware.num_nodes > 1 and for_nodes in available:
        return for_nodes
    # The run file's frozen_parts_fsdp lets the plain preset leave frozen parts whole.
    if strategy.replicates_frozen and strategy.preset not in available:
        return "multi_gpu_fsdp"
    return strategy.preset


def _option(work: Workload, strategy: Strategy, hardware: Hardware, available: Collection[str]) -> Option:
    preset = _preset(strategy, hardware, available)
    as_given = Settings(is_checkpointed=work.is_checkpointed)
    option = Option(
        strategy,
        preset,
        _why_not(strategy, preset, hardware, available),
        estimate(work, strategy, hardware, as_given),
        estimate(work, strategy, hardware, Settings(is_checkpointed=True)),
        estimate(work, strategy, hardware, Settings(is_checkpointed=False)),
        traffic(work, strategy, hardware, as_given),
        hardware.memory_bytes,
    )
    if work.finds_chunk or not option.fits:
        _make_fit(option, work, hardware)
    else:
        option.settings, option.batch, option.fitted = as_given, work.batch, option.given
        option.seconds = option.traffic.total_seconds * _repeats(strategy, work, hardware)
    if work.finds_chunk and option.settings is not None and option.settings.is_checkpointed == work.is_checkpointed:
        option.given = option.fitted or option.given  # the run finds this size itself
    return option


def _why_not(strategy: Strategy, preset: str, hardware: Hardware, available: Collection[str]) -> str:
    if strategy.name == "single" and hardware.num_devices > 1:
        return f"it would use one of {hardware.num_devices} devices"
    if preset not in available:
        return f"there is no preset {preset}"
    if strategy.is_deepspeed and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    return ""


def _make_fit(option: Option, work: Workload, hardware: Hardware) -> None:
    """(2) The quickest of: smaller chunks, checkpointing, both."""
    for is_checkpointed in dict.fromkeys([work.is_checkpointed, True]):
        for variant, settings in _smaller(work, is_checkpointed):
            found = estimate(variant, option.strategy, hardware, settings)
            if found.total > hardware.memory_bytes:
                continue
            sent = traffic(variant, option.strategy, hardware, settings)
            seconds = sent.seconds + sent.arithmetic_seconds * _waiting(variant, settings)
            seconds *= _repeats(option.strategy, work, hardware)
            if seconds < option.seconds:
                option.settings, option.batch, option.fitted = settings, variant.batch, found
                option.seconds = seconds


def _smaller(work: Workload, is_checkpointed: bool) -> list[tuple[Workload, Settings]]:
    """Settings from large to small: rows per chunk for a loss over embeddings, else the batch."""
    if not work.is_embedding:
        found, rows = [], work.batch
        while rows:
            share = -(-work.batch // rows)
            variant = replace(with_batch(work, rows), accumulation=work.accumulation * share)
            found.append((variant, Settings(is_checkpointed=is_checkpointed)))
            rows //= 2
        return found
    most = max(work.rows_of_chunk(column.length) for column in work.columns)
    whole = [(work, Settings(is_checkpointed=is_checkpointed))] if not work.finds_chunk else []
    sizes = [2**power for power in range(20, -1, -1) if 2**power < most or work.finds_chunk and 2**power <= most]
    return whole + [(work, Settings(rows, is_checkpointed)) for rows in sizes]


def _waiting(work: Workload, settings: Settings) -> float:
    """How many times longer arithmetic takes because chunks are small."""
    longest = max(column.length for column in work.columns)
    rows = work.rows_of_chunk(longest, settings.chunk_rows) if is_cut(work, settings) else work.batch
    return 1 + HALF_SPEED_TOKENS / (rows * longest)


def _repeats(strategy: Strategy, work: Workload, hardware: Hardware) -> float:
    """Steps that do what one step of all devices with rows of their own does."""
    if strategy.name == "single":
        return hardware.num_devices
    return tensor_parallel_size(work, hardware) if strategy.is_tensor_parallel else 1


def _best(options: list[Option]) -> Option | None:
    """(3) Of steps about as short, the simplest strategy: the table goes from simple to involved."""
    possible = [option for option in options if not option.why_not and option.settings is not None]
    possible = [option for option in possible if option.fits] or possible
    shortest = min((option.seconds for option in possible), default=0.0)
    return next((option for option in possible if option.seconds <= NEARLY * shortest), None)


# ---- reasons ----


def gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count < 100 * GIB else f"{count / GIB:.0f} GiB"


def count_of(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def count_with(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _explain(plan: Plan) -> None:
    work, hardware, best, say = plan.work, plan.hardware, plan.best, plan.reasons.append
    whole = model_of(work).whole
    share = whole.trained / whole.elements if whole.elements else 0
    by_name = {option.strategy.name: option for option in plan.options}
    simplest = by_name.get("DDP") or by_name["single"]
    states = simplest.given.gradients + simplest.given.optimizer
    trained = f"All {count_of(whole.elements)} parameters train"
    if share < 1:
        trained = f"{count_of(whole.trained)} of {count_of(whole.elements)} parameters train ({share:.1%})"
    state_size = f"gradients {gib(simplest.given.gradients)}, optimizer state {gib(simplest.given.optimizer)}"
    say(f"{trained}: {state_size}.")
    if best is None:
        _explain_nothing_fits(plan)
        return
    fitted = best.fitted or best.given
    if best.strategy.name == "DDP":
        saved = states + simplest.given.master_weights
        less = "would save little" if saved < 0.1 * hardware.memory_bytes else f"could save at most {gib(saved)}"
        with_changes = "Everything fits" if best.fits else "With the changes below everything fits"
        say(
            f"{with_changes} on each device ({gib(fitted.total)} of {gib(hardware.memory_bytes)}); sharding {less} "
            f"and send more. DDP sends {gib(best.traffic.bytes)} per device and step."
        )
    elif best.strategy.name != "single":
        fixed = simplest.given.total - simplest.given.activations - simplest.given.embeddings
        what = "fits only with changes" if simplest.settings is not None else "does not fit"
        if simplest.fits:
            what = "fits too, but its step is longer"
        say(
            f"{simplest.strategy.name} {what}: {gib(fixed)} before any activation, {gib(simplest.given.total)} in "
            f"all, of {gib(hardware.memory_bytes)}. {best.strategy.name} ({best.strategy.in_words}) needs "
            f"{gib(fitted.total)} and sends {gib(best.traffic.bytes)} per device and step."
        )
    else:
        say(f"One device: {gib(fitted.total)} of {gib(hardware.memory_bytes)}.")
    _explain_activations(plan, best, fitted)
    if not best.fits:
        say(f"As it stands the run needs {gib(best.given.total)} per device and does not fit; the changes below do.")
    if hardware.num_devices > 1 and best.strategy.name == "DDP":
        sent, computed = best.traffic.seconds, best.traffic.arithmetic_seconds
        if sent < 0.1 * computed:
            say(f"Communication is about {sent / computed:.0%} of the arithmetic: compressing gradients is pointless.")
    _changes(plan, best)


def _explain_activations(plan: Plan, best: Option, fitted: Bytes) -> None:
    work, settings = plan.work, best.settings
    assert settings is not None
    longest = max(column.length for column in work.columns)
    if is_cut(work, settings):
        rows = work.rows_of_chunk(longest, settings.chunk_rows)
        what = f"a chunk of {count_with(rows, 'row')} of {longest} tokens"
    else:
        what = f"{count_with(best.batch, 'row')} of {longest} tokens"
    with_it, without = best.checkpointed.activations, best.unchecked.activations
    as_given = settings.chunk_rows is None and best.batch == work.batch
    other = f" ({gib(without)} without checkpointing, {gib(with_it)} with)" if as_given else ""
    largest = max(
        ("weights", fitted.weights + fitted.master_weights), ("activations", fitted.activations), key=lambda x: x[1]
    )
    dominate = ": they dominate" if largest[0] == "activations" and fitted.activations > fitted.total / 2 else ""
    plan.reasons.append(f"Activations of {what}: {gib(fitted.activations)}{other}{dominate}.")


def _explain_nothing_fits(plan: Plan) -> None:
    least = min(plan.options, key=lambda option: option.checkpointed.total)
    choosable = [option for option in plan.options if option.settings is not None]
    memory = gib(plan.hardware.memory_bytes)
    if choosable:
        names = ", ".join(f"{option.strategy.name} ({option.why_not})" for option in choosable)
        plan.reasons.append(f"Nothing that can be chosen here fits {memory}. What would: {names}.")
        return
    plan.reasons.append(
        f"Nothing fits {memory}: the least is {least.strategy.name} with {gib(least.checkpointed.total)}. Use more "
        'devices, shorter rows, LoRA or frozen parts, "optim": "adamw_bnb_8bit", or half-precision weights.'
    )


def _changes(plan: Plan, best: Option) -> None:
    """Fields of the run file that the recommendation sets."""
    work, settings, changes = plan.work, best.settings, plan.changes
    assert settings is not None
    if plan.hardware.num_devices > 1 or best.strategy.name != "single":
        changes["accelerate_config"] = best.preset
    if best.strategy.preset == "multi_gpu_fsdp" and work.is_embedding and work.fsdp_mode == "auto":
        changes["gradient_cache_fsdp"] = "speed" if best.strategy.keeps_whole else "memory"
    if best.strategy.replicates_frozen and best.preset == "multi_gpu_fsdp":
        changes["frozen_parts_fsdp"] = "replicate"
    if settings.is_checkpointed and not work.is_checkpointed:
        changes["gradient_checkpointing"] = True
    if settings.chunk_rows is not None and not work.finds_chunk:
        changes["gradient_cache_chunk_size"] = settings.chunk_rows
    if best.batch != work.batch:
        changes["per_device_train_batch_size"] = best.batch
        changes["gradient_accumulation_steps"] = work.accumulation * -(-work.batch // best.batch)
