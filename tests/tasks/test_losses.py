"""Several losses in a run file: added up over the same rows, or one for each of several datasets."""

import inspect
import json

import pytest
import torch

from hf_dist_ext.engine.combined_losses import LossPerSource, SumOfLosses
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import hardware_of
from hf_dist_ext.run.config import fields_of_run_file
from hf_dist_ext.run.losses import INFONCE_FIELDS
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks.losses import build_loss
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from hf_dist_ext.training.step import EmbeddingStep
from hf_dist_ext.training.trainer import DistTrainer
from tests.test_train_script import main, run_file  # noqa: F401, fixtures
from tests.tiny_models import WORDS, model_config, tiny_tokenizer

RATED = [{"query": f"{w} {i}", "positive": f"text {w}", "score": i % 5 / 4} for i, w in enumerate(WORDS * 3)]
SUM = [{"loss": "infonce", "temperature": 0.1}, {"loss": "CoSENTLoss", "weight": 0.3, "loss_options": {"scale": 5.0}}]
PLAIN = {"learnable_temperature": ..., "columns": ..., "prompts": ...}


FIGURES = ("loss", "grad_norm", "masked_share")


def written(folder, name: str, rows: list[dict]) -> str:
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / f"{name}.jsonl")


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_infonce_of_a_run_file_has_the_defaults_of_infonce_from_python():
    of_class = {name: one.default for name, one in inspect.signature(InfoNCELoss).parameters.items()}
    assert {name: fields_of_run_file()[name].default for name in INFONCE_FIELDS}.items() <= of_class.items()


@pytest.fixture
def made(monkeypatch) -> list:
    """The losses of the trainers that are made."""
    found, init = [], DistTrainer.__init__

    def noting(self, *arguments, **options):
        found.append(options["loss"])
        init(self, *arguments, **options)

    monkeypatch.setattr(DistTrainer, "__init__", noting)
    return found


def test_losses_are_added_up_with_their_weights_and_each_is_logged(main, run_file, made, tmp_path):  # noqa: F811
    file = run_file(losses=SUM, dataset_name=written(tmp_path, "rated", RATED), **PLAIN)
    main(["--config", file])
    (loss,) = made
    assert isinstance(loss, SumOfLosses) and loss.weights == {"infonce": 1.0, "CoSENTLoss": 0.3}
    assert loss.losses["of_infonce"].temperature == pytest.approx(0.1)
    lines = [line for line in lines_of(tmp_path) if "loss" in line]
    assert len(lines) == 3
    for line in lines:
        total = line["infonce_loss"] + 0.3 * line["CoSENTLoss_loss"]
        assert line["loss"] == pytest.approx(total, rel=1e-3) and 0 <= line["infonce_accuracy"] <= 1
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "mrr@10" in report["after"], "evaluations follow the first loss"


def test_a_row_may_have_its_own_hard_negatives_alone(main, run_file, tmp_path, capsys):  # noqa: F811
    config = model_config("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    steps = []
    for fields in ({}, {"gradient_cache_chunk_size": None}, {"in_batch_negatives": True}):
        fields = {"in_batch_negatives": False} | fields
        main(["--config", run_file(model_config=config, overwrite_output_dir=True, save_strategy="no", **fields)])
        steps.append([value for line in lines_of(tmp_path) for name, value in line.items() if name in FIGURES])
    assert len(steps[0]) == 9 and steps[0] == pytest.approx(steps[1], rel=1e-3)
    assert steps[0][0] < steps[2][0] - 1, "two candidates beside the positive, not 47"
    rows = [{"query": w, "positive": w, "negative": ["text"] * (1 + i % 2)} for i, w in enumerate(WORDS * 3)]
    more = {"dataset_name": written(tmp_path, "uneven", rows), "overwrite_output_dir": True}
    file = run_file(in_batch_negatives=False, **more, **PLAIN)
    with pytest.raises(SystemExit):
        main(["--config", file])
    assert 'row 1 (counted from 0), column "negative": 2 negative(s), and row 0 has 1' in capsys.readouterr().err


def test_each_dataset_has_its_loss_and_its_figures(main, run_file, made, tmp_path, capsys):  # noqa: F811
    pairs = [{"query": f"{w} {i}", "positive": f"read {w} {i}"} for i, w in enumerate(WORDS * 3)]
    sources = [
        {"dataset_name": written(tmp_path, "pairs", pairs), "eval_holdout": 8},
        {"dataset_name": written(tmp_path, "rated", RATED), "eval_holdout": 8, "loss": "CoSENTLoss"},
        {"dataset_name": written(tmp_path, "sharp", pairs), "temperature": 0.2, "learnable_temperature": True},
    ]
    file = run_file(
        datasets=sources, dataset_name=..., eval_holdout=..., temperature=0.1, num_train_epochs=1, max_steps=...,
        per_device_train_batch_size=8, save_strategy="steps", save_steps=4, **PLAIN,
    )  # fmt: skip
    main(["--config", file])
    assert " rows, 16 to evaluate on" in capsys.readouterr().out, "rows of all datasets"
    (loss,) = made
    assert isinstance(loss, LossPerSource) and loss.of("rated").name == "CoSENTLoss"
    assert loss.of("pairs").fixed_temperature == 0.1 and loss.of("sharp").log_inverse_temperature is not None
    assert (tmp_path / "out" / "checkpoint-4" / "loss.safetensors").is_file()
    lines = lines_of(tmp_path)
    for name, has in (("pairs", "accuracy"), ("sharp", "accuracy"), ("rated", None)):
        of_source = [line for line in lines if f"loss_{name}" in line]
        assert of_source and all((has in line) if has else "accuracy" not in line for line in of_source)
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    figures = {name for name, value in report["after"].items() if value is not None}
    assert "rated_spearman_cosine" in figures and "pairs_mrr@10" in figures and "rated_mrr@10" not in figures


LATE = {"loss": "late_interaction"}
SOURCE = {"dataset_name": "code-search"}


@pytest.mark.parametrize("fields, message", [
    ({"losses": []}, "losses=\\[\\] is empty"),
    ({"losses": SUM, "loss": "infonce"}, 'loss="infonce" beside losses'),
    ({"losses": SUM, "loss_options": {"scale": 2}}, "loss_options=.* beside losses"),
    ({"losses": [{"weight": 1.0}]}, "losses\\[0\\] has no loss"),
    ({"losses": [{"loss": "infonce", "weight": 0}]}, "weight=0 must be above 0"),
    ({"losses": [{"loss": "infonce", "wieght": 2}]}, 'has no field "wieght", .* Closest: "weight"'),
    ({"losses": [{"loss": "infonces"}]}, 'loss="infonces" is no loss'),
    ({"losses": [{"loss": "CoSENTLoss", "temperature": 0.1}]}, "temperature=0.1 is an option of infonce"),
    ({"losses": [{"loss": "CoSENTLoss"}], "temperature": 0.1}, "is an option of infonce, and losses has none"),
    ({"losses": [{"loss": "infonce"}, LATE]}, 'losses: "late_interaction" reads a vector of every token, and '),
    ({"losses": SUM, "pooling": "tokens"}, 'pooling="tokens" leaves a vector of every token'),
    ({"loss": "sparse"}, 'loss="sparse" can not be trained here: it reads a weight of each term.* SparseEncoder'),
    ({"losses": [*SUM, {"loss": "sparse"}]}, 'loss="sparse" can not be trained here'),
    ({"datasets": [SOURCE | {"loss": "sparse"}]}, 'loss="sparse" can not be trained here'),
    ({"losses": [{"loss": "infonce"}], "label_column": "score"}, "none of losses reads a label"),
    ({"losses": SUM, "cross_device_negatives": False}, "cross_device_negatives=false with losses"),
    ({"datasets": [SOURCE | {"name": "a"}, SOURCE | LATE | {"name": "b"}]}, "datasets: .*reads a vector of every"),
    ({"datasets": [SOURCE | {"loss": "siglip"}], "loss": "infonce"}, "every one of datasets has a loss of its own"),
    ({"datasets": [SOURCE | {"loss": "siglip"}], "symmetric": True}, "symmetric=true is an option of infonce, and no"),
    ({"datasets": [SOURCE | {"loss": "none"}]}, 'datasets: "code_search" has no loss'),
    ({"datasets": [SOURCE, SOURCE | {"loss": "siglip", "name": "b"}], "matryoshka_dims": [8]}, "siglip reads whole"),
    ({"losses": [{"loss": "infonce"}, {"loss": "SoftmaxLoss"}], "matryoshka_dims": [8]}, "SoftmaxLoss reads whole"),
    ({"datasets": [SOURCE | {"loss": "TripletLoss", "label_column": "a"}]}, "TripletLoss reads no label"),
])  # fmt: skip
def test_what_can_not_be_is_refused_before_anything_is_read(fields, message, run_file):  # noqa: F811
    more = {"dataset_name": ..., "eval_holdout": ...} if "datasets" in fields else {}
    with pytest.raises(UsageError, match=message):
        load_run(["--config", run_file(**PLAIN | more | fields)])


def test_two_of_the_same_loss_have_different_names(run_file):  # noqa: F811
    twice = [{"loss": "infonce"}, {"loss": "infonce", "temperature": 0.5, "weight": 2}]
    options = load_run(["--config", run_file(losses=twice, **PLAIN)]).options
    loss = build_loss(options, 8, None, None, True)
    assert loss.weights == {"infonce": 1.0, "infonce_2": 2} and loss.losses["of_infonce_2"].fixed_temperature == 0.5


def test_dimensions_of_the_file_hold_for_every_loss_over_one_vector(run_file):  # noqa: F811
    def built(**fields):
        fields = PLAIN | {"dataset_name": ..., "eval_holdout": ...} | fields
        options = load_run(
            ["--config", run_file(matryoshka_dims=[8, 4], matryoshka_weights=[1, 0.5], **fields)]
        ).options
        return build_loss(options, 8, None, None, True)

    rated = {"loss": "CoSENTLoss", "loss_options": {"scale": 5.0}}
    whole = {"matryoshka_dims": None, "matryoshka_weights": None}
    sources = [SOURCE | {"name": name} | own for name, own in {"a": {}, "b": rated, "c": rated | whole}.items()]
    of_sources, of_sum = built(datasets=sources), built(losses=[SUM[0], rated], dataset_name="code-search")
    assert of_sources.of("a").matryoshka == [(8, 1), (4, 0.5)] == of_sum.losses["of_infonce"].matryoshka
    rows, targets = {name: torch.randn(6, 8) for name in ("query", "positive")}, {"label": torch.rand(6)}
    alone = SentenceTransformersLoss("CoSENTLoss", 8, scale=5.0)
    short = {name: torch.nn.functional.normalize(one[:, :4]) for name, one in rows.items()}
    expected = alone(rows, targets=targets).loss + 0.5 * alone(short, targets=targets).loss
    for loss in (of_sources.of("b"), of_sum.losses["of_CoSENTLoss"]):
        assert loss.name == "CoSENTLoss"
        torch.testing.assert_close(loss(rows, targets=targets).loss, expected)
    torch.testing.assert_close(
        of_sources.of("c")(rows, targets=targets).loss, alone(rows, targets=targets).loss, msg="null switches it off"
    )


def test_a_plan_counts_a_loss_that_compares_all_pairs(run_file):  # noqa: F811
    def held(**fields) -> float:
        run = load_run(["--config", run_file(per_device_train_batch_size=2048, **PLAIN, **fields)])
        return make_plan(run, hardware_of(1, 8.0, 1, None)).options[0].bytes.embeddings

    whole = held(losses=[{"loss": "siglip"}, {"loss": "MultipleNegativesRankingLoss"}])
    assert whole > 1.3 * held(losses=[{"loss": "siglip"}, {"loss": "infonce"}])


def test_a_column_that_no_loss_reads_is_not_encoded(main, run_file, tmp_path, monkeypatch):  # noqa: F811
    """Of a dataset that happens to have negatives; the sum with a loss that reads them encodes all."""
    rows = [row | {"negative": ["never read"] * (1 + i % 2)} for i, row in enumerate(RATED)]
    seen, encode = set(), EmbeddingStep._encode

    def noting(self, model, chunk, **more):
        seen.update(map(tuple, chunk.features["input_ids"].tolist()))
        return encode(self, model, chunk, **more)

    monkeypatch.setattr(EmbeddingStep, "_encode", noting)
    unread = tuple(tiny_tokenizer()("never read")["input_ids"])
    for losses, is_read in ((SUM[1:], False), ([{"loss": "infonce"}, *SUM[1:]], True)):
        seen.clear()
        more = rows if not is_read else [row | {"negative": ["never read"]} for row in rows]
        files = {"dataset_name": written(tmp_path, "rows", more), "output_dir": str(tmp_path / str(is_read))}
        main(["--config", run_file(losses=losses, **files, **PLAIN)])
        found = {tuple(token for token in one if token) for one in seen}
        assert len(found) > 10 and (unread in found) == is_read


def test_a_column_that_is_named_and_not_read_is_refused(run_file):  # noqa: F811
    fields = PLAIN | {"columns": {"query": "question", "positive": "answer", "negative": "wrong"}}
    with pytest.raises(UsageError, match='columns has "negative", and CoSENTLoss reads a query and its positive only'):
        load_run(["--config", run_file(loss="CoSENTLoss", **fields)])


def test_labels_of_a_stream_that_are_shorter_in_a_later_batch_are_named(main, run_file, tmp_path, capsys):  # noqa: F811
    rows = [{"query": f"{w} {i}", "positive": f"text {w}", "negative": ["read", "a date"], "scores": [1.0, 0.5, 0.2]}
            for i, w in enumerate(WORDS * 3)]  # fmt: skip
    for row in rows[40:]:
        row["scores"] = row["scores"][:2]
    file = run_file(
        loss="DistillKLDivLoss", dataset_name=written(tmp_path, "rows", rows), streaming=True, eval_holdout=...,
        per_device_train_batch_size=2, **PLAIN,
    )  # fmt: skip
    with pytest.raises(SystemExit):
        main(["--config", file, "--max_steps", "30"])
    assert "the first row of the data has a label of the shape" in capsys.readouterr().err
