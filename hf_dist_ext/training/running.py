"""What the parts of a trainer ask of it: of all that `DistTrainer` has, no more than this.

A part is made once, and these attributes change: `model_init` and a search make another model, accelerator and
strategy. So a part keeps the trainer as a `Running` and reads what it needs when it needs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from hf_dist_ext.checkpoints.keeper import Keeper
from hf_dist_ext.data.position import DataPosition


class Running(Protocol):
    """`options` holds our fields, with their defaults where the arguments are transformers' own (`has_own_arguments`
    is false then). `stage`: the name of the run's stage, None outside of stages."""

    args: Any
    loss: Any
    model_wrapped: Any
    strategy: Any
    data_position: DataPosition
    keeper: Keeper
    processing_class: Any
    state: Any
    step: Any
    clock: Any
    meter: Any
    stage: str | None

    @property
    def options(self) -> Any: ...

    @property
    def has_own_arguments(self) -> bool: ...

    @property
    def bare_model(self) -> nn.Module: ...

    def progress(self) -> tuple[int, int]: ...

    def rows_of_micro_batch(self) -> tuple[int, int]: ...

    def log(self, logs: dict[str, float]) -> None: ...

    def precision(self) -> AbstractContextManager: ...

    def _prepare_inputs(self, inputs: Any) -> Any: ...
