r"""SIGKILL at random moments near a save, again and again; every killed run is resumed and must end bit for bit as the
uninterrupted one.

    python tests/distributed/kill_worker.py --mode fsdp-sharded --kills 12 --output found.json

(1) the uninterrupted run: its last weights, and how long a save takes
(2) a kill: the processes of a run report the begin of their saves; at a random moment of a random one, one of them is
    killed and soon after the others, as a launcher does
(3) the run is started again with resume_from_checkpoint=True and ends; its weights are compared

With `--clock` a run is killed several times before it ends, and the clock, and the times of the files that were
written, go an hour back or forth between its starts; each must begin at the newest step that was committed.

`--stock` runs transformers' own classes instead, a mode that ends in `+frozen` freezes a layer; in one that ends in
`+async` files are written, slowly, while training goes on, and a save ends with its commit. `ddp+pipeline` cuts an
embedding model in two; `multi_gpu_3d@8+pipeline` are two pipelines of two stages of which two processes each have half
of every layer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_dist_ext.checkpoints import async_save, manifest
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies import tensors
from hf_dist_ext.strategies.collectives import sharded_on_cpu
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import HSDP, MODES, ZERO, Run
from tests.distributed.tensor_parallel_worker import collate
from tests.tiny_models import around

STEPS, SAVE_EVERY = 10, 2
KILLS_OF_A_RUN, HOUR = 4, 3600.0  # with --clock


def train(report, folder: Path, options: argparse.Namespace, resume: bool = False, clock: float = 0.0) -> str:
    """One process of a run; returns a hash of all weights it ends with. `clock`: how far its clock is off."""
    right = time.time
    time.time = lambda: right() + clock
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1,
    )  # fmt: skip
    # Epochs of 6 steps, of 3 on two or four processes: some saves are in the middle of a later epoch.
    number = 20 if options.copies else 12
    rows = [{"input_ids": (ids := torch.randint(1, 60, (8,))), "labels": ids} for _ in range(number)]
    trainer_class, arguments = (Trainer, TrainingArguments) if options.stock else (DistTrainer, DistTrainingArguments)
    args = arguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVE_EVERY, save_total_limit=2, learning_rate=1e-2,
        per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=not options.zero, logging_steps=1000,
        seed=5,
        **({"frozen_modules": ["layers.0"]} if options.frozen else {}),
        **({"save_async": True} if options.later else {}),
        **({"sharding": "HYBRID_SHARD", "sharding_group_size": 2} if options.copies else {}),
        **({"pipeline_parallel_size": 2, "gradient_cache_chunk_size": 1} if options.pipeline else {}),
    )  # fmt: skip

    class Reporting(trainer_class):
        def create_accelerator_and_postprocess(self):
            with sharded_on_cpu():  # without it the stock class trains DDP on a CPU
                super().create_accelerator_and_postprocess()

        def _save_checkpoint(self, *arguments):
            report("begin")
            super()._save_checkpoint(*arguments)
            if not options.later:
                report("end")

    if options.later:
        make, commit = async_save.make, manifest.commit
        async_save.make = lambda *arguments: (time.sleep(0.1), make(*arguments))
        manifest.commit = lambda *arguments: (commit(*arguments), report("end"))

    class Began(TrainerCallback):
        def on_train_begin(self, args, state, control, **others):
            report(f"from {state.global_step}")

    if options.pipeline:
        embedder, loss = around(AutoModel.from_config(config), pooling="last"), InfoNCELoss(0.1)
        more = {"train_dataset": list(range(number)), "data_collator": collate, "loss": loss}
        trainer = Reporting(embedder, args, callbacks=[Began()], **more)
    else:
        trainer = Reporting(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[Began()])
    trainer.train(resume_from_checkpoint=resume)
    digest = hashlib.sha256()
    if options.pipeline:
        for name, tensor in sorted(trainer.whole_weights().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()
    for parameter in trainer.model.parameters():
        with tensors.whole_under_zero(parameter):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def uninterrupted(mode: str, folder: Path, options: argparse.Namespace) -> tuple[str, float]:
    run, durations, begun = Run(mode, folder, partial(train, folder=folder, options=options)), [], 0.0
    for line in run.lines:
        if line == "begin\n":
            begun = time.perf_counter()
        elif line == "end\n":
            durations.append(time.perf_counter() - begun)
        else:
            digest = line.strip()
    assert run.wait(), run.logs[0].read_text()
    return digest, sorted(durations)[len(durations) // 2]


def killed_and_resumed(
    mode: str, folder: Path, options: argparse.Namespace, seconds: float, draw: random.Random
) -> dict:
    """What a kill left and whether the run ends with the right weights after it."""
    run = Run(mode, folder, partial(train, folder=folder, options=options))
    # A save that goes on beside training has its end for certain before the one after the next begins.
    save, moment = draw.randint(3 if options.later else 2, 4), draw.uniform(-0.1, 1.2) * seconds
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
        "kills": 1,
        "moment": round(moment / seconds, 2),
        "committed": [path.name for path in folders if not manifest.why_incomplete(path)],
        "not_committed": [path.name for path in folders if manifest.why_incomplete(path)],
    }
    resumed, digest = Run(mode, folder, partial(train, folder=folder, options=options, resume=True)), ""
    for line in resumed.lines:
        digest = line.strip()
    if not resumed.wait():
        lines = resumed.logs[0].read_text().strip().splitlines()
        return found | {"error": lines[-1] if lines else "killed"}
    return found | {"digest": digest}


def killed_at_other_times(
    mode: str, folder: Path, options: argparse.Namespace, seconds: float, draw: random.Random, kills: int
) -> dict:
    """The starts of one run that is killed so often, each with another clock, and how its last start ends."""
    starts, clock, newest = [], 0.0, 0
    for number in range(kills + 1):
        clock = draw.choice([hour for hour in (-HOUR, 0.0, HOUR) if hour != clock])
        began = time.time()
        job = partial(train, folder=folder, options=options, resume=newest > 0, clock=clock)
        run, saves, ends, digest = Run(mode, folder, job), draw.randint(1, 2), 0, ""
        start = {"clock": clock, "newest": newest}
        for line in run.lines:
            if line.startswith("from "):
                start["from"] = int(line[5:])
            ends += line == "end\n"
            saves -= line == "begin\n"
            digest = line.strip()
            if number < kills and saves == 0 and line == "begin\n":
                time.sleep(max(draw.uniform(-0.1, 1.2) * seconds, 0.0))
                run.kill(run.pids)
        is_well = run.wait()
        if number == kills or is_well:
            start |= {"digest": digest} if is_well else {"error": run.logs[0].read_text()[-3000:]}
        complete = [path for path in folder.glob("checkpoint-*") if not manifest.why_incomplete(path)]
        committed = max(map(manifest.step_of, complete), default=0)
        newest = max(committed, start.get("from", 0) + SAVE_EVERY * ends)  # also when rotation has deleted it
        start["complete"] = len(complete)
        starts.append(start)
        for path in folder.rglob("*"):
            if path.exists() and path.stat().st_mtime >= began:
                os.utime(path, (began + clock, path.stat().st_mtime + clock))
        if is_well:
            break
    return {"kills": len(starts) - 1, "starts": starts, "digest": starts[-1].get("digest")}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    modes = [mode + frozen + later for mode in MODES | HSDP for frozen in ("", "+frozen") for later in ("", "+async")]
    modes += [mode + frozen for mode in ZERO for frozen in ("", "+frozen")]
    modes += ["ddp+pipeline", "multi_gpu_3d@8+pipeline"]
    parser.add_argument("--mode", choices=modes, nargs="+", required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--output", required=True)
    options = parser.parse_args(words)
    found = {}
    for mode in options.mode:
        draw, options.frozen, options.later = random.Random(options.seed), "+frozen" in mode, "+async" in mode
        options.copies, options.zero, options.pipeline = "hsdp" in mode, "zero" in mode, "pipeline" in mode
        if options.zero:
            import deepspeed  # noqa: F401, once, before the forks
        with TemporaryDirectory() as folder:
            digest, seconds = uninterrupted(mode, Path(folder, "whole"), options)
            kills: list[dict] = []
            while (left := options.kills - sum(kill["kills"] for kill in kills)) > 0:
                run = Path(folder, f"run{len(kills)}")
                if options.clock:
                    most = min(left, KILLS_OF_A_RUN)
                    kills.append(killed_at_other_times(mode, run, options, seconds, draw, most))
                else:
                    kills.append(killed_and_resumed(mode, run, options, seconds, draw))
                shutil.rmtree(run, ignore_errors=True)
        right = sum(kill.get("digest") == digest for kill in kills)
        print(f"{mode}{', stock' if options.stock else ''}: {right} of {len(kills)} resumed bit for bit", flush=True)
        found[mode] = {"digest": digest, "seconds_per_save": seconds, "kills": kills}
    Path(options.output).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
