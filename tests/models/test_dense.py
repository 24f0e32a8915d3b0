"""Dense modules of sentence-transformers' folders, one or several, with what they do beside a linear map."""

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.dense import DenseLayer
from hf_dist_ext.models.embedding_model import EmbeddingModel
from tests.models.test_model_folder import TEXTS, embed, tiny
from tests.tiny_models import tiny_tokenizer

CHAINS = {
    "LaBSE": ("cls", [dict(in_features=32, out_features=32, activation_function=nn.Tanh())], True),
    "EmbeddingGemma": (
        "mean",
        [
            dict(in_features=32, out_features=48, bias=False, activation_function=nn.Identity()),
            dict(in_features=48, out_features=32, bias=False, activation_function=nn.Identity()),
        ],
        True,
    ),
    "residuals": (
        "lasttoken",
        [
            dict(in_features=32, out_features=12, activation_function=nn.GELU(), use_residual=True),
            dict(in_features=12, out_features=12, activation_function=nn.PReLU(), use_residual=True),
        ],
        False,
    ),
}


@pytest.fixture(params=CHAINS)
def theirs(request, tmp_path):
    pooling, layers, normalize = CHAINS[request.param]
    tiny().backbone.save_pretrained(tmp_path / "backbone")
    tiny_tokenizer().save_pretrained(tmp_path / "backbone")
    torch.manual_seed(0)
    modules = [Transformer(str(tmp_path / "backbone")), Pooling(32, pooling), *(Dense(**layer) for layer in layers)]
    model = SentenceTransformer(modules=modules + [Normalize()] * normalize, device="cpu")
    model.save(str(tmp_path / "theirs"))
    return tmp_path / "theirs", model.encode(TEXTS, convert_to_tensor=True), len(layers)


def test_we_embed_as_the_folder_says_and_write_it_back(theirs, tmp_path):
    folder, expected, count = theirs
    model = EmbeddingModel.from_pretrained(folder)
    assert expected.std(dim=0).max() > 1e-3 and len(model.dense) == count
    assert (embed(model, tiny_tokenizer()) - expected).abs().max() <= 1e-6

    model.save_pretrained(tmp_path / "ours", tokenizer=tiny_tokenizer())
    served = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert (served.encode(TEXTS, convert_to_tensor=True) - expected).abs().max() <= 1e-6
    for number in range(count):
        name = f"{2 + number}_Dense/model.safetensors"
        before, after = load_file(folder / name), load_file(tmp_path / "ours" / name)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_every_weight_of_the_modules_gets_a_gradient(theirs):
    model = EmbeddingModel.from_pretrained(theirs[0]).train()
    features = tiny_tokenizer()(TEXTS, padding=True, return_tensors="pt")
    (model(**features).embeddings @ torch.arange(model.embedding_dim).float()).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.projection.parameters())


def test_one_linear_map_keeps_its_names_and_several_have_numbers():
    one = EmbeddingModel(tiny().backbone, projection_dim=8, projection_bias=True)
    assert set(one.projection.state_dict()) == {"weight", "bias"}
    two = EmbeddingModel(tiny().backbone, dense=[DenseLayer(32, 8, bias=True), DenseLayer(8, 4)])
    assert set(two.projection.state_dict()) == {"0.weight", "0.bias", "1.weight"} and two.embedding_dim == 4


def test_modules_that_do_not_follow_one_another_are_refused():
    with pytest.raises(UsageError, match="gives 8 dimensions and the next one takes 9"):
        EmbeddingModel(tiny().backbone, dense=[DenseLayer(32, 8), DenseLayer(9, 4)])
    with pytest.raises(UsageError, match="takes 16 dimensions, and the backbone gives 32"):
        EmbeddingModel(tiny().backbone, dense=[DenseLayer(16, 8)])
