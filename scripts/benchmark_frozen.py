"""Projector-only training of a LLaVA: the stock Trainer beside DistTrainer, with and without the feature cache.

    python scripts/benchmark_frozen.py --output outputs/benchmark_frozen             # two CPU cores: some 4 minutes
    python scripts/benchmark_frozen.py --sizes tiny --no_launch

(1) the model is built from a config; image encoder and language model are frozen, the projector trains. The stock
    Trainer gets a model whose `requires_grad` was set by hand, as its users do
(2) contestants take turns; a ratio is the median of the ratios within a turn. The first step of a turn is left out
(3) counted: forward and backward calls of the frozen parts per step, bytes that DDP reduces per step (two real
    processes), bytes of optimizer state and of one checkpoint

Activation checkpointing is on, as in LLaVA's own recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Trainer, TrainerCallback, TrainingArguments

from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer

ROOT = Path(__file__).resolve().parents[1]
IMAGE_TOKEN, TEXT_TOKENS = 5, 16
SIZES = {
    "tiny": {"width": 64, "layers": 2, "heads": 2, "vocabulary": 512, "image": 16, "patch": 4, "batch": 8},
    "mid": {"width": 384, "layers": 6, "heads": 6, "vocabulary": 8192, "image": 112, "patch": 14, "batch": 4},
}
CONTESTANTS = ("Trainer", "DistTrainer", "DistTrainer, feature cache")
ENCODER, LANGUAGE = "model.vision_tower.encoder", "model.language_model"


def build(size: dict[str, int]) -> LlavaForConditionalGeneration:  # (1)
    torch.manual_seed(0)
    common = {
        "hidden_size": size["width"], "intermediate_size": 4 * size["width"], "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
    }  # fmt: skip
    vision = {"model_type": "clip_vision_model", "image_size": size["image"], "patch_size": size["patch"], **common}
    text = {"model_type": "llama", "vocab_size": size["vocabulary"], "max_position_embeddings": 512, **common}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    return LlavaForConditionalGeneration(config)


def rows_of(size: dict[str, int], count: int) -> list[dict[str, torch.Tensor]]:
    tokens = (size["image"] // size["patch"]) ** 2
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        words = torch.randint(6, size["vocabulary"], (TEXT_TOKENS,), generator=generator)
        ids = torch.cat([torch.full((tokens,), IMAGE_TOKEN), words])
        labels = torch.cat([torch.full((tokens,), -100), words])
        pixels = torch.randn(3, size["image"], size["image"], generator=generator)
        rows.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}
        )
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Meter(TrainerCallback):
    """Seconds of every step, and what DDP sends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.reduced = 0
        self.trainer: Any = None

    def on_step_begin(self, args, state, control, **more) -> None:
        wrapped = self.trainer.model_wrapped
        if state.global_step == 0 and hasattr(wrapped, "register_comm_hook"):
            wrapped.register_comm_hook(None, self._reduce)
        self._started = time.perf_counter()

    def on_step_end(self, args, state, control, **more) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)

    def _reduce(self, _, bucket):
        self.reduced += bucket.buffer().nbytes
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / torch.distributed.get_world_size())


def count_calls(model: torch.nn.Module) -> dict[str, int]:
    """Forward and backward calls of the first layer of each frozen part."""
    calls = dict.fromkeys(["encoder forward", "encoder backward", "language forward", "language backward"], 0)
    for part, root in (("encoder", f"{ENCODER}.layers.0"), ("language", f"{LANGUAGE}.layers.0")):
        layer = model.get_submodule(root)
        # Inside the layer: checkpointing runs a layer's own forward again without its hooks.
        inner = next(child for name, child in layer.named_children() if "norm" in name)

        def begin(module, args, part=part):
            calls[f"{part} forward"] += 1

        def end(module, args, output, part=part):
            if output.requires_grad:
                output.register_hook(
                    lambda gradient: calls.__setitem__(f"{part} backward", calls[f"{part} backward"] + 1)
                )

        inner.register_forward_pre_hook(begin)
        inner.register_forward_hook(end)
    return calls


def run(contestant: str, size: dict[str, int], steps: int, folder: Path, save: bool = False) -> dict[str, Any]:
    model = build(size)
    is_ours = contestant != "Trainer"
    options: dict[str, Any] = {"trainable_modules": ["projector"]} if is_ours else {}
    if "cache" in contestant:
        options["frozen_feature_cache"] = str(folder / "features")
    if not is_ours:
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
    calls, meter = count_calls(model), Meter()
    args = (DistTrainingArguments if is_ours else TrainingArguments)(
        output_dir=str(folder / contestant.replace(" ", "_")), per_device_train_batch_size=size["batch"],
        per_device_eval_batch_size=size["batch"], max_steps=steps, save_strategy="steps" if save else "no",
        save_steps=steps, logging_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
        learning_rate=1e-3, dataloader_pin_memory=False,
        gradient_checkpointing=True,  # transformers 5.23 has activation_checkpointing beside it, 5.20 has not
        use_cpu=not torch.cuda.is_available(), **options,
    )  # fmt: skip
    count = size["batch"] * steps * args.world_size
    trainer = (DistTrainer if is_ours else Trainer)(
        model, args, train_dataset=rows_of(size, count), data_collator=collate, callbacks=[meter]
    )
    meter.trainer = trainer
    before = dict(calls)
    # The cache is filled when the loader is made; what a step calls is counted behind it.
    trainer.add_callback(_AtBegin(lambda: before.update(calls)))
    trainer.train()
    state = trainer.optimizer.state.values()
    found: dict[str, Any] = {name: (calls[name] - before[name]) / steps for name in calls}
    found |= {
        "seconds": meter.seconds[1:],
        "reduced_bytes": meter.reduced / steps,
        "optimizer_bytes": sum(t.nbytes for one in state for t in one.values() if isinstance(t, torch.Tensor)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    if save:
        files = [path for path in Path(args.output_dir).rglob("*") if path.is_file() and "checkpoint-" in str(path)]
        found["checkpoint_bytes"] = sum(path.stat().st_size for path in files)
    return found


class _AtBegin(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_train_begin(self, args, state, control, **more) -> None:
        self.act()


def measure(name: str, turns: int, steps: int, folder: Path) -> dict[str, Any]:  # (2)
    size = SIZES[name]
    found = {contestant: run(contestant, size, 2, folder / "saved", save=True) for contestant in CONTESTANTS}
    seconds: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    for turn in range(turns):
        for contestant in CONTESTANTS[turn % 3 :] + CONTESTANTS[: turn % 3]:
            seconds[contestant].append(statistics.median(run(contestant, size, steps, folder)["seconds"]))
    for contestant, entry in found.items():
        ratios = [stock / own for stock, own in zip(seconds["Trainer"], seconds[contestant], strict=True)]
        entry["samples_per_second_over_trainer"] = statistics.median(ratios)
        entry["seconds"] = seconds[contestant]
    return found


def reduced_bytes(name: str, folder: Path) -> dict[str, float]:  # (3)
    output = folder / f"reduced_{name}.json"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / "configs" / "accelerate" / "multi_gpu_ddp.yaml"), "--num_processes", "2", __file__,
        "--sizes", name, "--worker", str(output),
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return json.loads(output.read_text())


def print_table(name: str, found: dict[str, dict[str, Any]]) -> None:
    first = found["Trainer"]
    print(f"\n{name}: {first['parameters']:,} parameters, {first['trainable']:,} train")
    lines = [
        ("image encoder: forwards per step", lambda e: f"{e['encoder forward']:.0f}"),
        ("image encoder: backwards per step", lambda e: f"{e['encoder backward']:.0f}"),
        ("language model: forwards per step", lambda e: f"{e['language forward']:.0f}"),
        ("language model: backwards per step", lambda e: f"{e['language backward']:.0f}"),
        ("bytes reduced per step, 2 processes", lambda e: f"{e['reduced_bytes']:,.0f}"),
        ("optimizer state, bytes", lambda e: f"{e['optimizer_bytes']:,}"),
        ("checkpoint, bytes", lambda e: f"{e['checkpoint_bytes']:,}"),
        ("samples per second, of Trainer's", lambda e: f"{e['samples_per_second_over_trainer']:.2f}"),
    ]
    print(f"{'':<38}" + "".join(f"{contestant:>28}" for contestant in CONTESTANTS))
    for label, cell in lines:
        print(f"{label:<38}" + "".join(f"{cell(found[contestant]):>28}" for contestant in CONTESTANTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn; the first is left out")
    parser.add_argument("--no_launch", action="store_true", help="do not launch two processes to count DDP's bytes")
    parser.add_argument("--output", type=Path, help="write results.json into this folder")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.worker:
            found = {c: run(c, SIZES[options.sizes[0]], 2, folder)["reduced_bytes"] for c in CONTESTANTS}
            if os.environ.get("RANK", "0") == "0":
                options.worker.write_text(json.dumps(found))
            return
        results = {}
        for name in options.sizes:
            found = measure(name, options.turns, options.steps, folder / name)
            if not options.no_launch:
                for contestant, number in reduced_bytes(name, folder).items():
                    found[contestant]["reduced_bytes"] = number
            print_table(name, found)
            results[name] = found
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
