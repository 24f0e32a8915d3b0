#!/usr/bin/env python
"""What a step costs an H200 at least, counted without a GPU: `python scripts/gpu_roofline.py [MODEL ...]`.

One update of `DistTrainer` runs on tensors without values (tests/fake_cuda) with pairs of up to 256 tokens, packed,
under bf16. Every kernel takes at least 2 microseconds, the time of its products at 65 % of 989 TFLOP/s (494 in
float32, as TF32), and that of its bytes at 80 % of 4.8 TB/s. Attention counts as if every row of a chunk were as long
as its longest. The sum is a bound: it knows no gap between kernels. MFU counts 6 operations for each weight outside of
the embedding and each real token, of 989 TFLOP/s. The host is taken to launch a kernel in 5 microseconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ROWS = {"bert-base": (256, 32768), "qwen3-0.6b": (128, 16384)}  # pairs of a step, tokens of a chunk
PEAK, LAUNCH_ON_HOST, MOST_TOKENS = 989e12, 5e-6, 256


def main() -> None:
    from tests.fake_cuda.build import build

    if "FAKE_CUDA_LIBRARY" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "device.so")
            build(library)
            command = [sys.executable, __file__, *sys.argv[1:]]
            code = os.spawnve(os.P_WAIT, sys.executable, command, os.environ | {"FAKE_CUDA_LIBRARY": str(library)})
        sys.exit(code)
    print(__doc__.split("\n\n", 1)[1])
    print("| model | tokens of a chunk | kernels per forward | per replay | step | products | MFU | launches |")
    print("|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or ROWS:
        print(row(name), flush=True)
    os._exit(0)  # torch's threads would ask a device that is not there to end


def row(name: str) -> str:
    from tests.fake_cuda import cases  # isort: skip  # before torch

    import datasets
    import numpy as np
    import torch
    from model_sizes import MODELS, pooling_of

    from hf_dist_ext.engine.losses import InfoNCELoss
    from hf_dist_ext.models.from_run import build as build_model
    from tests.tiny_models import tiny_tokenizer

    pairs, tokens = ROWS.get(name, (8, 64))
    lengths = np.random.default_rng(0).lognormal(np.log(MOST_TOKENS / 2.2), 0.6, (2, pairs)).astype(int)
    lengths = np.clip(lengths, 4, MOST_TOKENS)
    texts = [[cases.text(i, n - 2) for i, n in enumerate(column.tolist())] for column in lengths]
    data = datasets.Dataset.from_dict(dict(zip(("query", "positive"), texts, strict=True)))

    def model(folder: Path) -> torch.nn.Module:
        with torch.device("cuda"):
            made = build_model(
                model_config=MODELS[name], tokenizer=tiny_tokenizer(max_length=MOST_TOKENS), pooling=pooling_of(name)
            )
        table = made.transformers_model.get_input_embeddings().weight
        sizes.append(sum(p.numel() for p in made.parameters()) - table.numel())
        return made

    sizes: list[int] = []
    options = cases.PACKED | {"gradient_cache_chunk_size": None, "gradient_cache_chunk_tokens": tokens}
    case = cases.Case(model, lambda made: InfoNCELoss(), lambda: data, options)
    with cases.DEVICE:
        found = cases.run(case, rows=pairs)
    forward, replay = (max(found["kernels"][kind]) for kind in (cases.ENCODE, cases.REPLAY))
    seconds, launches = found["seconds"], found["launched"] * LAUNCH_ON_HOST
    mfu = 6 * sizes[0] * int(lengths.sum()) / seconds / PEAK
    share = found["products"] / seconds
    of_step = f"{seconds * 1e3:.1f} ms | {share:.0%} | {mfu:.0%} | {launches * 1e3:.0f} ms"
    return f"| {name} | {tokens:,} | {forward:,} | {replay:,} | {of_step} |"


if __name__ == "__main__":
    main()
