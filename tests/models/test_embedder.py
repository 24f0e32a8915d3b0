"""What a trainer asks of a model of sentence-transformers is what the model itself gives."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import nn

from hf_dist_ext.data.sentence_collator import SentenceCollator
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import embedder_of
from tests.sentence_models import bert, picture_model, routed_model, static_model, text_model
from tests.tiny_models import tiny_tokenizer

TEXTS = ["parse a date", "search", "read file into list of lines : sort the numbers by key", "text text"]


def gradients(model: nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0), dtype=embeddings.dtype)
    model.zero_grad()
    (embeddings * weights).sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert found.abs().max() > 0
    return found


def chunk_of(features: dict, **limits):
    chunked = lay_out({"query": features}, ChunkLimits(**limits))
    (chunk,) = chunked.chunks()
    return chunked, chunk


def in_order(chunked, chunk, embeddings: torch.Tensor) -> torch.Tensor:
    return chunked.to_columns([embeddings], [chunk])["query"]


@pytest.mark.parametrize("mode", [*Pooling.POOLING_MODES, ("mean", "cls")], ids=str)
def test_rows_end_to_end_have_the_embeddings_and_gradients_of_padded_ones(tmp_path, mode):
    first = bert(tmp_path)
    pooling = Pooling(32, mode)
    modules = [first, pooling, Dense(pooling.get_embedding_dimension(), 8), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu").double().eval()
    embedder, features = embedder_of(model), model.preprocess(TEXTS)
    assert embedder.why_padded is None and not embedder.takes_column
    expected = model(dict(features))["sentence_embedding"]
    wanted = gradients(model, expected)
    chunked, chunk = chunk_of({k: v for k, v in features.items() if isinstance(v, torch.Tensor)}, packs=True)
    assert "packed_rows" in chunk.features
    found = in_order(chunked, chunk, embedder.call(model, chunk.features))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(model, found), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packs", [True, False])
def test_static_embeddings_are_those_of_the_model(packs):
    model = SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=4), Normalize()]).double()
    embedder, features = embedder_of(model), model.preprocess(TEXTS)
    assert features["input_ids"].dim() == 1
    expected = model(dict(features))["sentence_embedding"]
    wanted = gradients(model, expected)
    collate = SentenceCollator(model.preprocess, tokenizer=model.tokenizer)
    batch = collate([{"query": text, "positive": text} for text in TEXTS])
    chunked, chunk = chunk_of(batch["query"], packs=packs)
    found = in_order(chunked, chunk, embedder.call(model, chunk.features))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients(model, found), wanted, rtol=1e-12, atol=1e-14)


def test_the_frozen_modules_that_come_first_are_run_apart_from_the_rest(tmp_path):
    modules = [bert(tmp_path), Pooling(32, "mean"), Dense(32, 8), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu").double().eval()
    assert embedder_of(model).num_frozen is None  # everything trains
    model[0].requires_grad_(False)
    embedder, features = embedder_of(model), model.preprocess(TEXTS)
    expected = model(dict(features))["sentence_embedding"]
    assert embedder.num_frozen == 2 and list(embedder.frozen_modules) == [model[0], model[1]]
    pooled = embedder.call(model, features, stops_at_pooled=True)
    assert pooled.shape == (4, 32) and not pooled.requires_grad
    torch.testing.assert_close(embedder.call(model, {"pooled": pooled}), expected, rtol=0, atol=0)
    torch.testing.assert_close(model(dict(features))["sentence_embedding"], expected, rtol=0, atol=0)
    model[2].requires_grad_(False)
    assert embedder_of(model).num_frozen is None  # nothing trains


def test_columns_whose_constants_a_module_reads_share_no_chunk(tmp_path):
    routed, pictures = routed_model(tmp_path / "routed"), picture_model(tmp_path / "pictures")
    leaves_out = text_model(tmp_path / "text")
    leaves_out[1].include_prompt = False
    for model in (routed, pictures, leaves_out):
        assert embedder_of(model).takes_column and embedder_of(model).why_padded
    embedder, features = embedder_of(routed), routed.preprocess(TEXTS, task="query")
    tensors = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
    of_query, of_document = (
        embedder.call(routed, tensors, column=task, constants={"task": task}) for task in ("query", "document")
    )
    torch.testing.assert_close(of_query, routed(dict(features))["sentence_embedding"])
    routed[0].sub_modules["document"][0].model.embeddings.word_embeddings.weight.data.mul_(2)
    changed = embedder.call(routed, tensors, column="document", constants={"task": "document"})
    assert not torch.allclose(changed, of_document)


def test_a_module_of_another_kind_keeps_rows_padded(tmp_path):
    class Own(Normalize):
        pass

    model = text_model(tmp_path)
    assert embedder_of(model).why_padded is None
    other = SentenceTransformer(modules=[*list(model)[:2], Own()], device="cpu")
    assert "modules" in embedder_of(other).why_padded and embedder_of(other).takes_column
    assert embedder_of(static_model()).why_padded is None
    assert copy.deepcopy(model)[0].model is not model[0].model


def test_a_model_that_peft_has_wrapped_is_refused_with_the_remedy(tmp_path):
    wrapped = get_peft_model(text_model(tmp_path), LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(UsageError, match="PeftModel is around a model of sentence-transformers.*add_adapter"):
        embedder_of(wrapped)
