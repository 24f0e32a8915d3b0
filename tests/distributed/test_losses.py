"""Losses of the global batch: on two processes, with uneven batches and accumulation, the weights of one process."""

import json
import os
from functools import partial

import pytest
import torch
from sentence_transformers.multi_vector_encoder import losses as multi_vector
from sentence_transformers.sentence_transformer import losses
from torch import nn

from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss, as_loss
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.tiny_models import tiny_tokenizer
from tests.training.test_sentence_losses import Learnt

BATCH, ROWS, WIDTH = 12, 29, 8  # the last update has fewer rows, and they do not divide


class Words(nn.Module):
    """A vector per text of 5 words; enough layers that a wrong factor shows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, attention_mask=None):
        return self.words(input_ids).mean(dim=1).tanh() + self.layer(self.words(input_ids).sum(dim=1)).tanh()


def batch_of(rows: list[int], columns: int, label: str | None) -> dict:
    draw = [torch.Generator().manual_seed(row) for row in rows]
    texts = torch.stack([torch.randint(1, 40, (columns, 5), generator=generator) for generator in draw], dim=1)
    names = ["query", "positive", "negative", "other"][:columns]
    labels = {
        "class": lambda: torch.tensor([row % 3 for row in rows]),
        "score": lambda: torch.tensor([row * 7 % 5 / 4 for row in rows]),
        "scores": lambda: torch.stack([torch.randn(columns - 1, generator=generator) for generator in draw]),
        "vector": lambda: torch.stack([torch.randn(columns, 3, generator=generator) for generator in draw]),
    }
    batch = {name: {"input_ids": texts[i]} for i, name in enumerate(names)}
    batch["ids"] = {names[-1]: torch.tensor([row % 7 for row in rows])}  # equal ones are on different processes
    return batch | ({"targets": {"label": labels[label]()}} if label else {})


# columns, kind of label, loss
BY_NAME = {
    "CoSENTLoss": (2, "score", {}),
    "MultipleNegativesRankingLoss": (3, None, {}),
    "OnlineContrastiveLoss": (2, "score", {}),
    "AnglELoss": (2, "score", {}),
    "TripletLoss": (3, None, {}),
    "MarginMSELoss": (4, "scores", {}),
    "DistillKLDivLoss": (4, "scores", {}),
    "EmbedDistillLoss": (2, "vector", {"projection_dim": 3}),
    "GISTEmbedLoss": (3, None, {"temperature": 0.1}),
    "siglip": (3, None, {}),
    "MatryoshkaLoss": (2, "score", {"loss": "CoSENTLoss", "matryoshka_dims": [8, 3]}),
    "sum": (3, "score", {}),
    "infonce and siglip": (3, None, {}),
    "an object": (3, None, {}),
    "of one column": (1, "class", {}),
    "of token vectors": (3, None, {}),
}


class Tokens(Words):
    """Up to 5 vectors per text."""

    def forward(self, input_ids, attention_mask=None):
        vectors = self.words(input_ids).tanh() + self.layer(self.words(input_ids)).tanh()
        return {"embeddings": {"vectors": vectors, "mask": torch.arange(5) <= input_ids[:, :1] % 5}}


# As a user makes them, with options that mean something on several processes; the model of the object is not used.
OBJECTS = {
    "an object": partial(Learnt, gather_across_devices=True, mini_batch_size=3),
    "of one column": partial(losses.BatchHardTripletLoss, margin=2.0),
    "of token vectors": partial(
        multi_vector.CachedMultiVectorMultipleNegativesRankingLoss, mini_batch_size=3, gather_across_devices=True
    ),
}


class Guide(nn.Sequential):
    """A frozen model of its own, with what losses ask of one."""

    tokenizer, max_seq_length, encode = tiny_tokenizer(), 24, None

    def __init__(self) -> None:
        torch.manual_seed(9)
        super().__init__(Words())

    def forward(self, features):
        return {"sentence_embedding": self[0](features["input_ids"]).double()}


def made(name: str) -> nn.Module:
    options = BY_NAME[name][2]
    if name == "GISTEmbedLoss":
        options = options | {"guide": Guide(), "tokenizer": Guide.tokenizer, "max_length": 24}
    if name == "sum":
        parts = {"infonce": InfoNCELoss(0.5, learnable_temperature=True), "tuples": made("AnglELoss")}
        return SumOfLosses(parts, {"tuples": 0.3}).double()
    if name == "infonce and siglip":
        parts = {"infonce": InfoNCELoss(0.5, learnable_temperature=True, symmetric=True)}
        return SumOfLosses(parts | {"siglip": SigmoidLoss(bias=-2.0)}, {"siglip": 0.3}).double()
    if name == "siglip":
        return SigmoidLoss(bias=-2.0).double()
    if name in OBJECTS:
        return as_loss(OBJECTS[name](Guide()), Guide())
    return SentenceTransformersLoss(name, WIDTH, **options).double()


def train(folder, processes: int, name: str, chunk: int | None) -> tuple[list[float], list[float]]:
    """Weights after two updates, of two batches and of one, and the losses that were logged."""
    columns, label, _ = BY_NAME[name]
    torch.manual_seed(0)
    model = (Tokens if name == "of token vectors" else Words)().double()
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # the first rank's loss is everyone's
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=BATCH // processes, gradient_accumulation_steps=2, num_train_epochs=1, optim="sgd",
        train_sampling_strategy="sequential", learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0,
        gradient_cache_chunk_size=chunk,
    )  # fmt: skip
    loss = made(name)
    trainer = DistTrainer(
        model, args, train_dataset=list(range(ROWS)), loss=loss,
        data_collator=lambda rows: batch_of(rows, columns, label),
    )  # fmt: skip
    before = {**model.state_dict(), **loss.state_dict()}
    before = {name: weights.clone() for name, weights in before.items()}
    trainer.train()
    after = {**trainer.whole_weights(), **loss.state_dict()}  # the model's on the first rank only
    if trainer.is_world_process_zero():
        assert after.keys() == before.keys()
        assert all((after[name] - before[name]).abs().max() > 1e-6 for name in after), "something was not trained"
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 2
    return [value for name in sorted(after) for value in after[name].flatten().tolist()], logged


def compare(folder, names: list[str], mode: str, processes: int, chunk: int | None = 3) -> None:
    alone = json.loads(Run("single", folder / "one", lambda say: run(folder, 1, names, None)).result())
    several = json.loads(Run(mode, folder / "more", lambda say: run(folder, processes, names, chunk)).result())
    for name in names:
        (ours, our_losses), (theirs, their_losses) = several[name], alone[name]
        error = (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).norm()
        limit = 1e-8 if name == "of token vectors" else 1e-10  # their maxsim adds up in float32
        assert error <= limit * torch.tensor(theirs, dtype=torch.float64).norm(), (name, error)
        assert our_losses == pytest.approx(their_losses, rel=1e-6), name  # Trainer adds losses up in float32


def run(folder, processes: int, names: list[str], chunk: int | None) -> str:
    return json.dumps({name: train(folder / name, processes, name, chunk) for name in names})


def test_losses_by_name_are_of_the_global_batch(tmp_path):
    """In the second update the rows of the first process make one chunk and those of the other one two: DDP orders its
    buckets anew there, and must not do it inside of a forward."""
    names = ["CoSENTLoss", "EmbedDistillLoss", "GISTEmbedLoss", "siglip", "sum", "infonce and siglip", *OBJECTS]
    compare(tmp_path, names, "ddp", 2, chunk=5)


@pytest.mark.slow
@pytest.mark.parametrize("mode, processes", [("ddp", 2), ("ddp-3", 3), ("fsdp-full", 2)])
@pytest.mark.parametrize("chunk", [3, None])
def test_so_are_all_of_them_in_every_mode(tmp_path, mode, processes, chunk):
    compare(tmp_path, list(BY_NAME), mode, processes, chunk)
