"""A model of three outputs per row: those of bge-m3, the same through the cache, and a folder that others read."""

import json
from functools import partial

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize

from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sparse_loss import SparseLoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.encode_once import has_frozen_backbone
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.hybrid_model import HybridEmbeddingModel
from hf_dist_ext.training.checks import check_outputs
from tests.tiny_models import WORDS, model_config, tiny_tokenizer

TEXTS = ["parse a date", "sort the numbers by key sort", "list", "unknown read file into list of lines from text"]
OUTPUTS = {"infonce": "dense", "sparse": "sparse", "late_interaction": "tokens"}


def made(name: str = "xlm-roberta", pooling: str = "cls", **options) -> HybridEmbeddingModel:
    torch.manual_seed(0)
    config = model_config(name, **({} if name == "qwen3" else {"hidden_dropout_prob": 0.0}))
    special = tiny_tokenizer().all_special_ids
    return HybridEmbeddingModel.from_config(config, pooling=pooling, special_ids=special, **options).eval()


def losses() -> SumOfLosses:
    parts = {"infonce": InfoNCELoss(0.1), "sparse": SparseLoss(0.2), "late_interaction": LateInteractionLoss(0.7)}
    return SumOfLosses(parts, {"sparse": 0.3}, OUTPUTS)


@pytest.mark.parametrize("name, side", [("xlm-roberta", "right"), ("qwen3", "left")])
def test_the_three_outputs_are_those_of_bge_m3(name, side):
    """Of one text after another, without padding, by the formulas of its paper."""
    model, tokenizer = made(name, token_dim=6).double(), tiny_tokenizer(side)
    found = model(**tokenizer(TEXTS, padding=True, return_tensors="pt"))
    assert found.vectors.shape == (4, 11, 6) and found.weights.shape == found.terms.shape == (4, 11)
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt")
        states = model.backbone(**{key: ids[key] for key in ("input_ids", "attention_mask")}).last_hidden_state[0]
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)  # rotary angles are float32
        close(found.dense[row], normalize(states[0], dim=0))
        vectors = normalize(model.colbert_linear(states[1:]), dim=1)
        close(found.vectors[row][found.vectors_mask[row]], vectors)
        weights = model.sparse_linear(states).squeeze(1).clamp(min=0)
        expected = {}
        for term, weight in zip(ids["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if term not in tokenizer.all_special_ids:
                expected[term] = max(weight, expected.get(term, 0.0))
        ours = {}
        real = found.terms_mask[row]
        for term, weight in zip(found.terms[row][real].tolist(), found.weights[row][real].tolist(), strict=True):
            ours[term] = max(weight, ours.get(term, 0.0))
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6) and len(ours) == len({*text.split()} - {"unknown"})


@pytest.mark.parametrize("name, side, has_wide", [("xlm-roberta", "right", True), ("qwen3", "left", True)])
def test_cached_gradients_are_those_of_the_full_batch(name, side, has_wide):
    pooling = "last" if name == "qwen3" else "cls"
    model, loss = made(name, pooling, token_dim=6, projection_dim=5).double(), losses()
    words = lambda i, n: " ".join(WORDS[(i * n + k) % len(WORDS)] for k in range(1 + i * n % 8))  # noqa: E731
    batch = ContrastiveCollator(tiny_tokenizer(side), ["query", "positive"])(
        [{"query": words(i, 3), "positive": words(i, 5)} for i in range(9)]
    )
    batch = {column: batch[column] for column in ("query", "positive")}
    plain = loss({column: model(**features).embeddings for column, features in batch.items()}).loss
    trained = {key: p for key, p in model.named_parameters() if "pooler" not in key}
    expected = torch.autograd.grad(plain, list(trained.values()), allow_unused=True)
    seen = {key for key, grad in zip(trained, expected, strict=True) if grad is not None and grad.abs().max() > 1e-6}
    assert {"sparse_linear.bias", "colbert_linear.weight", "projection.weight"} <= seen and len(seen) > 20
    options = {"can_shift": name == "qwen3"}
    wide = lay_out(batch, ChunkLimits(max_rows=7), **options)
    chunked = lay_out(batch, ChunkLimits(max_rows=2), **options)
    step = cached_step(chunked, lambda chunk: model(**chunk.features).embeddings, loss, wide=wide)
    assert step.num_chunks >= 9 and step.loss.item() == pytest.approx(plain.item(), rel=1e-12)
    for (key, parameter), gradient in zip(trained.items(), expected, strict=True):
        if gradient is not None:
            assert (parameter.grad - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-3), key


def test_the_folder_is_a_dense_model_with_the_files_of_bge_m3_beside(tmp_path):
    model, tokenizer = made(token_dim=6), tiny_tokenizer()
    model.save_pretrained(tmp_path / "m3", tokenizer=tokenizer, max_length=24)
    again = HybridEmbeddingModel.from_pretrained(tmp_path / "m3")
    weights = again.state_dict()
    assert weights.keys() == model.state_dict().keys() and again.token_dim == 6
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert again.special_ids == model.special_ids == sorted(tokenizer.all_special_ids) != []
    features = tokenizer(TEXTS, padding=True, return_tensors="pt")
    for one, other in zip(model(**features).to_tuple(), again(**features).to_tuple(), strict=True):
        assert torch.equal(one, other)
    for name, shape in (("sparse_linear", (1, 32)), ("colbert_linear", (6, 32))):
        stored = torch.load(tmp_path / "m3" / f"{name}.pt", weights_only=True)
        assert {key: tuple(value.shape) for key, value in stored.items()} == {"weight": shape, "bias": shape[:1]}
    dense = model(**features).dense.detach()
    served = torch.from_numpy(SentenceTransformer(str(tmp_path / "m3"), device="cpu").encode(TEXTS))
    assert (served - dense).abs().max() <= 1e-6
    assert torch.equal(EmbeddingModel.from_pretrained(tmp_path / "m3")(**features).embeddings, dense)
    kinds = [module["type"].rpartition(".")[2] for module in json.loads((tmp_path / "m3/modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"]


def test_a_plain_encoder_begins_with_new_heads_as_wide_as_it_is(tmp_path):
    EmbeddingModel.from_config(model_config("bert")).backbone.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = HybridEmbeddingModel.from_pretrained(tmp_path, pooling="cls")
    assert model.token_dim == 32 and model.sparse_linear.weight.abs().sum() > 0 and model.pooling == "cls"
    assert "term weights; token vectors of 32 dimensions" in model.describe()


def test_what_it_can_not_be_is_refused(tmp_path):
    made(token_dim=6).save_pretrained(tmp_path, tokenizer=tiny_tokenizer())
    with pytest.raises(UsageError, match="has token vectors of 6 dimensions, not 8. Leave token_dim out"):
        HybridEmbeddingModel.from_pretrained(tmp_path, token_dim=8)
    with pytest.raises(UsageError, match="is not split or cut .in_stages.. Use multi_gpu_fsdp"):
        HybridEmbeddingModel.from_pretrained(tmp_path, in_stages=lambda kind: kind)
    with pytest.raises(UsageError, match="token_dim=0 must be at least 1"):
        made(token_dim=0)
    with pytest.raises(UsageError, match="pools its tokens to the dense one"):
        made(pooling="tokens")
    with pytest.raises(UsageError, match="gives several outputs of a row, and InfoNCELoss does not say which"):
        check_outputs(made(), InfoNCELoss())
    check_outputs(made(), losses())
    model = made(projection_dim=4)
    model.backbone.requires_grad_(False)
    assert not has_frozen_backbone(model), "pooled vectors are not all that the model goes on from"
