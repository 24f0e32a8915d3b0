"""`torch_compile` with a loss over embeddings: chunks of many shapes go through few graphs.

Dynamo makes graphs that take any number of rows and tokens, from the first chunk on. By itself it makes one for the
first shape, others once rows and tokens have differed, and, as accelerate's launcher tells it, one for every shape:
past its limit it then runs uncompiled. Chunks have few shapes all the same (engine/chunks.py): CUDA graphs are
recorded for each of them.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

from hf_dist_ext.training.packing import has_prompt_tokens

# Graphs of one function of the model, which its layers share: without gradients, with them, in evaluation; and each
# of these again for every kind of layer and tower, and for the sizes that inductor writes other kernels for. Dynamo's
# own limit, 8, can be reached by that; what is beyond it runs uncompiled, with a warning alone.
RECOMPILE_LIMIT = 64


def prepare(args: Any, plugin: TorchDynamoPlugin) -> None:
    """Before there is an `Accelerator`: what its plugin compiles with. An accelerate YAML can ask for it too."""
    if plugin.backend == DynamoBackend.NO:
        return
    args.torch_compile = True
    plugin.dynamic = plugin.backend != DynamoBackend.NEURON  # which fails to compile for any shape
    from torch._dynamo import config as dynamo  # takes a second
    from torch.fx.experimental import _config as symbols

    # Else a first chunk with as many tokens as rows, or as the model is wide, makes a graph for such chunks alone.
    symbols.use_duck_shape = False
    dynamo.recompile_limit = max(RECOMPILE_LIMIT, dynamo.recompile_limit)


def has_buckets(args: Any, model: nn.Module) -> bool:
    """Whether chunks have few shapes. Not where tokens of adapters take an unknown part of the model's positions."""
    return args.torch_compile and not has_prompt_tokens(model)
