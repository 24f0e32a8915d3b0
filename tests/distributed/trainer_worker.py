r"""One process of the trainer tests: every check writes what it found; the tests say what it must be.

    stock     DistTrainer(loss=None) beside Trainer: losses, weights, checkpoint and resume
    evaluation  retrieval metrics of rows spread over the ranks
    resume    a contrastive run stopped at a checkpoint and resumed, beside the uninterrupted one
    counts    collectives of one step, read from torch's profiler

    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml tests/distributed/trainer_worker.py \
        --output found.json
"""

from __future__ import annotations

import argparse
import collections
import json
import os
from pathlib import Path

import datasets
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_dist_ext import launched
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.launching import leave_together
from tests.tiny_models import WORDS, embedding_model, tiny_tokenizer

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=60)


def is_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in parts])


def losses_of(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# ---- stock ----


def stock_model(kind: str) -> tuple[torch.nn.Module, list[dict]]:
    torch.manual_seed(0)
    rows = []
    for i in range(24):
        ids = torch.randint(1, 60, (10,), generator=torch.Generator().manual_seed(i))
        rows.append({"input_ids": ids, "labels": ids if kind == "causal" else torch.tensor(i % 2)})
    if kind == "causal":
        return LlamaForCausalLM(LlamaConfig(**SMALL)), rows
    return BertForSequenceClassification(BertConfig(**SMALL)), rows


def stock_run(classes: tuple, kind: str, folder: Path, resume: str | None = None) -> Trainer:
    trainer_class, arguments_class = classes
    model, rows = stock_model(kind)
    args = arguments_class(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, logging_steps=1, save_steps=5,
        learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = trainer_class(model, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check_stock(folder: Path) -> dict:
    found = {}
    for kind in ("classification", "causal"):
        theirs = stock_run((Trainer, TrainingArguments), kind, folder / f"theirs-{kind}")
        start = weights_of(stock_model(kind)[0])
        ours = stock_run((DistTrainer, DistTrainingArguments), kind, folder / f"ours-{kind}")
        resumed = stock_run(
            (DistTrainer, DistTrainingArguments),
            kind,
            folder / f"ours-{kind}",
            str(folder / f"ours-{kind}/checkpoint-5"),  # epochs are of 3 or of 2 steps
        )
        found[kind] = {
            "moved": (weights_of(theirs.model) - start).norm().item(),
            "losses_equal": losses_of(theirs) == losses_of(ours),
            "weights_equal": torch.equal(weights_of(theirs.model), weights_of(ours.model)),
            "resumed_equal": torch.equal(weights_of(ours.model), weights_of(resumed.model)),
            "files_equal": _files(folder / f"theirs-{kind}") <= _files(folder / f"ours-{kind}"),
        }
    return found


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- resume ----


def pairs(num_rows: int = 40) -> datasets.Dataset:
    draw = torch.Generator().manual_seed(1)
    text = lambda n: " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw))  # noqa: E731
    return datasets.Dataset.from_list(
        [{"query": text(2 + i % 3), "positive": text(4 + i % 7)} for i in range(num_rows)]
    )


def contrastive_trainer(folder: Path, dropout: float = 0.1, **more) -> DistTrainer:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = SMALL | dict(model_type="bert", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    arguments = dict(per_device_train_batch_size=8, max_steps=11, logging_steps=1, save_steps=4) | more
    args = DistTrainingArguments(
        output_dir=str(folder), gradient_cache_chunk_size=3, learning_rate=1e-3, report_to=[], disable_tqdm=True,
        use_cpu=True, seed=3, **arguments,
    )  # fmt: skip
    return DistTrainer(
        model=embedding_model(config, projection_dim=16),
        args=args,
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive"]),
        train_dataset=pairs(),
        eval_dataset=pairs(21),
        processing_class=tokenizer,
        loss=InfoNCELoss(temperature=0.1, learnable_temperature=True),
    )


def check_resume(folder: Path) -> dict:
    whole = contrastive_trainer(folder / "whole")
    start, temperature = weights_of(whole.model), whole.loss.temperature
    whole.train()
    resumed = contrastive_trainer(folder / "whole")
    # Epochs are of 5 or of 3 steps: it is in the middle of the second or of the third one.
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-8"))
    difference = (weights_of(whole.model) - weights_of(resumed.model)).abs().max().item()
    return {
        "moved": (weights_of(whole.model) - start).abs().max().item(),
        "temperature_moved": abs(whole.loss.temperature - temperature),
        "weights_equal": torch.equal(weights_of(whole.model), weights_of(resumed.model)),
        "largest_difference": difference,
        "temperatures_equal": whole.loss.temperature == resumed.loss.temperature,
        "losses_equal": losses_of(whole)[8:] == losses_of(resumed)[8:],
        "files": sorted(_files(folder / "whole" / "checkpoint-8")),
    }


def check_evaluation(folder: Path) -> dict:
    """Retrieval of the untrained model over 21 rows, which no number of ranks divides."""
    trainer = contrastive_trainer(
        folder / "evaluation", max_steps=1, eval_on_start=True, per_device_eval_batch_size=4, save_strategy="no"
    )
    trainer.train()
    first = next(line for line in trainer.state.log_history if "eval_mrr@10" in line)
    return {name: first[name] for name in ("eval_mrr@10", "eval_ndcg@10", "eval_recall@1", "eval_recall@10")}


# ---- counts ----


class StepProfiler(TrainerCallback):
    """Profiles the third step: the first ones build buckets and gather lazily."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 2:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.start()

    def on_pre_optimizer_step(self, args, state, control, **others):
        if state.global_step == 2:
            self.profiler.stop()
            # `profiler.events()` makes objects of ten thousands of operations, seconds for a count of some of them.
            names = [event.name() for event in self.profiler.profiler.kineto_results.events()]
            self.counts = dict(collections.Counter(name for name in names if name.startswith("gloo:")))


def check_counts(folder: Path) -> dict:
    found = {}
    modes = ["speed", "memory"] if is_fsdp() else ["speed"]
    for name, more in [(mode, {"gradient_cache_fsdp": mode}) for mode in modes] + [
        ("accumulation", {"gradient_accumulation_steps": 2, "gradient_cache_fsdp": "speed"})
    ]:
        trainer = contrastive_trainer(
            folder / f"counts-{name}", dropout=0.0, max_steps=3, save_strategy="no", max_grad_norm=0, **more
        )
        trainer.loss = InfoNCELoss()  # no parameter of its own
        trainer.train_dataset = pairs(96)  # whole batches, also in the third step
        trainer.add_callback(profiler := StepProfiler())
        trainer.train()
        chunks = [line["num_chunks"] for line in trainer.state.log_history if "num_chunks" in line]
        found[name] = profiler.counts | {"num_chunks": chunks[-1]}
        if is_fsdp():
            from torch.distributed.fsdp import FSDPModule

            found[name]["units"] = sum(isinstance(module, FSDPModule) for module in trainer.model.modules())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--counts_alone", action="store_true")
    options = parser.parse_args()
    folder = Path(options.folder)
    found: dict = {"world_size": launched.processes()}
    if not options.counts_alone:
        found |= {"resume": check_resume(folder), "evaluation": check_evaluation(folder)}
    if not (options.counts_alone or is_fsdp()):
        found["stock"] = check_stock(folder)
    if launched.processes() > 1:
        found["counts"] = check_counts(folder)
    if rank() == 0:
        Path(options.output).write_text(json.dumps(found, indent=1))
    if launched.processes() > 1:
        leave_together()


if __name__ == "__main__":
    main()
