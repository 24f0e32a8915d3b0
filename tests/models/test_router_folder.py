"""Routers of sentence-transformers: queries and documents through modules of their own, read as two towers."""

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.router_folder import read_routes
from tests.models.test_model_folder import tiny, write_json
from tests.tiny_models import tiny_tokenizer

PROMPTS = {"query": "search : ", "document": "text : "}


def asymmetric(folder, after=(), **routes) -> SentenceTransformer:
    """A query route of a table and a document route of a Bert, saved to `folder`."""
    tiny().backbone.save_pretrained(folder / "backbone")
    tiny_tokenizer().save_pretrained(folder / "backbone")
    torch.manual_seed(0)
    query = [StaticEmbedding(tiny_tokenizer(), embedding_dim=16), Dense(16, 32)]
    document = [Transformer(str(folder / "backbone")), Pooling(32, "cls"), Normalize()]
    router = Router(routes or {"query": query, "document": document}, default_route=None)
    model = SentenceTransformer(modules=[router, *after], device="cpu", prompts=PROMPTS)
    model.default_prompt_name = "query"
    model.save(str(folder / "model"))
    return model


def test_each_route_is_a_model_of_its_own(tmp_path):
    asymmetric(tmp_path, [Normalize()])
    routes = read_routes(tmp_path / "model")
    assert list(routes) == ["query", "document"]
    query, document = routes.values()
    assert query.is_static and [layer.out_features for layer in query.dense] == [32] and query.normalize
    assert not document.is_static and document.pooling == "cls" and document.normalize
    assert query.prompts == document.prompts == PROMPTS and query.default_prompt_name == "query"


@pytest.mark.parametrize(
    ("mappings", "expected"),
    [
        ({"('query', 'text')": "query", "(None, None)": "document"}, ["query", "document"]),
        ({"('query', None)": "document", "(None, 'text')": "query"}, ["document", "query"]),
        ({"(None, 'image')": "document"}, ["query", "document"]),
    ],
)
def test_routes_are_found_as_sentence_transformers_finds_them(tmp_path, mappings, expected):
    asymmetric(tmp_path)
    path = tmp_path / "model" / "router_config.json"
    config = json.loads(path.read_text())
    config["parameters"]["route_mappings"] = mappings
    write_json(path, config)
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")[0]
    tasks = ("query", "document")
    assert [theirs._resolve_route(task, "text") for task in tasks] == expected
    is_static = {"query": True, "document": False}
    read = read_routes(tmp_path / "model")
    assert [read[task].is_static for task in tasks] == [is_static[route] for route in expected]


def test_weights_that_routes_share_are_refused(tmp_path):
    shared = StaticEmbedding(tiny_tokenizer(), embedding_dim=16)
    asymmetric(tmp_path, query=[shared, Dense(16, 8)], document=[shared, Dense(16, 8)])
    with pytest.raises(UsageError, match="share query_0_StaticEmbedding"):
        read_routes(tmp_path / "model")
    asymmetric(tmp_path / "after", [Dense(32, 8)])
    with pytest.raises(UsageError, match="share Dense"):
        read_routes(tmp_path / "after" / "model")


def test_one_route_for_both_or_a_route_for_none_is_refused(tmp_path):
    asymmetric(tmp_path)
    path = tmp_path / "model" / "router_config.json"
    config = json.loads(path.read_text())
    write_json(path, config | {"parameters": {"route_mappings": {"(None, 'text')": "query"}}})
    with pytest.raises(UsageError, match='the same route, "query"'):
        read_routes(tmp_path / "model")
    more = config["structure"] | {"third": config["structure"]["query"]}
    write_json(path, config | {"structure": more})
    with pytest.raises(UsageError, match="the Router's route third"):
        read_routes(tmp_path / "model")
    renamed = {"question": config["structure"]["query"], "answer": config["structure"]["document"]}
    write_json(path, config | {"structure": renamed})
    with pytest.raises(UsageError, match='routes question, answer, and none for the task "query"'):
        read_routes(tmp_path / "model")
