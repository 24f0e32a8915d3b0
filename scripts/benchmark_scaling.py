"""Weak scaling of DistTrainer: the same rows per device on 1, 2, ... processes, per preset.

    python scripts/benchmark_scaling.py --output outputs/scaling                      # 1 and 2 processes, DDP and FSDP
    python scripts/benchmark_scaling.py --processes 1 2 4 8 --width 768 --layers 12 --pairs 1024 --bf16

(1) every run is a real launch: accelerate's launcher, a shipped preset, DistTrainer with the gradient cache
(2) in a run: steps to warm up, steps that are timed, one step under torch.profiler, which is not timed
(3) runs are repeated in turns; a run's figure is the median of its timed steps, a setting's the median of its runs

Efficiency = (T1 / TN) / N, where TN is the seconds that N processes need per pair of the global batch and T1 those of
one process without a wrapper: 1.0 means that N processes train N times the pairs in the same time. The contrastive
batch grows with N, so that every row meets N times the candidates: that is part of the price and shown on its own.

Rows have one length, so that all ranks have the same work. Collectives and their bytes are the profiler's events
"gloo:*" and "nccl:*" of the first process: bytes are those of the tensors it hands in, seconds include waiting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.run.presets import find_preset

ROOT = Path(__file__).resolve().parent.parent
ALONE = "single_gpu"
WARM_UP_STEPS = 3
OF_A_RUN = (
    "wrapper", "device", "contrastive_batch", "collectives", "cpu_seconds_per_step",
)  # fmt: skip
TYPE_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4}

# (1), (3): the process that starts the others -----------------------------------------------------------------------


def launch(preset: str, processes: int, options: argparse.Namespace) -> dict:
    """One run's figures, from its first process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(find_preset(preset))]
        command += ["--num_processes", str(processes), "--main_process_port", "0", __file__, "--worker", str(report)]
        for name in ("pairs", "length", "chunk_rows", "width", "layers", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--bf16"] if options.bf16 else []
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Threads as every process of N would have them, or one process alone would look faster than it scales.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode or not report.is_file():
            raise RuntimeError(
                f"{preset} on {processes} process(es) ended with {done.returncode}:\n{done.stderr[-4000:]}"
            )
        return json.loads(report.read_text(encoding="utf-8"))


def measure(options: argparse.Namespace) -> list[dict]:
    """A row per preset and number of processes; the first is one process alone."""
    settings = [(ALONE, 1)] + [(preset, n) for preset in options.presets for n in options.processes if n > 1]
    runs: dict[tuple[str, int], list[dict]] = {setting: [] for setting in settings}
    for turn in range(options.repeats):
        for preset, processes in settings[turn % len(settings) :] + settings[: turn % len(settings)]:
            run = launch(preset, processes, options)
            runs[preset, processes].append(run)
            print(f"{preset} on {processes}: {statistics.median(run['step_seconds']):.3f} s per step", flush=True)
    rows = []
    for (preset, processes), found in runs.items():
        medians = [statistics.median(run["step_seconds"]) for run in found]
        middle = found[medians.index(statistics.median_low(medians))]
        row = {"preset": preset, "processes": processes, "seconds_per_step": statistics.median(medians)}
        rows.append(row | {key: middle[key] for key in OF_A_RUN} | {"runs": found})
    alone = rows[0]["seconds_per_step"]
    for row in rows:
        row["pairs_per_second"] = options.pairs * row["processes"] / row["seconds_per_step"]
        row["efficiency"] = row["pairs_per_second"] / (options.pairs / alone) / row["processes"]
        row["collective_bytes"] = sum(kind["bytes"] for kind in row["collectives"].values())
        row["collective_count"] = sum(kind["count"] for kind in row["collectives"].values())
        row["collective_seconds"] = sum(kind["seconds"] for kind in row["collectives"].values())
    return rows


def print_table(rows: list[dict]) -> None:
    print(
        f"\n{'preset':<18}{'processes':>10}{'pairs/s':>10}{'s/step':>9}{'efficiency':>12}{'collectives':>13}"
        f"{'MiB/step':>10}{'in them, s':>12}{'CPU s':>8}"
    )
    for row in rows:
        print(
            f"{row['preset']:<18}{row['processes']:>10}{row['pairs_per_second']:>10.1f}{row['seconds_per_step']:>9.3f}"
            f"{row['efficiency']:>12.2f}{row['collective_count']:>13}{row['collective_bytes'] / 2**20:>10.2f}"
            f"{row['collective_seconds']:>12.3f}{row['cpu_seconds_per_step']:>8.3f}"
        )


def run(options: argparse.Namespace) -> None:
    if max(options.processes) < 2:
        raise UsageError(f"--processes {options.processes}: scaling needs a number above 1 beside the one alone.")
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"
    machine += f", OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}"
    print(f"{machine}; " + ", ".join(f"{name} {number}" for name, number in packages.items()))
    rows = measure(options)
    print_table(rows)
    if options.output is None:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "worker")}
    report = {
        "command": " ".join(["python", "scripts/benchmark_scaling.py", *sys.argv[1:]]),
        "machine": f"{machine}, {rows[0]['device']}",
        "versions": packages,
        "efficiency_is": "(T1 / TN) / N, T = seconds per pair of the global batch",
        **settings,
        "results": rows,
    }
    (options.output / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.output}/results.json")


# (2): what every process runs ---------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    import torch
    from transformers import TrainerCallback
    from transformers.utils import logging as transformers_logging

    from hf_dist_ext.engine.losses import InfoNCELoss
    from hf_dist_ext.models.from_run import build
    from hf_dist_ext.strategies.collectives import leave_together
    from hf_dist_ext.training.arguments import DistTrainingArguments
    from hf_dist_ext.training.trainer import DistTrainer

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    last_step = WARM_UP_STEPS + options.steps

    class Observer(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.cpu_seconds: list[float] = []  # of all threads of this process
            self.profiler = None

        def on_step_begin(self, args, state, control, **others) -> None:
            if state.global_step == last_step:
                activities = [torch.profiler.ProfilerActivity.CPU]
                activities += [torch.profiler.ProfilerActivity.CUDA] if args.device.type == "cuda" else []
                self.profiler = torch.profiler.profile(activities=activities, record_shapes=True)
                self.profiler.start()
            self.started, self.cpu_started = self.now(args), time.process_time()

        def on_step_end(self, args, state, control, **others) -> None:
            seconds, cpu_seconds = self.now(args) - self.started, time.process_time() - self.cpu_started
            if self.profiler is not None:
                self.profiler.stop()
            elif state.global_step > WARM_UP_STEPS:
                self.seconds.append(seconds)
                self.cpu_seconds.append(cpu_seconds)

        @staticmethod
        def now(args) -> float:
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

    def collate(rows: list) -> dict:
        ids = torch.stack(rows)  # (B, 2, length)
        mask = torch.ones_like(ids[:, 0])
        return {name: {"input_ids": ids[:, i], "attention_mask": mask} for i, name in enumerate(("query", "positive"))}

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = build(model_config={
        "model_type": "bert", "hidden_size": options.width, "num_hidden_layers": options.layers, "vocab_size": 3000,
        "num_attention_heads": max(1, options.width // 64), "intermediate_size": 4 * options.width,
        "max_position_embeddings": max(options.length, 16),
    })  # fmt: skip
    rows = torch.randint(5, 3000, (options.pairs * processes, 2, options.length))
    with tempfile.TemporaryDirectory() as folder:
        args = DistTrainingArguments(
            output_dir=folder, per_device_train_batch_size=options.pairs, max_steps=last_step + 1, report_to=[],
            gradient_cache_chunk_size=options.chunk_rows, save_strategy="no", logging_strategy="no", bf16=options.bf16,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = DistTrainer(
            model=model, args=args, data_collator=collate, train_dataset=list(rows), loss=InfoNCELoss()
        )
        trainer.add_callback(observer := Observer())
        trainer.train()
        if args.process_index == 0:
            trace = Path(folder) / "trace.json"
            observer.profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            report = {
                "wrapper": type(trainer.model_wrapped).__name__,
                "device": str(args.device.type),
                "contrastive_batch": options.pairs * processes,
                "step_seconds": observer.seconds,
                "cpu_seconds_per_step": statistics.median(observer.cpu_seconds),
                "collectives": collectives(events),
            }
            Path(options.worker).write_text(json.dumps(report), encoding="utf-8")
    # With its barrier: a group that is freed while its thread frees the tensors of a gather hangs (torch 2.13, gloo).
    leave_together()


def collectives(events: list[dict]) -> dict[str, dict[str, float]]:
    """Kind -> count, bytes and seconds of a step, from a profiler's trace with shapes."""
    count, nbytes, seconds = Counter(), Counter(), Counter()
    for event in events:
        name, shapes = event.get("name", ""), event.get("args", {}).get("Input Dims")
        if not name.startswith(("gloo:", "nccl:")) or shapes is None:
            continue
        count[name] += 1
        seconds[name] += event.get("dur", 0) / 1e6
        for shape, kind in zip(shapes, event["args"].get("Input type", []), strict=False):
            rows = shape if shape and isinstance(shape[0], list) else [shape]  # a list of tensors, or one
            nbytes[name] += sum(TYPE_BYTES.get(kind, 4) * math.prod(one) for one in rows if one)
    return {name: {"count": count[name], "bytes": nbytes[name], "seconds": seconds[name]} for name in sorted(count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["multi_gpu_ddp", "multi_gpu_fsdp"])
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2], help="one process alone is always measured"
    )
    parser.add_argument("--pairs", type=int, default=256, help="rows per device")
    parser.add_argument("--length", type=int, default=32, help="tokens of every row")
    parser.add_argument("--chunk_rows", type=int, default=32, help="rows per chunk of the gradient cache")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="autocast, as Trainer's bf16")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every setting")
    parser.add_argument("--output", type=Path, help="write results.json into this folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # set for the processes that this one starts
    options = parser.parse_args()
    with exit_on_usage_error():
        (work if options.worker else run)(options)


if __name__ == "__main__":
    main()
