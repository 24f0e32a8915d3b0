r"""What the stock Trainer does when something happens to it: the second column of the table in docs/safety.md.

    python tests/parity/stock_events.py                # a quarter of an hour on two busy cores
    python tests/parity/stock_events.py hang memory    # events whose names hold one of the words

Every event is a real run of transformers' own classes: processes, signals, kills and collectives over gloo on the CPU.
What is printed is what was seen: exit codes, seconds, and what the folder holds. Each event is one function; its name
is the event, its docstring the row's first cell. `worker` is what the processes run.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from tests.launching import PRESETS, ROOT, environment

LIMIT = 60  # seconds after which a run that should have ended is said to hang
SECRET = "hf_SECRET"
NUM_ROWS = 64

# ---- a run ----


def worker(folder: Path, what: dict[str, Any], **options: Any) -> None:
    """`what`: slow (seconds per step), on_rank_1 (what happens to it in the third step), loss (a factor of rank 1's
    from then on), bad_row ("nan" or "unreadable"). `options` are TrainingArguments."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    from hf_dist_ext.strategies.collectives import sharded_on_cpu
    from tests.distributed.failing_worker import fail

    rank = os.environ.get("RANK", "0")

    class Model(BertForSequenceClassification):
        def forward(self, input_ids, weight, labels=None):
            with open(folder / f"rows-{rank}.txt", "a") as file:
                file.write(" ".join(map(str, (input_ids[:, 0] - 1).tolist())) + "\n")
            output = super().forward(input_ids=input_ids, labels=labels)
            output.loss = output.loss * weight.mean()
            if rank == "1" and Steps.number >= 3:
                output.loss = output.loss * what.get("loss", 1.0)
            return output

    class Steps(TrainerCallback):
        number = 0

        def on_step_begin(self, args, state, control, **others):
            Steps.number = state.global_step + 1
            time.sleep(what.get("slow", 0.0))
            if rank == "1" and Steps.number == 3 and "on_rank_1" in what:
                if what["on_rank_1"] == "memory":
                    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                fail(what["on_rank_1"])

        def on_step_end(self, args, state, control, **others):
            (folder / f"step-{rank}").write_text(str(state.global_step))

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return NUM_ROWS

        def __getitem__(self, index):
            if what.get("bad_row") == "unreadable" and index == 7:
                raise OSError("image file is truncated")
            weight = torch.tensor(torch.nan if what.get("bad_row") == "nan" and index == 7 else 1.0)
            ids = torch.full((6,), index + 1)
            return {"input_ids": ids, "weight": weight, "labels": torch.tensor(index % 2)}

    class OnCPU(Trainer):
        def create_accelerator_and_postprocess(self):
            with sharded_on_cpu():  # without it the stock class trains DDP on a CPU
                super().create_accelerator_and_postprocess()

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "BertLayer"  # accelerate's own choice crashes for Bert
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=80, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    resumes = options.pop("resume", None)
    args = TrainingArguments(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True,
            "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 6,
        } | options
    )  # fmt: skip
    trainer = OnCPU(Model(config), args, train_dataset=Rows(), callbacks=[Steps()])
    trainer.train(resume_from_checkpoint=resumes)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    are_nan = all(weight.isnan().any() for weight in weights)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (folder / f"end-{rank}.json").write_text(json.dumps({"nan": are_nan, "losses": losses}))


class Started:
    """A run in the background, of one process ("python") or of two under accelerate's launcher with a preset (and
    words for the launcher behind it)."""

    def __init__(self, preset: str, folder: Path, what: dict | None = None, **options: Any):
        folder.mkdir(exist_ok=True)
        command = [sys.executable]
        if preset != "python":
            preset, *more = preset.split()
            command += ["-m", "accelerate.commands.launch", "--config_file", str(PRESETS / f"{preset}.yaml")]
            command += ["--num_processes", "2", "--main_process_port", "0", *more]
        self.command = [*command, __file__, "worker", str(folder), json.dumps(what or {}), json.dumps(options)]
        self.folder, self.log = folder, folder / f"log-{time.monotonic()}.txt"
        self.process = subprocess.Popen(
            self.command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment(), cwd=ROOT
        )

    def reach(self, step: int) -> Started:
        path = self.folder / "step-0"
        while not (path.is_file() and int(path.read_text() or 0) >= step):
            assert self.process.poll() is None, self.text()[-2000:]
            time.sleep(0.05)
        return self

    def ranks(self) -> list[psutil.Process]:
        found = [child for child in psutil.Process(self.process.pid).children() if "RANK" in child.environ()]
        return sorted(found, key=lambda child: child.environ()["RANK"])

    def end(self, limit: float = 300) -> str:
        """How it ended, in words; it is killed when it did not."""
        began = time.monotonic()
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
            self.process.wait()
            return f"still running after {limit:.0f} s"
        self.seconds = time.monotonic() - began
        return f"code {code if code >= 0 else 128 - code}"

    def text(self) -> str:
        return self.log.read_text()


def checkpoints(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("checkpoint-*"))
    return ", ".join(found) or "no checkpoint"


def end_of(folder: Path, rank: int = 0) -> dict:
    return json.loads((folder / f"end-{rank}.json").read_text())


# ---- from outside ----

EVENTS: dict[str, Callable[[Path], str]] = {}


def event(function: Callable[[Path], str]) -> Callable[[Path], str]:
    EVENTS[function.__name__] = function
    return function


@event
def sigterm(folder: Path) -> str:
    """SIGTERM, one process"""
    run = Started("python", folder, {"slow": 0.1}, max_steps=1000).reach(3)
    run.process.terminate()
    return f"{run.end()}, {checkpoints(folder)}"


@event
def signals_apart(folder: Path) -> str:
    """signals 0.7 s apart on two ranks (enable_jit_checkpoint)"""
    run = Started("multi_gpu_ddp", folder, {"slow": 0.1}, max_steps=10_000, enable_jit_checkpoint=True).reach(3)
    first, second = run.ranks()
    first.terminate()
    time.sleep(0.7)
    second.terminate()
    words = run.end(LIMIT)
    return f"{words}; " + "; ".join(
        f"{path.name} holds {', '.join(sorted(file.name for file in path.iterdir()))}"
        for path in folder.glob("checkpoint-*")
    )


@event
def slurm(folder: Path) -> str:
    """a time limit of SLURM (stand-in for `scontrol`)"""
    fake = folder / "bin" / "scontrol"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    fake.chmod(0o755)
    job = (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()
    words = [sys.executable, __file__, "worker", str(folder / "out"), '{"slow": 0.1}', '{"max_steps": 1000}']
    ours = 'python scripts/train_hf.py "$@" --resume_from_checkpoint auto'
    assert ours in job
    (folder / "job.sh").write_text(job.replace(ours, " ".join(f"'{word}'" for word in words)))
    (folder / "out").mkdir()
    path = f"{fake.parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", str(folder / "job.sh")], env=environment(PATH=path, SLURM_JOB_ID="17", SLURM_SUBMIT_DIR=str(ROOT)),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (folder / "out" / "step-0").is_file():
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    code = process.wait(LIMIT)
    is_requeued = (folder / "requeued").is_file()
    return f"code {code}, {checkpoints(folder / 'out')}, {'requeued' if is_requeued else 'not requeued'}"


@event
def second_run(folder: Path) -> str:
    """a second run into one folder"""
    options = {"max_steps": 20, "save_strategy": "steps", "save_steps": 5}
    runs = [Started("python", folder, {"slow": 0.2}, seed=seed, **options) for seed in (1, 2)]
    return f"{' and '.join(run.end() for run in runs)}, both wrote {checkpoints(folder)}"


# ---- what a step meets ----


@event
def nan_row(folder: Path) -> str:
    """one NaN row, one process"""
    run = Started("python", folder, {"bad_row": "nan"}, max_steps=18, save_strategy="steps", save_steps=6)
    words, end = run.end(), end_of(folder)
    zeros = sum(loss == 0 for loss in end["losses"])
    nan = "all weights NaN" if end["nan"] else "weights finite"
    return f"{words}, {nan}, {zeros} of {len(end['losses'])} logged losses are 0, {checkpoints(folder)}"


@event
def unreadable_row(folder: Path) -> str:
    """one unreadable row"""
    run = Started("python", folder, {"bad_row": "unreadable"}, max_steps=18)
    return f"{run.end()}, {run.text().strip().splitlines()[-1]}"


def infinite(folder: Path, preset: str) -> str:
    run = Started(preset, folder, {"loss": float("inf")}, save_strategy="steps", save_steps=2)
    words, ends = run.end(), [end_of(folder, rank) for rank in range(2)]
    nan = "all weights NaN on both ranks" if all(end["nan"] for end in ends) else "weights finite"
    return f"{words}, {nan}, {checkpoints(folder)}, losses {ends[0]['losses']}"


@event
def infinite_ddp(folder: Path) -> str:
    """an infinite loss on one of two ranks, DDP"""
    return infinite(folder, "multi_gpu_ddp")


@event
def infinite_fsdp(folder: Path) -> str:
    """an infinite loss on one of two ranks, FSDP2"""
    return infinite(folder, "multi_gpu_fsdp")


def on_rank_1(folder: Path, how: str, **options: Any) -> str:
    run = Started("multi_gpu_ddp", folder, {"on_rank_1": how, "slow": 0.1}, max_steps=1000, **options).reach(2)
    words = run.end(LIMIT)
    if words.startswith("still"):
        return words
    return f"{words} after {run.seconds:.1f} s, {run.text().count('Traceback (most recent call last)')} tracebacks"


@event
def rank_raises(folder: Path) -> str:
    """a rank raises"""
    return on_rank_1(folder, "raise")


@event
def rank_exits(folder: Path) -> str:
    """a rank calls sys.exit(3)"""
    return on_rank_1(folder, "exit")


@event
def rank_is_killed(folder: Path) -> str:
    """a rank is killed"""
    return on_rank_1(folder, "kill")


@event
def rank_hangs(folder: Path) -> str:
    """a rank hangs"""
    return on_rank_1(folder, "hang")


@event
def timeout_on_gloo(folder: Path) -> str:
    """a rank hangs, `ddp_timeout` of 4 s on gloo"""
    return on_rank_1(folder, "hang", ddp_timeout=4)


@event
def memory(folder: Path) -> str:
    """memory runs out on one of two ranks (simulated)"""
    return on_rank_1(folder, "memory")


@event
def memory_with_auto_find_batch_size(folder: Path) -> str:
    """the same with `auto_find_batch_size`"""
    return on_rank_1(folder, "memory", auto_find_batch_size=True)


# ---- checkpoints ----


@event
def full_disk(folder: Path) -> str:
    """the disk runs full during a save"""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=True)
    try:
        words = Started("python", disk, max_steps=20, save_strategy="steps", save_steps=2).end()
        left = checkpoints(disk)
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        run = Started("python", disk, max_steps=20, resume=True)
        again = run.end()
        return f"{words}, {left}; resumed with room: {again}, {run.text().strip().splitlines()[-1]}"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


SAVES = {"save_strategy": "steps", "save_steps": 2}


def saved(folder: Path, preset: str = "python", **options: Any) -> Path:
    words = Started(preset, folder, max_steps=2, **SAVES, **options).end()
    assert words == "code 0", words
    return folder / "checkpoint-2"


def resumed(folder: Path, preset: str = "python", **options: Any) -> str:
    run = Started(preset, folder, **SAVES | {"max_steps": 4, "resume": True} | options)
    words, lines = run.end(), run.text().splitlines()
    if words != "code 0":
        return f"{words}, {lines[-1]}"
    return f"{words}, goes on {'with a warning' if 'do not match' in run.text() else 'without a word'}"


@event
def earlier_run(folder: Path) -> str:
    """a run starts afresh among an earlier one's checkpoints and is killed before its first save"""
    saved(folder)
    run = Started("python", folder, {"slow": 0.5}, max_steps=100, seed=7).reach(1)
    run.process.kill()
    run.end()
    (folder / "rows-0.txt").unlink()
    words, steps = resumed(folder), len((folder / "rows-0.txt").read_text().splitlines())
    return f"{words}{' from the checkpoint of the earlier run' if steps == 2 else ''}"


@event
def flipped_bytes(folder: Path) -> str:
    """64 bytes of a checkpoint are flipped"""
    path, draw = saved(folder) / "optimizer.pt", random.Random(0)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for index in draw.sample(range(middle, middle + 2000), 64):
        content[index] ^= 255
    path.write_bytes(content)
    return resumed(folder)


@event
def missing_optimizer(folder: Path) -> str:
    """a checkpoint without its optimizer state"""
    (saved(folder) / "optimizer.pt").unlink()
    return resumed(folder)


@event
def changed_batch(folder: Path) -> str:
    """another batch size on resume"""
    found = []
    for batch in (8, 2):
        inside = folder / str(batch)
        saved(inside)  # two steps of four rows; then the rest of the epoch
        words = resumed(inside, per_device_train_batch_size=batch, max_steps=NUM_ROWS // batch)
        rows = (inside / "rows-0.txt").read_text().split()
        skipped, repeated = NUM_ROWS - len(set(rows)), len(rows) - len(set(rows))
        found.append(f"from 4 to {batch} rows: {words}; {skipped} of {NUM_ROWS} rows skipped, {repeated} repeated")
    return "; ".join(found)


@event
def token(folder: Path) -> str:
    """a hub token in `training_args.bin`"""
    path = saved(folder, hub_token=SECRET) / "training_args.bin"
    return "in clear text" if SECRET.encode() in path.read_bytes() else "not there"


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@event
def metadata(folder: Path) -> str:
    """a `.metadata` that executes code (FSDP2, sharded)"""
    sharded = "multi_gpu_fsdp --fsdp_state_dict_type SHARDED_STATE_DICT"
    path = saved(folder, sharded) / "pytorch_model_fsdp_0" / ".metadata"
    content = pickle.loads(path.read_bytes())
    content.planner_data = Runs(folder / "ran")
    path.write_bytes(pickle.dumps(content))
    words = resumed(folder, sharded)
    return f"{'it is run' if (folder / 'ran').exists() else 'it is not run'}; {words}"


def main() -> None:
    for name, function in EVENTS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        with TemporaryDirectory() as folder:
            print(f"| {function.__doc__} | {function(Path(folder))} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), json.loads(sys.argv[3]), **json.loads(sys.argv[4]))
    else:
        main()
