#!/usr/bin/env python
"""What the guard costs per step and per save, as ratios measured side by side in one run.

    python scripts/benchmark_guard.py
    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml scripts/benchmark_guard.py

Two trainers on the same batches take turns, one with the guard and one without, several times; the median of each
counts. The steps are small on purpose: the guard's price does not grow with the model, so its share is largest there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.nonfinite import check_weights
from hf_dist_ext.training.trainer import DistTrainer


def seconds_per_step(limit: int | None, steps: int, width: int, folder: str) -> float:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width, num_hidden_layers=4, num_attention_heads=4, intermediate_size=4 * width, vocab_size=1000
    )
    rows = [{"input_ids": torch.randint(1, 1000, (64,)), "labels": torch.tensor(i % 2)} for i in range(64)]
    args = DistTrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, max_steps=steps, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=10**6, max_nonfinite_steps=limit,
    )  # fmt: skip
    trainer = DistTrainer(BertForSequenceClassification(config), args, train_dataset=rows)
    started = clock()
    trainer.train()
    return (clock() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="The price of the guard, as ratios.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", default="outputs/benchmark_guard")
    options = parser.parse_args()
    found: dict[int | None, list[float]] = {20: [], None: []}
    for _ in range(options.repeats + 1):
        for limit in found:
            found[limit].append(seconds_per_step(limit, options.steps, options.width, options.folder))
    with_guard, without = (statistics.median(times[1:]) for times in found.values())  # the first ones warm up
    weights = torch.nn.ParameterList(torch.randn(1 << 20) for _ in range(32))
    checked = seconds(lambda: check_weights(weights.named_parameters(), "it", torch.device("cpu")))
    saved = seconds(lambda: torch.save(weights.state_dict(), "/dev/null"))
    if rank() == 0:
        per_step = f"{with_guard:.4f} with the guard, {without:.4f} without"
        print(f"seconds per step: {per_step}: ratio {with_guard / without:.3f}")
        print(f"a look at 32 million weights: {checked:.4f} s, {checked / saved:.2f} of torch.save to nowhere")


def seconds(action: Callable[[], None]) -> float:
    started = clock()
    action()
    return clock() - started


def clock() -> float:
    """Without an accelerator the time of this process's own work, which neighbours on the machine do not change."""
    return time.perf_counter() if torch.accelerator.is_available() else time.process_time()


if __name__ == "__main__":
    main()
