"""Refuses parallelism whose processes share rows, tensor parallelism first, where a loss over embeddings is trained.

(1) sizes: what an accelerate YAML or `parallelism_config` splits beside rows
(2) a model that transformers has split while loading it (`DistributedConfig`), on its own or inside another one

Such a loss counts every process's rows once, so ranks that hold the same rows would each weigh in, without an error.
What stands in the way of doing it right is upstream, measured in docs/choosing-a-strategy.md ("Tensor parallelism");
tests/distributed/test_upstream.py tells when it is gone.
"""

from __future__ import annotations

import os
from typing import Any

from .errors import UsageError

KINDS = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def check(model: Any, args: Any) -> None:
    """Before an `Accelerator` exists. Raises UsageError."""
    if shared := _sizes(args):  # (1)
        name, size = next(iter(shared.items()))
        raise UsageError(
            f"{name}_size={size} in the parallelism_config: with {KINDS[name]} parallelism {size} processes hold the "
            "same rows, and a loss over embeddings counts the rows of each. Use multi_gpu_fsdp or multi_gpu_hsdp; "
            'docs/choosing-a-strategy.md, "Tensor parallelism", says why.'
        )
    if (found := _split_at_load(model)) is not None:  # (2)
        raise UsageError(
            f"{type(found).__name__} was split while it was loaded (distributed_config). Trainer cannot resume such a "
            "model, and gradients over several chunks go wrong in some, so a loss over embeddings is not trained with "
            "it. Load it without distributed_config and use multi_gpu_fsdp or multi_gpu_hsdp; "
            'docs/choosing-a-strategy.md, "Tensor parallelism", has the figures.'
        )


def _sizes(args: Any) -> dict[str, int]:
    config = getattr(args, "parallelism_config", None)
    if config is not None:
        found = {name: getattr(config, f"{name}_size") for name in KINDS}
    elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        found = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in KINDS}
    else:
        found = {}
    return {name: size for name, size in found.items() if size > 1}


def _split_at_load(model: Any) -> Any:
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((m for m in modules if getattr(m, "is_distributed_loading_by_transformers", False)), None)
