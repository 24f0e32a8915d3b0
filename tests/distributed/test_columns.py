"""Columns whose features differ in kind (one more key, images): gradient, loss and metrics of the plain step.

Processes are forked, rows are made from their number alone, and everything is float64.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import LlavaConfig, LlavaModel
from transformers.models.llama import modeling_llama  # noqa: F401, before the forks

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.metrics import retrieval_metrics
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import MODES, Run, gather_everything, needs_deepspeed
from tests.parity.exactness_worker import BATCH, BERT, GradientRecorder, _with_norms_in_its_own_precision, naive_loss
from tests.tiny_models import embed, embedding_model
from tests.tiny_vision_language import IMAGE_TOKEN, TEXT, TOKENS_PER_IMAGE, VISION, BlankPictures

COLUMNS = ("query", "positive", "negative")
WIDTH = 24
LIMIT = 600  # seconds
Batch = dict[str, dict[str, torch.Tensor]]


def words(row: int, column: str) -> list[int]:
    generator = torch.Generator().manual_seed(100 * row + len(column))
    length = int(torch.randint(3, WIDTH + 1, (), generator=generator))
    return torch.randint(1, IMAGE_TOKEN, (length,), generator=generator).tolist()


def text(rows: list[int], column: str, with_images: Callable[[int], bool] = lambda row: False) -> dict:
    lists = [[IMAGE_TOKEN] * TOKENS_PER_IMAGE * with_images(row) + words(row, column) for row in rows]
    width = max(map(len, lists))
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in lists])
    found = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    generators = [torch.Generator().manual_seed(row) for row in rows if with_images(row)]
    if generators:
        found["pixel_values"] = torch.stack([torch.randn(3, 16, 16, generator=g) for g in generators])
        found["num_images"] = [int(with_images(row)) for row in rows]
    return found


def typed(column: str, rows: list[int]) -> Batch:
    """Plain text, and one column that says of every token of which of two types it is."""
    batch = {name: text(rows, name) for name in COLUMNS}
    batch[column]["token_type_ids"] = batch[column]["input_ids"] % 2
    return batch


def pictured(column: str, rows: list[int], every: int = 1) -> Batch:
    """Images in every so many rows of one column; "none": in no row."""
    batch = {name: text(rows, name) for name in COLUMNS}
    return batch if column == "none" else batch | {column: text(rows, column, lambda row: row % every == 0)}


def bert() -> SentenceTransformer:
    return embedding_model(BERT | {"num_hidden_layers": 4})


class LastToken(nn.Module):
    """A vector of the last token of text."""

    pooling = "last"

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone, self.config = backbone, backbone.config

    def forward(self, **features):
        states = self.backbone(**features).last_hidden_state
        return states[torch.arange(len(states)), features["attention_mask"].sum(1) - 1]


def llava(uses_all: bool = True) -> nn.Module:
    vision, language = ({**part, "attention_dropout": 0.0} for part in (VISION, TEXT))
    config = LlavaConfig(vision_config=vision, text_config=language, image_token_index=IMAGE_TOKEN)
    config.vision_feature_layer = -1
    model = LastToken(_with_norms_in_its_own_precision(LlavaModel(config)))
    # LLaVA has no use for it.
    model.backbone.vision_tower.post_layernorm.requires_grad_(not uses_all)
    return model


# model, and per rank (rank r takes number r, modulo their number) how rows become a batch
KINDS = {
    "one more key": (bert, [partial(typed, "positive")]),
    "one more key, elsewhere on each rank": (bert, [partial(typed, "positive"), partial(typed, "negative")]),
    "images": (llava, [partial(pictured, "positive")]),
    "images, elsewhere on each rank": (llava, [partial(pictured, "positive"), partial(pictured, "negative")]),
}
FEW_IMAGES = {
    "in every fifth row": (llava, [partial(pictured, "positive", every=5)]),
    "on the first rank only": (llava, [partial(pictured, "positive"), partial(pictured, "none")]),
    "in one row of the first rank": (llava, [partial(pictured, "positive", every=99), partial(pictured, "none")]),
    "a parameter that no row uses": (
        partial(llava, False),
        [partial(pictured, "positive"), partial(pictured, "none")],
    ),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return (KINDS | FEW_IMAGES)[kind][0]().double()


def collate(kind: str, of_rank: int, rows: list[int]) -> Batch:
    of_ranks = (KINDS | FEW_IMAGES)[kind][1]
    return of_ranks[of_rank % len(of_ranks)](rows)


def without_counts(features: dict) -> dict:
    return {name: value for name, value in features.items() if name != "num_images"}


def plain_step(kind: str, model: nn.Module, processes: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one global batch, and its embeddings."""
    parts = [collate(kind, r, list(range(r * BATCH, (r + 1) * BATCH))) for r in range(processes)]
    encoded = [{name: embed(model, **without_counts(features)) for name, features in part.items()} for part in parts]
    embeddings = {name: torch.cat([of_rank[name] for of_rank in encoded]) for name in COLUMNS}
    return naive_loss(embeddings, 0.1, symmetric=False), embeddings


def trained_and_evaluated(folder: Path, kind: str, processes: int, processor=None) -> dict:
    model, recorder = build(kind), GradientRecorder()
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, max_steps=2,
        optim="sgd", learning_rate=0.0, max_grad_norm=0, save_strategy="no", report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", use_cpu=True, gradient_cache_chunk_size=2,
    )  # fmt: skip
    loss = recorder.loss = InfoNCELoss(temperature=0.1).double()
    rows = list(range(BATCH * processes))
    trainer = DistTrainer(
        model=model, args=args,
        data_collator=lambda rows: collate(kind, rank(), rows), train_dataset=rows, eval_dataset=rows,
        loss=loss, callbacks=[recorder], processing_class=processor,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()

    model = build(kind)
    wanted_loss, embeddings = plain_step(kind, model.eval(), processes)
    metrics = retrieval_metrics(*[embeddings[name].detach() for name in COLUMNS[:2]])
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(plain_step(kind, model.train(), processes)[0], trained, materialize_grads=True)
    wanted = torch.cat([gradient.flatten() for gradient in wanted])
    found = torch.cat([gradient.flatten() for gradient in recorder.steps[-1].values()])
    return {
        "norm": float(wanted.norm()),
        "gradient": float((found - wanted).norm() / wanted.norm()),
        "loss": abs(evaluated["eval_loss"] - float(wanted_loss)),
        "metrics": {name: [evaluated[f"eval_{name}"], value] for name, value in metrics.items()},
    }


def kinds_of(mode: str) -> list[str]:
    """Those that differ with this mode's number of processes; under FSDP every parameter has a use."""
    kinds = [kind for kind, (_, of_ranks) in KINDS.items() if len(of_ranks) <= MODES[mode][0]]
    few = {"single": 0, "ddp": len(FEW_IMAGES), "fsdp-sharded": 3}[mode]
    return [*kinds, *list(FEW_IMAGES)[:few]]


def of_all_kinds(say, folder: Path, mode: str) -> str:
    signal.alarm(LIMIT)  # ends a process that waits for others
    found = {}
    for kind in kinds_of(mode):
        # Under FSDP a rank without images takes part in the gathers by blank ones.
        processor = BlankPictures() if kind in FEW_IMAGES and mode == "fsdp-sharded" else None
        found[kind] = trained_and_evaluated(folder, kind, MODES[mode][0], processor)
    return json.dumps(found)


@functools.cache
def found_of(mode: str) -> dict[str, dict]:
    """By kind: of one group of processes that trains one after another."""
    with TemporaryDirectory() as name:
        folder = Path(name, "run")
        return json.loads(Run(mode, folder, partial(of_all_kinds, folder=folder, mode=mode)).result())


WAYS = [(kind, mode) for mode in ("single", "ddp", "fsdp-sharded") for kind in kinds_of(mode)]


@pytest.mark.parametrize("kind, mode", [way for way in WAYS if way[0] in KINDS])
def test_a_loss_sees_columns_in_the_order_of_the_batch(kind, mode):
    check(found_of(mode)[kind])


@pytest.mark.parametrize("kind, mode", [way for way in WAYS if way[0] in FEW_IMAGES])
def test_a_rank_or_chunk_without_images_trains_with_the_gradient_of_the_whole_batch(kind, mode):
    check(found_of(mode)[kind])


def stepped_under_zero(say, folder: Path, kind: str, processor=None) -> str:
    """Two steps in float32, as ZeRO's master weights are, beside plain ones."""
    signal.alarm(LIMIT)
    # Before any trainer: with ZeRO-3 running, transformers builds models sharded.
    model, wanted, processes, rate = build(kind).float(), build(kind), 2, 0.1
    import deepspeed

    deepspeed_install.shutil.which = lambda name: None  # over gloo, without compiling communication of its own
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=2, optim="sgd", learning_rate=rate,
        lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no", report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", gradient_cache_chunk_size=3,
    )  # fmt: skip
    trainer = DistTrainer(
        model=model, args=args,
        data_collator=lambda rows: collate(kind, rank(), rows), train_dataset=list(range(2 * BATCH)),
        loss=InfoNCELoss(temperature=0.1), processing_class=processor,
    )  # fmt: skip
    gather_everything(trainer)
    trainer.train()
    before = {name: p.detach().clone() for name, p in wanted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in wanted.parameters() if p.requires_grad], lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        plain_step(kind, wanted.train(), processes)[0].backward()
        optimizer.step()
    moved = error = 0.0
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        found = dict(trainer.model.named_parameters())
        for name, parameter in wanted.named_parameters():
            moved += (parameter - before[name]).square().sum().item()
            error += (parameter - found[name].detach()).square().sum().item()
    return json.dumps({"moved": moved**0.5, "error": (error / moved) ** 0.5})


@needs_deepspeed
@pytest.mark.parametrize("kind, mode", [
    ("on the first rank only", "zero1"), pytest.param("on the first rank only", "zero2", marks=pytest.mark.slow),
    ("in one row of the first rank", "zero3"),
])  # fmt: skip
def test_so_it_does_under_zero(kind, mode, tmp_path):
    processor = BlankPictures() if mode == "zero3" else None
    target = partial(stepped_under_zero, folder=tmp_path / "run", kind=kind, processor=processor)
    found = json.loads(Run(mode, tmp_path / "run", target).result())
    assert found["moved"] > 0.1 and found["error"] < 1e-5  # float32


def check(found: dict) -> None:
    assert found["norm"] > 0.1 and found["gradient"] < 1e-10
    assert found["loss"] < 1e-6  # accelerate gathers it in float32
    assert len(found["metrics"]) > 3
    assert all(abs(ours - wanted) < 1e-9 for ours, wanted in found["metrics"].values())
