"""Pipelines of a run on a machine: which there could be, bytes of their largest rank, what they send and wait.

(1) how many ranks a pipeline may have, and over how many devices each may split its layers
(2) what lies on a stage, and what a chunk leaves there. Word embeddings are on the first stage; the norm, pooling,
    projection or head behind the layers on the last one
(3) bytes rank by rank: its stages' weights, gradients and state, and the chunks that are alive at once (policy.py)
(4) per step: messages between stages, one reduction over the copies, and the time that ranks wait

A rank holds the chunks that leave most, as many as its schedule keeps alive. Copies of a pipeline stand beside each
other and average gradients once per update.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import PIPELINE_PRESETS, Hardware, PipelineShape, StrategySpec, splits_layers
from hf_dist_ext.planner.forward import TEMPORARY_VALUES, TEMPORARY_VALUES_CHECKPOINTED, Forward, Layer
from hf_dist_ext.planner.memory import (
    Bytes,
    Case,
    Model,
    ParameterSums,
    Settings,
    framework_bytes,
    loss_bytes,
    scratch_bytes,
    state_bytes,
    summed,
)
from hf_dist_ext.planner.traffic import Traffic, between_copies, inside_layers, links_of, speed
from hf_dist_ext.planner.workload import BatchColumn, Workload

MOST_PARTS = 8  # devices that share layers; more do not pay even inside a machine
# As strategies/pipeline/options.py refuses them.
NOT_IN_PIPELINES = (
    "fp16", "torch_compile", "gradient_cache_keep_graph", "frozen_feature_cache", "save_async", *policy.DDP_FIELDS,
    "bf16_full_eval", "fp16_full_eval", "neftune_noise_alpha", "use_liger_kernel", *policy.FSDP_FIELDS,
)  # fmt: skip


# ---- (1) ----


def why_none(work: Workload) -> str:
    """ "" where the run's model can be cut, and its fields go with it."""
    if not _is_known_in_stages(work):
        return f"a pipeline can not be made of {work.config['model_type']}"
    if not work.is_embedding:
        return "a pipeline needs a loss over embeddings"
    alien = next((name for name in NOT_IN_PIPELINES if work.given.get(name) not in (None, False, 0)), "")
    return f"a pipeline does not go with {alien}" if alien else ""


def _is_known_in_stages(work: Workload) -> bool:
    return work.config["model_type"] in policy.IN_STAGES and "auto_map" not in work.config


def candidates(work: Workload, hardware: Hardware) -> list[StrategySpec]:
    """Pipelines that the devices can be dealt to: of the size that the run asks for, else of every size."""
    asked, devices, found = work.pipeline_size, hardware.num_devices, []
    if devices < 2 or work.has_towers or work.leaves_tokens or not _is_known_in_stages(work):
        return []
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    for ranks in [asked] if asked > 1 else sizes:
        for parts in (1, *(size for size in sizes if size <= MOST_PARTS and splits_layers(work, hardware, size))):
            pipeline = _pipeline(work, ranks, parts)
            if devices % pipeline.devices == 0 and not _why_not_cut(work, pipeline):
                found.append(_strategy(pipeline, devices // pipeline.devices))
    return found


def why_not_dealt(work: Workload, hardware: Hardware) -> str:
    """Where the run asks for a pipeline, and there are no `candidates` of a model that can be cut."""
    asked, devices = work.pipeline_size, hardware.num_devices
    if devices % asked:
        return f"pipelines of {asked} can not be made of {devices} device(s); --num_devices says how many there are"
    if work.has_towers:
        return "a pipeline can not be made of towers"
    if work.leaves_tokens:
        return "a pipeline can not be made of a model that gives a vector of every token"
    return _why_not_cut(work, _pipeline(work, asked, parts=1))


def _pipeline(work: Workload, ranks: int, parts: int) -> PipelineShape:
    given = work.given
    schedule, split = given.get("pipeline_schedule") or policy.PIPELINE_SCHEDULE, given.get("pipeline_split")
    return PipelineShape(
        ranks,
        schedule,
        policy.stages_per_rank(schedule, given.get("pipeline_stages_per_rank")),
        None if split is None else tuple(split),
        parts,
    )


def _why_not_cut(work: Workload, pipeline: PipelineShape) -> str:
    """ "" where every stage gets a layer."""
    split, stages = pipeline.split, pipeline.num_stages
    if split is not None and len(split) != stages - 1:
        return f"pipeline_split={list(split)} has {len(split)} numbers, {stages} stages need {stages - 1}"
    if stages <= num_layers(work) and min(layers_of(work, pipeline)) > 0:
        return ""
    at = "" if split is None else f" cut at {list(split)} (pipeline_split)"
    return f"{num_layers(work)} layers{at} do not make {stages} stages of at least one layer each"


def _strategy(pipeline: PipelineShape, copies: int) -> StrategySpec:
    sizes = {"TP": pipeline.parts, "PP": pipeline.ranks, "DP": copies}
    name = " x ".join(f"{what} {size}" for what, size in sizes.items() if size > 1)
    shared = "layers split in groups, " if pipeline.parts > 1 else ""
    words = f"{shared}layers over {pipeline.ranks} devices, one after another"
    return StrategySpec(name, PIPELINE_PRESETS[pipeline.parts > 1], pipeline=pipeline, in_words=words)


# ---- (2) ----


def num_layers(work: Workload) -> int:
    return len(work.forward(work.columns[0]).layers)


def layers_of(work: Workload, pipeline: PipelineShape) -> list[int]:
    """Layers per stage, as a run would have them."""
    count = num_layers(work)
    if pipeline.split is not None:
        return [end - first for first, end in zip((0, *pipeline.split), (*pipeline.split, count), strict=True)]
    return policy.layers_of_stages(count, pipeline.num_stages)


@functools.lru_cache(maxsize=64)
def models_of_stages(work: Workload, pipeline: PipelineShape) -> list[Model]:
    """Parameters stage by stage, of one device of several that share layers."""
    layers, counts = work.forward(work.columns[0]).layers, layers_of(work, pipeline)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    stage_of = dict(zip((layer.name for layer in layers), stages, strict=True))
    models, stage = [Model() for _ in counts], 0
    for parameter in work.parameters(pipeline.parts).values():  # in order: before the layers, in them, behind them
        stage = stage_of[parameter.layer] if parameter.layer else stage and len(counts) - 1
        models[stage].add(parameter, parameter.layer, work)
    return models


@dataclass(frozen=True)
class Left:
    """On one stage by one row, but for copies of weights in the precision of the computation. Bytes, but for
    multiply-adds. Chunks share the copies of trained weights (strategies/pipeline/passes.py)."""

    saved: float  # until the row's backward, with what came in and what was given
    casts: float  # copies of weights, which a chunk has for as long
    shared_casts: float  # and those that all chunks of a pass share
    working: float  # while one chunk's backward runs
    working_casts: float  # copies of weights, meanwhile
    message: float  # to the next stage; the gradient that comes back has as many
    multiply_adds: float  # of all passes and the backward


@functools.lru_cache(maxsize=256)
def left_on_stages(work: Workload, pipeline: PipelineShape, column: BatchColumn, is_checkpointed: bool) -> list[Left]:
    """Stage by stage, of one row of a column."""
    forward = work.forward(column, "nothing", pipeline.parts)
    firsts = [0, *accumulate(layers_of(work, pipeline))]
    return [
        _left_on(work, forward, first, end, is_checkpointed) for first, end in zip(firsts, firsts[1:], strict=False)
    ]


def _left_on(work: Workload, whole: Forward, first: int, end: int, is_checkpointed: bool) -> Left:
    """On the stage with the layers from `first` to `end`."""
    layers, following = whole.layers[first:end], whole.layers[end : end + 1]
    parts: list[Layer] = [whole.before] * (first == 0) + [whole.after] * (not following) + layers
    again = [layer for layer in layers if is_checkpointed and layer.saved]
    largest = max(part.largest for part in parts)
    kept = [part for part in parts if part not in again]
    saved = sum(part.saved for part in kept) + sum(layer.input for layer in again)
    casts, working, working_casts = sum(part.casts for part in kept), TEMPORARY_VALUES * largest, 0.0
    own_casts = casts if again else sum(part.frozen_casts for part in kept)
    if again:
        saved += max(layer.beside for layer in whole.layers)
        widest = max(layer.saved - layer.input * layer.keeps_input for layer in again)
        working = widest + TEMPORARY_VALUES_CHECKPOINTED * largest
        working_casts = max(layer.casts for layer in again)
    message = following[0].input if following else 0.0
    came_in = 0.0 if first == 0 or layers[0].keeps_input or layers[0] in again else layers[0].input
    saved += (message or 4.0 * work.embedding_dim) + came_in
    passes = 2 + bool(again)  # without a graph, with one, and once more
    multiply_adds = sum(passes * part.multiply_adds + part.backward for part in parts)
    return Left(saved, own_casts, casts - own_casts, working, working_casts, message, multiply_adds)


# ---- (3) ----


@dataclass(frozen=True)
class Rank:
    """Of a pipeline: what it has and holds."""

    layers: int
    live_chunks: int
    needed: Bytes

    def as_dict(self) -> dict[str, Any]:
        return {"layers": self.layers, "live_chunks": self.live_chunks, "bytes": self.needed.as_dict()}


class Staged:
    """A run in one pipeline or copies of it, with its settings. `own`: the stages of a rank. Bytes are those of one
    step."""

    def __init__(self, work: Workload, pipeline: PipelineShape, settings: Settings, copies: int = 1):
        self.work, self.pipeline, self.copies = work, pipeline, copies
        self.layers, self.models = layers_of(work, pipeline), models_of_stages(work, pipeline)
        chunks = work.num_chunks(settings.chunk_rows)
        # of a micro-batch, with the idle ones that the schedule needs
        self.num_chunks = policy.dealt_chunks(pipeline.schedule, pipeline.ranks, chunks)
        self.left = {c: left_on_stages(work, pipeline, c, settings.is_checkpointed) for c in work.columns}
        self.chunks = [(chunks, self.left[chunks.column]) for chunks in work.chunks(settings.chunk_rows)]

    @property
    def bubble_share(self) -> float:
        """As a run logs `bubble_share_expected`."""
        pipeline = self.pipeline
        return policy.idle_share(pipeline.schedule, pipeline.ranks, pipeline.per_rank, self.num_chunks)

    @property
    def gradients(self) -> float:
        """That the copies of a rank reduce together, of the rank with most."""
        return max(sum(unit.trained_stored for unit in self.units(own)) for own in self.pipeline.stages_of_ranks)

    @property
    def reduced(self) -> float:
        """That a device sends to others for it."""
        return 2 * (self.copies - 1) / self.copies * self.gradients

    def units(self, own: Iterable[int]) -> list[ParameterSums]:
        return [unit for stage in own for unit in self.models[stage].units.values()]

    @functools.cached_property
    def ranks(self) -> list[Rank]:
        pipeline, work, copies, found = self.pipeline, self.work, self.copies, []
        for rank, own in enumerate(pipeline.stages_of_ranks):
            needed, units = self._state(own), self.units(own)
            live = policy.live_chunks(pipeline.schedule, pipeline.ranks, pipeline.per_rank, self.num_chunks, rank)
            saved, casts = self.held(own, live)
            lefts = [(chunks.rows, left[stage]) for stage in own for chunks, left in self.chunks]
            needed.weights += casts
            needed.activations = saved + max(rows * left.working + left.working_casts for rows, left in lefts)
            # messages that leave and one that arrives, forwards and back
            ends = (chunks.rows * left[stage].message for chunks, left in self.chunks for stage in _and_before(own))
            needed.buffers += 2 * (policy.MESSAGES_ON_THE_WAY + 1) * max(ends)
            needed.embeddings = loss_bytes(work, copies) if len(self.layers) - 1 in own else 0.0
            needed.scratch = scratch_bytes(work, sum(u.trained for u in units))
            needed.framework = framework_bytes(needed, is_alone=False)
            found.append(Rank(sum(self.layers[stage] for stage in own), max(map(sum, live)), needed))
        return found

    def _state(self, own: Sequence[int]) -> Bytes:
        """Weights, gradients and state. Copies average gradients, flat, once per update."""
        whole = summed(self.units(own))
        needed = state_bytes(self.work, whole, StrategySpec("copies", ""), self.copies)
        share = min(1.0, policy.REDUCED_TOGETHER / max(whole.trained, 1))
        needed.buffers = whole.trained_stored * share if self.copies > 1 else 0.0
        return needed

    def held(self, own: Sequence[int], live: Iterable[tuple[int, ...]]) -> tuple[float, float]:
        """Bytes that a rank keeps until backwards: saved values, and copies of weights. `live`: its chunks at once,
        per stage."""
        cases = []
        for case in live:
            saved = casts = 0.0
            for stage, count in zip(own, case, strict=True):
                casts += max(left[stage].shared_casts for left in self.left.values())
                for chunks, left in sorted(self.chunks, key=lambda one: -one[0].rows * one[1][stage].saved):  # noqa: B023
                    taken = min(count, chunks.number)
                    saved += taken * chunks.rows * left[stage].saved
                    casts += taken * left[stage].casts
                    count -= taken
            cases.append((saved, casts))
        return max(cases, key=sum)

    # ---- (4) ----

    def messages(self, own: Sequence[int]) -> tuple[float, float]:
        """How many a rank sends, and their bytes: what its stages give, in both passes, and gradients where an earlier
        stage trains."""
        number, size = 0, 0.0
        for stage in own:
            if stage + 1 < self.pipeline.num_stages:
                number, size = number + 2 * self.num_chunks, size + 2 * self._given(stage)
            has_gradient = any(model.whole.trained for model in self.models[:stage])
            if stage and has_gradient:
                number, size = number + self.num_chunks, size + self._given(stage - 1)
        return number * self.work.accumulation, size * self.work.accumulation

    @property
    def most_messages(self) -> tuple[float, float]:
        return max((self.messages(own) for own in self.pipeline.stages_of_ranks), key=lambda one: one[1])

    def _given(self, stage: int) -> float:
        """Bytes that all rows of a micro-batch take from a stage to the next."""
        return sum(column.rows * left[stage].message for column, left in self.left.items())

    def operations(self, own: Sequence[int]) -> float:
        """Floating-point operations of a rank's step; a multiply-add is two."""
        rows = 2 * self.work.accumulation
        return sum(
            rows * column.rows * left[stage].multiply_adds for stage in own for column, left in self.left.items()
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.pipeline.ranks,
            "parts": self.pipeline.parts,
            "copies": self.copies,
            "schedule": self.pipeline.schedule,
            "layers": self.layers,
            "chunks": self.num_chunks,
            "bubble_share": round(self.bubble_share, 4),
            "sent_between_stages": round(self.most_messages[1]),
            "reduced": round(self.reduced),
            "of_ranks": [rank.as_dict() for rank in self.ranks],
        }


def staged(case: Case) -> Staged:
    pipeline = case.strategy.pipeline
    assert pipeline is not None
    return Staged(case.work, pipeline, case.settings, case.hardware.num_devices // pipeline.devices)


def _and_before(own: Sequence[int]) -> list[int]:
    """The stages of a rank, and the one before them."""
    return [stage for stage in (min(own) - 1, *own) if stage >= 0]


def estimate(case: Case) -> Bytes:
    """Of the rank that needs most."""
    return max((rank.needed for rank in staged(case).ranks), key=lambda needed: needed.total)


def traffic(case: Case) -> Traffic:
    """Of one optimizer step, and of the device that does most of each. Arithmetic takes longer by what ranks wait."""
    one, sums, hardware = staged(case), Traffic(), case.hardware
    pipeline, (inside, across) = one.pipeline, links_of(hardware)
    is_inside = pipeline.devices <= hardware.per_node
    sums.send("send", *one.most_messages, pipeline.ranks, inside if is_inside else across)
    if pipeline.parts > 1:
        layers = max(sum(one.layers[stage] for stage in own) for own in pipeline.stages_of_ranks)
        sums.send("all_reduce", *inside_layers(case, layers), pipeline.parts, inside)
    between = between_copies(hardware, pipeline.devices)
    sums.send("all_reduce", 1, one.gradients, one.copies, between)
    sums.send_embeddings(case.work, one.copies, between)
    sums.arithmetic = max(map(one.operations, pipeline.stages_of_ranks))
    sums.arithmetic_seconds = sums.arithmetic / speed(hardware, case.work.compute_bytes) / (1 - one.bubble_share)
    return sums
