"""Late interaction in a trainer: two processes are one, dropout is replayed, and a run that was stopped goes on."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run, slow
from tests.tiny_models import WORDS, embedding_model, loaded, model_config, tiny_tokenizer

BATCH, ROWS = 12, 29  # the last update has one batch of five rows, which do not divide
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def table(rows: int = ROWS) -> list[dict]:
    """Texts of all lengths, some of them twice, and from none to three negatives."""
    words = lambda i, n: " ".join(WORDS[(i * n + k) % len(WORDS)] for k in range(1 + i * n % 7))  # noqa: E731
    return [
        {"query": words(i, 3), "positive": words(i, 5), "negative": [words(i + k, 2) for k in range(i % 4)]}
        for i in range(rows)
    ]


def trainer_of(
    folder, processes: int, chunk: int | None, dropout: bool = False, padding_side: str = "right", **options
) -> DistTrainer:
    torch.manual_seed(0)
    config = model_config("bert", **({} if dropout else NO_DROPOUT))
    model = embedding_model(config, pooling="tokens", projection_dim=6).double()
    args = DistTrainingArguments(
        **{
            "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1,
            "per_device_train_batch_size": BATCH // processes, "per_device_eval_batch_size": BATCH // processes,
            "gradient_accumulation_steps": 2, "optim": "sgd",
            "num_train_epochs": 1, "train_sampling_strategy": "sequential", "learning_rate": 0.05,
            "lr_scheduler_type": "constant", "max_grad_norm": 0, "gradient_cache_chunk_size": chunk,
            "save_strategy": "no",
        } | options
    )  # fmt: skip
    tokenizer = tiny_tokenizer(padding_side)
    return DistTrainer(
        model=model, args=args, train_dataset=table(), eval_dataset=table(2 * BATCH), processing_class=tokenizer,
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive", "negative"]),
        loss=LateInteractionLoss(temperature=0.7, queries_per_tile=3, documents_per_tile=4),
    )  # fmt: skip


def train(say, folder: Path, processes: int, chunk: int | None, **options) -> str:
    """Weights after two updates, the losses that were logged, and figures of an evaluation."""
    trainer = trainer_of(folder, processes, chunk, **options)
    before = {name: weights.clone() for name, weights in trainer.model.state_dict().items()}
    trainer.train()
    figures = {name: value for name, value in trainer.evaluate().items() if "@" in name or name == "eval_loss"}
    after = trainer.whole_weights()  # on the first rank only
    if not trainer.is_world_process_zero():
        return ""
    moved = {name for name in after if (after[name] - before[name]).abs().max() > 1e-7}
    assert "projection.linear.weight" in moved and len(moved) > 30, len(moved)
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 2 and figures
    return json.dumps([[v for n in sorted(after) for v in after[n].flatten().tolist()], logged, figures])


def compare(folder, mode: str, processes: int, chunk: int | None, **options) -> None:
    alone = json.loads(
        Run("single", folder / "one", partial(train, folder=folder / "a", processes=1, chunk=None)).result()
    )
    several = json.loads(
        Run(
            mode, folder / "more", partial(train, folder=folder / "b", processes=processes, chunk=chunk, **options)
        ).result()
    )
    ours, theirs = (torch.tensor(one[0], dtype=torch.float64) for one in (several, alone))
    assert (ours - theirs).norm() <= 1e-10 * theirs.norm()
    assert several[1] == pytest.approx(alone[1], rel=1e-6)  # Trainer adds losses up in float32
    assert several[2] == pytest.approx(alone[2], rel=1e-5) and several[2]["eval_mrr@10"] < 1


@pytest.mark.parametrize(
    "mode, processes, chunk",
    [("ddp", 2, 3), slow("ddp-3", 3, 2), slow("ddp", 2, None), slow("fsdp-full", 2, 3), slow("fsdp-sharded-3", 3, 2),
     slow("single", 1, 3)],
)  # fmt: skip
def test_two_processes_are_one(tmp_path, mode, processes, chunk):
    compare(tmp_path, mode, processes, chunk)


def stopped(say, folder: Path, processes: int, resume: str | None) -> str:
    """With dropout: the weights at the end of a run, saved in its middle or resumed from there."""
    options = {"save_strategy": "steps", "save_steps": 1, "dropout": True, "seed": 3}
    trainer = trainer_of(folder, processes, 3, **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "end"))
    return "done"


@pytest.mark.parametrize("mode, processes", [("single", 1), slow("ddp", 2), slow("fsdp-sharded", 2)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, mode, processes):
    for name, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-1"))):
        target = partial(stopped, folder=tmp_path / name, processes=processes, resume=resume)
        assert Run(mode, tmp_path / f"{name}-log", target).result() == "done"
    ends = [load_file(tmp_path / name / "end" / "model.safetensors") for name in ("whole", "resumed")]
    assert ends[0].keys() == ends[1].keys() and all(ends[0][key].equal(ends[1][key]) for key in ends[0])
    whole = loaded(tmp_path / "whole" / "end")
    assert isinstance(whole, MultiVectorEncoder) and whole.projection.linear.weight.any()
