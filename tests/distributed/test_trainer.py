"""DistTrainer on one and two processes: equal to Trainer without a loss, collectives of a step counted."""

import collections
import functools
import os
from pathlib import Path

import datasets
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
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

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import look
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


# ---- counts ----


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
            found[name]["units"] = sum(isinstance(module, FSDPModule) for module in trainer.model.modules())
    return found


RUNS = {"single": ("python", 1), "DDP": ("multi_gpu_ddp", 2)}
RUNS |= {"FSDP2": ("multi_gpu_fsdp", 2), "HSDP": ("multi_gpu_hsdp", 4)}


@functools.cache
def stock(run: str) -> dict:
    return look(*RUNS[run], check_stock)


@functools.cache
def counts_of(run: str) -> dict:
    return look(*RUNS[run], check_counts)


@pytest.mark.parametrize("run", ["single", "DDP"])
@pytest.mark.parametrize("kind", ["classification", "causal"])
def test_without_a_loss_it_is_trainer(run, kind):
    found = stock(run)[kind]
    assert found["moved"] > 0.01
    assert found["losses_equal"] and found["weights_equal"] and found["files_equal"]
    assert found["resumed_equal"]


# gloo runs a reduce-scatter as an all-reduce, so both carry that name. Per micro-batch the loss side costs two
# all-gathers (row counts; text hashes), one per column whose rows all ranks read, and one reduce-scatter back. Once
# per update the ranks tell each other whether a loss was not finite.
LOSS_REDUCES = 1
GATHERS_OF_LOSS = 3
GATHERS_OF_GUARD = 1


def test_ddp_reduces_gradients_once_per_bucket_and_step():
    counts = counts_of("DDP")
    assert counts["speed"]["num_chunks"] > 3, "one chunk would prove nothing"
    assert counts["speed"]["gloo:all_reduce"] == 1 + LOSS_REDUCES
    assert counts["speed"]["gloo:all_gather"] == GATHERS_OF_LOSS + GATHERS_OF_GUARD
    assert counts["accumulation"]["gloo:all_reduce"] == 1 + 2 * LOSS_REDUCES


def test_fsdp_gathers_weights_and_reduces_gradients_once_per_unit_and_step():
    counts = counts_of("FSDP2")
    speed, units, norm = counts["speed"], counts["speed"]["units"], 1  # the logged gradient norm is one all-reduce
    assert units == 4 and speed["num_chunks"] > 3  # two layers, the embeddings, the rest
    assert speed["gloo:all_reduce"] == units + LOSS_REDUCES + norm
    assert speed["gloo:all_gather"] == units + GATHERS_OF_LOSS + GATHERS_OF_GUARD
    accumulation = counts["accumulation"]  # two micro-batches: still one reduction and one gather of every unit
    assert accumulation["gloo:all_reduce"] == units + 2 * LOSS_REDUCES + norm
    assert accumulation["gloo:all_gather"] == units + 2 * GATHERS_OF_LOSS + GATHERS_OF_GUARD


def test_fsdp_memory_mode_reduces_every_chunk():
    memory = counts_of("FSDP2")["memory"]
    assert memory["gloo:all_reduce"] == memory["num_chunks"] * memory["units"] + LOSS_REDUCES + 1
    assert memory["gloo:all_gather"] > 2 * counts_of("FSDP2")["speed"]["gloo:all_gather"]


def test_copies_of_groups_reduce_once_per_unit_and_step_too():
    """In a group, and then over the groups: two all-reduces for gloo."""
    counts = counts_of("HSDP")
    speed, memory, units, norm = counts["speed"], counts["memory"], counts["speed"]["units"], 1
    assert units == 4 and speed["num_chunks"] > 3
    assert speed["gloo:all_reduce"] == 2 * units + LOSS_REDUCES + norm
    assert speed["gloo:all_gather"] == units + GATHERS_OF_LOSS + GATHERS_OF_GUARD
    assert counts["accumulation"]["gloo:all_reduce"] == 2 * units + 2 * LOSS_REDUCES + norm
    assert memory["gloo:all_reduce"] == (memory["num_chunks"] + 1) * units + LOSS_REDUCES + norm
