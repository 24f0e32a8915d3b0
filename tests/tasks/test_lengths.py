"""A column's length is the run file's, else the folder's, and never more than the model has positions for."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.tasks.lengths import lengths_of, positions_of

COLUMNS, POSITIONS, OF_TOKENIZER = ["query", "positive", "negative"], 20, 512
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}
FAMILIES = {
    "bert": SIZES,
    "xlm-roberta": SIZES,
    "mpnet": SIZES,
    "deberta-v2": SIZES,
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "vocab_size": 50},
    "opt": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "vocab_size": 50,
            "word_embed_proj_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_the_most_tokens_is_embedded_and_no_longer_one(family):
    config = AutoConfig.for_model(family, max_position_embeddings=POSITIONS, **FAMILIES[family])
    model = AutoModel.from_config(config)
    most = positions_of(model)
    for length, fits in ((most, True), (most + 1, False)):
        ids, mask = torch.full((1, length), 7), torch.ones(1, length, dtype=torch.long)
        try:
            model(input_ids=ids, attention_mask=mask)
        except (RuntimeError, IndexError):
            assert not fits
        else:
            assert fits


def a_model(**options) -> EmbeddingModel:
    return EmbeddingModel.from_config({"model_type": "bert", "max_position_embeddings": POSITIONS, **SIZES}, **options)


@pytest.mark.parametrize("given, lengths", [
    (None, POSITIONS),
    (8, 8),
    ({"query": 8, "positive": 16}, {"query": 8, "positive": 16, "negative": POSITIONS}),
])  # fmt: skip
def test_columns_without_a_length_have_the_models(given, lengths):
    assert lengths_of(a_model(), given, COLUMNS, OF_TOKENIZER) == lengths


def test_columns_without_a_length_have_the_folders_where_others_are_given_one():
    given, folders = {"positive": 16}, a_model(max_length=12)
    assert lengths_of(folders, given, COLUMNS, OF_TOKENIZER) == {"query": 12, "positive": 16, "negative": 12}
    folders.lengths = {"query": 6, "document": 14}
    assert lengths_of(folders, given, COLUMNS, OF_TOKENIZER) == {"query": 6, "positive": 16, "negative": 14}
    assert lengths_of(folders, {"query": 8}, COLUMNS, OF_TOKENIZER) == {"query": 8, "positive": 14, "negative": 14}


def test_a_folders_length_that_is_too_long_is_cut():
    assert lengths_of(a_model(max_length=OF_TOKENIZER), None, COLUMNS, OF_TOKENIZER) == POSITIONS
    assert lengths_of(a_model(max_length=12), None, COLUMNS, OF_TOKENIZER) == 12
    assert lengths_of(a_model(), None, COLUMNS, 16) is None  # the tokenizer's own


def test_a_model_without_a_table_of_positions_has_no_limit():
    config = {**SIZES, "model_type": "llama", "max_position_embeddings": POSITIONS}
    assert lengths_of(EmbeddingModel.from_config(config), None, COLUMNS, OF_TOKENIZER) is None
    assert lengths_of(EmbeddingModel.from_config(config), 100, COLUMNS, OF_TOKENIZER) == 100


@pytest.mark.parametrize("given", [POSITIONS + 1, {"negative": POSITIONS + 1}])
def test_a_length_that_the_model_cannot_take_is_refused(given):
    with pytest.raises(UsageError, match="max_length=21: the model has positions for 20 tokens"):
        lengths_of(a_model(), given, COLUMNS, OF_TOKENIZER)
