"""Which strategy runs: the only file that names a particular one, and the place where a new one is added to a list.

A model that is split already says so itself, before there is an `Accelerator`; else the accelerator says in what it
will wrap the model. A loss over embeddings counts every process's rows once, so ranks that hold the same rows would
each weigh in, without an error: what makes ranks share rows is refused where it was not made exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import (
    collectives,
    ddp,
    fsdp_options,
    splitting,
)
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.fsdp import FSDP
from hf_dist_ext.strategies.pipeline import options as pipeline_options
from hf_dist_ext.strategies.pipeline import strategy as pipeline
from hf_dist_ext.strategies.pipeline.strategy import Pipeline
from hf_dist_ext.strategies.tensor_parallel import TensorParallel
from hf_dist_ext.strategies.zero import ZeRO

OF_AN_ACCELERATOR: tuple[type[Strategy], ...] = (ZeRO, FSDP, ddp.DDP, Strategy)  # the first one that runs
SHARE_ROWS = {"cp": "context", "sp": "sequence"}

# ---- the strategy ----


def of_model(model: Any, args: Any) -> Strategy:
    """Before an `Accelerator` exists, under a loss over embeddings. `model` None: `model_init` will make one.

    Raises:
        UsageError: what an accelerate YAML or `parallelism_config` splits beside rows is not exact.
    """
    if shared := _sizes(args, SHARE_ROWS):
        name, size = next(iter(shared.items()))
        raise UsageError(
            f"{name}_size={size} in the parallelism_config: with {SHARE_ROWS[name]} parallelism {size} processes hold "
            "the same rows, and a loss over embeddings counts the rows of each. Use multi_gpu_fsdp or multi_gpu_hsdp."
        )
    if pipeline_options.size(args) > 1:
        return Pipeline(model, args)
    size = _sizes(args, ("tp",)).get("tp", 1)
    if model is None:
        return TensorParallel(None) if launched.mesh_size("tp") > 1 else Strategy()
    split = splitting.find_split(model)
    if split is not None:
        splitting.check_layout(model, split, size)
        splitting.check_rest(model, args)
        return TensorParallel(model)
    if size > 1:
        raise UsageError(
            f"tp_size={size} in the parallelism_config, but {type(model).__name__} is whole on every process. "
            'Load it with SentenceTransformer(..., model_kwargs={"distributed_config": DistributedConfig(tp_size='
            f"{size}, fsdp_size=processes // {size})}}), or use multi_gpu_fsdp."
        )
    return Strategy()


def launched_split(args: Any) -> Any:
    """How a model shall be split while it is loaded, as the launcher says: a DistributedConfig of transformers. None
    in a pipeline, which splits the layers of its own stages (`in_stages`)."""
    return None if pipeline_options.size(args) > 1 else splitting.launched_config()


def in_stages(args: Any) -> Callable[[type], type] | None:
    """How a process reads its part of a pipeline's model: a class of backbones -> one that does. None: there is no
    pipeline."""
    return pipeline.in_stages(args)


def of_accelerator(accelerator: Any, before: Strategy) -> Strategy:
    """The one that runs; `before` is what the model said, and all there is while `accelerator` is None."""
    if accelerator is None:
        return before
    runs = next(kind for kind in OF_AN_ACCELERATOR if kind.runs(accelerator))
    strategy = before if before.comes_with_model else runs()
    strategy.accelerator = accelerator
    return strategy


def _sizes(args: Any, names: Iterable[str]) -> dict[str, int]:
    """Of the dimensions of a mesh of processes, those above 1."""
    config = getattr(args, "parallelism_config", None)
    sizes = {name: launched.mesh_size(name) if config is None else getattr(config, f"{name}_size") for name in names}
    return {name: size for name, size in sizes.items() if size > 1}


# ---- the way to an Accelerator ----


def check_arguments(args: Any) -> None:
    """Rules between the fields of the strategies. Raises UsageError."""
    fsdp_options.check(args)
    ddp.check(args)
    pipeline_options.check(args)


@contextlib.contextmanager
def building(args: Any, before: Strategy) -> Iterator[None]:
    """Around the making of an `Accelerator`."""
    with fsdp_options.without_fsdp(args), collectives.sharded_on_cpu(has_mesh=before.comes_with_model):
        yield


def plugins(args: Any, fsdp_plugin: Any) -> dict[str, Any]:
    """Arguments for `Accelerator` that the fields of the strategies ask for."""
    if pipeline_options.size(args) > 1:
        return pipeline_options.options(args)
    return fsdp_options.options(args, fsdp_plugin)


def set_handlers(args: Any, handlers: list[Any], has_loss: bool) -> None:
    """Put the fields into what Trainer made for an `Accelerator`."""
    if hasattr(args, "ddp_comm_hook"):
        ddp.options(args, handlers, has_loss)
