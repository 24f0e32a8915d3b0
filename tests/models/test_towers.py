import pytest
import torch

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.towers import TowerModel
from tests.tiny_models import CHECKPOINTING, model_config, tiny_towers

COLUMNS = {"query": "text", "positive": "image", "negative": "image"}


def batch():
    torch.manual_seed(1)
    text = {"input_ids": torch.randint(4, 32, (3, 6)), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    return {"query": text, "positive": {"pixel_values": torch.randn(3, 3, 16, 16)}}


def tiny(family="clip"):
    torch.manual_seed(0)
    return TowerModel(tiny_towers(family), COLUMNS).eval()


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_each_column_goes_through_its_tower_and_every_parameter_is_used(family):
    model, columns = tiny(family), batch()
    text = model.towers["text"](**columns["query"])
    image = model.towers["image"](**columns["positive"])
    text, image = (text[0], image[0]) if family == "clip" else (text.pooler_output, image.pooler_output)
    queries, images = (model(column=name, **columns[name]).embeddings for name in ("query", "positive"))
    torch.testing.assert_close(queries, text / text.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(images, image / image.norm(dim=-1, keepdim=True))
    assert torch.equal(model(column="negative", **columns["positive"]).embeddings, images)

    (queries @ images.T)[0].sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_saved_model_comes_back_bit_identical(tmp_path):
    columns = batch()
    towers = tiny_towers()
    towers["text"] = EmbeddingModel.from_config(model_config("bert"), pooling="cls", projection_dim=8)
    model = TowerModel(towers, COLUMNS).eval()
    model.save_pretrained(tmp_path)
    reloaded = TowerModel.from_pretrained(tmp_path)
    assert reloaded.column_to_tower == COLUMNS and reloaded.state_dict().keys() == model.state_dict().keys()
    for name, features in columns.items():
        expected = model(column=name, **features).embeddings
        assert expected.abs().sum() > 0
        assert torch.equal(reloaded(column=name, **features).embeddings, expected)

    given = {
        key: torch.randn_like(value) if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    model.save_pretrained(tmp_path, state_dict=given)
    assert all(
        torch.equal(value, given[key]) for key, value in TowerModel.from_pretrained(tmp_path).state_dict().items()
    )


def test_activation_checkpointing_reaches_every_tower():
    model = tiny().train()
    getattr(model, f"{CHECKPOINTING}_enable")(**{f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}})
    assert all(getattr(tower, f"is_{CHECKPOINTING}") for tower in model.towers.values())
    model(column="positive", **batch()["positive"]).embeddings[:, 0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.towers["image"].parameters())
    getattr(model, f"{CHECKPOINTING}_disable")()
    assert not any(getattr(tower, f"is_{CHECKPOINTING}") for tower in model.towers.values())


def test_what_has_no_tower_is_named(tmp_path):
    with pytest.raises(UsageError, match='"sound"; there are .*text.*image'):
        TowerModel(tiny_towers(), {"query": "sound"})
    with pytest.raises(UsageError, match='no tower for column "title"'):
        tiny()(column="title", **batch()["query"])
    with pytest.raises(UsageError, match="no towers.json"):
        TowerModel.from_pretrained(tmp_path)
    model = tiny()
    model.save_pretrained(tmp_path)
    (tmp_path / "image" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="image. cannot be loaded"):
        TowerModel.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match='every weight of the tower "text"'):
        model.save_pretrained(tmp_path, state_dict={})
