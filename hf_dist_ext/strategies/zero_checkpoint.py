"""How DeepSpeed's engine reads its part of a checkpoint, the folder `global_stepN` beside the model's own files.

The files are pickles that DeepSpeed reads with `weights_only=False`: here it is True, with a list of the classes that
they are made of. `trust_checkpoint` switches that off.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hf_dist_ext.errors import UsageError

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def attach(engine: Any, is_part: bool, trusts: bool, around: Callable[[], AbstractContextManager]) -> None:
    """Once the engine is made: it reads as this file says, whoever asks it to. `is_part`: frozen weights were left
    out; `around`: what it reads inside of."""
    if "load_checkpoint" in vars(engine):
        return
    load = engine.load_checkpoint

    def load_checkpoint(folder: str, *arguments: Any, **options: Any) -> Any:
        if is_part:
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

    def stage(kind: Any, name: str) -> Any:
        """What `getattr` may do: Python 3.11.0 to 3.11.3 write an enum's member as `getattr(its class, its name)`."""
        if kind is not ZeroStageEnum or name not in kind.__members__:
            raise pickle.UnpicklingError(f"GLOBAL getattr would read {name} of {kind!r}.")
        return kind[name]

    classes = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, fragment_address]
    return [*classes, (stage, "builtins.getattr")]
