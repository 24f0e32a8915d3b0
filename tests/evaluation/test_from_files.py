"""What a run file names as evaluations are evaluators of sentence-transformers with its data and prompts."""

from functools import partial

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation as of_vectors
from sentence_transformers.util.similarity import SimilarityFunction

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.encoder import dist_encoder
from hf_dist_ext.evaluation.evaluators import named, run_evaluators
from hf_dist_ext.evaluation.from_files import evaluators_of
from hf_dist_ext.strategies.base import Strategy
from tests.evaluation import evaluators
from tests.evaluation.models import multi_vector_encoder
from tests.retrieval_data import PROMPTS, corpus, save_model, write_beir, write_rows

COLUMNS = ["query", "positive"]
ALL = ["cosine", "dot", "euclidean", "manhattan"]
NAMES = {"sts": ("sentence1", "sentence2", "score"), "triplet": ("anchor", "positive", "negative")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    save_model(folder / "model")
    write_beir(folder / "corpus", *corpus())
    write_rows(folder)
    return folder


def entry(made, kind: str, **more) -> dict:
    """Of rows of `made`, whose columns have other names."""
    return {
        "type": kind, "path": str(made / f"{kind}.jsonl"), "columns": {name: f"my_{name}" for name in NAMES[kind]},
    } | more  # fmt: skip


def loaded(made) -> SentenceTransformer:
    return SentenceTransformer(str(made / "model"), device="cpu")


def evaluated(entries: list[dict], model) -> dict[str, float]:
    given = evaluators_of(read_evaluations(entries), model, COLUMNS, PROMPTS, batch_size=8)
    figures = run_evaluators(given, dist_encoder(model, model, Strategy(), "cpu"))
    known = [name for one in given for name in one.figure_names or ()]
    assert set(known) <= figures.keys() and len(set(known)) == len(known)
    figures.pop("sequential_score")
    return named(figures, "eval")


def test_figures_are_those_of_evaluators_made_by_hand(made, tmp_path):
    """Of text with its prompt, in all similarities, and of leading dimensions."""
    model, rows = loaded(made), write_rows(tmp_path)
    sts, triplet = ({name: [row[name] for row in rows[kind]] for name in NAMES[kind]} for kind in ("sts", "triplet"))
    queries, documents, right = corpus()
    right, off = {query: set(of_query) for query, of_query in right.items()}, {"write_csv": False}
    query = lambda texts: [PROMPTS["query"] + text for text in texts]  # noqa: E731
    first, second = query(sts["sentence1"]), query(sts["sentence2"])
    ranked = {"type": "retrieval", "path": str(made / "corpus")}
    found = evaluated([
        entry(made, "sts", name="s", similarity_fn_names=ALL),
        entry(made, "sts", name="cut", truncate_dim=5),
        entry(made, "sts", name="prompted", prompt=None),
        entry(made, "triplet", name="t", similarity_fn_names=ALL, margin=0.05),
        ranked | {"name": "c", "similarity_fn_names": ALL, "truncate_dim": 5},
        ranked | {"name": "swapped", "query_column": "positive", "corpus_column": "query"},
        ranked | {"name": "given", "query_prompt": PROMPTS["positive"], "corpus_prompt": ""},
    ], model)  # fmt: skip
    model.prompts = {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    similarity = of_vectors.EmbeddingSimilarityEvaluator
    expected = similarity(*sts.values(), similarity_fn_names=ALL, name="s", **off)(model)
    expected |= similarity(*sts.values(), name="cut", truncate_dim=5, **off)(model)
    expected |= similarity(first, second, sts["score"], name="prompted", **off)(model)
    triplets = of_vectors.TripletEvaluator(*triplet.values(), name="t", similarity_fn_names=ALL, margin=0.05, **off)
    expected |= triplets(model)
    scores = {name: SimilarityFunction.to_similarity_fn(name) for name in ALL}
    retrieval = partial(of_vectors.InformationRetrievalEvaluator, queries, documents, right, **off)
    expected |= retrieval(name="c", truncate_dim=5, score_functions=scores)(model)
    model.prompts = {"query": PROMPTS["positive"], "document": PROMPTS["query"]}
    expected |= retrieval(name="swapped")(model)
    model.prompts = {"query": PROMPTS["positive"], "document": ""}
    expected |= retrieval(name="given")(model)
    assert len(expected) > 90 and len(set(expected.values())) > 50
    assert found == pytest.approx({f"eval_{name}": value for name, value in expected.items()}, abs=1e-5)


def test_token_vectors_are_compared_by_maxsim(made):
    """A corpus as sentence-transformers' evaluator of token vectors compares it."""
    model = multi_vector_encoder()
    ranked = {"type": "retrieval", "name": "c", "path": str(made / "corpus"), "corpus_chunk_size": 40}
    found = evaluated([entry(made, "triplet", name="t"), ranked], model)
    assert "eval_t_maxsim_accuracy" in found
    model.prompts = {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    queries, documents, right = corpus()
    right = {query: set(of_query) for query, of_query in right.items()}
    theirs = evaluators.of_tokens.MultiVectorInformationRetrievalEvaluator(queries, documents, right, name="c")(model)
    assert len(theirs) == 15 and 0 < theirs["c_maxsim_ndcg@10"] < 1
    assert {name: found[f"eval_{name}"] for name in theirs} == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("more, words", [
    ({"truncate_dim": 17}, 'evaluation "c": truncate_dim is 17, but embeddings have 16'),
    ({"query_column": "question"}, 'query_column="question" is no column of this run: query, positive'),
])  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(more, words, made):
    given = {"type": "retrieval", "name": "c", "path": str(made / "corpus"), **more}
    with pytest.raises(UsageError, match=words):
        evaluated([given], loaded(made))


@pytest.mark.parametrize("option", [{"truncate_dim": 8}, {"similarity_fn_names": ["cosine"]}])
def test_options_of_one_vector_are_refused_of_token_vectors(option, made):
    with pytest.raises(UsageError, match=f'evaluation "c": {next(iter(option))} is of one vector per row'):
        evaluated([{"type": "retrieval", "name": "c", "path": str(made / "corpus"), **option}], multi_vector_encoder())
    with pytest.raises(UsageError, match='"s": it compares one vector per row'):
        evaluated([entry(made, "sts", name="s")], multi_vector_encoder())
