"""A model that is told whether rows are padded embeds them as one that looks for itself."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, masking_utils

from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.packing import ASKS, padding_is_known
from tests.tiny_models import model_config


def batch(lengths: list[int]) -> dict:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 30, mask.shape, generator=torch.Generator().manual_seed(0))
    return {"query": {"input_ids": ids * mask, "attention_mask": mask}}


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "xlm-roberta"])
def test_masks_are_those_of_a_model_that_looks(family, monkeypatch):
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(**model_config(family)), attn_implementation="sdpa").eval()
    made = lay_out(batch([16, 16, 16, 12, 12, 9, 8, 8]), ChunkLimits(max_rows=2)).chunks()
    wanted = [bool(chunk.features["attention_mask"].all()) for chunk in made]
    assert [chunk.is_full for chunk in made] == wanted == [True, False, False, True]
    for chunk in made:
        looked = model(**chunk.features).last_hidden_state
        with padding_is_known(chunk.is_full), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__bool__", None)  # nothing is read
            told = model(**chunk.features).last_hidden_state
        torch.testing.assert_close(told, looked)
    padded = model(**made[1].features).last_hidden_state[1, :12]
    with padding_is_known(True):
        wrong = model(**made[1].features).last_hidden_state[1, :12]
    # it does not look; and a causal model's tokens see nothing behind them
    assert torch.allclose(wrong, padded) == (family == "qwen3")


def test_transformers_looks_again_afterwards():
    before = [getattr(masking_utils, name) for name in ASKS]
    with pytest.raises(KeyError), padding_is_known(False):
        assert [getattr(masking_utils, name) for name in ASKS] != before
        raise KeyError
    assert [getattr(masking_utils, name) for name in ASKS] == before


def test_rows_with_gaps_are_not_known():
    made = batch([6, 6])
    made["query"]["attention_mask"][0, 2] = 0
    assert [chunk.is_full for chunk in lay_out(made, ChunkLimits(max_rows=1)).chunks()] == [None, None]
