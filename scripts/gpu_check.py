#!/usr/bin/env python
"""What has to be seen on a GPU, by one command, as one page of tables with the device's name.

    python scripts/gpu_check.py --output outputs/gpu                   # all parts, at most 40 minutes
    python scripts/gpu_check.py --output outputs/gpu --quick           # fewer models and cells, at most 10 minutes
    python scripts/gpu_check.py --output outputs/gpu --part batch      # one part again; the page is made anew
    python scripts/gpu_check.py --output outputs/dry --dry_run         # every branch with a tiny model on a CPU

(1) tests: those that need a CUDA device
(2) matrix: bf16 and fp16 x one process, DDP and FSDP2 x compiled or not x attention, 64 chunks in every step. All
    cells have the same weights and the same global batch, so their first loss and gradient norm must agree
(3) benchmarks: benchmark_gradient_cache.py and benchmark_training.py with models from 33 million to 0.6 billion
(4) batch: batches of up to 65,536 pairs, the smallest of each model padded too, and of the first one compiled
(5) plan: what `hf-dist plan` says beside what torch's allocator counted

Each part writes PART.md into the output folder, and page.md is made of them. A cell is a process of its own, so that
one that runs out of memory stops no other. A cell that fails, or that the part's time no longer holds, stands in its
table as failed, with the error or the last line of its log (logs/), and the exit code is 1. DDP and FSDP2 have one
process for every visible GPU; on one GPU that is one, and the table says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import psutil
import torch
from benchmark_gradient_cache import COLUMNS, describe_machine
from model_sizes import MODELS, pooling_of
from transformers import AutoConfig, AutoModel

from hf_dist_ext.data.code_search import load_code_search, train_tokenizer
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.planner.devices import count_devices

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
CHUNKS = 64  # of a step in the matrix
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}  # dense products per second in bf16
OPTIONAL = ("flash_attn", "sentence_transformers", "matplotlib", "pytest", "deepspeed")
SPREADS = {"one process": "single_gpu", "DDP": "multi_gpu_ddp", "FSDP2": "multi_gpu_fsdp"}
# of the plan's options, and the fields that make a run that one
PLANNED = {"one process": "single", "DDP": "DDP", "FSDP2": "FSDP memory"}


@dataclass(frozen=True)
class Sizes:
    models: tuple[str, ...] = ("minilm", "bert-base", "qwen3-0.6b")
    precisions: tuple[str, ...] = ("bf16", "fp16")
    matrix_model: str = "small"
    matrix_batch: int = 2048
    matrix_length: int = 64
    compiles: tuple[bool, ...] = (False, True)
    compile_backend: str = "inductor"
    # model -> pairs of a step, its rows at most so many tokens, in chunks of so many tokens
    batches: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("minilm", (1024, 4096, 16384, 65536)),
        ("bert-base", (4096, 65536)),
        ("qwen3-0.6b", (4096, 16384)),
    )
    batch_length: int = 128
    chunk_tokens: int = 32768
    plan_batch: int = 512
    plan_length: int = 128
    plan_chunk_rows: int = 32
    # model -> pairs of a step, tokens of a chunk and half as many. The memory of all contestants lies on the GPU
    # together: at a time one of them computes, and the others' allocators keep what theirs took.
    benchmarks: tuple[tuple[str, int, int], ...] = (
        ("minilm", 2048, 32768), ("bert-base", 1024, 16384), ("qwen3-0.6b", 256, 4096),
    )  # fmt: skip

    share: float = 1.0  # of the seconds that a part may take


QUICK = Sizes(
    models=("bert-base",), precisions=("bf16",), compiles=(False,), share=0.25,
    batches=(("bert-base", (4096,)), ("qwen3-0.6b", (2048,))), benchmarks=(("bert-base", 1024, 16384),),
)  # fmt: skip
TINY = Sizes(
    models=("tiny",), precisions=("bf16",), matrix_model="tiny", matrix_batch=64, matrix_length=16,
    compile_backend="aot_eager",  # inductor compiles for minutes on a CPU
    batches=(("tiny", (32, 128)),), batch_length=16, chunk_tokens=256, plan_batch=16, plan_length=16,
    plan_chunk_rows=4, benchmarks=(("tiny", 8, 1024),),
)  # fmt: skip


# cells ---------------------------------------------------------------------------------------------------------------


def started(command: Sequence[str], more: dict[str, str], output: Path, log: Path, seconds: float) -> int | None:
    """The exit code of a command; None when it took longer than `seconds` and was ended with all that it had started.

    more: added to the environment. output, log: what it prints and its errors.
    """
    with open(output, "w", encoding="utf-8") as said, open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=said, stderr=errors, env=os.environ | more, cwd=ROOT)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                try:
                    one.kill()
                except psutil.NoSuchProcess:  # it ended meanwhile
                    continue
            process.wait()
            return None


def last_line(*files: Path) -> str:
    """The last line that names an error, else the last one."""
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8", errors="replace").split("\n")]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?([\w.]*(Error|Exception)|error)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300].replace("|", "\\|")


@dataclass
class Part:
    """A part as it runs. `data`: a folder with rows.jsonl, long.jsonl (all longer than any limit) and tokenizer."""

    name: str
    machine: str
    output: Path
    data: Path
    sizes: Sizes
    devices: int  # 0: a dry run
    lines: list[str] = field(default_factory=list)
    failures: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.title, self.work, seconds = PARTS[self.name]
        self.seconds = seconds * self.sizes.share if self.devices else math.inf
        (self.output / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def processes(self) -> int:
        """Of DDP and FSDP2."""
        return self.devices or 2

    def table(self, *columns: str) -> None:
        self.lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]

    def has_benchmark(self, title: str, command: list[str], columns: Sequence[str], failure: str) -> bool:
        """Begin the table of a benchmark that was run, with its only row where it failed."""
        self.lines += ["", f"### {title}", "", f"`{shown(command)}`"]
        self.table(*columns)
        if failure:
            self.row("all", *[""] * (len(columns) - 2), failure=failure)
        return not failure

    def counted(self, steps: list[dict]) -> str:
        """Peak GiB, or why there is none."""
        return number(peak_gib(steps)) if self.devices else "not counted on a CPU"

    def row(self, *cells: object, failure: str = "", otherwise: str = "ok") -> None:
        """`failure`: why the cell failed; "" when it did not, and what stands in the last column then."""
        self.failures += bool(failure)
        words = [*map(str, cells), f"**FAILED**: {failure}" if failure else otherwise]
        self.lines.append("| " + " | ".join(words) + " |")
        print(self.lines[-1], flush=True)
        self.write()

    def write(self, is_done: bool = False) -> None:
        """The part's file and the page; what has been measured is there also when this script is killed."""
        head = [f"## {self.title}", "", f"{self.machine}.", ""]
        if not self.devices:
            head += ["**A dry run with a tiny model on a CPU: no figure here says anything about a GPU.**", ""]
        when, took = time.strftime("%Y-%m-%d %H:%M", time.gmtime()), time.monotonic() - self.began
        end = f"{self.failures} failed" if is_done else "**not finished**"
        head.append(f"{when} UTC, {took:.0f} s, {end}. `python scripts/gpu_check.py --part {self.name}`")
        (self.output / f"{self.name}.md").write_text("\n".join([*head, *self.lines, ""]), encoding="utf-8")
        write_page(self.output)

    def run(self) -> None:
        self.write()
        try:
            self.work(self)
        except Exception as error:  # a report that can not be read; the next part runs all the same
            traceback.print_exc()
            self.failures += 1
            self.lines += ["", f"**FAILED**: {type(error).__name__}: {error}"]
        self.write(is_done=True)

    def call(self, name: str, command: Sequence[str], seconds: float, **environment: str) -> tuple[str, Path]:
        """Runs a cell, at most `seconds` and what is left of the part's: (why it failed or "", its output's file).
        A dry run has ten times as long, as a CPU may be busy."""
        output, log = (self.output / "logs" / f"{self.name}-{name}.{suffix}" for suffix in ("out", "log"))
        left = self.seconds - (time.monotonic() - self.began)
        if left < 1:
            return f"not run: the {self.seconds:.0f} seconds of this part were over", output
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        limit = min(seconds if self.devices else 10 * seconds, left)
        code = started(command, {"PYTHONPATH": path, **environment}, output, log, limit)
        if code == 0:
            return "", output
        what = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"
        return f"{what}: {last_line(output, log)}", output

    def run_file(self, name: str, model: str, **fields: object) -> Path:
        run = {
            "model_config": MODELS[model], "pooling": pooling_of(model), "loss": "infonce", "learning_rate": 1e-4,
            "dataset_name": str(self.data / "rows.jsonl"), "tokenizer_name": str(self.data / "tokenizer"),
            "no_duplicates_in_batch": False, "seed": 0, "logging_steps": 1, "save_strategy": "no", "report_to": [],
            "output_dir": str(self.data / name), "use_cpu": self.devices == 0, **fields,
        }  # fmt: skip
        path = self.data / f"{name}.json"
        path.write_text(json.dumps(run, indent=1), encoding="utf-8")
        return path

    def train(self, name: str, run: Path, seconds: float) -> tuple[str, list[dict]]:
        """(why it failed or "", what was logged of each step). The trained model is not kept."""
        failure, _ = self.call(name, [sys.executable, "-m", "hf_dist_ext.cli", "train", "--config", str(run)], seconds)
        folder = Path(json.loads(run.read_text(encoding="utf-8"))["output_dir"])
        logged, steps = folder / "metrics.jsonl", []
        if logged.is_file():
            lines = logged.read_text(encoding="utf-8").splitlines()
            steps = [one for one in map(json.loads, lines) if "loss" in one]
        shutil.rmtree(folder, ignore_errors=True)
        if not failure and not steps:
            failure = "it logged no step"
        if not failure and not all(math.isfinite(one["loss"]) for one in steps):
            failure = f"losses {[one['loss'] for one in steps]}"
        return failure, steps


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def peak_gib(steps: list[dict]) -> float | None:
    """None on a CPU, where nothing counts it."""
    return max((one["peak_memory_gib"] for one in steps if "peak_memory_gib" in one), default=None)


# (1) -----------------------------------------------------------------------------------------------------------------


def tests(part: Part) -> None:
    """Each file by itself, so that one that takes too long hides no other; the one that compiles begins first."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cuda" in path.read_text()]
    files = [path for path in files if True in part.sizes.compiles or "compil" not in path.name]
    files.sort(key=lambda path: ("compile" not in path.name, path))
    part.table("test", "seconds", "")
    with ThreadPoolExecutor(cells_at_once()) as pool:
        for path, failure in zip(files, pool.map(lambda path: test_file(part, path), files), strict=True):
            report, broken = part.data / f"{path.stem}.xml", 0
            cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
            for case in cases:
                broken += test_row(part, case)
            if failure and not broken or not cases:
                part.row(path.stem, "", failure=failure or "no test was found")


def test_file(part: Part, path: Path) -> str:
    """Why it failed or "". A trainer in the test's own process takes one GPU."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "cuda", "-p", "no:cacheprovider"]
    command += ["--junitxml", str(part.data / f"{path.stem}.xml"), str(path)]
    return part.call(path.stem, command, part.seconds, **({} if "distributed" in path.parts else first_device()))[0]


def test_row(part: Part, case: ElementTree.Element) -> bool:
    """Whether it failed."""
    skipped, broken = case.find("skipped"), next((one for one in case if one.tag in ("failure", "error")), None)
    why = "" if broken is None else (broken.get("message") or "it failed").strip().splitlines()[-1][:300]
    name = f"{case.get('classname')}::{case.get('name')}".replace("|", "\\|")
    otherwise = "ok" if skipped is None else f"skipped: {skipped.get('message')}"
    part.row(name, number(float(case.get("time") or 0)), failure=why.replace("|", "\\|"), otherwise=otherwise)
    return broken is not None


def cells_at_once() -> int:
    return max(1, min(4, (os.cpu_count() or 1) // 4))


def first_device() -> dict[str, str]:
    """The environment of a cell that shall see one GPU: of several, Trainer would use nn.DataParallel."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


# (2) -----------------------------------------------------------------------------------------------------------------


def disagreement(steps: list[dict], wanted: list[dict]) -> str:
    """ "" when the first step has the loss and the gradient of the first cell, up to half precision."""
    found, first = steps[0], wanted[0]
    if found["num_chunks"] != CHUNKS:
        return f"{found['num_chunks']:.0f} chunks"
    if abs(found["loss"] - first["loss"]) > 0.02 * abs(first["loss"]):
        return f"the first loss is {found['loss']:.4f}, that of the first cell {first['loss']:.4f}"
    # fp16 skips steps whose scaled gradients overflow, which its scaler begins with
    norms = [one["grad_norm"] for one in steps if math.isfinite(one["grad_norm"]) and one["grad_norm"] > 0]
    if not norms:
        return "no step had a finite gradient"
    if math.isfinite(found["grad_norm"]) and abs(found["grad_norm"] - first["grad_norm"]) > 0.1 * first["grad_norm"]:
        return f"the first gradient norm is {found['grad_norm']:.4f}, that of the first cell {first['grad_norm']:.4f}"
    return ""


def matrix(part: Part) -> None:
    sizes, wanted = part.sizes, []
    attentions = ["sdpa"]
    if importlib.util.find_spec("flash_attn") is None:
        part.lines += ["", "FlashAttention (the package flash_attn) is not installed here: its cells were not run."]
    elif part.devices:
        attentions.append("flash_attention_2")
    if not part.devices:
        part.lines += ["", "fp16 and FlashAttention need a GPU: their cells are not part of a dry run."]
    text = f"A batch of {sizes.matrix_batch:,} pairs of at most {sizes.matrix_length} tokens; the model is"
    part.lines += ["", f"{text} {sizes.matrix_model}. Cells may run beside each other, so they are not timed."]
    part.table("precision", "spread", "attention", "compiled", "loss", "gradient norm", "chunks", "peak GiB", "")
    cells = [
        (precision, spread, attention, is_compiled)
        for is_compiled in sizes.compiles  # the slow ones come last
        for attention in attentions
        for precision in sizes.precisions
        for spread in SPREADS
    ]
    with ThreadPoolExecutor(cells_at_once()) as pool:
        results = pool.map(lambda cell: matrix_cell(part, *cell), cells)
        for (precision, spread, attention, is_compiled), (failure, steps) in zip(cells, results, strict=True):
            wanted = wanted or ([] if failure else steps)
            failure = failure or disagreement(steps, wanted)
            spread += f", {part.processes} process(es)" if spread != "one process" else ""
            figures = [""] * 4
            if steps:
                first = [number(steps[0][key], 4) for key in ("loss", "grad_norm")]
                figures = [*first, number(steps[0]["num_chunks"], 0), part.counted(steps)]
            part.row(precision, spread, attention, "yes" if is_compiled else "no", *figures, failure=failure)


def matrix_cell(part: Part, precision: str, spread: str, attention: str, is_compiled: bool) -> tuple[str, list[dict]]:
    sizes, processes = part.sizes, 1 if spread == "one process" else part.processes
    fields: dict = {"torch_compile": True, "torch_compile_backend": sizes.compile_backend} if is_compiled else {}
    rows = sizes.matrix_batch // processes
    name = f"{precision}-{SPREADS[spread]}-{attention}{'-compiled' * is_compiled}"
    run = part.run_file(
        name, sizes.matrix_model, max_length=sizes.matrix_length, max_steps=4, attn_implementation=attention,
        per_device_train_batch_size=rows, gradient_cache_chunk_size=rows * len(COLUMNS) // CHUNKS,
        accelerate_config=SPREADS[spread], num_processes=processes, train_sampling_strategy="sequential",
        **{precision: True}, **fields,
    )  # fmt: skip
    return part.train(name, run, 240 if is_compiled else 120)


# (3) -----------------------------------------------------------------------------------------------------------------


def benchmarks(part: Part) -> None:
    for model, rows, tokens in part.sizes.benchmarks:
        training(part, model, rows, tokens)
        gradient_cache(part, model)


def training(part: Part, model: str, rows: int, tokens: int) -> None:
    """Training as users train."""
    folder = part.data / f"training-{model}"
    command = [sys.executable, "scripts/benchmark_training.py", "--comparisons", "mnr", "--turns", "2"]
    command += ["--model", model, "--rows", str(rows), "--device", "cuda" if part.devices else "cpu"]
    half = str(tokens // 2)
    command += ["--mini_batches", str(tokens // 2 // 256), "--mini_batch_tokens", half]  # rows are cut at 256 tokens
    command += ["--chunk_tokens", half, str(tokens), "--kept_tokens", *code_root(part), "--output", str(folder)]
    if not part.devices or importlib.util.find_spec("flash_attn") is not None:
        command += ["--their_attention", "flash_attention_2" if part.devices else "eager"]
    # the script forks, which a process that has asked CUDA itself must not
    environment = {**first_device(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    failure, _ = part.call(f"training-{model}", command, 150, **environment)
    columns = ("trainer", "rows/s", "time, of theirs", "tensors, MiB", "process, MiB", "")
    if not part.has_benchmark(f"Training as users train, {model}, {rows:,} pairs a step", command, columns, failure):
        return
    (result,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    for name, one in result["contestants"].items():
        memory = [number(one[key] / 2**20, 0) for key in ("peak_bytes", "grown_bytes")]
        part.row(name, number(one["rows_per_second"], 1), number(one["time"]), *memory)
    part.lines += ["", f"The losses of all steps differ by {result['losses_differ_by']:.1e} at most."]


def gradient_cache(part: Part, model: str) -> None:
    """A cached step beside the plain one and sentence-transformers."""
    folder = part.data / f"cache-{model}"
    command = [sys.executable, "scripts/benchmark_gradient_cache.py", "--turns", "1", *code_root(part)]
    command += ["--preset", "gpu", "--sizes", model, "--curve_pairs", "256", "4096"] if part.devices else []
    command += [] if part.devices else ["--preset", "smoke", "--curve_pairs", "8"]
    command += ["--output", str(folder)]
    failure, _ = part.call(f"cache-{model}", command, 180)
    title = f"A cached step beside the plain one and sentence-transformers, {model}"
    columns = ("step", "seconds", "of plain", "tokens computed", "peak MiB", "")
    if not part.has_benchmark(title, command, columns, failure):
        return
    (size,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["sizes"]
    found = size["text"]["contestants"]
    plain = statistics.median(found["plain"]["seconds"]) if "plain" in found else None
    for name, one in found.items():
        seconds = statistics.median(one["seconds"])
        of_plain = number(seconds / plain) if plain else "plain does not fit"
        part.row(name, number(seconds, 3), of_plain, number(one["tokens"], 0), number(one["peak_bytes"] / 2**20, 0))
    part.table("ratio", "")
    for name, value in size["ratios"].items():
        part.lines.append(f"| {name} | {'one side does not fit the device' if value is None else number(value, 3)} |")


def code_root(part: Part) -> list[str]:
    """A dry run reads a few hundred functions instead of the whole library."""
    return [] if part.devices else ["--code_root", str(Path(sysconfig.get_path("stdlib"), "asyncio"))]


def shown(command: Sequence[str]) -> str:
    """As a reader would type it."""
    words = command[1 : command.index("--output")] if "--output" in command else command[1:]
    return " ".join(["python", *words])


# (4) -----------------------------------------------------------------------------------------------------------------


def batch(part: Part) -> None:
    sizes = part.sizes
    part.lines += [
        "",
        f"One process, bf16, chunks of {sizes.chunk_tokens:,} tokens, texts cut at {sizes.batch_length} tokens; the "
        "last of two steps, of three where they compile. MFU: 6 operations for each weight outside of the embedding "
        "and each real token, of the products in half precision that the card is sold with.",
    ]
    columns = ("rows/s", "tokens/s", "MFU", "chunks", "s/step", "of it data", "peak GiB", "loss", "")
    part.table("model", "pairs", "chunks are", *columns)
    compiles = {"torch_compile": True, "torch_compile_backend": sizes.compile_backend, "max_steps": 3}
    for model, batches in sizes.batches:
        weights = weights_beside_embedding(model)
        cells = [(batches[0], "padded", {"gradient_cache_packing": False})]
        if model == sizes.batches[0][0]:
            cells.append((batches[0], "packed, compiled", compiles))
        for pairs, how, fields in [*cells, *((pairs, "packed", {}) for pairs in batches)]:
            name = f"{model}-{pairs}-{how.replace(', ', '-')}"
            run = part.run_file(
                name, model, max_length=sizes.batch_length, per_device_train_batch_size=pairs, bf16=True,
                gradient_cache_chunk_tokens=sizes.chunk_tokens, accelerate_config="single_gpu",
                **{"gradient_cache_packing": "auto", "max_steps": 2, **fields},
            )  # fmt: skip
            failure, steps = part.train(name, run, 300)
            figures = [""] * 8
            if steps:
                last = steps[-1]
                figures = [number(last[key], 0) for key in ("rows_per_second", "tokens_per_second")]
                figures += [share_of_peak(6 * weights * last["tokens_per_second"]), number(last["num_chunks"], 0)]
                figures += [number(pairs / last["rows_per_second"]), number(last["seconds_data"]), part.counted(steps)]
                figures.append(number(last["loss"], 4))
            part.row(model, f"{pairs:,}", how, *figures, failure=failure)


def weights_beside_embedding(model: str) -> int:
    with torch.device("meta"):
        made = AutoModel.from_config(AutoConfig.for_model(**MODELS[model]))
    return made.num_parameters() - made.get_input_embeddings().weight.numel()


def share_of_peak(operations_per_second: float) -> str:
    """ "" for a card that is not listed."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for card, peak in PEAKS.items() if card in name), None)
    return "" if peak is None else f"{operations_per_second / peak:.0%}"


# (5) -----------------------------------------------------------------------------------------------------------------


def plan(part: Part) -> None:
    sizes = part.sizes
    spreads = list(SPREADS) if part.processes > 1 else ["one process"]
    text = f"bf16, {sizes.plan_batch} pairs per process, all texts cut at {sizes.plan_length} tokens, chunks of"
    text += f" {sizes.plan_chunk_rows} rows. GiB per process, without the framework's share, which is not counted."
    part.lines += ["", f"{text} Measured: `max_memory_allocated` of the first process."]
    part.table("model", "run", "spread", "planned", "measured", "off", "of it activations", "of it states", "")
    for model in sizes.models:
        for kind, fields in {"plain": {}, "checkpointing": {"gradient_checkpointing": True}}.items():
            for spread in spreads:
                name = f"{model}-{kind}-{SPREADS[spread]}"
                processes = 1 if spread == "one process" else part.processes
                run = part.run_file(
                    name, model, max_length=sizes.plan_length, max_steps=3, bf16=True, num_processes=processes,
                    per_device_train_batch_size=sizes.plan_batch, gradient_cache_chunk_size=sizes.plan_chunk_rows,
                    gradient_cache_packing=False, gradient_cache_fsdp="memory", accelerate_config=SPREADS[spread],
                    dataset_name=str(part.data / "long.jsonl"), **fields,
                )  # fmt: skip
                command = [sys.executable, "-m", "hf_dist_ext.cli", "plan", "--config", str(run), "--json"]
                failure, said = part.call(f"planned-{name}", [*command, "--num_devices", str(processes)], 60)
                needed = {} if failure else planned(json.loads(said.read_text(encoding="utf-8")), PLANNED[spread])
                of_training, steps = part.train(name, run, 120)
                measured = peak_gib(steps)
                off = "" if measured is None or not needed else f"{needed['total'] / measured - 1:+.1%}"
                if part.devices and steps and measured is None:
                    of_training = "no peak was logged"
                sums = [number(needed.get(key), 3) for key in ("total", "activations", "states")]
                figures = [sums[0], part.counted(steps), off, *sums[1:]]
                part.row(model, kind, spread, *figures, failure=failure or of_training)


def planned(said: dict, strategy: str) -> dict[str, float]:
    """GiB of tensors."""
    needed = next(one["bytes"] for one in said["strategies"] if one["strategy"] == strategy)
    states = sum(needed[name] for name in ("weights", "master_weights", "gradients", "optimizer"))
    found = {"total": needed["total"] - needed["framework"], "activations": needed["activations"], "states": states}
    return {name: value / GIB for name, value in found.items()}


# the page ------------------------------------------------------------------------------------------------------------

# name -> (title, what runs, seconds it may take beside those in which the data is written)
PARTS: dict[str, tuple[str, Callable[[Part], None], float]] = {
    "tests": ("Tests that need a GPU", tests, 250),
    "matrix": ("Smoke matrix", matrix, 500),
    "benchmarks": ("Benchmarks", benchmarks, 500),
    "batch": ("Large batches", batch, 700),
    "plan": ("The plan beside measured memory", plan, 400),
}


def write_data(folder: Path, rows: int, is_dry: bool) -> None:
    """Code-search pairs with a number in front, so that no two are equal, and a tokenizer that is trained on them."""
    root = Path(sysconfig.get_path("stdlib"), "asyncio") if is_dry else None
    pairs = load_code_search(held_out=1, root=root)["train"].shuffle(seed=0)
    tokenizer = train_tokenizer((text for name in COLUMNS for text in pairs[name]), model_max_length=512)
    tokenizer.save_pretrained(folder / "tokenizer")
    found = [{name: pairs[i % len(pairs)][name] for name in COLUMNS} for i in range(min(rows, len(pairs)))]
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for i in range(rows):
            file.write(json.dumps({name: f"{i} {found[i % len(found)][name]}" for name in COLUMNS}) + "\n")
    with open(folder / "long.jsonl", "w", encoding="utf-8") as file:
        for i in range(min(rows, 8192)):
            long = {name: f"{i} " + " ".join([found[i % len(found)][name]] * 150) for name in COLUMNS}
            file.write(json.dumps({name: text[:8000] for name, text in long.items()}) + "\n")


def machine(devices: int) -> str:
    words = describe_machine("cuda" if devices else "cpu")
    if devices:
        memory = torch.cuda.get_device_properties(0).total_memory / GIB
        words += f" x {devices}, {memory:.0f} GiB each, CUDA {torch.version.cuda}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    return f"{words}; {packages}; not installed: {', '.join(missing) or 'nothing that a cell needs'}"


def write_page(output: Path) -> None:
    lines = ["# Check on a GPU", ""]
    for name, (title, *_) in PARTS.items():
        path = output / f"{name}.md"
        lines.append(path.read_text(encoding="utf-8") if path.is_file() else f"## {title}\n\nNot run.\n")
    (output / "page.md").write_text("\n".join(lines), encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    devices = 0 if options.dry_run else count_devices()
    if not options.dry_run and not (devices and torch.cuda.is_available()):
        raise UsageError("torch sees no CUDA device here. Use a machine that has one, or --dry_run.")
    sizes = TINY if options.dry_run else QUICK if options.quick else Sizes()
    described, failures = machine(devices), 0
    print(described, flush=True)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        write_data(data, 256 if options.dry_run else 65536, options.dry_run)
        for part_name in options.part:
            part = Part(part_name, described, options.output, data, sizes, devices)
            print(f"\n{part.title}", flush=True)
            part.run()
            failures += part.failures
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
