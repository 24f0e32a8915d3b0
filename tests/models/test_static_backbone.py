"""Static embeddings: sentence-transformers' StaticEmbedding and model2vec's files, read, embedded and written."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import load_tokenizer
from hf_dist_ext.models.embedding_model import EmbeddingModel
from tests.models.test_model_folder import TEXTS, embed, write_json
from tests.tiny_models import tiny_tokenizer

LONG = [*TEXTS, " ".join(["sort the numbers by key"] * 9), ""]  # one is longer than the tokenizer's limit, one empty


@pytest.fixture
def theirs(tmp_path):
    torch.manual_seed(0)
    modules = [StaticEmbedding(tiny_tokenizer(), embedding_dim=16), Dense(16, 8), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(tmp_path / "theirs"))
    return tmp_path / "theirs", model.encode(LONG, convert_to_tensor=True)


def test_a_folder_is_embedded_and_written_back(theirs, tmp_path):
    folder, expected = theirs
    model, tokenizer = EmbeddingModel.from_pretrained(folder), load_tokenizer(folder)
    assert expected.std(dim=0).max() > 1e-3
    assert (embed(model, tokenizer, LONG) - expected).abs().max() <= 1e-6
    model.save_pretrained(tmp_path / "ours", tokenizer=tokenizer)
    tokenizer.save_pretrained(tmp_path / "ours")  # as Trainer does, after it was used
    served = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert (served.encode(LONG, convert_to_tensor=True) - expected).abs().max() <= 1e-6
    again = EmbeddingModel.from_pretrained(tmp_path / "ours")
    assert (embed(again, load_tokenizer(tmp_path / "ours"), LONG) - expected).abs().max() <= 1e-6


def test_rows_that_tokens_share_and_weights_of_tokens_are_folded(theirs, tmp_path):
    folder, _ = theirs
    table = load_file(folder / "model.safetensors")["embedding.weight"]
    mapping = torch.arange(len(table)).flip(0)
    weights = torch.linspace(0.5, 2, len(table))
    save_file({"embeddings": table, "mapping": mapping, "weights": weights}, folder / "model.safetensors")
    model = EmbeddingModel.from_pretrained(folder)
    assert torch.equal(model.backbone.embedding.weight, table.flip(0) * weights[:, None])
    expected = SentenceTransformer(str(folder), device="cpu").encode(LONG, convert_to_tensor=True)
    assert (embed(model, load_tokenizer(folder), LONG) - expected).abs().max() <= 1e-6


def test_what_is_no_table_is_named(theirs):
    folder, _ = theirs
    with pytest.raises(UsageError, match="the mean of their tokens"):
        EmbeddingModel.from_pretrained(folder, pooling="cls")
    save_file({"other": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match="its weights are other"):
        EmbeddingModel.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="tokenizer.json is missing"):
        load_tokenizer(folder)
    write_json(folder / "modules.json", [{"type": "sentence_transformers.models.BoW", "path": ""}])
    with pytest.raises(UsageError, match="chains BoW"):
        EmbeddingModel.from_pretrained(folder)
