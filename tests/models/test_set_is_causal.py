"""What is set in a model that embeds, and what its folder says of it."""

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from hf_dist_ext import set_is_causal
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import build_backbone, parse_config
from tests.tiny_models import embedding_model, model_config, tiny_tokenizer

STABLELM = {"model_type": "stablelm", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 64}  # fmt: skip


def first_tokens(model: SentenceTransformer) -> torch.Tensor:
    texts = ["read a file", "read a date", "read a date sort by key"]
    states = model.encode(texts, output_value="token_embeddings", batch_size=3)
    return torch.stack([of_text[0] for of_text in states])


def test_a_decoder_sees_both_ways_and_so_does_its_folder(tmp_path):
    torch.manual_seed(0)
    build_backbone(parse_config(model_config("qwen3"))).save_pretrained(tmp_path / "decoder")
    tiny_tokenizer().save_pretrained(tmp_path / "decoder")
    transformer = Transformer(str(tmp_path / "decoder"))
    model = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")
    causal = first_tokens(model)
    assert causal.allclose(causal[:1], atol=1e-6)
    is_training = [module.training for module in model.modules()]
    set_is_causal(model, False)
    assert [module.training for module in model.modules()] == is_training
    both = first_tokens(model)
    assert (both[1:] - both[:1]).abs().amax(dim=1).min() > 1e-3
    model.save_pretrained(str(tmp_path / "trained"))
    torch.testing.assert_close(first_tokens(SentenceTransformer(str(tmp_path / "trained"), device="cpu")), both)
    set_is_causal(model, True)
    torch.testing.assert_close(first_tokens(model), causal)


@pytest.mark.parametrize("config, is_causal, words", [
    (STABLELM, False, "is_causal=false, and StableLmModel .* hides the tokens after"),  # without padding
    (model_config("bert"), True, "is_causal=true, and BertModel .* sees the tokens after"),  # with padding
])  # fmt: skip
def test_a_family_that_does_not_heed_it_is_refused(config, is_causal, words):
    model = embedding_model(config)
    before = json.loads(model.backbone.model.config.to_json_string())
    with pytest.raises(UsageError, match=words):
        set_is_causal(model, is_causal)
    assert getattr(model.backbone.model.config, "is_causal", None) == before.get("is_causal")
    with pytest.raises(UsageError, match="this one has none inside"):
        set_is_causal(torch.nn.Linear(1, 1), is_causal)
