"""A model cut into the stages of a pipeline: what lies where, and what a chunk leaves on each stage.

Word embeddings are on the first stage; the norm, pooling, projection or head behind the layers on the last one. A
stage keeps of a chunk what autograd saved of its layers, what came in and what it gave, and, under autocast, copies of
its weights: chunks share those of trained weights (strategies/pipeline_passes.py), and have their own of frozen ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import Pipeline
from hf_dist_ext.planner.forward import TEMPORARY_VALUES, TEMPORARY_VALUES_CHECKPOINTED, Forward, Layer
from hf_dist_ext.planner.memory import Model, Settings, Sizes
from hf_dist_ext.planner.workload import Column, Workload


@dataclass(frozen=True)
class Left:
    """On one stage by one row, but for copies of weights in the precision of the computation. Bytes, but for
    multiply-adds."""

    saved: float  # until the row's backward, with what came in and what was given
    casts: float  # copies of weights, which a chunk has for as long
    shared_casts: float  # and those that all chunks of a pass share, unless FSDP2 reduces behind every backward
    working: float  # while one chunk's backward runs
    working_casts: float  # copies of weights, meanwhile
    message: float  # to the next stage; the gradient that comes back has as many
    forward: float
    backward: float


def num_layers(work: Workload) -> int:
    return len(work.forward(work.columns[0]).layers)


def layers_of(work: Workload, pipeline: Pipeline) -> list[int]:
    """Layers per stage, as a run would have them."""
    count = num_layers(work)
    if pipeline.split is not None:
        return [end - first for first, end in zip((0, *pipeline.split), (*pipeline.split, count), strict=True)]
    return policy.layers_of_stages(count, pipeline.places, head_in_layers(work))


def head_in_layers(work: Workload) -> float:
    """Work of a vocabulary's matrix behind the layers; 0 for an embedding model, which has none."""
    if work.is_embedding:
        return 0.0
    matrices = sum(p.elements for p in work.parameters().values() if p.layer is not None and p.is_multiplied)
    return work.config["vocab_size"] * work.config["hidden_size"] * num_layers(work) / matrices


@functools.lru_cache(maxsize=64)
def models_of_stages(work: Workload, pipeline: Pipeline) -> list[Model]:
    """Parameters stage by stage, of one device of several that share layers."""
    layers, counts = work.forward(work.columns[0]).layers, layers_of(work, pipeline)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    stage_of = dict(zip((layer.name for layer in layers), stages, strict=True))
    models, stage = [Model() for _ in counts], 0
    for parameter in work.parameters(pipeline.parts).values():  # in order: before the layers, in them, behind them
        stage = stage_of[parameter.layer] if parameter.layer else stage and len(counts) - 1
        models[stage].whole.add(parameter, work)
        models[stage].units.setdefault(parameter.layer, Sizes()).add(parameter, work)
    return models


@functools.lru_cache(maxsize=256)
def left_on_stages(work: Workload, pipeline: Pipeline, column: Column, settings: Settings) -> list[Left]:
    """Stage by stage, of one row of a column."""
    forward = work.forward(column, "nothing", pipeline.parts)
    firsts = [0, *accumulate(layers_of(work, pipeline))]
    return [
        _left_on(work, forward, forward.layers[first:end], forward.layers[end : end + 1], first == 0, settings)
        for first, end in zip(firsts, firsts[1:], strict=False)
    ]


def _left_on(
    work: Workload,
    whole: Forward,
    layers: Sequence[Layer],
    following: Sequence[Layer],
    is_first: bool,
    settings: Settings,
) -> Left:
    around = [whole.before] * is_first + [whole.after] * (not following)
    parts, again = [*around, *layers], [layer for layer in layers if settings.is_checkpointed and layer.saved]
    largest = max(part.largest for part in parts)
    kept = [part for part in parts if part not in again]
    saved = sum(part.saved for part in kept) + sum(layer.input for layer in again)
    saved += max(layer.beside for layer in whole.layers) if again else 0.0
    working, working_casts = TEMPORARY_VALUES * largest, 0.0
    casts = sum(part.casts for part in kept)
    own_casts = casts if again else sum(part.frozen_casts for part in kept)
    if again:
        widest = max(layer.saved - layer.input * layer.keeps_input for layer in again)
        working = widest + TEMPORARY_VALUES_CHECKPOINTED * largest
        working_casts = max(layer.casts for layer in again)
    message = following[0].input if following else 0.0
    given = message or 4.0 * work.embedding_dim
    came_in = 0.0 if is_first or layers[0].keeps_input or layers[0] in again else layers[0].input
    passes = 2 + bool(again)  # without a graph, with one, and once more
    forward, backward = sum(part.products for part in parts), sum(part.backward for part in parts)
    return Left(
        saved + given + came_in,
        own_casts,
        casts - own_casts,
        working,
        working_casts,
        message,
        passes * forward,
        backward,
    )
