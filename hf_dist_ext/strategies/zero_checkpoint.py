"""What DeepSpeed's engine writes and reads of a checkpoint: the folder `global_stepN`, beside the model's own files.

(1) its files are pickles that DeepSpeed reads with `weights_only=False`: here True, and a list of the classes that
    they are made of. `trust_checkpoint` switches that off
(2) a run with frozen parts leaves the frozen weights out; what trains stands in `trainable.safetensors` too, as in
    every mode
(3) ZeRO's parts are those of one number of processes: on another one only the weights can be taken
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hf_dist_ext.errors import UsageError

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

# ---- (1) ----


def attach(engine: Any, is_part: bool, trusts: bool, around: Callable[[], AbstractContextManager]) -> None:
    """Once the engine is made: it reads as this file says, whoever asks it to. `is_part`: frozen weights were left
    out; `around`: what it reads inside of."""
    if "load_checkpoint" in vars(engine):
        return
    load = engine.load_checkpoint

    def load_checkpoint(folder: str, *arguments: Any, **options: Any) -> Any:
        if is_part:  # (2)
            options["load_module_strict"] = False
        with around(), reading(trusts, folder):
            return load(folder, *arguments, **options)

    engine.load_checkpoint = load_checkpoint


@contextlib.contextmanager
def reading(trust: bool, folder: str) -> Iterator[None]:
    """While inside, torch reads pickles of the classes below only; UsageError names what another one would run."""
    if trust:
        yield
        return
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_classes()):
            yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise UsageError(
            f"{folder} holds more than DeepSpeed's state: {reason.strip()} If you made it yourself, set "
            "trust_checkpoint=true."
        ) from error
    finally:
        os.environ.pop(FORCE)
        if before is not None:
            os.environ[FORCE] = before


def _classes() -> list[Any]:
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, fragment_address]


# ---- (2) ----


def save(engine: Any, folder: Path) -> None:
    """The engine's own state of a run with frozen parts; every rank calls it."""
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)


# ---- (3) ----


def check_processes(folder: Path, content: Mapping[str, Any], world_size: int) -> None:
    before = content.get("world_size", world_size)
    if before != world_size:
        raise UsageError(
            f"{folder} is of {before} processes, this run of {world_size}: ZeRO's parts fit the number "
            "they were made for. resume_weights_only=true takes the weights."
        )
    if content.get("sharding", "deepspeed") != "deepspeed" or not list(folder.glob("global_step*")):
        raise UsageError(
            f"{folder} was not written under DeepSpeed, which can not continue it. resume_weights_only=true takes its "
            "weights."
        )
