"""The gradient cache over frozen parts: exact, and nothing frozen is encoded twice."""

import datasets
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.formula_device import with_memory
from tests.tiny_models import OF_DUAL, WORDS, dual_encoder, embedding_model, model_config, tiny_tokenizer

ROWS = 12


def texts() -> datasets.Dataset:
    rows = [
        {"query": " ".join(WORDS[i % 7 : i % 7 + 2 + i % 5]), "positive": " ".join(WORDS[(3 * i) % 8 :][: 2 + i % 7])}
        for i in range(ROWS)
    ]
    return datasets.Dataset.from_list(rows)


def frozen_model() -> SentenceTransformer:
    torch.manual_seed(0)
    return embedding_model(model_config("bert"), projection_dim=8).double()


def trained(folder, model, steps: int = 2, **options) -> DistTrainer:
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=ROWS, max_steps=steps, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=1e-2, no_duplicates_in_batch=False,
        max_grad_norm=0.0, **options,
    )  # fmt: skip
    trainer = DistTrainer(
        model, args, train_dataset=texts(), loss=InfoNCELoss(0.1),
        data_collator=ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], max_length=16),
    )  # fmt: skip
    trainer.train()
    return trainer


def encoded_rows(model: SentenceTransformer) -> list[int]:
    """To which every forward of the backbone adds its rows."""
    rows: list[int] = []

    def count(module: nn.Module, arguments: tuple) -> None:
        ends = arguments[0].get("cu_seq_lens_q")  # of rows end to end
        rows.append(len(arguments[0]["input_ids"]) if ends is None else len(ends) - 1)

    model.backbone.register_forward_pre_hook(count)
    return rows


@pytest.mark.parametrize("cut", [{"gradient_cache_chunk_size": 5}, {"gradient_cache_chunk_size": "auto"}])
def test_a_frozen_backbone_is_encoded_once_and_the_projection_learns_as_without_a_cache(tmp_path, cut):
    plain = trained(tmp_path / "plain", frozen_model(), trainable_modules=["projection"])
    model = frozen_model()
    before = model.projection.linear.weight.clone()
    rows = encoded_rows(model)
    cached = trained(tmp_path / "cached", model, trainable_modules=["projection"], **cut)
    assert (model.projection.linear.weight - before).abs().max() > 1e-3
    assert torch.allclose(model.projection.linear.weight, plain.model.projection.linear.weight, rtol=0, atol=1e-12)
    assert sum(rows) == 2 * 2 * ROWS  # steps x columns x rows: no row twice
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (plain, cached)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("modules", [["projection"], None])
def test_no_memory_is_left_for_graphs_that_a_frozen_backbone_does_not_make(tmp_path, modules):
    options = {"gradient_cache_chunk_size": "auto", "gradient_cache_keep_graph": "auto"}
    made = trained(tmp_path, frozen_model(), steps=1, trainable_modules=modules, **options)
    with with_memory(made, tokens=64):
        assert made.chunk_budget.keeps_graphs == made.chunk_budget.has_graphs == (modules is None)
    assert made.step.layout.num_kept == 0


def locked(frozen: str) -> tuple[SentenceTransformer, dict]:
    torch.manual_seed(0)
    model = dual_encoder().double()
    for part in embedder_of(model).parts[frozen]:
        part.requires_grad_(False)
    words = torch.randint(4, 20, (7, 9))
    batch = {
        "query": {"input_ids": words, "attention_mask": torch.ones_like(words)},
        "positive": {"pixel_values": torch.randn(7, 3, 16, 16).double()},
    }
    return model, batch


def score(embeddings: dict[str, torch.Tensor]):
    logits = 10 * embeddings["query"] @ embeddings["positive"].T
    return nn.functional.cross_entropy(logits, torch.arange(len(logits))), {}


@pytest.mark.parametrize("frozen", ["image", "text"])
@pytest.mark.parametrize("keep_graph", [0, 1, 100])
def test_a_frozen_tower_leaves_pass_three_and_gradients_stay_exact(frozen, keep_graph):
    model, batch = locked(frozen)
    embedder = embedder_of(model)
    encode = lambda column, features: embedder.call(model, features, column, OF_DUAL[column])  # noqa: E731
    score({name: encode(name, features) for name, features in batch.items()})[0].backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert wanted and max(gradient.abs().max() for gradient in wanted.values()) > 1e-3
    model.zero_grad()
    calls = {"text": 0, "image": 0}
    for name, (tower, *_) in embedder.parts.items():
        tower.register_forward_pre_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    step = cached_step(
        lay_out(batch, ChunkLimits(max_rows=3), shares_tower=False),
        lambda chunk: encode(chunk.column, chunk.features),
        score,
        keep_graph=keep_graph,
        is_frozen=lambda chunk: chunk.column in embedder.frozen_columns(batch, OF_DUAL),
    )
    other = {"text": "image", "image": "text"}[frozen]
    assert calls[frozen] == 3 and calls[other] == 6 - min(keep_graph, 3)
    assert step.num_forwards == calls["text"] + calls["image"]
    for name, parameter in model.named_parameters():
        if name in wanted:
            assert torch.allclose(parameter.grad, wanted[name], rtol=1e-10, atol=1e-14), name
        else:
            assert parameter.grad is None


def test_a_batch_of_frozen_columns_only_is_refused():
    model, batch = locked("image")
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="nothing that was encoded requires a gradient"):
        cached_step(
            lay_out(batch, ChunkLimits(max_rows=3), shares_tower=False),
            lambda chunk: embedder_of(model).call(model, chunk.features, chunk.column, OF_DUAL[chunk.column]),
            score,
            is_frozen=lambda chunk: True,
        )
