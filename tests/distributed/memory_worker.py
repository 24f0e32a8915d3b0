"""Two DDP runs beside each other: one in which rank 1 runs out of memory in three later steps, and one in which not.

accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml tests/distributed/memory_worker.py --output f
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from hf_dist_ext.distributed import rank
from tests.test_out_of_memory import losses, weights
from tests.test_trainer import trainer


def compare(output: Path) -> None:
    options = dict(gradient_cache_chunk_size=8, num_rows=128, max_steps=6, gradient_accumulation_steps=2)
    whole = trainer(output.parent / "whole", learning_rate=0.01, **options)
    start = weights(whole)
    whole.train()
    short = trainer(output.parent / "short", learning_rate=0.01, **options)
    encode, passes = short._encode, {(2, False): 4, (3, True): 2, (4, False): 1}  # step, with a graph -> what fits

    def encoding(model, chunk, **more):
        at = short.state.global_step, torch.is_grad_enabled()
        if rank() == 1 and chunk.num_rows > passes.get(at, 8):
            raise torch.OutOfMemoryError("not enough memory")
        return encode(model, chunk, **more)

    short._encode = encoding
    short.train()
    found = {
        "moved": (weights(whole) - start).abs().max().item(),
        "difference": (weights(whole) - weights(short)).abs().max().item(),
        "losses": [losses(whole), losses(short)],
        "share": short._retry.share,
        "skipped": short.guard.total,
    }
    if rank() == 0:
        output.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    compare(Path(parser.parse_args().output))  # its trainers are gone before the group is
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
