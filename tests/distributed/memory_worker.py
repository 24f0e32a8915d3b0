r"""Two runs beside each other: one in which rank 1 runs out of memory in later steps, and one in which not; inside of
a layer, forward and backward. Under FSDP its neighbours are gathered one by one.

    accelerate launch --config_file configs/accelerate/multi_gpu_fsdp.yaml tests/distributed/memory_worker.py \
        --output found.json

With `--mode memory` (FSDP gathers per chunk) the run that runs out can not go on and ends; with `--resume` as well, it
goes on from its checkpoint with the chunks that the error named.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_dist_ext.distributed import rank
from hf_dist_ext.errors import RunError
from tests.launching import leave_together
from tests.test_out_of_memory import losses, weights
from tests.test_trainer import Tiny, trainer


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


def model() -> nn.Module:
    torch.manual_seed(1)
    return Tiny(nn.Sequential(*[Layer() for _ in range(4)]))


class ShortOfMemory:
    """A layer of rank 1 that holds no more rows than `fits` says, by step and whether a graph is made; `backward` at
    the first backward of this step."""

    def __init__(self, of, fits: dict[tuple[int, bool], int], backward: int | None = None):
        self.of, self.fits, self.backward = of, fits, backward

    def __call__(self, layer, inputs, output):
        step = self.of.state.global_step
        if rank() == 1 and len(output) > self.fits.get((step, torch.is_grad_enabled()), 8):
            raise torch.OutOfMemoryError("not enough memory")
        if rank() == 1 and step == self.backward and output.requires_grad:
            self.backward = None
            output.register_hook(self.fail)

    def fail(self, gradient):
        raise torch.OutOfMemoryError("not enough memory for a gradient")


def compare(output: Path) -> None:
    options = dict(num_rows=128, max_steps=6, gradient_accumulation_steps=2, learning_rate=0.01)
    whole = trainer(output.parent / "whole", model(), gradient_cache_chunk_size=8, **options)
    start = weights(whole)
    whole.train()
    short = trainer(output.parent / "short", model(), gradient_cache_chunk_size=8, **options)
    hook = ShortOfMemory(short, {(2, False): 2, (3, True): 1}, backward=1)
    short.model.middle[1].register_forward_hook(hook)
    short.train()
    found = {
        "moved": (weights(whole) - start).abs().max().item(),
        "difference": (weights(whole) - weights(short)).abs().max().item(),
        "losses": [losses(whole), losses(short)],
        "share": short._retry.share,
        "skipped": short.guard.total,
        "units": sum(isinstance(module, FSDPModule) for module in short.model.modules()),
    }
    if rank() == 0:
        output.write_text(json.dumps(found))


def end(output: Path, resume: bool) -> None:
    """A run that ends in step 3, or one that goes on from there and is compared."""
    options = dict(num_rows=128, max_steps=6, learning_rate=0.01, gradient_cache_fsdp="memory")
    saving = dict(save_strategy="steps", save_steps=1)
    if not resume:
        short = trainer(output.parent / "short", model(), gradient_cache_chunk_size=8, **options, **saving)
        short.model.middle[1].register_forward_hook(ShortOfMemory(short, {(2, False): 4}))
        try:
            short.train()
        except RunError as error:
            print(f"error: {error}", flush=True)
            os._exit(1)  # as a script would; this process does not wait for the other
    whole = trainer(output.parent / "whole", model(), gradient_cache_chunk_size=8, **options)
    whole.train()
    short = trainer(output.parent / "short", model(), gradient_cache_chunk_size=4, **options)
    short.train(resume_from_checkpoint=True)
    found = {"difference": (weights(whole) - weights(short)).abs().max().item(), "step": short.state.global_step}
    if rank() == 0:
        output.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--mode", choices=["speed", "memory"], default="speed")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    compare(options.output) if options.mode == "speed" else end(options.output, options.resume)


if __name__ == "__main__":
    main()
    leave_together()
