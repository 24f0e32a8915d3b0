"""Do the gradient caches that people use give the full batch's gradient? Each library in an environment of its own.

    python scripts/audit_others.py                                      # all: some 20 minutes, 15 GB while it runs
    python scripts/audit_others.py --libraries GradCache --environments envs --json others.json

(1) venv and pip make an environment per library, from PyPI
(2) in it the library's own trainer takes a step or two on a tiny random model in float64 (audit_others_cases.py), with
    settings that its pages document, on one process and then on two (gloo). Gradients are read before the optimizer
(3) the same rows go through a copy of the same weights at once, on one process, in one graph without a cache

The error of a setting is the largest over parameters, steps and processes. Where a library defines another loss, such
as one with negatives of the own process only, the truth is the gradient of that loss, and the remark says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
# What pip is asked for. Older versions of torch stand where a library, or a build of torchvision, asks for them.
LIBRARIES = {
    "sentence-transformers": ["sentence-transformers[train]==6.2.0", "transformers==5.23.0", "torch==2.13.0"],
    "GradCache": ["GradCache==0.0.1", "transformers==5.23.0", "torch==2.13.0", "numpy==2.4.6"],
    "pylate": ["pylate==1.6.0"],
    "FlagEmbedding": ["FlagEmbedding==1.4.2", "torch==2.13.0"],
    "open_clip_torch": ["open_clip_torch[training]==3.3.0", "torch==2.11.0"],
    "hf_dist_ext": ["-c", f"{ROOT / 'constraints.txt'}", "-e", f"{ROOT}"],
}
COLUMNS = ("library", "version", "setting", "processes", "largest relative error", "remark")
EXACT = 1e-10  # rounding in float64, with room


class Difference(NamedTuple):
    """`error`: the largest of a parameter. `words`: where it is, or how many times the full gradient there is."""

    error: float
    words: str


def compare(found: Mapping[str, torch.Tensor | None], full: Mapping[str, torch.Tensor | None]) -> Difference:
    """Gradients by parameter; None is zero. A parameter whose full gradient is nothing but rounding, such as the bias
    of attention's keys, is measured by the norm of the whole gradient."""
    assert found.keys() == full.keys(), f"not in both: {sorted(found.keys() ^ full.keys())}"
    truth = {name: gradient.double() for name, gradient in full.items() if gradient is not None}
    given = {name: gradient.double() for name, gradient in found.items() if gradient is not None}
    whole = sum(float(gradient.square().sum()) for gradient in truth.values()) ** 0.5
    assert 0 < whole < float("inf"), f"the full batch's gradient has norm {whole}: there is nothing to compare"
    errors, bent, factors = {}, {}, {}
    for name in full:
        expected = truth.get(name, 0 * given[name]) if name in given else truth.get(name)
        if expected is None:  # zero in both
            continue
        gradient, size = given.get(name, 0 * expected), float(expected.norm())
        is_rounding = size <= 1e-6 * whole
        factor = 1.0 if is_rounding else float((gradient * expected).sum()) / size**2
        errors[name], bent[name] = (
            float((gradient - times * expected).norm()) / (whole if is_rounding else size) for times in (1.0, factor)
        )
        if not is_rounding:
            factors[name] = float(f"{factor:.4g}")
    largest, where = max((float("inf") if error != error else error, name) for name, error in errors.items())
    if largest <= EXACT:
        return Difference(largest, "")
    if not all(error <= EXACT for error in bent.values()):
        return Difference(largest, f"most at `{where}`")
    usual = statistics.mode(factors.values())
    words = [f"`{name}`: {factor:g} times the full gradient" for name, factor in factors.items() if factor != usual]
    return Difference(largest, "; ".join(words + [f"{usual:g} times the full gradient"] * (usual != 1)))


def row_of(library: str, version: str, setting: str, processes: int, found: list[Difference], remark: str) -> dict:
    worst = max(found)
    remarks = "; ".join(filter(None, (worst.words, remark)))
    return dict(zip(COLUMNS, (library, version, setting, processes, worst.error, remarks), strict=True))


def line_of(row: Mapping[str, object]) -> str:
    cells = (row[column] for column in COLUMNS)
    return "| " + " | ".join(f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def table_of(rows: list[dict]) -> str:
    return "\n".join(["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), *map(line_of, rows)])


def python_of(library: str, folder: Path) -> Path:
    """Of the library's environment, which is made unless the folder holds it already."""
    python, wanted = folder / "bin" / "python", folder / "installed.txt"
    requirements = "\n".join(LIBRARIES[library])
    if not wanted.is_file() or wanted.read_text() != requirements:
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *LIBRARIES[library]],
            check=True,
            capture_output=True,
            text=True,
        )
        wanted.write_text(requirements)
    return python


def rows_of(library: str, folder: Path) -> list[dict]:
    try:
        python = python_of(library, folder.resolve())
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        remark = f"pip does not install it: {said[0] if said else error.stderr[-300:]}"
        return [dict(zip(COLUMNS, (library, "", "", "", "", remark), strict=True))]
    cases = Path(__file__).with_name("audit_others_cases.py")
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    rows = []
    for launch in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        with tempfile.TemporaryDirectory() as written:
            output = Path(written) / "rows.json"
            command = [python, *launch, cases, library, output]
            ended = subprocess.run(command, env=os.environ | quiet, cwd=written, capture_output=True, text=True)
            if ended.returncode:
                raise SystemExit(f"error: {library} failed: {' '.join(map(str, command))}\n{ended.stderr[-6000:]}")
            rows += json.loads(output.read_text())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--environments", type=Path, help="folder that keeps the environments for another time")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for library in args.libraries:
            rows += rows_of(library, (args.environments or Path(folder)) / library)
            print(f"{library}: done", flush=True)
    print(table_of(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
