"""Evaluations of token vectors: MaxSim as sentence-transformers computes it, from a run file to the saved folder."""

import json

import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorInformationRetrievalEvaluator,
    MultiVectorTripletEvaluator,
)
from sentence_transformers.util import maxsim
from torch.nn.functional import normalize

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation import token_vectors
from hf_dist_ext.evaluation.token_vectors import TokenVectors
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import hardware_of
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks.search import load
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.metrics import retrieval_metrics
from hf_dist_ext.training.trainer import DistTrainer
from tests.retrieval_data import corpus, write_beir, write_rows
from tests.test_train_script import main, run_file  # noqa: F401, fixtures
from tests.tiny_models import embedding_model, model_config, tiny_tokenizer
from tests.training.test_trainer import collate


def rows_of(number: int, width: int, seed: int) -> TokenVectors:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(number, width, generator=draw) < 0.6
    mask[:, 1] = True
    vectors = normalize(torch.randn(number, width, 5, generator=draw), dim=-1)
    return TokenVectors(vectors.masked_fill(~mask[..., None], 1e9), mask)


def listed(rows: TokenVectors) -> list[torch.Tensor]:
    return [vectors[mask] for vectors, mask in zip(rows.vectors, rows.mask, strict=True)]


@pytest.mark.parametrize("tile", [1, 70, 2**22])
def test_scores_are_those_of_sentence_transformers_whatever_the_tile(tile, monkeypatch):
    monkeypatch.setattr(token_vectors, "TILE", tile)
    queries, documents = rows_of(7, 4, 0), rows_of(11, 6, 1)
    torch.testing.assert_close(queries.scores(documents), maxsim(listed(queries), listed(documents)))
    assert queries[:0].scores(documents).shape == (0, 11) and queries.scores(documents[:0]).shape == (7, 0)


def test_a_long_row_costs_its_own_tokens_alone(monkeypatch):
    """A query of 90 tokens and a document of 80 among 32 and 128 of four."""
    counted, best = [], token_vectors.best_matches
    monkeypatch.setattr(
        token_vectors, "best_matches", lambda *rows: (counted.append(len(rows[0]) * len(rows[1])), best(*rows))[1]
    )
    columns = []
    for number, longest in ((32, 90), (128, 80)):
        mask = torch.arange(longest) < torch.tensor([longest, *[4] * (number - 1)])[:, None]
        columns.append(TokenVectors(torch.randn(number, longest, 5), mask))
    columns[0].scores(columns[1])
    assert sum(counted) == (90 + 31 * 4) * 64 * (80 + 4)  # in tiles of 64 documents; padded it would be 25 times this


def test_a_document_without_tokens_is_the_last_one():
    """The longest come first, and 64 at a time."""
    queries, documents = rows_of(3, 4, 0), rows_of(65, 6, 1)
    documents.mask[7] = False
    scores = queries.scores(documents)
    assert (scores.argsort(dim=1, stable=True)[:, 0] == 7).all()
    torch.testing.assert_close(scores[:, 8:], queries.scores(documents[8:]))


def test_rows_of_a_batch_are_ranked_by_their_scores():
    queries, documents = rows_of(9, 4, 2), rows_of(9, 6, 3)
    scores = queries.scores(documents)
    ranks = (scores >= scores.diagonal()[:, None] - 1e-6).sum(dim=1)
    found = retrieval_metrics(queries, documents)
    assert found["mrr@10"] == pytest.approx((1 / ranks).mean().item()) and 0 < found["mrr@10"] < 1


def test_a_run_file_trains_evaluates_and_saves_token_vectors(main, run_file, tmp_path):  # noqa: F811
    queries, documents, right = corpus()
    right = dict(zip(right, [*list(right.values())[1:], ["d0"]], strict=True))  # nobody finds all of it
    write_beir(tmp_path / "corpus", queries, documents, right)
    rows = write_rows(tmp_path)["triplet"]
    given = {"anchor": "my_anchor", "positive": "my_positive", "negative": "my_negative"}
    evaluations = [
        {"type": "retrieval", "name": "c", "path": str(tmp_path / "corpus"), "corpus_chunk_size": 64},
        {"type": "triplet", "name": "t", "path": str(tmp_path / "triplet.jsonl"), "columns": given},
    ]
    file = run_file(
        loss="late_interaction", loss_options={"temperature": 0.5}, learnable_temperature=..., evaluations=evaluations,
        prompts={"query": "search : ", "positive": "list of ", "negative": "list of "},
        max_length={"query": 9, "positive": 12, "negative": 12}, save_strategy="no", learning_rate=1e-3, max_steps=6,
    )  # fmt: skip
    main(["--config", file])
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["after"]["mrr@10"] != report["before"]["mrr@10"] and 0 < report["after"]["mrr@10"] < 1
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["loss"] for line in lines if "loss" in line]
    assert logged[-1] < logged[0] and "accuracy" in lines[1]
    found = {key: value for line in lines for key, value in line.items() if "maxsim" in key}  # the last ones
    served = MultiVectorEncoder(str(tmp_path / "out"), device="cpu")
    assert served.get_embedding_dimension() == 16
    theirs = MultiVectorInformationRetrievalEvaluator(
        queries, documents, {query: set(of_query) for query, of_query in right.items()}, write_csv=False
    )(served)
    ours = {key.removeprefix("eval_c_"): value for key, value in found.items() if key.startswith("eval_c_")}
    assert len(ours) > 8 and 0 < ours["maxsim_ndcg@10"] < 1
    assert ours == pytest.approx({key: theirs[key] for key in ours}, abs=1e-9)
    texts = [[row[name] for row in rows] for name in ("anchor", "positive", "negative")]
    theirs = MultiVectorTripletEvaluator(*texts, write_csv=False)(served)
    assert found["eval_t_maxsim_accuracy"] == pytest.approx(theirs["maxsim_accuracy"])
    assert "MultiVectorEncoder" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UsageError, match="is a MultiVectorEncoder, and here one vector of a row"):
        load(str(tmp_path / "out"))


@pytest.mark.parametrize("fields, message", [
    ({"loss": "late_interaction", "pooling": "mean"}, 'pooling="mean" makes one vector of a row'),
    ({"pooling": "tokens"}, 'pooling="tokens" leaves a vector of every token'),
    ({"loss": "late_interaction", "temperature": 0.1}, "temperature=0.1 is an option of infonce"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(fields, message, run_file):  # noqa: F811
    with pytest.raises(UsageError, match=message):
        load_run(["--config", run_file(learnable_temperature=..., **fields)])


def test_an_option_that_the_loss_does_not_take_is_refused(main, run_file, capsys):  # noqa: F811
    with pytest.raises(SystemExit):
        main(["--config", run_file(learnable_temperature=..., loss="late_interaction", loss_options={"scale": 2})])
    assert "late_interaction has no option scale. It has temperature" in capsys.readouterr().err


def trainer(folder, pooling: str, loss) -> DistTrainer:
    model = embedding_model(model_config("bert"), pooling=pooling)
    args = DistTrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    return DistTrainer(model=model, args=args, data_collator=collate, train_dataset=[0], loss=loss)


def test_model_and_loss_must_agree_on_what_a_row_is(tmp_path):
    with pytest.raises(UsageError, match="InfoNCELoss reads one vector per row"):
        trainer(tmp_path, "tokens", InfoNCELoss())
    with pytest.raises(UsageError, match="the model gives one vector per row.*MultiVectorEncoder"):
        trainer(tmp_path, "cls", LateInteractionLoss())


@pytest.mark.parametrize("option", [{"truncate_dim": 8}, {"similarity_fn_names": ["cosine"]}])
def test_options_of_one_vector_are_refused(option, main, run_file, tmp_path, capsys):  # noqa: F811
    write_beir(tmp_path / "corpus", *corpus())
    entry = {"type": "retrieval", "name": "c", "path": str(tmp_path / "corpus"), **option}
    assert read_evaluations([entry])
    with pytest.raises(SystemExit):
        main(["--config", run_file(learnable_temperature=..., loss="late_interaction", evaluations=[entry])])
    assert f'evaluation "c": {next(iter(option))} is of one vector per row' in capsys.readouterr().err


def test_a_plan_counts_vectors_of_all_tokens(run_file):  # noqa: F811
    """What is gathered and held for the loss grows with the tokens, and no pipeline is offered."""

    def plan(**fields):
        run = load_run(["--config", run_file(learnable_temperature=..., max_length=24, **fields)])
        return make_plan(run, hardware_of(2, 8.0, 1, None))

    tokens, rows = plan(loss="late_interaction"), plan()
    of = {name: {o.strategy.name: o for o in p.options} for name, p in (("tokens", tokens), ("rows", rows))}
    assert of["tokens"]["DDP"].bytes.embeddings > 15 * of["rows"]["DDP"].bytes.embeddings
    assert of["tokens"]["DDP"].given.traffic.bytes > 1.1 * of["rows"]["DDP"].given.traffic.bytes
    assert not any(option.strategy.pipeline for option in tokens.options)
    assert tiny_tokenizer().model_max_length == 24
