"""Prints the matrix: strategy x (gradient cache, frozen parts, LoRA), each cell a real launch on gloo or why not.

python tests/parity/strategy_matrix.py                       # some ten minutes on two cores
python tests/parity/strategy_matrix.py --output matrix.json

A figure is |ours - reference| / |reference| of gradients in float64 (exactness_worker.py). ZeRO keeps gradients to
itself: there it is of weights after two SGD steps in float32 (distributed/deepspeed_worker.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.launching import launch  # noqa: E402

EXACTNESS = ROOT / "tests" / "parity" / "exactness_worker.py"
DEEPSPEED = ROOT / "tests" / "distributed" / "deepspeed_worker.py"
COLUMNS = {  # what is trained -> case of exactness_worker.py, of deepspeed_worker.py, for TP (None: refused there)
    "no cache": ("no cache", "no cache", "decoder, no cache"),
    "gradient cache": ("chunk 4, does not divide", "chunks of 4", "decoder, last token, left padding"),
    "cache, accumulation, temperature": (
        "accumulation, temperature", "temperature, accumulation", "decoder, accumulation, temperature"
    ),
    "cache, frozen backbone": (
        "frozen backbone, encoded once", "frozen backbone", "decoder, frozen, trained projection"
    ),
    "cache, frozen tower": ("frozen tower, encoded once", "frozen tower", None),
    "cache, LoRA": ("LoRA", "LoRA", None),
    "cache, LoRA and projection": ("LoRA and a trained projection", "LoRA and projection", None),
}  # fmt: skip
STRATEGIES = {  # preset, processes, arguments over every case's own
    "one process": ("python", 1, {}),
    "DDP": ("multi_gpu_ddp", 2, {}),
    "FSDP2, speed": ("multi_gpu_fsdp", 2, {"gradient_cache_fsdp": "speed", "frozen_parts_fsdp": "shard"}),
    "FSDP2, memory": ("multi_gpu_fsdp", 2, {"gradient_cache_fsdp": "memory", "frozen_parts_fsdp": "shard"}),
    "FSDP2, frozen replicated": ("multi_gpu_fsdp_frozen_replicated", 2, {}),
    "FSDP2, offload": ("multi_gpu_fsdp_offload", 2, {}),
    "HSDP 2x2": ("multi_gpu_hsdp", 4, {}),
    "TP 2": ("multi_gpu_tp", 2, {}),
    "TP 2 x FSDP 2": ("multi_gpu_tp", 4, {}),
    "ZeRO-1": ("deepspeed_zero1", 2, {}),
    "ZeRO-2": ("deepspeed_zero2", 2, {}),
    "ZeRO-3": ("deepspeed_zero3", 2, {}),
}


def measure(strategy: str) -> dict[str, str]:
    """Column -> figure, or why there is none."""
    preset, num_processes, arguments = STRATEGIES[strategy]
    is_deepspeed = preset.startswith("deepspeed")
    kind = 1 if is_deepspeed else 2 if preset == "multi_gpu_tp" else 0
    if is_deepspeed and importlib.util.find_spec("deepspeed") is None:
        return dict.fromkeys(COLUMNS, "DeepSpeed is not installed")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        more = ["--output", output]
        if is_deepspeed:
            more += ["--only", *[names[kind] for names in COLUMNS.values()]]
        else:
            cases = [names[kind] for names in COLUMNS.values() if names[kind]]
            more += ["--names", *cases, "--arguments", json.dumps(arguments)]
        done = launch(preset, num_processes, DEEPSPEED if is_deepspeed else EXACTNESS, *more, timeout=900, check=False)
        found = json.loads(output.read_text()) if output.is_file() else {}
    cells = {}
    for column, names in COLUMNS.items():
        entry = found.get(names[kind], {"refused": "refused"} if names[kind] is None else {})
        failed = f"failed, exit code {done.returncode}" if done.returncode else "not measured"
        cells[column] = f"{entry['error']:.1e}" if "error" in entry else entry.get("refused") or failed
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write every cell to this JSON file")
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    options = parser.parse_args()
    print("| strategy | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    table = {}
    for strategy in options.only:
        table[strategy] = measure(strategy)
        cells = [cell if len(cell) < 30 else "refused" for cell in table[strategy].values()]
        print(f"| {strategy} | " + " | ".join(cells) + " |", flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
