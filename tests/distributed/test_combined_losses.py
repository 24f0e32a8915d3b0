"""A loss per source: two processes are one, its parameters train, and a run that was stopped goes on."""

import json
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file

from hf_dist_ext.data.mixture import Mixture, Tagged
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.combined_losses import LossPerSource
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run, slow
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

SIZES, WINDOW = {"pairs": 16, "rated": 24, "classes": 16}, 8
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LABELS = {"rated": "score", "classes": "kind"}


def table(name: str) -> datasets.Dataset:
    words = lambda i, n: " ".join(WORDS[(i * n + k) % len(WORDS)] for k in range(2 + i % n))  # noqa: E731
    rows = [{"query": f"{words(i, 3)} {i}", "positive": words(i, 5)} for i in range(SIZES[name])]
    more = {"rated": lambda i: {"score": i * 7 % 5 / 4}, "classes": lambda i: {"kind": i % 3}}.get(name, lambda i: {})
    return datasets.Dataset.from_list([row | more(i) for i, row in enumerate(rows)])


def losses_of(width: int) -> LossPerSource:
    """With parameters of two sources' own losses and of the default."""
    made = {
        "rated": SentenceTransformersLoss("CoSENTLoss", width, scale=3.0),
        "classes": SentenceTransformersLoss("SoftmaxLoss", width, embedding_dimension=width, num_labels=3),
    }
    return LossPerSource(made, InfoNCELoss(0.5, learnable_temperature=True))


def train(say, folder: Path, processes: int, resume: str | None = None, **options) -> str:
    torch.manual_seed(0)
    model = embedding_model(model_config("bert", **NO_DROPOUT), projection_dim=6).double()
    args = DistTrainingArguments(
        **{
            "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1,
            "per_device_train_batch_size": WINDOW // processes, "num_train_epochs": 2, "learning_rate": 1e-3,
            "lr_scheduler_type": "constant", "gradient_cache_chunk_size": 3, "save_strategy": "no", "seed": 5,
            "per_device_eval_batch_size": WINDOW // processes,
        } | options
    )  # fmt: skip
    tokenizer, tables = tiny_tokenizer(), {name: table(name) for name in SIZES}
    collators = {
        name: ContrastiveCollator(tokenizer, ["query", "positive"], label_column=LABELS.get(name)) for name in SIZES
    }
    torch.manual_seed(1)
    losses = losses_of(6).double()
    trainer = DistTrainer(
        model=model, args=args,
        train_dataset=Mixture(tables, [0.3, 0.4, 0.3]), processing_class=tokenizer, loss=losses,
        eval_dataset={name: Tagged(name, one) for name, one in tables.items()},
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive"]).with_sources(collators),
    )  # fmt: skip
    before = {name: weights.clone() for name, weights in losses.state_dict().items()}
    trainer.train(resume_from_checkpoint=resume)
    figures = trainer.evaluate()
    after = {**trainer.whole_weights(), **losses.state_dict()}
    if not trainer.is_world_process_zero():
        return ""
    assert len(before) > 2 and all((after[name] - before[name]).abs().max() > 1e-5 for name in before), before
    lines = [line for line in trainer.state.log_history if "loss" in line]
    for name in SIZES:
        assert any(f"loss_{name}" in line for line in lines), name
    assert "eval_pairs_mrr@10" in figures and "eval_rated_spearman_cosine" in figures
    assert "eval_classes_mrr@10" in figures and "eval_rated_mrr@10" not in figures
    figures = {name: value for name, value in figures.items() if "@" in name or "cosine" in name}
    lines = [{name: value for name, value in line.items() if name.startswith("loss")} for line in lines]
    return json.dumps([[v for n in sorted(after) for v in after[n].flatten().tolist()], figures, lines])


def result(mode: str, folder: Path, processes: int, **options) -> list:
    target = partial(train, folder=folder, processes=processes, **options)
    return json.loads(Run(mode, folder.with_suffix(".log"), target).result())


@pytest.mark.parametrize(
    "mode, processes, options",
    [("ddp", 2, {}), slow("ddp", 2, {"gradient_accumulation_steps": 2}), slow("fsdp-full", 2, {}),
     slow("single", 1, {"gradient_cache_chunk_size": None})],
)  # fmt: skip
def test_two_processes_are_one(tmp_path, mode, processes, options):
    alone = result("single", tmp_path / "one", 1, **{n: v for n, v in options.items() if "cache" not in n})
    several = result(mode, tmp_path / "more", processes, **options)
    ours, theirs = (torch.tensor(one[0], dtype=torch.float64) for one in (several, alone))
    assert (ours - theirs).norm() <= 1e-10 * theirs.norm()
    assert several[1] == pytest.approx(alone[1], rel=1e-5)


def test_the_log_tells_each_sources_loss(tmp_path):
    """The mean over its batches since the last line; of one batch, the loss of the line."""
    *_, lines = result("ddp", tmp_path / "every", 2)
    *_, (line,) = result("ddp", tmp_path / "together", 2, logging_steps=len(lines))
    for name in SIZES:
        own = [one for one in lines if f"loss_{name}" in one]
        assert own and all(one["loss"] == pytest.approx(one[f"loss_{name}"], abs=1e-4) for one in own)
        assert all(len(one) == 2 for one in own), "a batch is of one source"
        assert line[f"loss_{name}"] == pytest.approx(sum(one["loss"] for one in own) / len(own), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode, processes", [("single", 1), ("ddp", 2)])
def test_a_run_that_was_stopped_goes_on_with_the_parameters_of_all_losses(tmp_path, mode, processes):
    options = {"save_strategy": "steps", "save_steps": 5}
    whole = result(mode, tmp_path / "whole", processes, **options)
    resumed = result(mode, tmp_path / "resumed", processes, resume=str(tmp_path / "whole" / "checkpoint-5"), **options)
    assert whole == resumed
    kept = load_file(tmp_path / "whole" / "checkpoint-5" / "loss.safetensors")
    assert {name.split(".")[1] for name in kept} == {"of_", "of_classes"}, "CoSENT has no parameter"
