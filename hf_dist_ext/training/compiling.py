"""`torch_compile` with a loss over embeddings: chunks of many shapes go through few graphs.

Dynamo makes graphs that take any number of rows and tokens, from the first chunk on. By itself it makes one for the
first shape, others once rows and tokens have differed, and, as accelerate's launcher tells it, one for every shape:
past its limit it then runs uncompiled.

liger-kernel's fused kernels are the other way to fewer launches, also of packed chunks (`fused_kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from transformers import PreTrainedModel, trainer
from transformers.utils import logging

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.packing import leave_uncompiled
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy, meanwhile

logger = logging.get_logger(__name__)

# Graphs of one function of the model, which its layers share: without gradients, with them, in evaluation; and each
# of these again for every kind of layer and tower, and for the sizes that inductor writes other kernels for. Dynamo's
# own limit, 8, can be reached by that; what is beyond it runs uncompiled, with a warning alone.
RECOMPILE_LIMIT = 64


def prepare(args: Any, plugin: TorchDynamoPlugin) -> None:
    """Before there is an `Accelerator`: what its plugin compiles with. An accelerate YAML can ask for it too."""
    if plugin.backend == DynamoBackend.NO:
        return
    args.torch_compile = True
    leave_uncompiled()
    plugin.dynamic = plugin.backend != DynamoBackend.NEURON  # which fails to compile for any shape
    from torch._dynamo import config as dynamo  # takes a second
    from torch.fx.experimental import _config as symbols

    # Else a first chunk with as many tokens as rows, or as the model is wide, makes a graph for such chunks alone.
    symbols.use_duck_shape = False
    dynamo.recompile_limit = max(RECOMPILE_LIMIT, dynamo.recompile_limit)
    if multiplies_in_tf32():
        # Trainer has said so to torch's newer switch alone. inductor asks the older one where it compares kernels
        # ("max-autotune"), and torch 2.13 then raises an error.
        torch.set_float32_matmul_precision("high")


def check(plugin: TorchDynamoPlugin) -> None:
    """Raises UsageError where CUDA graphs are asked for: each is for chunks of one shape, and a replay writes over the
    embeddings and gradients of the chunk before."""
    backend, is_on = plugin.backend.value.lower(), plugin.backend != DynamoBackend.NO
    by_mode = plugin.mode in ("reduce-overhead", "max-autotune")
    if is_on and (by_mode or backend == "cudagraphs"):
        asked = f'torch_compile_mode="{plugin.mode}"' if by_mode else f'torch_compile_backend="{backend}"'
        raise UsageError(
            f"{asked} replays CUDA graphs, each of which is for one shape, and chunks of a loss over embeddings have "
            'many. Use torch_compile_backend "inductor" with torch_compile_mode "default" or '
            '"max-autotune-no-cudagraphs".'
        )


def multiplies_in_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextmanager
def scores_in_float32(args: Any) -> Iterator[None]:
    """Around a loss. Where Trainer compiles it turns TF32 on for an NVIDIA GPU (transformers 5.23, TrainingArguments),
    which is meant for the model: scores would have ten bits, and a small temperature multiplies what they lack.
    Not where the run file sets `tf32` itself."""
    if not args.torch_compile or args.tf32 is not None or not multiplies_in_tf32():
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("high")


def announce(args: Any, strategy: Strategy, packs: bool) -> None:
    """On rank 0 one line before the first steps, which compile for minutes in silence. `packs`: chunks may be packed,
    whose pooling, and often attention, is in no graph."""
    if not args.torch_compile or collectives.rank() != 0:
        return
    graphs = "1 graph" if not args.uses_gradient_cache else "2 graphs (without gradients, and with them)"
    has_parts = strategy.forwards_are_collective or packs
    parts = " for each of its parts, of which layers that are alike are one" if has_parts else ""
    text = f"torch_compile: the first steps compile, which may take minutes. Expected are {graphs}{parts}, "
    text += "for chunks of any shape, and a few more where sizes need other kernels."
    logger.warning(text)


@contextmanager
def fused_kernels(has_loss: bool) -> Iterator[None]:
    """Around Trainer's `train`, for `use_liger_kernel`: with a loss over embeddings the kernels go into the models of
    transformers inside of the one that trains, where Trainer leaves a SentenceTransformer without. None of them is a
    language model's loss: liger would replace the backbone's forward by that of a model with a head."""
    theirs = trainer.apply_liger_kernel

    def apply(model: nn.Module, config: dict[str, Any] | None) -> None:
        inner: list[nn.Module] = []
        for module in model.modules():  # outer ones come first
            if isinstance(module, PreTrainedModel) and not any(module in one.modules() for one in inner):
                inner.append(module)
        for one in inner or [model]:
            theirs(one, {**(config or {}), "cross_entropy": False, "fused_linear_cross_entropy": False})

    with meanwhile(trainer, apply_liger_kernel=apply if has_loss else theirs):
        yield
