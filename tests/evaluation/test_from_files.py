"""What a run file names, evaluated by sentence-transformers' evaluators: the figures that rows had before."""

import pytest
import torch
from sentence_transformers import SentenceTransformer

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.encoder import dist_encoder
from hf_dist_ext.evaluation.evaluators import named, run_evaluators
from hf_dist_ext.evaluation.from_files import evaluators_of
from hf_dist_ext.strategies.base import Strategy
from tests.evaluation.models import multi_vector_encoder
from tests.retrieval_data import PROMPTS, corpus, save_model, write_beir, write_mteb, write_rows
from tests.training.test_evaluations import ALL, entry, trainer

COLUMNS = ["query", "positive"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_rows(folder)
    return folder


def by_theirs(entries: list[dict], model, **more) -> dict[str, float]:
    given = evaluators_of(read_evaluations(entries), model, COLUMNS, PROMPTS, batch_size=8, **more)
    figures = run_evaluators(given, dist_encoder(model, model, Strategy(), "cpu"))
    figures.pop("sequential_score")
    return named(figures, "eval")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_figures_are_ours(seed, made, tmp_path, monkeypatch):
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda _: manual_seed(seed))
    folder = save_model(tmp_path / "model", normalize=seed < 2)
    monkeypatch.undo()
    entries = [
        entry(made, "sts", name="s", similarity_fn_names=ALL, dims=[5], precisions=["int8"]),
        entry(made, "sts", name="prompted", prompt=None, column="positive"),
        entry(made, "triplet", name="t", similarity_fn_names=ALL, dims=[5]),
        entry(made, "triplet", name="m", margin=0.05, query_prompt="sort "),
        entry(made, "reranking", name="r", at_k=3, dims=[5]),
        entry(made, "reranking", name="other", similarity_fn_names=["dot"], query_column="positive"),
    ]
    ours = trainer(tmp_path / "run", entries, folder).evaluate()
    model = SentenceTransformer(str(folder), device="cpu")
    model.similarity_fn_name = "cosine" if seed < 2 else "dot"
    theirs = by_theirs(entries, model)
    assert len(theirs) > 50 and len(set(theirs.values())) > 30
    for name, figure in theirs.items():  # rounding moves a value from one step of int8 to the next
        assert figure == pytest.approx(ours[name], abs=1e-3 if "int8" in name else 1e-6), name
    assert {name for name in ours if name.startswith(tuple(f"eval_{one['name']}_" for one in entries))} == set(theirs)


def test_token_vectors_are_compared_by_maxsim(made):
    model = multi_vector_encoder()
    found = by_theirs([entry(made, "triplet", name="t"), entry(made, "reranking", name="r")], model)
    assert set(found) == {"eval_t_maxsim_accuracy", "eval_r_map", "eval_r_mrr@10", "eval_r_ndcg@10"}
    with pytest.raises(UsageError, match="correlates no scores of token vectors"):
        by_theirs([entry(made, "sts", name="s")], model)


@pytest.mark.parametrize("kind", ["triplet", "reranking"])
def test_what_sentence_transformers_does_not_quantise_is_refused(kind, made):
    with pytest.raises(UsageError, match='"t": the evaluators of .* quantise nothing'):
        by_theirs([entry(made, kind, name="t", precisions=["int8"])], save_and_load(made))


def save_and_load(folder) -> SentenceTransformer:
    return SentenceTransformer(str(save_model(folder / "model")), device="cpu")


def test_a_task_of_mteb_has_the_main_score_of_mteb(tmp_path):
    mteb = pytest.importorskip("mteb")
    path = write_mteb(tmp_path / "NFCorpus", *corpus())
    entries = [{"type": "mteb", "task": "NFCorpus", "path": str(path)}]
    model = save_and_load(tmp_path)
    found = by_theirs(entries, model)
    (data,) = read_evaluations(entries)
    model.prompts = {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    expected = mteb.evaluate(model, data.task, cache=None, co2_tracker=False).task_results[0].get_score()
    assert found == {"eval_NFCorpus_main_score": pytest.approx(expected, abs=1e-4)} and 0 < expected < 1


def test_a_corpus_has_no_evaluator(tmp_path):
    path = write_beir(tmp_path / "corpus", *corpus())
    with pytest.raises(UsageError, match='"corpus": a corpus is evaluated by hf_dist_ext itself'):
        by_theirs([{"type": "retrieval", "path": str(path)}], save_and_load(tmp_path))
