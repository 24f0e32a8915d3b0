"""Pipelines of a run on a machine: (1) which there could be, (2) by closed formulas, what a rank needs, sends, waits.

A rank is a process of a pipeline, with one stage of consecutive layers or several. Layers are dealt evenly. The first
rank has the word embeddings and holds most chunks until their backward, later ones may have a layer more, and the last
one has the loss: a plan counts the one that needs most. Copies of a pipeline stand beside each other and average
gradients once per update.
"""

from __future__ import annotations

from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import PIPELINE_PRESETS, Hardware, PipelineShape, StrategySpec, splits_layers
from hf_dist_ext.planner.forward import TEMPORARY_VALUES, TEMPORARY_VALUES_CHECKPOINTED
from hf_dist_ext.planner.memory import (
    Bytes,
    Case,
    ParameterSums,
    framework_bytes,
    loss_bytes,
    scratch_bytes,
    state_bytes,
    summed,
)
from hf_dist_ext.planner.traffic import Traffic, arithmetic, between_copies, inside_layers, links_of, speed
from hf_dist_ext.planner.workload import Workload

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
    alien = next((name for name in NOT_IN_PIPELINES if work.given.get(name) not in (None, False, 0, "NO_SHARD")), "")
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
    schedule, split = work.given.get("pipeline_schedule") or policy.PIPELINE_SCHEDULE, work.given.get("pipeline_split")
    per_rank = policy.stages_per_rank(schedule, work.given.get("pipeline_stages_per_rank"))
    return PipelineShape(ranks, schedule, per_rank, None if split is None else tuple(split), parts)


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


def num_layers(work: Workload) -> int:
    return len(work.forward(work.columns[0]).layers)


def layers_of(work: Workload, pipeline: PipelineShape) -> list[int]:
    """Layers per stage, as a run would have them."""
    count = num_layers(work)
    if pipeline.split is not None:
        return [end - first for first, end in zip((0, *pipeline.split), (*pipeline.split, count), strict=True)]
    return policy.layers_of_stages(count, pipeline.num_stages)


# ---- (2) ----


class Staged:
    """A run in one pipeline or copies of it, with its settings."""

    def __init__(self, case: Case):
        pipeline = case.strategy.pipeline
        assert pipeline is not None
        self.case, self.work, self.pipeline = case, case.work, pipeline
        self.copies = case.hardware.num_devices // pipeline.devices
        self.layers = layers_of(case.work, pipeline)
        self.layers_of_ranks = [sum(self.layers[stage] for stage in own) for own in pipeline.stages_of_ranks]
        self.most_layers = max(self.layers_of_ranks)
        # those of which one needs most: with the word embeddings, with the most layers, with the loss
        self.largest = {0, self.layers_of_ranks.index(self.most_layers), pipeline.ranks - 1}
        # of a micro-batch, with the idle ones that the schedule needs
        chunks = case.work.num_chunks(case.settings.chunk_rows)
        self.num_chunks = policy.dealt_chunks(pipeline.schedule, pipeline.ranks, chunks)
        self.shape = pipeline.schedule, pipeline.ranks, pipeline.per_rank, self.num_chunks

    @property
    def bubble_share(self) -> float:
        """As a run logs `bubble_share_expected`."""
        return policy.idle_share(*self.shape)

    def live_chunks(self, rank: int) -> int:
        return policy.live_chunks(*self.shape, rank)

    def parameters(self, rank: int) -> ParameterSums:
        """Of as many layers as it has, those that take most. What belongs to no layer, above all the word embeddings,
        is the first rank's."""
        model, count = self.case.model, self.layers_of_ranks[rank]
        layers = sorted(model.layers, key=lambda one: (-one.trained_stored, -one.stored))[:count]
        return summed([*layers, model.root] if rank == 0 else layers)

    def needed(self, rank: int) -> Bytes:
        work, whole, is_last = self.work, self.parameters(rank), rank == self.pipeline.ranks - 1
        needed = state_bytes(work, whole, StrategySpec("copies", ""), self.copies)
        saved, needed.activations, casts, frozen_casts, message = self._most_of_a_chunk(self.layers_of_ranks[rank])
        live = self.live_chunks(rank) / self.pipeline.per_rank  # of all stages of the rank together
        needed.weights += casts + live * frozen_casts
        needed.activations += live * saved
        averaged = whole.trained_stored * min(1.0, policy.REDUCED_TOGETHER / max(whole.trained, 1))
        needed.buffers = averaged * (self.copies > 1) + 2 * (policy.MESSAGES_ON_THE_WAY + 1) * message
        needed.embeddings = loss_bytes(work, self.copies) if is_last else 0.0
        needed.scratch = scratch_bytes(work, whole.trained)
        needed.framework = framework_bytes(needed, is_alone=False)
        return needed

    def _most_of_a_chunk(self, layers: int) -> tuple[float, ...]:
        """On a rank with so many layers, of the chunks that leave most there: bytes until the backward, bytes while it
        runs, copies of weights that chunks share, copies of frozen weights of each chunk, and the message to the next
        stage."""
        work, found = self.work, []
        for chunks in work.chunks(self.case.settings.chunk_rows):
            forward = work.forward(chunks.column, "nothing", self.pipeline.parts)
            share, largest = layers / len(forward.layers), max(part.largest for part in forward.parts)
            widest, message = max(forward.layers, key=lambda one: one.saved), forward.layers[-1].input
            if self.case.settings.is_checkpointed:
                kept = sum(layer.input for layer in forward.layers if layer.saved)
                running = widest.saved + TEMPORARY_VALUES_CHECKPOINTED * largest
                casts, frozen_casts = widest.casts, 0.0
            else:
                kept, running = sum(layer.saved for layer in forward.layers), TEMPORARY_VALUES * largest
                frozen_casts = share * sum(layer.frozen_casts for layer in forward.layers)
                casts = share * sum(layer.casts for layer in forward.layers) - frozen_casts
            kept = share * kept + forward.before.saved + self.pipeline.per_rank * message
            found.append((chunks.rows * kept, chunks.rows * running, casts, frozen_casts, chunks.rows * message))
        return tuple(map(max, zip(*found, strict=True)))

    @property
    def messages(self) -> tuple[float, float]:
        """How many a rank sends at most, and their bytes: what its stages give, in both passes, and gradients where
        layers train."""
        work, trains = self.work, any(layer.trained for layer in self.case.model.layers)
        times = (2 + (trains and self.pipeline.ranks > 2)) * self.pipeline.per_rank * work.accumulation
        rows = {
            column: work.forward(column, "nothing", self.pipeline.parts).layers[-1].input for column in work.columns
        }
        return times * self.num_chunks, times * sum(column.rows * message for column, message in rows.items())

    @property
    def gradients(self) -> float:
        """Bytes that the copies of a rank average, of the rank with most."""
        return max(self.parameters(rank).trained_stored for rank in self.largest)

    @property
    def reduced(self) -> float:
        """Bytes of gradients that a device sends to its copies, once per update."""
        return 2 * (self.copies - 1) / self.copies * self.gradients

    def as_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.pipeline.ranks,
            "parts": self.pipeline.parts,
            "copies": self.copies,
            "schedule": self.pipeline.schedule,
            "layers": self.layers,
            "chunks": self.num_chunks,
            "live_chunks": self.live_chunks(0),
            "bubble_share": round(self.bubble_share, 4),
            "sent_between_stages": round(self.messages[1]),
            "reduced": round(self.reduced),
        }


def estimate(case: Case) -> Bytes:
    """Of the rank that needs most."""
    staged = Staged(case)
    return max(map(staged.needed, staged.largest), key=lambda needed: needed.total)


def traffic(case: Case) -> Traffic:
    """Of one optimizer step, and of the device that does most of each. Arithmetic takes longer by what ranks wait."""
    one, sums, hardware = Staged(case), Traffic(), case.hardware
    pipeline, (inside, across) = one.pipeline, links_of(hardware)
    between = between_copies(hardware, pipeline.devices)
    sums.send("send", *one.messages, pipeline.ranks, inside if pipeline.devices <= hardware.per_node else across)
    if pipeline.parts > 1:
        sums.send("all_reduce", *inside_layers(case, one.most_layers), pipeline.parts, inside)
    sums.send("all_reduce", 1, one.gradients, one.copies, between)
    sums.send_embeddings(case.work, one.copies, between)
    sums.arithmetic = arithmetic(case) * one.most_layers / num_layers(case.work)
    sums.arithmetic_seconds = sums.arithmetic / speed(hardware, case.work.compute_bytes) / (1 - one.bubble_share)
    return sums
