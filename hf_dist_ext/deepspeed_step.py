"""What differs in a step under DeepSpeed: which backward is the last one, and who may take part.

(1) accelerate's wrapper runs the optimizer inside the backward of an accumulation boundary, so every chunk's backward
    but the one that completes the step is marked as none; the division by accumulation is ours, DeepSpeed's is off
(2) ZeRO-1 reduces at the boundary; ZeRO-2 and 3 scatter every chunk's gradients as they come, none stay whole
(3) what can not be exact or can not be reached is refused

DeepSpeed keeps float32 master weights and averages over ranks, as DDP does: no factor of ours enters.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from .errors import UsageError

if TYPE_CHECKING:
    from .trainer import DistTrainer

FLOOR = (0, 19, 1)  # below, ZeRO-1/2 with offloading dropped the gradients of all backwards but the last


def backward(trainer: DistTrainer, loss: torch.Tensor, completes: bool) -> None:
    """(1): `completes` runs the reduction and the optimizer's step."""
    engine = trainer.accelerator.deepspeed_engine_wrapped
    engine.backward(loss, sync_gradients=completes, scale_wrt_gas=False)


def is_zero3(trainer: DistTrainer) -> bool:
    """Weights are gathered when a layer runs: forwards are collectives."""
    return trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3


def check(trainer: DistTrainer) -> None:
    """Raises UsageError for what does not work under DeepSpeed."""
    check_version(version("deepspeed"))
    if trainer._loss_parameters():
        raise UsageError(
            "learnable_temperature does not work under DeepSpeed, whose optimizer owns the model's parameters only. "
            "Use a fixed temperature, or multi_gpu_ddp or multi_gpu_fsdp."
        )
    if trainer._budget is not None:
        raise UsageError(
            'an automatic chunk size or number of graphs ("auto") is not measured under DeepSpeed. Give '
            "gradient_cache_chunk_size or gradient_cache_chunk_tokens, and gradient_cache_keep_graph, as numbers."
        )


def check_chunks(trainer: DistTrainer, num_kept: int, num_chunks: int, num_tables: int) -> None:
    """ZeRO-3 counts one backward per forward: with two graphs alive at once its gradients are wrong, in silence."""
    if is_zero3(trainer) and num_chunks > 1 and (num_kept or num_tables > 1):
        raise UsageError(
            "DeepSpeed ZeRO-3 needs every forward to be followed by its backward, and this step keeps several graphs: "
            "use a gradient cache (gradient_cache_chunk_size) with gradient_cache_keep_graph 0 and one tower for all "
            "columns, or ZeRO-2, or multi_gpu_fsdp."
        )


def check_version(found: str) -> None:
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split("+")[0].split(".")[:3])
    if numbers < FLOOR:
        raise UsageError(
            f"DeepSpeed {found} is older than {'.'.join(map(str, FLOOR))}, which a step of several backwards needs "
            "(older ones lose gradients). Run: pip install -e '.[deepspeed]'"
        )
