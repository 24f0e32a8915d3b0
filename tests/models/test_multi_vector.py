"""A model of token vectors: the same through the cache on either side of padding, served by MultiVectorEncoder."""

import json

import pytest
import torch
from sentence_transformers import MultiVectorEncoder

from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.multi_vector import real_in_front
from tests.tiny_models import WORDS, model_config, tiny_tokenizer

TEXTS = ["parse a date", "sort the numbers by key", "list", "read file into list of lines from text : search"]
PROMPTS, LENGTHS = {"query": "search : ", "positive": "list of "}, {"query": 7, "positive": 12}


def made(name: str = "bert", **options) -> EmbeddingModel:
    torch.manual_seed(0)
    config = model_config(name, **({} if name == "qwen3" else {"hidden_dropout_prob": 0.0}))
    return EmbeddingModel.from_config(config, pooling="tokens", **options).eval()


def batch_of(padding_side: str, rows: int = 9) -> dict:
    words = lambda i, n: " ".join(WORDS[(i * n + k) % len(WORDS)] for k in range(1 + i * n % 8))  # noqa: E731
    collate = ContrastiveCollator(tiny_tokenizer(padding_side), ["query", "positive"], PROMPTS, LENGTHS)
    batch = collate([{"query": words(i, 3), "positive": words(i, 5)} for i in range(rows)])
    return {name: batch[name] for name in ("query", "positive")}


@pytest.mark.parametrize("name, padding_side", [("bert", "right"), ("qwen3", "left"), ("bert", "left")])
@pytest.mark.parametrize("has_wide", [False, True])
def test_cached_gradients_are_those_of_the_full_batch(name, padding_side, has_wide):
    """Rows padded on the left are narrower in a small chunk than in a wide one, and their tokens stand elsewhere."""
    model, batch, loss = made(name, projection_dim=6).double(), batch_of(padding_side), LateInteractionLoss(0.5)
    plain = loss({column: model(**features).embeddings for column, features in batch.items()}).loss
    trained = dict(model.named_parameters())
    expected = torch.autograd.grad(plain, list(trained.values()), allow_unused=True)
    assert sum(gradient is not None and gradient.abs().max() > 1e-6 for gradient in expected) > 20
    options = {"can_shift": name == "qwen3"}
    wide = lay_out(batch, ChunkLimits(max_rows=7), **options) if has_wide else None
    step = cached_step(
        lay_out(batch, ChunkLimits(max_rows=2), **options),
        lambda chunk: model(**chunk.features).embeddings,
        loss,
        wide=wide,
    )
    assert step.num_chunks >= 9 and step.loss.item() == pytest.approx(plain.item(), rel=1e-12)
    for (key, parameter), gradient in zip(trained.items(), expected, strict=True):
        if gradient is not None:
            assert (parameter.grad - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-3), key


@pytest.mark.parametrize("dim, normalize", [(8, True), (None, False)])
def test_the_folder_is_one_for_multi_vector_encoder(dim, normalize, tmp_path):
    """Prompts, lengths, projection and mask are the same, and its own way of saving is read back."""
    prompts = {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    model = made(projection_dim=dim, normalize=normalize, prompts=prompts, max_length=LENGTHS)
    model.save_pretrained(tmp_path / "ours", tokenizer=tiny_tokenizer())
    served = MultiVectorEncoder(str(tmp_path / "ours"), device="cpu")
    served.save_pretrained(str(tmp_path / "theirs"))
    collate = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], PROMPTS, LENGTHS)
    for folder in ("ours", "theirs"):
        back = EmbeddingModel.from_pretrained(tmp_path / folder)
        assert (back.pooling, back.normalize) == ("tokens", normalize) and back.prompts["document"] == "list of "
        assert back.lengths == {"query": 7, "document": 12}
        for column, encode in (("query", served.encode_query), ("positive", served.encode_document)):
            with torch.no_grad():
                found = back(**collate.features(column, TEXTS))
            rows = [vectors[mask] for vectors, mask in zip(found.vectors, found.mask, strict=True)]
            assert len({len(row) for row in rows}) > 1, "rows of different lengths"
            for row, theirs in zip(rows, encode(TEXTS), strict=True):
                torch.testing.assert_close(row, theirs, rtol=0, atol=1e-6)


def change(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("file, changes, message", [
    ("config_sentence_transformers.json", {"model_type": "ColBERT"}, "was saved by PyLate"),
    ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "expands queries"),
    ("2_MultiVectorMask/config.json", {"skiplist_words": ["."]}, r"leaves out tokens \(skiplist_words\)"),
    ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "has module_input_name="),
    ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "does not work on token_embeddings"),
    ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "chains Transformer -> Dense"),
])  # fmt: skip
def test_a_folder_that_scores_otherwise_is_refused(file, changes, message, tmp_path):
    made(projection_dim=8, max_length=LENGTHS).save_pretrained(tmp_path, tokenizer=tiny_tokenizer())
    change(tmp_path / file, **changes)
    with pytest.raises(UsageError, match=message):
        EmbeddingModel.from_pretrained(tmp_path)


def test_token_vectors_are_pooled_where_another_pooling_is_given(tmp_path):
    made(projection_dim=8).save_pretrained(tmp_path, tokenizer=tiny_tokenizer())
    model = EmbeddingModel.from_pretrained(tmp_path, pooling="mean")
    features = dict(tiny_tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    assert model(**features).embeddings.shape == (4, 8)
    with pytest.raises(UsageError, match=r"must be \(rows, tokens\)"):
        real_in_front(torch.zeros(4, 5, 2), features["attention_mask"])
