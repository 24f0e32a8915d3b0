"""Prints the exactness table: configuration, and the largest relative gradient error per way of running it.

python tests/parity/exactness_table.py            # about two minutes on two cores
python tests/parity/exactness_table.py --output exactness.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.forked import launch  # noqa: E402
from tests.parity import exactness_worker  # noqa: E402

RUNS = {"single": ("python", 1), "DDP 2": ("multi_gpu_ddp", 2), "DDP 3": ("multi_gpu_ddp", 3), "FSDP2 2": ("multi_gpu_fsdp", 2), "HSDP 2x2": ("multi_gpu_hsdp", 4), "TP 2": ("multi_gpu_tp", 2), "TP 2 x FSDP 2": ("multi_gpu_tp", 4)}  # fmt: skip  # noqa: E501


def measure(run: str, *names: str) -> dict[str, dict[str, float]]:
    """Case name -> {"error", "tolerance"} of one way of running: of all its cases, or of these."""
    preset, num_processes = RUNS[run]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "errors.json"
        launch(
            preset, num_processes, exactness_worker.main, "--output", output, *(["--names", *names] if names else [])
        )
        return json.loads(output.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="also write every figure to this JSON file")
    options = parser.parse_args()
    table = {run: measure(run) for run in RUNS}
    names = list(dict.fromkeys(name for errors in table.values() for name in errors))
    print("| configuration | bound | " + " | ".join(RUNS) + " |")
    print("|---|---|" + "---|" * len(RUNS))
    for name in names:
        cells = [f"{table[run][name]['error']:.1e}" if name in table[run] else "" for run in RUNS]
        bound = next(errors[name]["tolerance"] for errors in table.values() if name in errors)
        print(f"| {name} | {bound:.0e} | " + " | ".join(cells) + " |")
    if options.output:
        Path(options.output).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
