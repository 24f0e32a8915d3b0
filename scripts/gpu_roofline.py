#!/usr/bin/env python
"""What a step costs an H200 at least, counted without a GPU: `python scripts/gpu_roofline.py [MODEL ...]`.

One update of `DistTrainer` runs on tensors without values (tests/fake_cuda) with pairs of up to 256 tokens, packed,
under bf16, with two and with three of the model's layers: each further layer adds what the third one adds. Every
kernel takes at least 2 microseconds, the time of its products at 65 % of 989 TFLOP/s (494 in float32, as TF32), and
that of its bytes at 80 % of 4.8 TB/s. Attention counts as if every row of a chunk were as long as its longest. The sum
is a bound: it knows no gap between kernels. MFU counts 6 operations for each weight outside of the embedding and each
real token, of 989 TFLOP/s. The host is taken to launch a kernel in 5 microseconds.

Compiled (`torch_compile`): the kernels of the step's largest chunk are those into which inductor's scheduler fuses its
graphs, with the bytes that it says they read and write (tests/fake_cuda/compiled.py): a count. The step's time is that
of its uncompiled parts and, for all chunks, the largest one's by tokens: a model. "Graphs kept": all chunks keep their
graph (`gradient_cache_keep_graph`), so that none is encoded twice; whether memory holds them is not asked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
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
    print("| model | tokens of a chunk | | kernels per forward | per replay | step | products | MFU | launches |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or ROWS:
        for line in rows(name):
            print(line, flush=True)
    os._exit(0)  # torch's threads would ask a device that is not there to end


def rows(name: str) -> Iterator[str]:
    from model_sizes import MODELS

    (pairs, tokens), layers = ROWS.get(name, (8, 64)), MODELS[name]["num_hidden_layers"]
    two, three = (measured(name, number, pairs, tokens) for number in (2, 3))
    for how in two:
        found = {key: two[how][key] + (layers - 2) * (three[how][key] - two[how][key]) for key in two[how]}
        mfu = 6 * found["weights"] * found["tokens"] / found["seconds"] / PEAK
        of_step = f"{found['seconds'] * 1e3:.1f} ms | {found['products'] / found['seconds']:.0%} | {mfu:.0%}"
        launches = f"{found['launched'] * LAUNCH_ON_HOST * 1e3:.0f} ms"
        kernels = [f"{found[kind]:,}" if kind in found else "" for kind in ("forward", "replay")]
        yield f"| {name} | {tokens:,} | {how} | {' | '.join(kernels)} | {of_step} | {launches} |"


def measured(name: str, layers: int, pairs: int, tokens: int) -> dict[str, dict[str, float]]:
    """Of a step with so many layers, as it is and compiled."""
    from tests.fake_cuda import cases  # isort: skip  # before torch
    import datasets
    import numpy as np
    import torch
    from model_sizes import MODELS, pooling_of

    from hf_dist_ext.engine.losses import InfoNCELoss
    from hf_dist_ext.models.from_run import build as build_model
    from tests.fake_cuda import compiled
    from tests.tiny_models import tiny_tokenizer

    lengths = np.random.default_rng(0).lognormal(np.log(MOST_TOKENS / 2.2), 0.6, (2, pairs)).astype(int)
    lengths = np.clip(lengths, 4, MOST_TOKENS)
    texts = [[cases.text(i, n - 2) for i, n in enumerate(column.tolist())] for column in lengths]
    data = datasets.Dataset.from_dict(dict(zip(("query", "positive"), texts, strict=True)))
    config = MODELS[name] | {"num_hidden_layers": layers}

    def model(folder: Path) -> torch.nn.Module:
        with torch.device("cuda"):
            made = build_model(
                model_config=config, tokenizer=tiny_tokenizer(max_length=MOST_TOKENS), pooling=pooling_of(name)
            )
        table = made.transformers_model.get_input_embeddings().weight
        sizes.append(sum(p.numel() for p in made.parameters()) - table.numel())
        return made

    sizes = []
    options = cases.PACKED | {"gradient_cache_chunk_size": None, "gradient_cache_chunk_tokens": tokens}
    case = cases.Case(model, lambda made: InfoNCELoss(), lambda: data, options)
    with cases.DEVICE, cases.chunks_of() as seen:
        plain, kept = (
            cases.run(replace(case, options=options | {"gradient_cache_keep_graph": number}), rows=pairs)
            for number in (0, pairs)
        )
    of_all = {"weights": sizes[0], "tokens": int(lengths.sum())}
    with cases.DEVICE:
        counts = [chunk.features["input_ids"].numel() for _, chunk in seen]
    (step, chunk), num_tokens = seen[counts.index(max(counts))], max(counts)
    forward, replay = compiled.chunk_costs(cases.DEVICE, step, chunk)
    num_chunks = len(plain["kernels"][cases.REPLAY])

    def of_step(run: dict, *chunk_costs: dict[str, float]) -> dict[str, float]:
        """As it ran, or with chunks of these costs instead."""
        times = {"seconds": of_all["tokens"] / num_tokens, "launched": num_chunks}
        found = of_all | {key: run[key] for key in ("seconds", "products", "launched")}
        if chunk_costs:
            for key, of_phases in (("seconds", run["seconds_of"]), ("launched", run["kernels"])):
                of_chunks = sum(sum(of_kind) for kind, of_kind in of_phases.items() if kind != cases.SCORE)
                found[key] += times[key] * sum(one[key] for one in chunk_costs) - of_chunks
            found["products"] = times["seconds"] * sum(one["products"] for one in chunk_costs)
        return found

    most = (max(plain["kernels"][kind]) for kind in (cases.ENCODE, cases.REPLAY))
    return {
        "": of_step(plain) | dict(zip(("forward", "replay"), most, strict=True)),
        "compiled": of_step(plain, forward, replay) | {"forward": forward["launched"], "replay": replay["launched"]},
        "graphs kept": of_step(kept),
        "compiled, graphs kept": of_step(kept, replay),
    }


if __name__ == "__main__":
    main()
