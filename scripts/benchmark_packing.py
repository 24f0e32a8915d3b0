"""A cached step with packed chunks beside the same step with padded ones, over models and lengths of rows.

    OMP_NUM_THREADS=1 python scripts/benchmark_packing.py                      # CPU: some minutes
    python scripts/benchmark_packing.py --device cuda --attention flash_attention_2 --pairs 4096 --chunk_tokens 65536

Both steps have the same weights, rows, loss and limit of tokens per chunk, and take turns; a ratio is the median of
the ratios within a turn. The share of padding, by which `gradient_cache_packing="auto"` decides, is that of the padded
chunks. On a CPU the ratio is of CPU seconds, so that what else the machine runs counts less.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_gradient_cache import (
    COLUMNS,
    Batch,
    Models,
    Size,
    our_step,
    peak_of,
    ratio,
    take_turns,
    text_batches,
)
from model_sizes import bert

from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.from_run import build

KINDS = ("packed", "padded")
QWEN = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768,
}  # fmt: skip
MODELS = {"width 64, 1 layer": bert(64, 1, 2), "width 256, 4 layers": bert(256, 4, 4), "qwen3, width 256": QWEN}
# name -> tokens of a row, from a number that is equally likely between 0 and 1
LENGTHS: dict[str, Callable[[float], int]] = {
    "64": lambda at: 64,
    "57 to 64": lambda at: 57 + int(8 * at),
    "50 to 64": lambda at: 50 + int(15 * at),
    "30 to 64": lambda at: 30 + int(35 * at),
    "4 to 20": lambda at: 4 + int(17 * at),
    "12, a few of 256": lambda at: 256 if at > 0.97 else 12,
}


def batch_of_lengths(length_of: Callable[[float], int], pairs: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for name in COLUMNS:
        lengths = torch.tensor([length_of(at) for at in torch.rand(pairs, generator=generator).tolist()])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(5, 500, mask.shape, generator=generator) * mask
        batch[name] = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", choices=["code", *LENGTHS], default=["code", *LENGTHS])
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--chunk_tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--code_root", type=Path, help="read code-search pairs here instead of the standard library")
    options = parser.parse_args()
    tokenizer, of_code = text_batches(Size("", {}), options.code_root, options.device)
    key = "cpu_seconds" if options.device == "cpu" else "seconds"
    limits = ChunkLimits(max_tokens=options.chunk_tokens)
    print(f"{'model':<22}{'tokens of a row':<18}{'padding':>8}{'packed / padded':>17}{'of peak memory':>16}")
    for name in options.models:
        torch.manual_seed(0)
        config = {"vocab_size": max(500, len(tokenizer)), "pad_token_id": 0} | MODELS[name]
        model = build(model_config=config, attn_implementation=options.attention).to(options.device).train()
        if options.device != "cpu":
            backbone = model.transformers_model
            backbone.forward = torch.autocast(options.device, torch.bfloat16)(backbone.forward)
        models = Models(model, model, options.device)
        for lengths in options.lengths:
            batch = (
                of_code(options.pairs)
                if lengths == "code"
                else batch_of_lengths(LENGTHS[lengths], options.pairs, options.device)
            )
            real, computed = lay_out(batch, limits).count_tokens()
            steps = {kind: our_step(models, batch, limits, packing=kind == "packed") for kind in KINDS}
            peaks = {kind: peak_of(step, options.device) for kind, step in steps.items()}
            figures = take_turns(steps, options.turns, options.device)
            packed = ratio(figures, *KINDS, key)
            memory = peaks["packed"] / peaks["padded"]
            print(f"{name:<22}{lengths:<18}{1 - real / computed:>8.3f}{packed:>17.2f}{memory:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
