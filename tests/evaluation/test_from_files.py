"""What a run file names as evaluations are evaluators of sentence-transformers with its data, prompts and views."""

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation as of_vectors
from sentence_transformers.util import dot_score

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.encoder import dist_encoder
from hf_dist_ext.evaluation.evaluators import by_view, headlines_of, is_hidden, named, run_evaluators
from hf_dist_ext.evaluation.from_files import evaluators_of
from hf_dist_ext.strategies.base import Strategy
from tests.evaluation import evaluators
from tests.evaluation.models import multi_vector_encoder
from tests.retrieval_data import PROMPTS, corpus, save_model, write_beir, write_lines, write_rows

COLUMNS = ["query", "positive"]
ALL = ["cosine", "dot", "euclidean", "manhattan"]
NAMES = {
    "sts": ("sentence1", "sentence2", "score"),
    "triplet": ("anchor", "positive", "negative"),
    "reranking": ("query", "positive", "negative"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    save_model(folder / "model")
    write_beir(folder / "corpus", *corpus())
    evaluators.nano_beir(folder / "nano")
    pairs = [{**row, "label": int(row["score"] > 2)} for row in write_rows(folder)["sts"]]
    write_lines(folder / "binary.jsonl", pairs)
    return folder


def entry(made, kind: str, **more) -> dict:
    """Of rows of `made`, whose columns have other names."""
    return {
        "type": kind, "path": str(made / f"{kind}.jsonl"), "columns": {name: f"my_{name}" for name in NAMES[kind]},
    } | more  # fmt: skip


def loaded(made) -> SentenceTransformer:
    return SentenceTransformer(str(made / "model"), device="cpu")


def evaluated(entries: list[dict], model, **more) -> dict[str, float]:
    given = evaluators_of(read_evaluations(entries), model, COLUMNS, PROMPTS, batch_size=8, **more)
    figures = run_evaluators(given, dist_encoder(model, model, Strategy(), "cpu"))
    known = [name for one in given for name in one.figure_names or ()]
    assert set(known) <= figures.keys() and len(set(known)) == len(known)
    figures.pop("sequential_score")
    return named(figures, "eval")


def test_figures_are_those_of_evaluators_made_by_hand(made, tmp_path):
    """Of text with its prompt, in all similarities, of leading dimensions and of quantised values."""
    model, rows = loaded(made), write_rows(tmp_path)
    sts, triplet = ({name: [row[name] for row in rows[kind]] for name in NAMES[kind]} for kind in ("sts", "triplet"))
    labels, off = [int(score > 2) for score in sts["score"]], {"write_csv": False}
    query = lambda texts: [PROMPTS["query"] + text for text in texts]  # noqa: E731
    first, second = query(sts["sentence1"]), query(sts["sentence2"])
    found = evaluated([
        entry(made, "sts", name="s", similarity_fn_names=ALL, dims=[5], precisions=["int8"]),
        entry(made, "sts", name="prompted", prompt=None),
        {"type": "binary", "name": "b", "path": str(made / "binary.jsonl"), "dims": [5]},
        entry(made, "triplet", name="t", similarity_fn_names=ALL, margin=0.05),
        entry(made, "reranking", name="r", at_k=3, dims=[5], similarity_fn_names=["dot"]),
        entry(made, "reranking", name="swapped", query_column="positive", corpus_prompt=""),
        {"type": "nanobeir", "path": str(made / "nano"), "dataset_names": ["nfcorpus", "scifact"]},
    ], model)  # fmt: skip
    model.prompts = {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    expected = {}
    for dim, precision in ((None, None), (5, None), (None, "int8"), (5, "int8")):
        prefix = "_".join(["s", *[f"dim{dim}"] * bool(dim), *[precision] * bool(precision)])
        expected |= of_vectors.EmbeddingSimilarityEvaluator(
            *sts.values(), similarity_fn_names=ALL, name=prefix, truncate_dim=dim, precision=precision, **off
        )(model)
    expected |= of_vectors.EmbeddingSimilarityEvaluator(first, second, sts["score"], name="prompted", **off)(model)
    for dim, name in ((None, "b"), (5, "b_dim5")):
        expected |= of_vectors.BinaryClassificationEvaluator(
            sts["sentence1"], sts["sentence2"], labels, name, truncate_dim=dim, **off
        )(model)
    triplets = of_vectors.TripletEvaluator(*triplet.values(), name="t", similarity_fn_names=ALL, margin=0.05, **off)
    expected |= triplets(model)
    for dim, name in ((None, "r"), (5, "r_dim5")):
        expected |= of_vectors.RerankingEvaluator(
            rows["reranking"], at_k=3, name=name, truncate_dim=dim, similarity_fct=dot_score, **off
        )(model)
    expected |= of_vectors.NanoBEIREvaluator(["nfcorpus", "scifact"], dataset_id=str(made / "nano"), **off)(model)
    model.prompts = {"query": PROMPTS["positive"], "document": ""}
    expected |= of_vectors.RerankingEvaluator(rows["reranking"], name="swapped", **off)(model)
    assert len(expected) > 100 and len(set(expected.values())) > 60
    assert found == pytest.approx({f"eval_{name}": value for name, value in expected.items()}, abs=1e-5)


def test_a_report_shows_the_main_figures_and_the_views_side_by_side(made):
    model = loaded(made)
    entries = [
        {"type": "retrieval", "name": "c", "path": str(made / "corpus"), "dims": [5], "precisions": ["int8"]},
        entry(made, "sts", name="s", dims=[5]),
        {"type": "nanobeir", "path": str(made / "nano"), "dataset_names": ["nfcorpus"]},
    ]
    given = evaluators_of(read_evaluations(entries), model, COLUMNS, PROMPTS, batch_size=8)
    figures = named(run_evaluators(given, dist_encoder(model, model, Strategy(), "cpu")), "eval")
    main = [f"c_cosine_{name}" for name in ("recall@10", "ndcg@10", "mrr@10", "map@100")]
    main += ["s_spearman_cosine", "NanoBEIR_mean_cosine_ndcg@10"]
    assert headlines_of(given) == main
    shown = [name for name in figures if not is_hidden(name.removeprefix("eval_"), given)]
    assert sorted(shown) == sorted(f"eval_{name}" for name in main)
    assert not is_hidden("mrr@10", given) and is_hidden("sequential_score", given)
    views = by_view(given, figures)
    assert list(views) == main[:5] and list(views["s_spearman_cosine"]) == ["whole", "dim5"]
    assert views[main[1]] == {
        "whole": figures[f"eval_{main[1]}"], "int8": figures["eval_c_int8_cosine_ndcg@10"],
        "dim5": figures["eval_c_dim5_cosine_ndcg@10"], "dim5 int8": figures["eval_c_dim5_int8_cosine_ndcg@10"],
    }  # fmt: skip


def test_token_vectors_are_compared_by_maxsim(made):
    """A corpus as sentence-transformers' evaluator of token vectors compares it."""
    model = multi_vector_encoder()
    ranked = {"type": "retrieval", "name": "c", "path": str(made / "corpus"), "corpus_chunk_size": 40}
    found = evaluated([entry(made, "triplet", name="t"), entry(made, "reranking", name="r"), ranked], model)
    assert {"eval_t_maxsim_accuracy", "eval_r_map", "eval_r_mrr@10", "eval_r_ndcg@10"} < found.keys()
    model.prompts = {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    queries, documents, right = corpus()
    right = {query: set(of_query) for query, of_query in right.items()}
    theirs = evaluators.of_tokens.MultiVectorInformationRetrievalEvaluator(queries, documents, right, name="c")(model)
    assert len(theirs) == 15 and 0 < theirs["c_maxsim_ndcg@10"] < 1
    assert {name: found[f"eval_{name}"] for name in theirs} == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("more, words", [
    ({"dims": [4, 17]}, 'evaluation "c": dims has 17, but embeddings have 16'),
    ({"query_column": "question"}, 'query_column="question" is no column of this run: query, positive'),
])  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(more, words, made):
    given = {"type": "retrieval", "name": "c", "path": str(made / "corpus"), **more}
    with pytest.raises(UsageError, match=words):
        evaluated([given], loaded(made))


@pytest.mark.parametrize("option", [{"dims": [8]}, {"precisions": ["int8"]}, {"similarity_fn_names": ["cosine"]}])
def test_views_of_one_vector_are_refused_of_token_vectors(option, made):
    with pytest.raises(UsageError, match=f'evaluation "c": {next(iter(option))} is of one vector per row'):
        evaluated([{"type": "retrieval", "name": "c", "path": str(made / "corpus"), **option}], multi_vector_encoder())
    with pytest.raises(UsageError, match='"s": it compares one vector per row'):
        evaluated([entry(made, "sts", name="s")], multi_vector_encoder())
