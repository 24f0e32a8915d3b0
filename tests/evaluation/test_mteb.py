"""Tasks of the package `mteb` while a model trains: their data from folders, their figures those of mteb."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.evaluators import each_of
from hf_dist_ext.evaluation.from_files import evaluators_of
from hf_dist_ext.evaluation.mteb_task import load_task
from hf_dist_ext.run.evaluations import parse_evaluations
from tests.distributed.forked import Run
from tests.evaluation.models import sentence_transformer
from tests.evaluation.test_corpus import trainer
from tests.retrieval_data import corpus, save_model, texts, write_lines, write_mteb

mteb = pytest.importorskip("mteb")
OWN_PROMPTS = {"query_prompt": "search : ", "corpus_prompt": "list of "}


@pytest.fixture
def entries(tmp_path) -> list[dict]:
    """A corpus, pairs with scores and texts with classes, as MTEB has them on the hub."""
    write_mteb(tmp_path / "data" / "NFCorpus", *corpus())
    first, second, draw = texts(30, 7), texts(30, 8), random.Random(0)
    pairs = [{"sentence1": a, "sentence2": b, "score": draw.random() * 5} for a, b in zip(first, second, strict=True)]
    classes = [{"text": text, "label": i % 3} for i, text in enumerate(first)]
    for name, rows in {"STS12": pairs, "Banking77Classification": classes}.items():
        (tmp_path / "data" / name).mkdir()
        for split in ("train", "test"):
            write_lines(tmp_path / "data" / name / f"{split}.jsonl", rows)
    folders = sorted((tmp_path / "data").iterdir())
    return [{"type": "mteb", "task": folder.name, "path": str(folder)} | OWN_PROMPTS for folder in folders]


def of_mteb(entries: list[dict], model: SentenceTransformer) -> dict[str, float]:
    """By mteb alone, through sentence-transformers."""
    found = {}
    for options in parse_evaluations(entries):
        result = mteb.evaluate(model, load_task(options), cache=None, co2_tracker=False)
        found[f"eval_{options.name}_main_score"] = result.task_results[0].get_score()
    return found


def random_states(work) -> list:
    """After `work`, from the same states before it."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    work()
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_the_main_scores_are_those_of_mteb_and_two_processes_have_those_of_one(entries, tmp_path):
    folder = save_model(tmp_path / "model")

    def work(say) -> str:
        return json.dumps(trainer(tmp_path / "two", entries, folder).evaluate())

    # First: mteb uses polars, whose threads a forked process would wait for in vain.
    two = json.loads(Run("ddp", tmp_path / "log", work).result())
    made = trainer(tmp_path / "out", entries, folder)
    evaluated = made.evaluate()
    names = {f"eval_{name}" for one in each_of(made.evaluator) for name in one.figure_names}
    assert names == {name for name in evaluated if "main_score" in name}
    served = SentenceTransformer(str(folder), device="cpu")
    served.prompts = {"query": "search : ", "document": "list of "}
    expected = of_mteb(entries, served)
    assert {name: evaluated[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert {name: two[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected.values()}) == 3 and all(expected.values())
    same = {"type": "retrieval", "path": entries[1]["path"], "name": "own", "ignore_identical_ids": True}
    own = trainer(tmp_path / "own", [same], folder)
    found = own.evaluate()["eval_own_cosine_ndcg@10"]
    assert found == pytest.approx(evaluated["eval_NFCorpus_main_score"], abs=1e-4)
    assert random_states(made.evaluate) == random_states(own.evaluate), "training draws what it would have drawn"
    read = lambda: evaluators_of(read_evaluations(entries), served)  # noqa: E731
    assert random_states(read) == random_states(lambda: None)


@pytest.mark.parametrize("change, words", [
    ({"task": "NFCorpu"}, "mteb has no such task: 'NFCorpu' not found. Did you mean: 'NFCorpus'"),
    ({"task": "CQADupstackRetrieval"}, "mean of 12 with datasets of their own.*CQADupstackAndroidRetrieval"),
    ({"task": "CIRRIT2IRetrieval"}, "is about image and text; only tasks of texts"),
    ({"path": "mteb/nfcorpus"}, "is no folder. Give a clone of mteb/nfcorpus"),
    ({"split": "nowhere"}, 'has the splits test, not "nowhere"'),
    ({"task": "STS12", "path": "../half"}, 'has no split "test"; the task STS12'),
    ({"task": "SciFact", "path": "../STS12"}, "laid out as mteb/scifact"),
])  # fmt: skip
def test_what_mteb_cannot_run_is_refused_before_training(entries, change, words):
    folder = Path(entries[2]["path"])  # of STS12
    (folder.parent / "half").mkdir()
    shutil.copy(folder / "train.jsonl", folder.parent / "half")
    entry = entries[1] | change
    if change.get("path", "").startswith(".."):
        entry["path"] = str(folder / change["path"])
    with pytest.raises(UsageError, match=words):
        evaluators_of(read_evaluations([entry]), sentence_transformer())
