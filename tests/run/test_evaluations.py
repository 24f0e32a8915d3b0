"""The entries of `evaluations` in a run file: strict, as the file itself, and each field documented."""

import dataclasses
import json

import pytest

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.evaluations import TYPES, parse_evaluations
from hf_dist_ext.run.read import load_run
from tests.launching import ROOT

MODEL = {"model_config": {"model_type": "bert"}, "dataset_name": "code-search"}


@pytest.mark.parametrize("entry, words", [
    ({"path": "a/b"}, r"evaluations\[1\] has type=null. Types: retrieval"),
    ({"type": "retrieval"}, "has no path"),
    ({"type": "retrieval", "path": "./nowhere"}, 'path="./nowhere": there is no such file or folder'),
    ({"type": "retrieval", "path": "a/b", "ndcg_at": [1]}, 'has no field "ndcg_at". Closest: "ndcg_at_k"'),
    ({"type": "retrieval", "path": "a/b", "ndcg_at_k": 10}, "ndcg_at_k=10 in .* is an int; it takes a list of int"),
    ({"type": "retrieval", "path": "a/b", "mrr_at_k": [0]}, r"mrr_at_k=\[0\] must be at least 1"),
    ({"type": "retrieval", "path": "a/b", "mrr_at_k": []}, r"mrr_at_k=\[\] must not be empty"),
    ({"type": "retrieval", "path": "a/b", "mrr_at_k": [8, 8]}, r"mrr_at_k=\[8, 8\] names one twice"),
    ({"type": "retrieval", "path": "a/b", "truncate_dim": 0}, "truncate_dim=0 must be at least 1"),
    ({"type": "retrieval", "path": "a/b", "name": "a b"}, 'has name="a b". Give it a name of letters'),
    ({"type": "sts", "path": "a/b", "columns": {"text": "x"}}, 'columns has "text"; type "sts" reads sentence1, sent'),
    ({"type": "triplet", "path": "a/b", "margin": -0.5}, "margin=-0.5 must be at least 0"),
    ({"type": "retrieval", "path": "other/first"}, r'is called "first", and so is evaluations\[0\]'),
])  # fmt: skip
def test_an_entry_that_cannot_be_is_refused(entry, words, tmp_path):
    entries = [{"type": "retrieval", "path": "here/first", "_": "a comment"}, entry]
    with pytest.raises(UsageError, match=words):
        parse_evaluations(entries)
    (tmp_path / "run.json").write_text(json.dumps(MODEL | {"evaluations": entries}))
    with pytest.raises(UsageError, match=words):
        load_run(["--config", str(tmp_path / "run.json")])


@pytest.mark.parametrize("more, words", [
    ({"loss": None}, "evaluations compare embeddings, but loss is null"),
    ({"task": "image-text-to-text"}, 'belongs to task "embedding"'),
])  # fmt: skip
def test_evaluations_are_of_embeddings(more, words, tmp_path):
    entries = [{"type": "retrieval", "path": "a/b"}]
    (tmp_path / "run.json").write_text(json.dumps(MODEL | {"evaluations": entries} | more))
    with pytest.raises(UsageError, match=words):
        load_run(["--config", str(tmp_path / "run.json")])


def test_the_page_lists_every_field():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    for kind, of in TYPES.items():
        assert f'`"{kind}"`' in page
        for field in dataclasses.fields(of):
            assert f"`{field.name}`" in page, field.name


def test_an_evaluation_is_not_called_as_a_dataset_is(tmp_path):
    """Both would log eval_msmarco_mrr@10, where rows of the dataset are held out."""
    fields = {name: value for name, value in MODEL.items() if name != "dataset_name"}
    dataset = {"dataset_name": "a/b", "name": "msmarco"}
    fields |= {"evaluations": [{"type": "triplet", "path": "c/d", "name": "msmarco"}]}
    (tmp_path / "run.json").write_text(json.dumps(fields | {"datasets": [dataset | {"eval_holdout": 10}]}))
    with pytest.raises(UsageError, match='both have the name "msmarco"'):
        load_run(["--config", str(tmp_path / "run.json")])
    (tmp_path / "run.json").write_text(json.dumps(fields | {"datasets": [dataset]}))
    load_run(["--config", str(tmp_path / "run.json")])
