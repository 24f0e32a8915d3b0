#!/usr/bin/env python
"""What a save costs: the stock Trainer's, ours without and with the reading back, side by side in one run.

    python scripts/benchmark_checkpoints.py --width 512 --layers 8 --saves 7
    python scripts/benchmark_checkpoints.py --width 512 --layers 8 --saves 7 --during_steps 10

(1) one model on one process, trained one step so that the optimizer has state
(2) in turns, so that all meet the same machine: Trainer's `_save_checkpoint`; ours; ours with a hash that costs
    nothing, which leaves fsync, manifest and rotation; a frozen run's
(3) medians, and their ratios to Trainer's

With `--during_steps`: the seconds of so many training steps, a save before the first of them, stopping training or
beside it (`save_async`), over the seconds of the same steps without a save, all in turns.

The page cache takes a stock save in memory; ours ends when the disk has it. The sync after each stock save, outside of
its time, keeps one's writing from slowing the other's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer


class NoHash:
    """Stands for a hash that costs nothing."""

    def __init__(self, *arguments):
        pass

    def update(self, block) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def make(folder: Path, options: argparse.Namespace, is_stock: bool, **more) -> Trainer:  # (1)
    torch.manual_seed(0)
    width = options.width
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=options.layers,
            num_attention_heads=4, tie_word_embeddings=False,
        )
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    trainer_class, arguments = (Trainer, TrainingArguments) if is_stock else (DistTrainer, DistTrainingArguments)
    args = arguments(
        output_dir=str(folder), max_steps=1, save_strategy="no", save_total_limit=1, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=1, use_cpu=not torch.accelerator.is_available(), **more,
    )  # fmt: skip
    trainer = trainer_class(model, args, train_dataset=rows)
    trainer.train()
    return trainer


def save(trainer: Trainer) -> tuple[float, float]:
    """(seconds, seconds of the processor): on a busy machine the second is what a save costs of its own."""
    trainer.state.global_step += 1
    start, busy = time.perf_counter(), time.process_time()
    trainer._save_checkpoint(trainer.model, None)
    seconds = time.perf_counter() - start, time.process_time() - busy
    os.sync()
    return seconds


def during(folder: Path, options: argparse.Namespace) -> dict:
    """What a save adds to the steps that follow it."""
    trainers = {name: make(folder / name, options, False, save_async=name == "async") for name in ("sync", "async")}
    tokens = torch.randint(1000, (options.rows, 64), device=trainers["sync"].args.device)
    batch = {"input_ids": tokens, "labels": tokens}
    seconds: dict[str, list] = {kind: [] for kind in ("none", "sync", "async")}
    stops: dict[str, list] = {"none": [], "sync": [], "async": []}
    for turn in range(options.saves + 1):
        for kind in ("none", "sync", "async"):
            trainer = trainers["sync" if kind == "none" else kind]
            start = time.perf_counter()
            if kind != "none":
                trainer.state.global_step += 1
                trainer._save_checkpoint(trainer.model, None)
            returned = time.perf_counter() - start
            for _ in range(options.during_steps):
                trainer.training_step(trainer.model, batch)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            taken = time.perf_counter() - start
            trainer.keeper.background.collect(wait=True)
            os.sync()
            if turn:
                seconds[kind].append(taken)
                stops[kind].append(returned)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    ratios = {
        kind: statistics.median(one / none for one, none in zip(seconds[kind], seconds["none"], strict=True))
        for kind in ("sync", "async")
    }
    print(f"{options.during_steps} steps without a save: {medians['none']:.3f} s")
    for kind, ratio in ratios.items():
        stop = statistics.median(stops[kind])
        print(f"with a save, {kind:6}: {medians[kind]:.3f} s, ratio {ratio:.2f}; training stops for {stop:.3f} s")
    ratio = statistics.median(one / other for one, other in zip(stops["async"], stops["sync"], strict=True))
    print(f"the asynchronous save stops training for {ratio:.2f} of the time of the synchronous one")
    return {"seconds": medians, "ratios": ratios, "stops": ratio}


def size_of(folder: Path) -> int:
    newest = max(folder.glob("checkpoint-*"), key=manifest.step_of)
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--during_steps", type=int, help="measure so many training steps with a save beside them")
    parser.add_argument("--rows", type=int, default=4, help="of 64 tokens, per training step")
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary one")
    parser.add_argument("--output", help="also write the figures to this JSON file")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder) as name:
        if options.during_steps:
            found = during(Path(name), options)
            if options.output:
                Path(options.output).write_text(json.dumps(found, indent=1), encoding="utf-8")
            return
        kinds = {"Trainer": (True, {}), "ours": (False, {}), "ours, no hashes": (False, {})}
        kinds["ours, last layer trains"] = (False, {"trainable_modules": [f"layers.{options.layers - 1}"]})
        trainers = {}
        for number, (kind, (is_stock, more)) in enumerate(kinds.items()):
            trainers[kind] = make(Path(name, str(number)), options, is_stock, **more)
        seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for turn in range(options.saves + 1):  # (2)
            for kind, trainer in trainers.items():
                new = NoHash if kind.endswith("no hashes") else hashlib.new
                with mock.patch.object(manifest.hashlib, "new", new):
                    taken = save(trainer)
                if turn:  # the first of each warms up
                    seconds[kind].append(taken)
        medians = {kind: [statistics.median(column) for column in zip(*s, strict=True)] for kind, s in seconds.items()}
        print(f"{'':28}{'MiB':>8}{'seconds':>10}{'ratio':>8}{'processor':>12}{'ratio':>8}")
        found = {}
        for kind, trainer in trainers.items():  # (3)
            size, (wall, busy) = size_of(Path(trainer.args.output_dir)), medians[kind]
            ratios = [one / stock for one, stock in zip(medians[kind], medians["Trainer"], strict=True)]
            found[kind] = {"bytes": size, "seconds": wall, "processor_seconds": busy, "ratios": ratios}
            print(f"{kind:28}{size / 2**20:8.1f}{wall:10.3f}{ratios[0]:8.2f}{busy:12.3f}{ratios[1]:8.2f}")
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
