"""Rank 1 alone has a loss that is not finite in the third of five steps, or embeddings that differ when they are
encoded again: what every rank's weights do."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss, LossOutput
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.test_trainer import SMALL, contrastive_trainer, weights_of

BAD_STEP = 3


class Weights(TrainerCallback):
    def __init__(self):
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args, state, control, model=None, **others):
        self.seen.append(weights_of(model))


class InfiniteOnRankOne(InfoNCELoss):
    """Infinite, with a finite gradient: no reduction carries it to the others."""

    calls, bad_steps = 0, (BAD_STEP,)

    def forward(self, own, everyone=None, row_offset=0, ids=None):
        self.calls += self.training
        found = super().forward(own, everyone, row_offset, ids)
        bad = torch.inf if self.calls in self.bad_steps and rank() == 1 else 0.0
        return LossOutput(found.loss + bad, found.metrics)


class InfiniteClassifier(BertForSequenceClassification):
    """The same, as the model's own loss; the causes of the stock Trainer's NaN are many, one is enough."""

    calls = 0

    def forward(self, **inputs):
        self.calls += self.training
        output = super().forward(**inputs)
        if rank() == 1 and self.calls >= BAD_STEP:
            output.loss = output.loss + torch.inf
        return output


def classifier(folder: Path, **more) -> DistTrainer:
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 60, (10,)), "labels": torch.tensor(i % 2)} for i in range(40)]
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=5, report_to=[], disable_tqdm=True,
        use_cpu=True, remove_unused_columns=False, logging_steps=1, **more,
    )  # fmt: skip
    return DistTrainer(InfiniteClassifier(BertConfig(**SMALL)), args, train_dataset=rows)


def moves(trainer: DistTrainer, ends: bool) -> dict:
    trainer.add_callback(weights := Weights())
    message = ""
    try:
        trainer.train()
    except RunError as error:
        assert ends, error
        message = str(error)
    steps = zip(weights.seen, weights.seen[1:], strict=False)
    return {
        "moved": [not torch.equal(a, b) for a, b in steps],
        "total": trainer.health.guard.total,
        "counted": ["loss" in line for line in trainer.state.log_history if "learning_rate" in line],
        "message": message,
    }


def found_by_ranks(_, folder: Path) -> list[dict]:
    contrastive = contrastive_trainer(folder / "a", max_steps=5, save_strategy="no", logging_steps=1)
    contrastive.loss = InfiniteOnRankOne()
    drifting = contrastive_trainer(folder / "c", max_steps=5, save_strategy="no")
    if rank() == 1:
        calls: list[int] = []
        drifting.model.projection.linear.register_forward_hook(
            lambda module, given, output: calls.append(1) or output * (1 + 0.1 * len(calls)) + 0.1 * len(calls)
        )
    found = {
        "contrastive": moves(contrastive, ends=False),
        "drifting": moves(drifting, ends=True),
        "own loss": moves(classifier(folder / "b", max_nonfinite_steps=2, save_steps=1), ends=True),
    }
    everyone: list = [None, None]
    torch.distributed.all_gather_object(everyone, found)
    return everyone
