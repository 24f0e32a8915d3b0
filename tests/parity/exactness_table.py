"""Prints the exactness table: configuration, and the largest relative gradient error per way of running it.

python tests/parity/exactness_table.py            # about two hours on two cores
python tests/parity/exactness_table.py --columns "PP 2, 1f1b" "TP 2" --rows LoRA --output exactness.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_dist_ext.policy import stages_per_rank  # noqa: E402
from hf_dist_ext.strategies.pipeline.schedules import SCHEDULES  # noqa: E402
from tests.distributed.forked import look  # noqa: E402
from tests.parity import exactness_worker  # noqa: E402

RUNS = {"single": ("python", 1), "DDP 2": ("multi_gpu_ddp", 2), "DDP 3": ("multi_gpu_ddp", 3), "FSDP2 2": ("multi_gpu_fsdp", 2), "HSDP 2x2": ("multi_gpu_hsdp", 4), "TP 2": ("multi_gpu_tp", 2), "TP 2 x FSDP 2": ("multi_gpu_tp", 4)}  # fmt: skip  # noqa: E501

# name -> processes, and per pipeline: processes, schedule, stages per process
PIPELINES = {
    **{f"PP 2, {name}": (2, 2, name, stages_per_rank(name, None)) for name in SCHEDULES},
    "PP 2, zero_bubble, one stage each": (2, 2, "zero_bubble", 1),
    **{f"PP 3, {name}": (3, 3, name, stages_per_rank(name, None)) for name in SCHEDULES},
    **{f"PP 2 x DP 2, {name}": (4, 2, name, stages_per_rank(name, None)) for name in SCHEDULES},
}
PIPELINE_CASES = [
    "decoder, last token, left padding", "decoder, accumulation, temperature", "decoder, first half frozen",
    "decoder, frozen layers", "decoder, later layers frozen", "decoder, frozen, trained projection",
    "chunk 4, does not divide",
    "three columns, 3 hard negatives", "64 tokens per chunk", "gradient checkpointing", "LoRA", "max_grad_norm",
    "symmetric", "accumulation 2, short last window", "bf16 autocast", "dropout",
    "accumulation, temperature", "decoder, LoRA", "XLM-R, three columns", "ModernBERT, accumulation, clipped",
    "frozen layers",
]  # fmt: skip
SPLIT = [  # under tensor parallelism
    "decoder, last token, left padding", "decoder without norms in attention", "decoder, accumulation, temperature",
    "decoder, first half frozen", "decoder, frozen layers", "decoder, frozen, trained projection",
    "decoder, three columns, gradient checkpointing", "bf16 against float32, decoder, chunks: 8",
]  # fmt: skip
MESHES = {  # of pipelines whose layers are split: name -> processes, schedule
    f"{layout}, {name}": (processes, name)
    for layout, processes in {"PP 2 x TP 2": 4, "PP 2 x TP 2 x DP 2": 8}.items()
    for name in SCHEDULES
}


def measure_mesh(run: str, *names: str) -> dict[str, dict[str, float]]:
    """Likewise, of pipelines whose layers are split: of all cases, or of these."""
    processes, schedule = MESHES[run]
    arguments = {"pipeline_parallel_size": 2, "pipeline_schedule": schedule}
    return look("multi_gpu_3d", processes, exactness_worker.errors_of, arguments, names or SPLIT, 6)


def measure_pipeline(run: str, *names: str) -> dict[str, dict[str, float]]:
    """Likewise, of models of 6 layers: of all cases, or of these."""
    processes, size, schedule, per_rank = PIPELINES[run]
    arguments = {"pipeline_parallel_size": size, "pipeline_schedule": schedule, "pipeline_stages_per_rank": per_rank}
    names = names or PIPELINE_CASES + ["ranks with different row counts"] * (processes > size)
    return look("multi_gpu_pp", processes, exactness_worker.errors_of, arguments, names, 6)


def measure(run: str, *names: str) -> dict[str, dict[str, float]]:
    """Case name -> {"error", "tolerance"} of one way of running: of all its cases, or of these."""
    return look(*RUNS[run], exactness_worker.errors_of, {}, names)


def column(run: str, rows: list[str]) -> dict[str, dict[str, float]]:
    """All cases of one way of running, or those of these names that it has."""
    if run in RUNS:
        take, cases = measure, [case.name for case in exactness_worker.CASES]
    elif run in PIPELINES:
        take, cases = measure_pipeline, PIPELINE_CASES
    else:
        take, cases = measure_mesh, SPLIT
    names = [name for name in cases if name in rows]
    return take(run, *names) if names or not rows else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", nargs="+", choices=[*RUNS, *PIPELINES, *MESHES], help="these ways alone")
    parser.add_argument("--rows", nargs="+", default=[], help="these cases alone")
    parser.add_argument("--output", help="also write every figure to this JSON file")
    options = parser.parse_args()
    table = {run: column(run, options.rows) for run in options.columns or [*RUNS, *PIPELINES, *MESHES]}
    names = list(dict.fromkeys(name for errors in table.values() for name in errors))
    print("| configuration | bound | " + " | ".join(table) + " |")
    print("|---|---|" + "---|" * len(table))
    for name in names:
        cells = [f"{table[run][name]['error']:.1e}" if name in table[run] else "" for run in table]
        bound = next(errors[name]["tolerance"] for errors in table.values() if name in errors)
        print(f"| {name} | {bound:.0e} | " + " | ".join(cells) + " |")
    if options.output:
        Path(options.output).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
