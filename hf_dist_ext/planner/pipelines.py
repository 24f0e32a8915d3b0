"""Pipelines of a run on a machine: which there could be, bytes of their largest rank, what they send and wait.

(1) how many ranks a pipeline may have, and over how many devices each may split its layers
(2) bytes rank by rank: its stages' weights, gradients and state, and the chunks that are alive at once (policy.py)
(3) per step: messages between stages, one reduction over the copies, and the time that ranks wait

A rank holds the chunks that leave most, as many as its schedule keeps alive. Copies of a pipeline stand beside each
other and average gradients once per update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import PIPELINE_PRESETS, Hardware, Pipeline, Strategy, splits_layers
from hf_dist_ext.planner.cut import Left, layers_of, left_on_stages, models_of_stages, num_layers
from hf_dist_ext.planner.memory import Bytes, Settings, Sizes, framework_bytes, loss_bytes, scratch_bytes
from hf_dist_ext.planner.traffic import Links, Traffic, between_copies, inside_layers, links_of, speed
from hf_dist_ext.planner.workload import Chunks, Workload

MOST_PARTS = 8  # devices that share layers; more do not pay even inside a machine


# ---- (1) ----


def why_none(work: Workload) -> str:
    """ "" where the run's model can be cut, and its fields go with it."""
    if not _is_known_in_stages(work):
        return f"a pipeline can not be made of {work.config['model_type']}"
    if not work.is_embedding:
        return "a pipeline needs a loss over embeddings"
    if work.knobs.no_pipeline:
        return f"a pipeline does not go with {work.knobs.no_pipeline}"
    return ""


def _is_known_in_stages(work: Workload) -> bool:
    return work.config["model_type"] in policy.IN_STAGES and "auto_map" not in work.config


def candidates(work: Workload, hardware: Hardware) -> list[Strategy]:
    """Pipelines that the devices can be dealt to: of the size that the run asks for, else of every size."""
    if hardware.num_devices < 2 or work.has_towers or work.leaves_tokens:
        return []
    if not _is_known_in_stages(work):
        return []
    asked, devices = work.knobs.pipeline_size, hardware.num_devices
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    found = []
    for ranks in [asked] if asked > 1 else sizes:
        for parts in (1, *(size for size in sizes if size <= MOST_PARTS and splits_layers(work, hardware, size))):
            pipeline = _pipeline(work, ranks, parts)
            if devices % pipeline.devices == 0 and _can_be_cut(work, pipeline):
                found.append(_strategy(pipeline, devices // pipeline.devices))
    return found


def why_not_dealt(work: Workload, hardware: Hardware) -> str:
    """Where the run asks for a pipeline, and there are no `candidates` of a model that can be cut."""
    asked, devices = work.knobs.pipeline_size, hardware.num_devices
    if devices % asked:
        return f"pipelines of {asked} can not be made of {devices} device(s); --num_devices says how many there are"
    if work.has_towers:
        return "a pipeline can not be made of towers"
    if work.leaves_tokens:
        return "a pipeline can not be made of a model that gives a vector of every token"
    pipeline = _pipeline(work, asked, parts=1)
    split, stages = pipeline.split, len(pipeline.places)
    if split is not None and len(split) != stages - 1:
        return f"pipeline_split={list(split)} has {len(split)} numbers, {stages} stages need {stages - 1}"
    cut = "" if split is None else f" cut at {list(split)} (pipeline_split)"
    return f"{num_layers(work)} layers{cut} do not make {stages} stages of at least one layer each"


def _pipeline(work: Workload, ranks: int, parts: int) -> Pipeline:
    knobs = work.knobs
    sharding = knobs.sharding if knobs.sharding in ("FULL_SHARD", "SHARD_GRAD_OP") else ""
    return Pipeline(ranks, knobs.pipeline_schedule, knobs.stages_per_rank, knobs.pipeline_split, parts, sharding)


def _can_be_cut(work: Workload, pipeline: Pipeline) -> bool:
    if pipeline.split is not None and len(pipeline.split) != len(pipeline.places) - 1:
        return False
    return len(pipeline.places) <= num_layers(work) and all(count > 0 for count in layers_of(work, pipeline))


def _strategy(pipeline: Pipeline, copies: int) -> Strategy:
    sizes = {"TP": pipeline.parts, "PP": pipeline.ranks, "FSDP" if pipeline.sharding else "DP": copies}
    name = " x ".join(f"{what} {size}" for what, size in sizes.items() if size > 1)
    shared = "layers split in groups, " if pipeline.parts > 1 else ""
    words = f"{shared}layers over {pipeline.ranks} devices, one after another"
    return Strategy(name, PIPELINE_PRESETS[pipeline.parts > 1], pipeline=pipeline, in_words=words)


# ---- (2) ----


@dataclass(frozen=True)
class Rank:
    """Of a pipeline: what it has and holds."""

    layers: int
    live_chunks: int
    needed: Bytes

    def as_dict(self) -> dict[str, Any]:
        return {"layers": self.layers, "live_chunks": self.live_chunks, "bytes": self.needed.as_dict()}


def estimate(work: Workload, strategy: Strategy, hardware: Hardware, settings: Settings) -> Bytes:
    """Of the rank that needs most."""
    ranks = ranks_of(work, strategy.pipeline, hardware, settings)
    return max((rank.needed for rank in ranks), key=lambda needed: needed.total)


def ranks_of(work: Workload, pipeline: Pipeline, hardware: Hardware, settings: Settings) -> list[Rank]:
    counts, models = layers_of(work, pipeline), models_of_stages(work, pipeline)
    chunks, copies = num_chunks(work, pipeline, settings), hardware.num_devices // pipeline.devices
    found = []
    for rank, own in enumerate(pipeline.stages_of_ranks):
        units = [unit for stage in own for unit in models[stage].units.values()]
        needed = _sharded(pipeline, units, copies) if pipeline.sharding else _whole(work, units, copies)
        live = policy.live_chunks(pipeline.schedule, pipeline.ranks, pipeline.per_rank, chunks, rank)
        saved, casts = held(work, pipeline, settings, own, live)
        needed.weights += casts
        needed.activations = saved + _working(work, pipeline, settings, own)
        needed.buffers += _messages_under_way(work, pipeline, settings, own)
        needed.embeddings = loss_bytes(work, copies) if len(counts) - 1 in own else 0.0
        needed.scratch = scratch_bytes(work, sum(u.trained for u in units) / (copies if pipeline.sharding else 1))
        needed.framework = framework_bytes(needed, is_alone=False)
        found.append(Rank(sum(counts[stage] for stage in own), max(map(sum, live)), needed))
    return found


def _whole(work: Workload, units: Sequence[Sizes], copies: int) -> Bytes:
    """Weights, gradients and state of a rank whose copies average gradients, flat, once per update."""
    stored, trained = sum(unit.trained_stored for unit in units), sum(unit.trained for unit in units)
    has_masters = stored > trained * work.compute_bytes
    return Bytes(
        weights=sum(unit.frozen_stored for unit in units) + (0.0 if has_masters else stored),
        master_weights=stored if has_masters else 0.0,
        gradients=stored,
        optimizer=sum(unit.optimizer for unit in units),
        buffers=stored * min(1.0, policy.REDUCED_TOGETHER / max(trained, 1)) if copies > 1 else 0.0,
    )


def _sharded(pipeline: Pipeline, units: Sequence[Sizes], copies: int) -> Bytes:
    """The same where copies share one set (strategies/sharded_stages.py). Weights are gathered as they are stored: all
    for an update, or two units for a chunk; so are gradients."""
    whole = sorted((unit.trained_stored + unit.frozen_stored for unit in units), reverse=True)
    trained, largest = sum(unit.trained_stored for unit in units), max(unit.trained_stored for unit in units)
    frees = pipeline.frees
    return Bytes(
        weights=sum(whole[:2]) if frees else sum(whole),
        master_weights=sum(whole) / copies,
        gradients=trained / copies + (0.0 if frees else trained),
        optimizer=sum(unit.optimizer for unit in units) / copies,
        buffers=whole[0] + (2 if frees else 1) * largest,
    )


def num_chunks(work: Workload, pipeline: Pipeline, settings: Settings) -> int:
    """Of a micro-batch, with the idle ones that its schedule needs."""
    return policy.dealt_chunks(pipeline.schedule, pipeline.ranks, work.num_chunks(settings.chunk_rows))


def held(
    work: Workload, pipeline: Pipeline, settings: Settings, own: Iterable[int], live: Iterable[tuple[int, ...]]
) -> tuple[float, float]:
    """Bytes that a rank with the stages `own` keeps until backwards: saved values, and copies of weights. `live`: its
    chunks at once, per stage."""
    cases = []
    for case in live:
        saved = casts = 0.0
        for stage, count in zip(own, case, strict=True):
            if not pipeline.frees:
                casts += max(left.shared_casts for _, left in _left(work, pipeline, settings, stage))
            chunks = sorted(_chunks(work, pipeline, settings, stage), key=lambda one: one[0], reverse=True)
            for of_chunk, of_weights, number in chunks:
                taken = min(count, number)
                saved, casts, count = saved + taken * of_chunk, casts + taken * of_weights, count - taken
        cases.append((saved, casts))
    return max(cases, key=sum)


def _chunks(work: Workload, pipeline: Pipeline, settings: Settings, stage: int) -> Iterable[tuple[float, float, int]]:
    """On a stage: what a chunk saves, its copies of weights, and how many such chunks there are."""
    for chunks, left in _left_by(work, pipeline, settings, stage):
        yield chunks.rows * left.saved, left.casts + left.shared_casts * pipeline.frees, chunks.number


def _left(work: Workload, pipeline: Pipeline, settings: Settings, stage: int) -> Iterable[tuple[Any, Left]]:
    key = Settings(is_checkpointed=settings.is_checkpointed)
    return [(column, left_on_stages(work, pipeline, column, key)[stage]) for column in work.columns]


def _left_by(work: Workload, pipeline: Pipeline, settings: Settings, stage: int) -> Iterable[tuple[Chunks, Left]]:
    lefts = dict(_left(work, pipeline, settings, stage))
    return [(chunks, lefts[chunks.column]) for chunks in work.chunks(settings.chunk_rows)]


def _working(work: Workload, pipeline: Pipeline, settings: Settings, own: Iterable[int]) -> float:
    return max(
        chunks.rows * left.working + left.working_casts
        for stage in own
        for chunks, left in _left_by(work, pipeline, settings, stage)
    )


def _messages_under_way(work: Workload, pipeline: Pipeline, settings: Settings, own: Iterable[int]) -> float:
    """Those that leave and one that arrives, forwards and back."""
    largest = max(
        chunks.rows * left.message
        for stage in (min(own) - 1, *own)
        if stage >= 0
        for chunks, left in _left_by(work, pipeline, settings, stage)
    )
    return 2 * (policy.MESSAGES_ON_THE_WAY + 1) * largest


# ---- (3) ----


@dataclass(frozen=True)
class Facts:
    """A pipeline's own figures. Bytes are those of one step and of the device that sends most."""

    ranks: int
    parts: int
    copies: int
    schedule: str
    layers: tuple[int, ...]  # per stage
    chunks: int
    bubble_share: float
    sent_between_stages: float
    reduced: float
    of_ranks: tuple[Rank, ...]

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "layers": list(self.layers),
            "bubble_share": round(self.bubble_share, 4),
            "sent_between_stages": round(self.sent_between_stages),
            "reduced": round(self.reduced),
            "of_ranks": [rank.as_dict() for rank in self.of_ranks],
        }


def facts_of(work: Workload, pipeline: Pipeline, hardware: Hardware, settings: Settings) -> Facts:
    copies = hardware.num_devices // pipeline.devices
    return Facts(
        pipeline.ranks,
        pipeline.parts,
        copies,
        pipeline.schedule,
        tuple(layers_of(work, pipeline)),
        num_chunks(work, pipeline, settings),
        bubble_share(work, pipeline, settings),
        max(_messages(work, pipeline, settings, own)[1] for own in pipeline.stages_of_ranks),
        (1 if pipeline.sharding else 2)
        * (copies - 1)
        / copies
        * _reductions(work, pipeline, settings)
        * _reduced(work, pipeline),
        tuple(ranks_of(work, pipeline, hardware, settings)),
    )


def bubble_share(work: Workload, pipeline: Pipeline, settings: Settings) -> float:
    """As a run logs `bubble_share_expected`."""
    chunks = num_chunks(work, pipeline, settings)
    return policy.idle_share(pipeline.schedule, pipeline.ranks, pipeline.per_rank, chunks)


def traffic(work: Workload, strategy: Strategy, hardware: Hardware, settings: Settings) -> Traffic:
    """Of one optimizer step, and of the device that does most of each. Arithmetic takes longer by what ranks wait."""
    pipeline, sums = strategy.pipeline, Traffic()
    inside, across = links_of(hardware)
    beside = between_copies(hardware, pipeline.devices)
    copies, counts = hardware.num_devices // pipeline.devices, layers_of(work, pipeline)
    messages = max(
        (_messages(work, pipeline, settings, own) for own in pipeline.stages_of_ranks), key=lambda one: one[1]
    )
    sums.send("send", *messages, pipeline.ranks, inside if pipeline.devices <= hardware.per_node else across)
    if pipeline.parts > 1:
        layers = max(sum(counts[stage] for stage in own) for own in pipeline.stages_of_ranks)
        sums.send("all_reduce", *inside_layers(work, settings, layers), pipeline.parts, inside)
    if pipeline.sharding:
        _send_shards(sums, work, pipeline, settings, copies, beside)
    else:
        sums.send("all_reduce", 1, _reduced(work, pipeline), copies, beside)
    sums.send_embeddings(work, copies, beside)
    most = max(_operations(work, pipeline, settings, own) for own in pipeline.stages_of_ranks)
    busy = 1 - bubble_share(work, pipeline, settings)
    sums.arithmetic = most
    sums.arithmetic_seconds = most / speed(hardware, work.compute_bytes) / busy
    return sums


def _reductions(work: Workload, pipeline: Pipeline, settings: Settings) -> int:
    """Of a step's gradients over the copies: one per update, or behind every backward."""
    return num_chunks(work, pipeline, settings) * work.accumulation if pipeline.frees else 1


def _reduced(work: Workload, pipeline: Pipeline) -> float:
    models = models_of_stages(work, pipeline)
    return max(sum(models[stage].whole.trained_stored for stage in own) for own in pipeline.stages_of_ranks)


def _send_shards(
    sums: Traffic, work: Workload, pipeline: Pipeline, settings: Settings, copies: int, links: Links
) -> None:
    """Of the rank that has most: weights once per update, or for every forward and backward of every chunk;
    gradients once, or behind every backward."""
    models = models_of_stages(work, pipeline)
    ranks = [[unit for stage in own for unit in models[stage].units.values()] for own in pipeline.stages_of_ranks]
    units = max(ranks, key=lambda units: sum(unit.trained_stored + unit.frozen_stored for unit in units))
    backwards = _reductions(work, pipeline, settings)
    gathers = 3 * backwards if pipeline.frees else 1
    stored = sum(unit.trained_stored + unit.frozen_stored for unit in units)
    sums.send("all_gather", gathers * len(units), gathers * stored, copies, links)
    trained = [unit.trained_stored for unit in units if unit.trained]
    sums.send("reduce_scatter", backwards * len(trained), backwards * sum(trained), copies, links)


def _messages(work: Workload, pipeline: Pipeline, settings: Settings, own: Sequence[int]) -> tuple[float, float]:
    """How many a rank sends, and their bytes: what its stages give, in both passes, and gradients where an earlier
    stage trains."""
    places, models, chunks = pipeline.places, models_of_stages(work, pipeline), num_chunks(work, pipeline, settings)
    number, size = 0, 0.0
    for stage in own:
        if stage + 1 < len(places) and places[stage + 1] != places[stage]:
            number, size = number + 2 * chunks, size + 2 * _given(work, pipeline, settings, stage)
        if stage and places[stage - 1] != places[stage] and any(model.whole.trained for model in models[:stage]):
            number, size = number + chunks, size + _given(work, pipeline, settings, stage - 1)
    return number * work.accumulation, size * work.accumulation


def _given(work: Workload, pipeline: Pipeline, settings: Settings, stage: int) -> float:
    """Bytes that all rows of a micro-batch take from a stage to the next."""
    return sum(column.rows * left.message for column, left in _left(work, pipeline, settings, stage))


def _operations(work: Workload, pipeline: Pipeline, settings: Settings, own: Sequence[int]) -> float:
    """Floating-point operations of a rank's step; a multiply-add is two."""
    lefts = [one for stage in own for one in _left(work, pipeline, settings, stage)]
    return sum(2 * column.rows * work.accumulation * (left.forward + left.backward) for column, left in lefts)
