r"""SIGKILL at random moments near a save, again and again; every killed run is resumed and must end bit for bit as the
uninterrupted one.

    python tests/distributed/kill_worker.py --mode fsdp-sharded --kills 12 --output found.json

(1) the uninterrupted run: its last weights, and how long a save takes
(2) a kill: the processes of a run report the begin of their saves; at a random moment of a random one, one of them is
    killed and soon after the others, as a launcher does
(3) the run is started again with resume_from_checkpoint=True and ends; its weights are compared

Each run is one process, or two that talk over gloo. They are forked from this one, which has imported everything and
started nothing, so that a kill costs a second and not ten. `--stock` runs transformers' own classes instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_dist_ext import manifest
from hf_dist_ext.trainer import DistTrainer
from hf_dist_ext.training_args import DistTrainingArguments

STEPS, SAVE_EVERY = 10, 2
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
MODES = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp-full": (2, FSDP | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    "fsdp-sharded": (2, FSDP | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}),
}


def train(folder: Path, is_stock: bool, resume: bool, report) -> str:
    """One process of a run; returns a hash of all weights it ends with."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1,
    )  # fmt: skip
    rows = [{"input_ids": (ids := torch.randint(1, 60, (8,))), "labels": ids} for _ in range(24)]
    trainer_class, arguments = (Trainer, TrainingArguments) if is_stock else (DistTrainer, DistTrainingArguments)
    args = arguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVE_EVERY, save_total_limit=2, learning_rate=1e-2,
        per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1000, seed=5,
    )  # fmt: skip

    class Reporting(trainer_class):
        def _save_checkpoint(self, *arguments):
            report("begin")
            super()._save_checkpoint(*arguments)
            report("end")

    trainer = Reporting(LlamaForCausalLM(config), args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


class Run:
    """A started run: process ids, and a pipe through which rank 0 tells of saves and of its end."""

    def __init__(self, mode: str, folder: Path, is_stock: bool, resume: bool = False):
        world_size, environment = MODES[mode]
        self.reader, writer = os.pipe()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.pids = []
        for rank in range(world_size):
            if pid := os.fork():
                self.pids.append(pid)
                continue
            with open(folder.with_suffix(f".{rank}.log"), "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                if world_size > 1:
                    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                    values = (str(rank), str(rank), "2", "2", "127.0.0.1", port)
                    os.environ.update(dict(zip(names, values, strict=True)) | environment)
                said = lambda word, rank=rank: rank == 0 and os.write(writer, f"{word}\n".encode())  # noqa: E731
                said(train(folder, is_stock, resume, said))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        os.close(writer)
        self.lines = os.fdopen(self.reader)

    def wait(self) -> bool:
        """Whether all processes end well; when one does not, the others are ended."""
        left, is_well = set(self.pids), True
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if status and is_well:
                is_well = False
                self.kill(left)
        return is_well

    def kill(self, pids) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def uninterrupted(mode: str, folder: Path, is_stock: bool) -> tuple[str, float]:
    run, durations, begun = Run(mode, folder, is_stock), [], 0.0
    for line in run.lines:
        if line == "begin\n":
            begun = time.perf_counter()
        elif line == "end\n":
            durations.append(time.perf_counter() - begun)
        else:
            digest = line.strip()
    assert run.wait(), folder.with_suffix(".0.log").read_text()
    return digest, sorted(durations)[len(durations) // 2]


def killed_and_resumed(mode: str, folder: Path, is_stock: bool, seconds: float, draw: random.Random) -> dict:
    """What a kill left and whether the run ends with the right weights after it."""
    run, save, moment = Run(mode, folder, is_stock), draw.randint(2, 4), draw.uniform(-0.1, 1.2) * seconds
    for line in run.lines:
        save -= line == "begin\n"
        if save == 0:
            break
    time.sleep(max(moment, 0.0))
    order = draw.sample(run.pids, len(run.pids))
    for pid in order:
        run.kill([pid])
        time.sleep(draw.uniform(0, 0.02))
    run.wait()
    folders = sorted(folder.glob("checkpoint-*"))
    found = {
        "moment": round(moment / seconds, 2),
        "committed": [path.name for path in folders if not manifest.why_incomplete(path)],
        "not_committed": [path.name for path in folders if manifest.why_incomplete(path)],
    }
    resumed, digest = Run(mode, folder, is_stock, resume=True), ""
    for line in resumed.lines:
        digest = line.strip()
    if not resumed.wait():
        lines = folder.with_suffix(".0.log").read_text().strip().splitlines()
        return found | {"error": lines[-1] if lines else "killed"}
    return found | {"digest": digest}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with TemporaryDirectory() as folder:
        digest, seconds = uninterrupted(options.mode, Path(folder, "whole"), options.stock)
        found = {"digest": digest, "seconds_per_save": seconds, "kills": []}
        for number in range(options.kills):
            run = Path(folder, f"run{number}")
            found["kills"].append(killed_and_resumed(options.mode, run, options.stock, seconds, draw))
            shutil.rmtree(run, ignore_errors=True)
    right = sum(kill.get("digest") == digest for kill in found["kills"])
    print(f"{options.mode}{', stock' if options.stock else ''}: {right} of {options.kills} resumed bit for bit")
    Path(options.output).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
