"""An encoder gives what `encode` of its model gives, whatever the arguments, and every rank encodes a share."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.encoder import dist_encoder
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from tests.evaluation.models import multi_vector_encoder, sentence_transformer
from tests.evaluation.test_evaluators import encoder_of, on_all_ranks
from tests.retrieval_data import texts

ROWS = [1, 2, 3, 13]
MODELS = {"vectors": sentence_transformer, "tokens": multi_vector_encoder}
OPTIONS = {
    "vectors": [
        {}, {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"output_value": "token_embeddings"},
        {"precision": "ubinary"}, {"truncate_dim": 5, "normalize_embeddings": True},
        {"prompt": "sort "}, {"prompt_name": "document"},
    ],
    "tokens": [{}, {"convert_to_numpy": True}, {"normalize_embeddings": True}, {"prompt_name": "query"}],
}  # fmt: skip


def encoded(kind: str, model, encoder) -> Iterator[tuple[object, object]]:
    """By the model and by its encoder."""
    for number, options, name in product(ROWS, OPTIONS[kind], ("encode", "encode_query", "encode_document")):
        yield tuple(getattr(one, name)(texts(number, 3), batch_size=2, **options) for one in (model, encoder))
    for row in ("read file", []):
        yield model.encode(row), encoder.encode(row)


def are_equal(one, other) -> bool:
    assert type(one) is type(other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.dtype == other.dtype and one.device == other.device and np.allclose(one, other, atol=1e-10)


def compare(kind: str, model) -> bool:
    pairs = list(encoded(kind, model, encoder_of(model, "ddp" if collectives.world_size() > 1 else "single")))
    assert len(pairs) > 40
    return all(are_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["single", "ddp", "ddp-3"])
def test_it_encodes_as_its_model_on_every_rank(mode, kind, tmp_path):
    assert all(on_all_ranks(mode, tmp_path, partial(compare, kind, MODELS[kind]())))


def count(model) -> list[int]:
    rows = []

    def forward(features, **options):
        rows.append(len(features["input_ids"]))
        assert not model.training and not torch.is_grad_enabled() and not features["input_ids"].is_inference()
        return model(features, **options)

    model.train()
    found = dist_encoder(model, forward, Strategy(), "cpu").encode(texts(13, 3), batch_size=4)
    assert model.training and len(found) == 13
    return rows


def test_every_rank_runs_a_share_of_the_rows_in_equally_many_batches(tmp_path):
    model = sentence_transformer()
    assert on_all_ranks("ddp", tmp_path, partial(count, model)) == [[4, 3], [4, 3]]
    assert on_all_ranks("ddp-3", tmp_path, partial(count, model)) == [[4, 1]] * 3


def raw(model) -> str:
    with pytest.raises(UsageError) as raised:
        encoder_of(model, "ddp").encode(texts(3, 0), output_value=None)
    return str(raised.value)


def test_an_encoder_is_its_model_but_for_sharing(tmp_path):
    model = sentence_transformer()
    encoder = encoder_of(model, "single")
    assert isinstance(encoder, type(model)) and encoder.model_card_data is model.model_card_data
    first, second = model.encode(texts(4, 0)), model.encode(texts(3, 1))
    encoder.similarity_fn_name = "dot"
    assert model.similarity_fn_name == "dot"
    assert torch.equal(encoder.similarity(first, second), model.similarity(first, second))
    assert len(encoder.encode(texts(2, 0), output_value=None)) == 2
    assert all(
        "which processes do not exchange" in words for words in on_all_ranks("ddp", tmp_path, partial(raw, model))
    )
