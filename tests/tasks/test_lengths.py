"""A column's length is the run file's, else the folder's, and never more than the model has positions for."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.tasks.lengths import lengths_of, positions_of
from tests.tiny_models import embed, embedding_model, model_config, tiny_tokenizer

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


def a_model(kind: str = "bert", max_length: int | None = None) -> SentenceTransformer:
    tokenizer = tiny_tokenizer(max_length=max_length or OF_TOKENIZER)
    config = {"model_type": kind, "max_position_embeddings": POSITIONS, **SIZES}
    return embedding_model(config, tokenizer=tokenizer)


def test_columns_without_a_length_have_the_models():
    all_alike = dict.fromkeys(COLUMNS, 8)
    assert lengths_of(a_model(), None, COLUMNS) is None
    assert lengths_of(a_model(), 8, COLUMNS) == all_alike
    some = {"query": 8, "positive": 16}
    assert lengths_of(a_model(), some, COLUMNS) == some | {"negative": None}
    model = a_model()
    model[0].query_length, model[0].document_length = 6, 14
    assert lengths_of(model, {"positive": 16}, COLUMNS) == {"query": 6, "positive": 16, "negative": 14}
    assert lengths_of(model, None, COLUMNS) == {"query": 6, "positive": 14, "negative": 14}


@pytest.mark.parametrize("max_length, expected", [(OF_TOKENIZER, POSITIONS), (12, 12)])
def test_a_folders_length_that_is_too_long_is_cut(max_length, expected):
    model = a_model(max_length=max_length)
    lengths_of(model, None, COLUMNS)
    assert model.max_seq_length == expected


def test_a_model_without_a_table_of_positions_has_no_limit():
    assert lengths_of(a_model("llama"), 100, COLUMNS) == dict.fromkeys(COLUMNS, 100)


@pytest.mark.parametrize("given", [POSITIONS + 1, {"negative": POSITIONS + 1}])
def test_a_length_that_the_model_cannot_take_is_refused(given):
    with pytest.raises(UsageError, match="max_length=21: the model has positions for 20 tokens"):
        lengths_of(a_model(), given, COLUMNS)


def test_a_folder_embeds_queries_and_documents_as_a_training_step_does(tmp_path):
    torch.manual_seed(0)
    prompts, lengths = {"query": "search : ", "positive": "text "}, {"query": 6, "positive": 11}
    model = embedding_model(model_config("bert"), projection_dim=16)
    describe(model, lengths, {"query": prompts["query"], "document": prompts["positive"]})
    model.save_pretrained(str(tmp_path))
    served, texts = SentenceTransformer(str(tmp_path), device="cpu"), ["sort", "parse a date " * 5, "read by key"]
    collator = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], prompts, lengths)
    for column, encode in (("query", served.encode_query), ("positive", served.encode_document)):
        with torch.no_grad():
            expected = embed(model, **collator.features(column, texts))
        torch.testing.assert_close(torch.as_tensor(encode(texts)), expected, rtol=0, atol=1e-6)
    assert abs(served.encode_query(texts) - served.encode_document(texts)).max() > 1e-3
