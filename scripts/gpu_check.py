#!/usr/bin/env python
"""What has to be seen on a GPU, by one command, as one page of tables with the device's name.

    python scripts/gpu_check.py --output outputs/gpu                   # at most 40 minutes
    python scripts/gpu_check.py --output outputs/gpu --quick           # fewer models and cells, at most 10 minutes
    python scripts/gpu_check.py --output outputs/gpu --part batch      # one part again; page.md is made anew
    python scripts/gpu_check.py --output outputs/dry --dry_run         # every branch with a tiny model on a CPU

(1) tests: those that need a CUDA device
(2) matrix: bf16 and fp16 x one process, DDP and FSDP2 x compiled or not x attention, 64 chunks in every step. All
    cells have the same weights and the same global batch, so their first loss and gradient norm must agree
(3) benchmarks: what benchmark_training.py prints, of models from 33 million to 0.6 billion parameters
(4) batch: batches of up to 65,536 pairs, packed and padded, and compiled
(5) plan: what `hf-dist plan` says beside what torch's allocator counted

A cell is a process of its own, so that one that runs out of memory stops no other. A cell that fails, or for which no
time is left, stands in its table as failed, with the last line of its log (logs/), and the exit code is 1. DDP and
FSDP2 have one process for every visible GPU, a dry run has two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
from model_sizes import MODELS, pooling_of
from turns import describe_machine

from hf_dist_ext.data.code_search import load_code_search, train_tokenizer
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.planner.devices import count_devices

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
CHUNKS = 64  # of a step in the matrix
COLUMNS = ["query", "positive"]
SPREADS = {"one process": "single_gpu", "DDP": "multi_gpu_ddp", "FSDP2": "multi_gpu_fsdp"}
PLANNED = {"one process": "single", "DDP": "DDP", "FSDP2": "FSDP memory"}  # the plan's names of these


@dataclass(frozen=True)
class Sizes:
    """`batches`: model -> pairs of a step. `benchmarks`: model, pairs of a step, tokens of a chunk."""

    models: tuple[str, ...] = ("minilm", "bert-base", "qwen3-0.6b")
    precisions: tuple[str, ...] = ("bf16", "fp16")
    compiles: tuple[bool, ...] = (False, True)
    backend: str = "inductor"
    matrix: tuple[str, int, int] = ("small", 2048, 64)  # model, pairs of a step, tokens of a row
    batches: tuple = (("minilm", (1024, 16384, 65536)), ("bert-base", (4096, 65536)), ("qwen3-0.6b", (4096, 16384)))
    plan_pairs: int = 512
    benchmarks: tuple = (("minilm", 2048, 32768), ("bert-base", 1024, 16384), ("qwen3-0.6b", 256, 4096))
    seconds: float = 480  # that a part may take


QUICK = Sizes(
    ("bert-base",), ("bf16",), (False,), batches=Sizes.batches[1:2], benchmarks=Sizes.benchmarks[1:2], seconds=120
)
TINY = Sizes(
    ("tiny",), ("bf16",), backend="aot_eager", matrix=("tiny", 64, 16), batches=(("tiny", (32, 128)),), plan_pairs=16,
    benchmarks=(("tiny", 8, 1024),), seconds=math.inf,
)  # fmt: skip


@dataclass
class Part:
    """A part as it runs. `data`: a folder with rows.jsonl and tokenizer. `devices`: 0 in a dry run."""

    name: str
    sizes: Sizes
    output: Path
    data: Path
    devices: int
    lines: list[str] = field(default_factory=list)
    failures: int = 0

    def __post_init__(self) -> None:
        self.ends = time.monotonic() + self.sizes.seconds
        self.processes = self.devices or 2
        (self.output / "logs").mkdir(parents=True, exist_ok=True)

    def row(self, *cells: object, failure: str = "") -> None:
        """A line of the part's table; what has been measured is on the disk when this script is killed."""
        self.failures += bool(failure)
        self.lines.append(f"| {' | '.join(map(str, [*cells, f'**FAILED**: {failure}' if failure else 'ok']))} |")
        print(self.lines[-1], flush=True)
        self.write()

    def table(self, *columns: str) -> None:
        self.lines += ["", f"| {' | '.join(columns)} | |", "|---" * (len(columns) + 1) + "|"]

    def write(self) -> None:
        text = "\n".join([f"## {self.name}: {self.failures} failed", *self.lines, ""])
        (self.output / f"{self.name}.md").write_text(text, encoding="utf-8")

    def call(self, name: str, command: list[str], **environment: str) -> tuple[str, str]:
        """Runs a cell: (why it failed or "", what it printed)."""
        left = self.ends - time.monotonic()
        if left < 1:
            return "no time was left for it", ""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        log = self.output / "logs" / f"{self.name}-{name}.log"
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT, start_new_session=True,
                env=os.environ | {"PYTHONPATH": path} | environment,
            )  # fmt: skip
            try:
                said, _ = process.communicate(timeout=None if left == math.inf else left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return f"stopped after {left:.0f} s", ""
        if process.returncode == 0:
            return "", said
        lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        last = [line for line in lines if "Error" in line or line.startswith("error")] or lines or ["it said nothing"]
        return f"exit code {process.returncode}: {last[-1][:300]}".replace("|", "\\|"), said

    def train(self, path: Path) -> tuple[str, list[dict]]:
        """Of a run file: (why it failed or "", what was logged of each step)."""
        failure, _ = self.call(path.stem, [sys.executable, "-m", "hf_dist_ext.cli", "train", str(path)])
        logged = path.with_suffix("") / "metrics.jsonl"
        lines = logged.read_text(encoding="utf-8").splitlines() if logged.is_file() else []
        steps = [one for one in map(json.loads, lines) if "loss" in one]
        if not failure and not (steps and all(math.isfinite(one["loss"]) for one in steps)):
            failure = f"losses {[one['loss'] for one in steps]}"
        return failure, steps

    def run_file(self, name: str, model: str, spread: str = "one process", **fields: object) -> Path:
        run = {
            "model_config": MODELS[model], "pooling": pooling_of(model), "learning_rate": 1e-4, "seed": 0,
            "dataset_name": str(self.data / "rows.jsonl"), "tokenizer_name": str(self.data / "tokenizer"),
            "no_duplicates_in_batch": False, "logging_steps": 1, "save_strategy": "no", "report_to": [],
            "output_dir": str(self.data / name), "use_cpu": self.devices == 0, "accelerate_config": SPREADS[spread],
            "num_processes": 1 if spread == "one process" else self.processes, **fields,
        }  # fmt: skip
        path = self.data / f"{name}.json"
        path.write_text(json.dumps(run), encoding="utf-8")
        return path

    def compiled(self, is_compiled: bool) -> dict[str, object]:
        return {"torch_compile": True, "torch_compile_backend": self.sizes.backend} if is_compiled else {}


def peak_gib(steps: list[dict]) -> float:
    """0 on a CPU, where nothing counts it."""
    return max((one.get("peak_memory_gib", 0.0) for one in steps), default=0.0)


def tests(part: Part) -> None:
    """Each file by itself, so that one that takes too long hides no other."""
    part.table("file", "pytest says")
    for path in sorted(ROOT.joinpath("tests").rglob("test_*.py")):
        if "pytest.mark.cuda" in path.read_text(encoding="utf-8"):
            command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "cuda", "-q", "--tb=line", str(path)]
            failure, said = part.call(path.stem, command)
            part.row(path.relative_to(ROOT), (said.strip().splitlines() or [""])[-1].strip("= "), failure=failure)


def matrix(part: Part) -> None:
    model, pairs, length = part.sizes.matrix
    has_flash = part.devices and importlib.util.find_spec("flash_attn")
    part.table("precision", "spread", "attention", "compiled", "loss", "gradient norm", "chunks", "peak GiB")
    first: dict[str, float] = {}
    attentions = ["sdpa", *(["flash_attention_2"] if has_flash else [])]
    for is_compiled, attention, precision, spread in product(
        part.sizes.compiles, attentions, part.sizes.precisions, SPREADS
    ):
        rows = pairs // (1 if spread == "one process" else part.processes)
        path = part.run_file(
            f"{precision}-{spread}-{attention}-{is_compiled}".replace(" ", "-"), model, spread, **{precision: True},
            max_length=length, max_steps=4, attn_implementation=attention, per_device_train_batch_size=rows,
            train_sampling_strategy="sequential", gradient_cache_chunk_size=rows * len(COLUMNS) // CHUNKS,
            **part.compiled(is_compiled),
        )  # fmt: skip
        failure, steps = part.train(path)
        found = steps[0] if steps else dict.fromkeys(("loss", "grad_norm", "num_chunks"), math.nan)
        first = first or found
        # fp16 skips steps whose scaled gradients overflow, which its scaler begins with: then there is no norm
        bounds = {"num_chunks": (CHUNKS, 0), "loss": (first["loss"], 0.02), "grad_norm": (first["grad_norm"], 0.1)}
        for name, (wanted, share) in bounds.items():
            if not failure and math.isfinite(wanted) and abs(found[name] - wanted) > share * abs(wanted):
                failure = f"{name} is not {wanted:g}, as in the first cell"
        figures = [f"{found['loss']:.4f}", f"{found['grad_norm']:.4f}", found["num_chunks"], f"{peak_gib(steps):.2f}"]
        part.row(precision, spread, attention, "yes" if is_compiled else "no", *figures, failure=failure)


def benchmarks(part: Part) -> None:
    """What it prints stands on the page as it is."""
    source = [] if part.devices else ["--code_root", str(Path(sysconfig.get_path("stdlib"), "asyncio"))]
    for model, pairs, tokens in part.sizes.benchmarks:
        command = [sys.executable, "scripts/benchmark_training.py", "--comparisons", "mnr", "--turns", "1", *source]
        command += ["--model", model, "--rows", str(pairs), "--device", "cuda" if part.devices else "cpu"]
        command += ["--mini_batches", str(tokens // 512), "--mini_batch_tokens", str(tokens // 2)]
        command += ["--chunk_tokens", str(tokens // 2), str(tokens), "--kept_tokens"]
        # it forks, which a process that has asked CUDA itself must not
        failure, said = part.call(model, command, PYTORCH_NVML_BASED_CUDA_CHECK="1")
        part.lines += ["", f"    {shlex.join(['python', *command[1:]])}", "", *said.splitlines()]
        part.table("benchmark", "model")
        part.row("benchmark_training", model, failure=failure)


def batch(part: Part) -> None:
    part.lines += ["", "One process, bf16, texts cut at 128 tokens, chunks of 32,768 tokens; the last step of three."]
    part.table("model", "pairs", "chunks are", "rows/s", "tokens/s", "chunks", "peak GiB", "loss")
    for model, batches in part.sizes.batches:
        cells = [(batches[0], "padded"), (batches[0], "packed, compiled"), *((pairs, "packed") for pairs in batches)]
        for pairs, how in cells:
            path = part.run_file(
                f"{model}-{pairs}-{how.replace(', ', '-')}", model, max_length=128, max_steps=3, bf16=True,
                per_device_train_batch_size=pairs, gradient_cache_chunk_tokens=32768 if part.devices else 256,
                gradient_cache_packing=False if how == "padded" else "auto", **part.compiled("compiled" in how),
            )  # fmt: skip
            failure, steps = part.train(path)
            last = steps[-1] if steps else {}
            keys = ("rows_per_second", "tokens_per_second", "num_chunks")
            figures = [
                *(f"{last.get(key, math.nan):,.0f}" for key in keys),
                f"{peak_gib(steps):.2f}",
                f"{last.get('loss', math.nan):.4f}",
            ]
            part.row(model, f"{pairs:,}", how, *figures, failure=failure)


def plan(part: Part) -> None:
    text = f"bf16, {part.sizes.plan_pairs} pairs per process of up to 128 tokens, chunks of 32 rows. GiB per process."
    part.lines += ["", f"{text} Measured is `max_memory_allocated`; the plan's share of the framework is left out."]
    part.table("model", "run", "spread", "planned", "measured")
    for model, is_checkpointed, (spread, preset) in product(part.sizes.models, (False, True), SPREADS.items()):
        kind = "checkpointing" if is_checkpointed else "plain"
        path = part.run_file(
            f"{model}-{kind}-{preset}", model, spread, max_length=128, max_steps=3, bf16=True,
            gradient_checkpointing=is_checkpointed, per_device_train_batch_size=part.sizes.plan_pairs,
            gradient_cache_chunk_size=32, gradient_cache_packing=False, gradient_cache_fsdp="memory",
        )  # fmt: skip
        devices = str(1 if spread == "one process" else part.processes)
        command = [sys.executable, "-m", "hf_dist_ext.cli", "plan", str(path), "--json", "--num_devices", devices]
        failure, said = part.call(f"planned-{path.stem}", command)
        needed = math.nan
        if not failure:
            strategies = {one["strategy"]: one["bytes"] for one in json.loads(said)["strategies"]}
            needed = (strategies[PLANNED[spread]]["total"] - strategies[PLANNED[spread]]["framework"]) / GIB
        of_training, steps = part.train(path)
        part.row(model, kind, spread, f"{needed:.3f}", f"{peak_gib(steps):.3f}", failure=failure or of_training)


PARTS: dict[str, Callable[[Part], None]] = {
    "tests": tests, "matrix": matrix, "benchmarks": benchmarks, "batch": batch, "plan": plan,
}  # fmt: skip


def write_data(folder: Path, rows: int, is_dry: bool) -> None:
    """Code-search pairs with a number in front, so that no two are equal, and a tokenizer that is trained on them."""
    root = Path(sysconfig.get_path("stdlib"), "asyncio") if is_dry else None
    pairs = load_code_search(held_out=1, root=root)["train"].shuffle(seed=0)
    tokenizer = train_tokenizer((text for name in COLUMNS for text in pairs[name]), model_max_length=512)
    tokenizer.save_pretrained(folder / "tokenizer")
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for i in range(rows):
            row = pairs[i % len(pairs)]
            file.write(json.dumps({name: f"{i} {row[name]}" for name in COLUMNS}) + "\n")


def run(options: argparse.Namespace) -> None:
    devices = 0 if options.dry_run else count_devices()
    if not options.dry_run and not (devices and torch.cuda.is_available()):
        raise UsageError("torch sees no CUDA device here. Use a machine that has one, or --dry_run.")
    sizes, failures = TINY if options.dry_run else QUICK if options.quick else Sizes(), 0
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    machine = f"{describe_machine('cuda' if devices else 'cpu')} x {devices or 2}; {packages}"
    if options.dry_run:
        machine += ". **A dry run with a tiny model on a CPU: no figure here says anything about a GPU.**"
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), 256 if options.dry_run else 65536, options.dry_run)
        for part_name in options.part:
            part = Part(part_name, sizes, options.output, Path(name), devices)
            PARTS[part_name](part)
            part.write()
            failures += part.failures
    made = [path.read_text(encoding="utf-8") for part in PARTS if (path := options.output / f"{part}.md").is_file()]
    (options.output / "page.md").write_text("\n".join(["# Check on a GPU", "", machine, "", *made]), encoding="utf-8")
    print(f"\nwritten: {options.output}/page.md; {failures} failed")
    sys.exit(1 if failures else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"), help="folder of the page and its tables")
    parser.add_argument("--quick", action="store_true", help="fewer models and cells, at most ten minutes in all")
    parser.add_argument("--dry_run", action="store_true", help="every branch with a tiny model, on a CPU over gloo")
    options = parser.parse_args()
    with exit_on_usage_error():
        run(options)


if __name__ == "__main__":
    main()
