"""Backbones of every family: built of a configuration or read, without what no embedding depends on."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel

from hf_dist_ext.checkpoints.weights import take
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import parse_config
from tests.tiny_models import EXPERTS_CONFIG, TEXT_CONFIGS, embed, embedding_model, loaded, model_config

T5 = {"model_type": "t5", "vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}


def tiny(config="bert", **options) -> SentenceTransformer:
    torch.manual_seed(0)
    given = model_config(config) if isinstance(config, str) else config
    pooling = "last" if config in ("qwen3", "llama") else "mean"
    return embedding_model(given, **{"pooling": pooling} | options).eval()


def features(padding_side: str = "right") -> dict[str, torch.Tensor]:
    """(3, 7) tokens, the same on either side of the padding."""
    ids = torch.randint(4, 32, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.tensor([7, 5, 3])[:, None]).long()
    if padding_side == "left":
        ids = torch.stack([row.roll(2 * number) for number, row in enumerate(ids)])
        mask = mask.flip(1)
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("config", [*TEXT_CONFIGS, T5], ids=str)
def test_every_parameter_of_every_backbone_gets_a_gradient(config):
    """One without makes DDP fail unless it searches the graph in each step."""
    model = tiny(config, projection_dim=8).train()
    embed(model, **features())[:, 0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert {key.split(".")[0] for key in model.state_dict()} == {"backbone", "projection"}
    assert not any("pooler" in key for key in model.state_dict())


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "bert", "num_hidden_layers": 0}, "model_config: num_hidden_layers=0 must be at least 1"),
    ({"model_type": "t5", "num_layers": -1}, "model_config: num_layers=-1 must"),  # T5's name of it
    ({"model_type": "clip", "text_config": {"hidden_size": 0}}, "model_config: text_config: hidden_size=0 must"),
    (model_config("bert", model_type="brt"), 'model_type="brt".*Did you mean "bert"'),
    (model_config("bert", hiden_size=8), 'no field "hiden_size".*"hidden_size"'),
    (model_config("bert", hidden_size="wide"), "hidden_size.*expected int"),
])  # fmt: skip
def test_a_wrong_configuration_is_named(config, words):
    with pytest.raises(UsageError, match=words):
        parse_config(config)
    with pytest.raises(UsageError, match="model_config cannot be built"):
        embedding_model(model_config("bert", num_attention_heads=5))


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_pooler_in_the_files_is_left_out_without_a_report(tmp_path, model_type, caplog):
    torch.manual_seed(0)
    whole = AutoModel.from_config(AutoConfig.for_model(**model_config(model_type)))
    whole.save_pretrained(tmp_path)
    tiny().tokenizer.save_pretrained(tmp_path)
    assert any("pooler" in key for key in load_file(tmp_path / "model.safetensors"))
    caplog.clear()
    model = loaded(tmp_path)
    assert not any("pooler" in key for key in model.state_dict())
    assert "pooler" not in caplog.text and "UNEXPECTED" not in caplog.text
    # what else is not taken is still said
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"stray.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded(tmp_path)
    assert "stray.weight" in caplog.text and "pooler.dense" not in caplog.text


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_decoder_gives_the_same_whichever_side_the_padding_is_on(model_type):
    model = tiny(model_type)
    right, left = embed(model, **features()), embed(model, **features("left"))
    torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6)
    alone = embed(model, input_ids=features()["input_ids"][1:2, :5], attention_mask=torch.ones(1, 5))
    torch.testing.assert_close(right[1:2], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_gives_float32_embeddings_of_length_one(how):
    model = tiny(projection_dim=8, dtype="bfloat16" if how == "weights" else None)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        embeddings = embed(model, **features())
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(3), rtol=1e-2, atol=0)


def test_experts_keep_their_fast_implementation_and_their_weights(tmp_path):
    model = tiny(EXPERTS_CONFIG, pooling="last")
    assert model[0].model.config._experts_implementation == "grouped_mm"
    model.save_pretrained(str(tmp_path))
    read = loaded(tmp_path).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())


def test_the_encoder_of_an_encoder_decoder_comes_back(tmp_path):
    model = tiny(T5)
    model.save_pretrained(str(tmp_path))
    assert torch.equal(embed(loaded(tmp_path), **features()), embed(model, **features()))


def test_a_model_that_is_nowhere_is_named():
    with pytest.raises(UsageError, match="no-such-owner/no-such-model"):
        loaded("no-such-owner/no-such-model")


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded():
    model = tiny(projection_dim=8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    weights = {key: torch.ones_like(value) for key, value in before.items()}
    weights["stranger"] = weights.pop("projection.linear.weight")
    weights["backbone.model.embeddings.word_embeddings.weight"] = torch.zeros(33, 32)
    with pytest.raises(UsageError, match="checkpoint-7 does not fit") as caught:
        take(model, weights, "checkpoint-7")
    assert "1 missing: projection.linear.weight" in str(caught.value)
    assert "1 surplus: stranger" in str(caught.value)
    assert "word_embeddings.weight (33, 32) instead of (32, 32)" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    take(model, {key: value + 1 for key, value in before.items()}, "checkpoint-8")
    assert all(torch.equal(value, before[key] + 1) for key, value in model.state_dict().items())
