"""What makes a run slower than it has to be, by the figures that it logs, and which field changes it.

`why_slow` reads the means of logged figures over an hour; the console prints its sentences as one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WAITS = 0.15  # of the time, for data
PADDED = 0.3  # of the computed tokens
HALF_SPEED_TOKENS = 512  # a chunk of so few leaves half of a GPU idle, as the plan counts
IS_FREE = 0.5  # of a device's memory
SMALL = 0.25  # of a device's memory: what a whole model takes with gradients and AdamW's state
REDUCES = 0.5  # of the time
EFFICIENT = 0.8
BYTES_OF_ADAMW = 16  # a parameter in float32, its gradient and two moments


@dataclass(frozen=True)
class Facts:
    """Of a run. `device_bytes`: memory of one accelerator, 0 for a CPU."""

    workers: int
    processes: int
    device_bytes: int
    is_sharded: bool
    trained_parameters: int
    frozen_bytes: int


def why_slow(figures: Mapping[str, float], facts: Facts) -> list[str]:
    """Sentences for what the means of the logged `figures` show; none where nothing stands out."""
    said = []
    total = sum(value for name, value in figures.items() if name.startswith("seconds_"))
    if total and (share := figures.get("seconds_data", 0.0) / total) > WAITS:
        said.append(f"waited for data in {share:.0%} of the time: raise dataloader_num_workers (now {facts.workers})")
    if facts.processes > 1 and total and (share := _reduction(figures) / total) > REDUCES:
        said.append(
            f"reducing gradients took {share:.0%} of the time: a larger per_device_train_batch_size makes steps "
            "longer and rarer; ddp_comm_hook (DDP) or reduce_dtype (FSDP) sends half"
        )
    if (efficiency := figures.get("scaling_efficiency", 1.0)) < EFFICIENT:
        said.append(
            f"scaling efficiency is {efficiency:.0%}: raise per_device_train_batch_size, and between machines use "
            '"sharding": "HYBRID_SHARD" where FSDP runs'
        )
    whole = BYTES_OF_ADAMW * facts.trained_parameters + facts.frozen_bytes
    if facts.is_sharded and whole < SMALL * facts.device_bytes:
        said.append(
            f"FSDP gathers a model that takes {whole / 2**30:.1f} GiB of the {facts.device_bytes / 2**30:.0f} GiB of "
            'a device with gradients and AdamW: "accelerate_config": "ddp" sends less'
        )
    tokens = figures.get("tokens_per_chunk", HALF_SPEED_TOKENS)
    is_small = tokens < HALF_SPEED_TOKENS and figures.get("num_chunks", 1) > 2
    if is_small and figures.get("memory_share", 1.0) < IS_FREE:
        said.append(
            f"chunks of {tokens:.0f} tokens leave the device idle, and {1 - figures['memory_share']:.0%} of its "
            'memory is free: raise gradient_cache_chunk_size, or "auto"'
        )
    if (share := figures.get("padding_share", 0.0)) > PADDED:
        said.append(
            f"{share:.0%} of the computed tokens were padding: gradient_cache_packing, gradient_cache_chunk_tokens or "
            "a lower max_length compute fewer"
        )
    return said


def _reduction(figures: Mapping[str, float]) -> float:
    """Seconds by which a step's last chunk took longer than the others, as it waits for the reduction."""
    others = figures.get("num_chunks", 1.0) - 1
    last = figures.get("seconds_last_backward", 0.0)
    return max(0.0, last - figures.get("seconds_replay", 0.0) / others) if others > 0 else 0.0
