"""A model with a dense vector, term weights and token vectors per row, trained by a sum of losses: two processes are
one."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sparse_loss import SparseLoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.hybrid_model import HybridEmbeddingModel
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.distributed.test_late_interaction import BATCH, table
from tests.tiny_models import model_config, tiny_tokenizer

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OUTPUTS = {"infonce": "dense", "late": "tokens", "terms": "sparse"}


def loss_of(outputs: dict[str, str] = OUTPUTS) -> SumOfLosses:
    losses = {"infonce": InfoNCELoss(0.3, learnable_temperature=True), "late": LateInteractionLoss(0.7)}
    losses["terms"] = SparseLoss(0.2, queries_per_tile=4)
    return SumOfLosses(losses, {"late": 0.4, "terms": 0.6}, outputs).double()


def train(say, folder: Path, processes: int, chunk: int | None) -> str:
    torch.manual_seed(0)
    tokenizer, loss = tiny_tokenizer(), loss_of()
    model = HybridEmbeddingModel.from_config(
        model_config("bert", **NO_DROPOUT), special_ids=tokenizer.all_special_ids, token_dim=6
    ).double()
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=BATCH // processes, per_device_eval_batch_size=BATCH // processes,
        gradient_accumulation_steps=2, num_train_epochs=1, optim="sgd", train_sampling_strategy="sequential",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, gradient_cache_chunk_size=chunk,
    )  # fmt: skip
    trainer = DistTrainer(
        model, args, train_dataset=table(), eval_dataset=table(2 * BATCH), loss=loss,
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive", "negative"]),
    )  # fmt: skip
    before = {name: weights.clone() for name, weights in {**model.state_dict(), **loss.state_dict()}.items()}
    trainer.train()
    figures = {name: value for name, value in trainer.evaluate().items() if "@" in name}
    after = {**trainer.whole_weights(), **loss.state_dict()}
    if not trainer.is_world_process_zero():
        return ""
    moved = {name for name in before if (after[name] - before[name]).abs().max() > 1e-7}
    assert {"sparse_linear.weight", "colbert_linear.bias"} <= moved and len(moved) > 30, len(moved)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    parts = [[line[f"{name}_{what}"] for name in OUTPUTS for what in ("loss", "accuracy")] for line in lines]
    return json.dumps([[v for n in sorted(after) for v in after[n].flatten().tolist()], parts, figures])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("mode, processes, chunk", [("ddp", 2, 3), slow("ddp-3", 3, 2), slow("fsdp-full", 2, None)])
def test_two_processes_are_one(tmp_path, mode, processes, chunk):
    target = partial(train, folder=tmp_path / "a", processes=1, chunk=None)
    alone = json.loads(Run("single", tmp_path / "one", target).result())
    target = partial(train, folder=tmp_path / "b", processes=processes, chunk=chunk)
    several = json.loads(Run(mode, tmp_path / "more", target).result())
    ours, theirs = (torch.tensor(one[0], dtype=torch.float64) for one in (several, alone))
    assert (ours - theirs).norm() <= 1e-10 * theirs.norm()
    for one, other in zip(several[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert several[2] == pytest.approx(alone[2], rel=1e-5) and 0 < several[2]["eval_mrr@10"] < 1


def test_an_output_that_there_is_not_is_named(tmp_path):
    with pytest.raises(UsageError, match='outputs has "sparse", which is none of the losses: infonce, late, terms'):
        loss_of({"sparse": "dense"})
    batch = {name: torch.zeros(2, 3, dtype=torch.float64) for name in ("query", "positive")}
    with pytest.raises(UsageError, match='gives no output "dense" of a row; it gives one'):
        loss_of()(batch)
    with pytest.raises(UsageError, match='gives no output "tokens" of a row; it gives dense'):
        loss_of()({name: {"dense": torch.randn(2, 3, dtype=torch.float64)} for name in batch})
