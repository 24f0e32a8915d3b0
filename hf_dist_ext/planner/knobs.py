"""The scale knobs of a run file as the planner reads them: what FSDP shards, where, how gradients travel, pipelines.

They are the fields of strategies/fsdp_options.py, ddp.py and pipeline.py, which check their rules at launch. A hook of
DDP keeps beside the gradients what it sends: fp16 and bf16 a copy of half the size, PowerSGD two factors of each large
matrix and what they left out, top_k and random_k some elements and the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.forward import Parameter

# As strategies/pipeline_options.py refuses them.
NOT_IN_PIPELINES = (
    "fp16", "torch_compile", "gradient_cache_keep_graph", "frozen_feature_cache", "save_async", "ddp_comm_hook",
    "reduce_dtype", "cpu_offload", "min_num_params", "bf16_full_eval", "fp16_full_eval", "neftune_noise_alpha",
    "use_liger_kernel",
)  # fmt: skip
_OF_FSDP = ("sharding", "sharding_group_size", "cpu_offload", "min_num_params", "reduce_dtype")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SPARSE = ("top_k", "random_k")
_MODES = {"FULL_SHARD": "memory", "SHARD_GRAD_OP": "speed"}


@dataclass(frozen=True)
class Knobs:
    """None: the preset's own."""

    sharding: str | None = None
    sharding_group_size: int | None = None
    cpu_offload: bool | None = None
    min_num_params: int | None = None
    reduce_dtype: str | None = None
    hook: str | None = None
    hook_rank: int = 1
    hook_ratio: float = policy.SENT_SHARE
    pipeline_size: int = 1
    pipeline_schedule: str = policy.PIPELINE_SCHEDULE
    stages_per_rank: int = 1
    pipeline_split: tuple[int, ...] | None = None
    no_pipeline: str = ""  # a field that does not go with pipelines

    @property
    def of_fsdp(self) -> list[str]:
        """Names of those given that mean nothing without FSDP."""
        given = [name for name in _OF_FSDP if getattr(self, name) is not None]
        return [name for name in given if not (name == "sharding" and self.sharding == "NO_SHARD")]

    @property
    def fsdp_mode(self) -> str | None:
        """What `sharding` says about weights between the chunks of a step: gradient_cache_fsdp."""
        return _MODES.get(self.sharding or "")

    @property
    def reduce_bytes(self) -> int | None:
        return _BYTES.get(self.reduce_dtype or "")


def knobs_of(given: Mapping[str, Any]) -> Knobs:
    of_fsdp = {name: given.get(name) for name in _OF_FSDP}
    rank, ratio = given.get("ddp_power_sgd_rank") or 1, given.get("ddp_compression_ratio") or policy.SENT_SHARE
    return Knobs(**of_fsdp, hook=given.get("ddp_comm_hook"), hook_rank=rank, hook_ratio=ratio, **_of_pipelines(given))


def _of_pipelines(given: Mapping[str, Any]) -> dict[str, Any]:
    schedule, split = given.get("pipeline_schedule") or policy.PIPELINE_SCHEDULE, given.get("pipeline_split")
    return {
        "pipeline_size": given.get("pipeline_parallel_size") or 1,
        "pipeline_schedule": schedule,
        "stages_per_rank": policy.stages_per_rank(schedule, given.get("pipeline_stages_per_rank")),
        "pipeline_split": None if split is None else tuple(split),
        "no_pipeline": next((name for name in NOT_IN_PIPELINES if given.get(name) not in (None, False, 0)), ""),
    }


def sent_by_hook(knobs: Knobs, parameters: Iterable[Parameter]) -> float:
    """Bytes of the trained parameters' gradients that a process hands to DDP's collective: a reduction, or with top_k
    a gather of what all processes hand over."""
    hook, trained = knobs.hook, [one for one in parameters if one.trains]
    if hook in ("fp16", "bf16"):
        return sum(2 * one.elements for one in trained)
    if hook is None:
        return sum(one.elements * one.item for one in trained)
    if hook in SPARSE:
        place = 4 if hook == "top_k" else 0
        return sum(math.ceil(knobs.hook_ratio * one.elements) * (one.item + place) for one in trained)
    return sum(_factors(one, knobs.hook_rank) * one.item for one in trained)


def kept_by_hook(knobs: Knobs, parameters: Iterable[Parameter], world: int) -> float:
    """Bytes beside DDP's buckets: what is sent, and gathered, and what a lossy hook has left out."""
    parameters = list(parameters)
    if knobs.hook is None:
        return 0.0
    errors = 0.0 if knobs.hook in ("fp16", "bf16") else sent_by_hook(replace(knobs, hook=None), parameters)
    return errors + sent_by_hook(knobs, parameters) * (1 + world * (knobs.hook == "top_k"))


def _factors(parameter: Parameter, rank: int) -> float:
    """Elements that PowerSGD sends: a matrix is sent whole where its factors are not half as large."""
    if not parameter.columns:
        return parameter.elements
    rows = parameter.elements / parameter.columns
    factors = (rows + parameter.columns) * min(rank, rows, parameter.columns)
    return factors if 2 * factors < parameter.elements else parameter.elements
