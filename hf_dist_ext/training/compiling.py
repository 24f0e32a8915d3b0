"""`torch_compile` with a loss over embeddings: chunks of many shapes go through few graphs.

Dynamo makes graphs that take any number of rows and tokens, from the first chunk on. By itself it makes one for the
first shape, others once rows and tokens have differed, and, as accelerate's launcher tells it, one for every shape:
past its limit it then runs uncompiled. Chunks have few shapes all the same (engine/chunks.py): CUDA graphs are
recorded for each of them.

A CUDA graph writes its results into the same memory at every replay. Embeddings are copied from there (step.py), and
so are the gradients to which those of later chunks are added (`own_gradients`).

liger-kernel's fused kernels are the other way to fewer launches, also of packed chunks (`fused_kernels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from transformers import PreTrainedModel, trainer
from transformers.utils import logging

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.packing import leave_uncompiled
from hf_dist_ext.policy import records_cuda_graphs, width_in_buckets
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy, meanwhile
from hf_dist_ext.training.packing import has_prompt_tokens

logger = logging.get_logger(__name__)

# Graphs of one function of the model, which its layers share: without gradients, with them, in evaluation; and each
# of these again for every kind of layer and tower, and for the sizes that inductor writes other kernels for. Dynamo's
# own limit, 8, can be reached by that; what is beyond it runs uncompiled, with a warning alone.
RECOMPILE_LIMIT = 64


def prepare(args: Any, plugin: TorchDynamoPlugin) -> None:
    """Before there is an `Accelerator`: what its plugin compiles with. An accelerate YAML can ask for it too."""
    if plugin.backend == DynamoBackend.NO:
        return
    args.torch_compile, args.torch_compile_mode = True, plugin.mode
    args.torch_compile_backend = plugin.backend.value.lower()
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


def check(plugin: TorchDynamoPlugin, strategy: Strategy) -> None:
    """UsageError where gradients of several chunks would be added up in the memory of a CUDA graph."""
    backend, is_on = plugin.backend.value.lower(), plugin.backend != DynamoBackend.NO
    if is_on and records_cuda_graphs(plugin.mode, backend) and not strategy.adds_up_in_grad:
        by_mode = records_cuda_graphs(plugin.mode, None)
        asked = f'torch_compile_mode="{plugin.mode}"' if by_mode else f'torch_compile_backend="{backend}"'
        raise UsageError(
            f"{asked} replays CUDA graphs, and FSDP and DeepSpeed keep the gradients of a step's first chunk where "
            'the replay for the next chunk writes over them. Use torch_compile_backend "inductor" with '
            'torch_compile_mode "default" or "max-autotune-no-cudagraphs", or one process or multi_gpu_ddp.'
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


@contextmanager
def own_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Around a backward to whose gradients later ones are added.

    The first gradient of a parameter is the very tensor that the backward returned. Where that was a CUDA graph, the
    next replay writes over it (torch 2.13, torch/_inductor/cudagraph_trees.py, `format_dealloc_msg`). Remove when
    inductor returns tensors of their own.
    """
    first = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    yield
    for parameter in first:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def has_buckets(args: Any, model: nn.Module) -> bool:
    """Whether chunks have few shapes. Not where tokens of adapters take an unknown part of the model's positions."""
    return args.torch_compile and not has_prompt_tokens(model)


def announce(args: Any, strategy: Strategy, model: nn.Module, packs: bool) -> None:
    """On rank 0 one line before the first steps, which compile for minutes in silence. `model`: without wrappers.
    `packs`: its chunks may be packed, whose pooling, and often attention, is in no graph."""
    if not args.torch_compile or collectives.rank() != 0:
        return
    graphs = "1 graph" if not args.uses_gradient_cache else "2 graphs (without gradients, and with them)"
    has_parts = strategy.forwards_are_collective or packs
    parts = " for each of its parts, of which layers that are alike are one" if has_parts else ""
    text = f"torch_compile: the first steps compile, which may take minutes. Expected are {graphs}{parts}, "
    text += "for chunks of any shape, and a few more where sizes need other kernels."
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if records_cuda_graphs(args.torch_compile_mode, None) and has_buckets(args, model) and longest:
        widths = {width_in_buckets(tokens, args.gradient_cache_width_multiple) for tokens in range(1, longest + 1)}
        text += f" CUDA graphs are recorded for each shape of a chunk, which has one of {len(widths)} widths."
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
