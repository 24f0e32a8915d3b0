"""What SentenceTransformerTrainer takes in the place of one model, one dataset and one loss."""

import copy

import pytest
import sentence_transformers
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Dropout, Pooling

from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation import evaluators
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_data import nulls_of
from hf_dist_ext.training.trainer import DistTrainer
from tests.sentence_models import bert, text_model
from tests.tiny_models import WORDS

SHARED = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}


def pairs(count: int, first: int = 0) -> Dataset:
    words = [WORDS[(first + i) % len(WORDS)] for i in range(count + 1)]
    rows = zip(words, words[1:], strict=False)
    return Dataset.from_list(
        [{"a": f"{one} x", "b": other, "score": i / count} for i, (one, other) in enumerate(rows)]
    )


def by_name() -> dict[str, Dataset]:
    return {"near": pairs(8), "far": pairs(16, first=5)}


@pytest.fixture
def model(tmp_path):
    return text_model(tmp_path / "model")


def trainer(folder, model, kind=DistTrainer, loss=losses.CoSENTLoss, train=None, evaluation=None, **options):
    more = {name: options.pop(name) for name in ("model_init",) if name in options}
    args = DistTrainingArguments(output_dir=str(folder / "run"), **{**SHARED, "max_steps": 2, **options})
    return kind(model, args, train_dataset=train or pairs(12), eval_dataset=evaluation, loss=loss, **more)


def test_losses_by_dataset_train_every_model_that_model_init_makes(tmp_path):
    made = []

    def init(trial):
        made.append(text_model(tmp_path / str(len(made))))
        return made[-1]

    first = init(None)
    loss = {"near": losses.CosineSimilarityLoss(first), "far": losses.MultipleNegativesRankingLoss(first)}
    of_both = trainer(tmp_path, None, loss=loss, train=by_name(), evaluation=by_name(), model_init=init, max_steps=5)
    before = [p.clone() for p in first.parameters()]
    ends = []
    for _ in range(2):
        of_both.train()
        assert of_both.model is made[-1]
        ends.append([p.detach() for p in of_both.model.parameters()])
    assert all(map(torch.equal, *ends)) and all(map(torch.equal, before, first.parameters()))
    assert not all(map(torch.equal, before, ends[0]))


def test_rows_are_read_as_the_model_that_trains_reads_them(tmp_path):
    lengths, seen = iter((20, 3, 3)), []

    def init(trial):
        made = text_model(tmp_path / "model")
        made.max_seq_length = next(lengths)
        made[0].register_forward_pre_hook(lambda module, given: seen.append(given[0]["input_ids"].shape[-1]))
        return made

    trainer(tmp_path, None, model_init=init, gradient_cache_packing=False).train()
    assert max(seen) == 3, "as the last model, which trains"


def test_a_model_that_model_init_makes_needs_a_loss(tmp_path):
    with pytest.raises(UsageError, match="loss is missing: model_init makes a SentenceTransformer"):
        trainer(tmp_path, None, loss=None, model_init=lambda: text_model(tmp_path / "model"))


def test_streams_by_name_are_evaluated_each_with_its_loss(tmp_path, model):
    loss = {"near": losses.CosineSimilarityLoss(model), "far": losses.CoSENTLoss(model)}
    streams = IterableDatasetDict({name: one.to_iterable_dataset() for name, one in by_name().items()})
    made = trainer(tmp_path, model, loss=loss, train=by_name(), evaluation=streams)
    found, expected = made.evaluate(), made.evaluate(by_name())
    for name in ("near", "far"):
        assert found[f"eval_{name}_loss"] == expected[f"eval_{name}_loss"] > 0
    assert found["eval_near_loss"] != found["eval_far_loss"]
    with pytest.raises(UsageError, match=r"train_dataset\['near'\] is a stream"):
        trainer(tmp_path, model, train=streams)


def test_a_column_that_is_called_as_that_of_datasets_names_is_refused(tmp_path, model):
    wrong = pairs(12).rename_column("a", "dataset_name")
    for given in ({"train": wrong}, {"evaluation": wrong}, {"train": DatasetDict(x=wrong)}):
        with pytest.raises(UsageError, match='has a column "dataset_name"'):
            trainer(tmp_path, model, **given)
    with pytest.raises(UsageError, match='has a column "dataset_name"'):
        trainer(tmp_path, model).evaluate({"x": wrong})


@pytest.mark.parametrize("name", ["compute_loss", "get_batch_sampler", "collect_features"])
def test_a_method_that_would_never_be_called_is_refused(tmp_path, model, name):
    kind = type("Own", (DistTrainer,), {name: lambda self, *given: None})
    with pytest.raises(UsageError, match=f"Own has a method {name}, which DistTrainer .* does not call"):
        trainer(tmp_path, model, kind)


def test_workers_that_live_on_read_the_dataset_that_is_evaluated(tmp_path, model):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    made = trainer(tmp_path, model, evaluation=pairs(8), **options)
    seen, own = [], made.get_eval_dataloader()
    made.compute_metrics = lambda prediction: seen.append(len(prediction.predictions[0])) or {}
    for dataset in (pairs(12), None, pairs(4), made.eval_dataset):
        made.evaluate(dataset)
    assert seen == [12, 8, 4, 8] and made.get_eval_dataloader() is own
    assert [len(made.get_eval_dataloader(one).dataset) for one in (pairs(12), pairs(4))] == [12, 4]


def test_datasets_by_name_and_the_repository_are_on_the_card(tmp_path, model):
    trainer(tmp_path, model, train=by_name(), evaluation=by_name(), hub_model_id="me/mine")
    card = model.model_card_data
    assert [one["name"] for one in card.train_datasets] == ["near", "far"] and card.model_id == "me/mine"


# ---- frozen modules ----


def deep_model(folder, kind=SentenceTransformer, *between) -> SentenceTransformer:
    torch.manual_seed(1)
    modules = [bert(folder / "first"), Pooling(32, "mean"), Dense(32, 16), *between, Dense(16, 8)]
    return kind(modules=modules, device="cpu")


def ranked(folder, model, **options):
    options = {"gradient_cache_chunk_size": 4, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0} | options
    made = trainer(
        folder, model, loss=losses.MultipleNegativesRankingLoss, train=pairs(16).remove_columns("score"), **options
    )
    made.train()
    return made


def trained_modules(folder, model, **options) -> set[str]:
    before = copy.deepcopy(model.state_dict())
    ranked(folder, model, **options)
    return {name.split(".")[0] for name, now in model.state_dict().items() if not torch.equal(now, before[name])}


def test_a_model_that_was_frozen_in_one_run_trains_whole_in_the_next(tmp_path):
    model = deep_model(tmp_path)
    assert trained_modules(tmp_path, model, trainable_modules=["3"]) == {"3"}
    model[2].requires_grad_(True)
    assert trained_modules(tmp_path, model) == {"2", "3"}
    model.requires_grad_(True)
    assert trained_modules(tmp_path, model) == {"0", "2", "3"} and model[0].model.training


def test_a_forward_of_a_subclass_is_called_over_frozen_modules(tmp_path):
    class Louder(SentenceTransformer):
        def forward(self, *given, **more):
            found = super().forward(*given, **more)
            return {**found, "sentence_embedding": 3 * found["sentence_embedding"].sin()}

    model = deep_model(tmp_path, Louder).requires_grad_(False)
    model[3].requires_grad_(True)
    whole = copy.deepcopy(model).requires_grad_(True)
    ranked(tmp_path, model)
    ranked(tmp_path, whole, learning_rate_mapping={r"^model\.[02]\.": 0.0})
    torch.testing.assert_close(model[3].state_dict(), whole[3].state_dict(), rtol=1e-5, atol=1e-6)


def test_kept_features_of_frozen_modules_train_to_the_same_weights(tmp_path):
    start, kept = (
        deep_model(tmp_path, SentenceTransformer, Dropout(0.0)),
        {"frozen_feature_cache": str(tmp_path / "kept")},
    )
    ends = []
    for options in ({}, kept):
        model, runs = copy.deepcopy(start), []
        model[0].register_forward_hook(lambda *given, runs=runs: runs.append(1))
        made = ranked(tmp_path, model, trainable_modules=["4"], max_steps=6, **options)
        assert made.step.sizes.embedder.num_frozen == 3, "what drops out is drawn in every step"
        ends.append((model[4].state_dict(), len(runs)))
    (expected, plain), (found, once) = ends
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert once < plain and not torch.equal(found["linear.weight"], start[4].linear.weight)


def test_rows_without_a_text_are_refused_and_without_a_negative_are_not(tmp_path, model):
    loss = losses.MultipleNegativesRankingLoss(model)
    args = DistTrainingArguments(tmp_path, use_cpu=True, report_to=[])
    rows = {"anchor": ["a date", "parse"], "positive": ["text", "read"], "negative": ["search", None]}
    DistTrainer(model, args, Dataset.from_dict(rows), loss=loss)
    with pytest.raises(UsageError, match='train_dataset: column "positive" has no value in 1 of 2 rows'):
        DistTrainer(model, args, Dataset.from_dict(rows | {"positive": ["text", None]}), loss=loss)


def test_a_filtered_dataset_is_judged_by_the_rows_that_it_has(tmp_path, model):
    rows = Dataset.from_dict({"anchor": ["a", "b", "c", "d"], "positive": ["text", None, "read", None]})
    kept = rows.filter(lambda row: row["positive"] is not None, keep_in_memory=True)
    assert nulls_of(kept) == {"anchor": 0, "positive": 0}
    assert nulls_of(rows.select([3, 0, 1])) == {"anchor": 0, "positive": 2}
    trainer(tmp_path, model, train=kept, loss=losses.MultipleNegativesRankingLoss)
    assert len(model.model_card_data.train_datasets) == 1, "the card describes it"


def test_a_transform_says_which_columns_there_are(tmp_path, model):
    rows = Dataset.from_dict({"x": ["date", None], "n": [0, 1]})
    rows = rows.with_transform(lambda of: {"b": ["file"] * len(of["x"]), "a": ["date"] * len(of["x"])})
    for given in (rows, {"one": rows}):
        made = trainer(tmp_path, model, train=given, loss=losses.MultipleNegativesRankingLoss, prompts={"a": "open "},
                       per_device_train_batch_size=2, no_duplicates_in_batch=False)  # fmt: skip
        assert list(made.data_collator.columns) == ["b", "a"]
        made.train()


@pytest.mark.parametrize("name, module", [("CrossEncoder", "cross_encoder"), ("SparseEncoder", "sparse_encoder")])
@pytest.mark.parametrize("loss", [None, losses.CoSENTLoss])
def test_another_encoder_is_refused_by_its_name(tmp_path, name, module, loss):
    base = type(name, (torch.nn.Linear,), {"__module__": f"sentence_transformers.{module}.model"})
    assert getattr(sentence_transformers, name).__module__ == base.__module__
    other = type("Mine", (base,), {})(2, 2)
    for more in ({"model": other}, {"model": None, "model_init": lambda: other}) if loss else ({"model": other},):
        with pytest.raises(UsageError, match=f"model is a Mine, which DistTrainer does not train. .* {name}Trainer"):
            trainer(tmp_path, loss=loss, **more)


def test_compute_metrics_of_the_user_gets_the_embeddings_of_a_single_column(tmp_path, model):
    rows = Dataset.from_dict({"text": WORDS[:11], "label": [0, 1, 1, 0, 2, 2, 0, 1, 2, 0, 1]})
    made, seen = trainer(tmp_path, model, train=rows, evaluation=rows, loss=losses.BatchAllTripletLoss), []
    assert set(made.evaluate()) >= {"eval_loss"} and made.predict(rows).predictions.shape == (11, 32)
    made.compute_metrics = lambda prediction: seen.append(prediction) or {"mine": 1.0}
    assert made.evaluate()["eval_mine"] == 1.0
    assert (seen[0].label_ids == rows["label"]).all()
    torch.testing.assert_close(torch.from_numpy(seen[0].predictions), torch.from_numpy(model.encode(rows["text"])))


def test_a_short_batch_of_a_stream_counts_as_many_rows_as_it_has(tmp_path, model):
    more = {"per_device_eval_batch_size": 4}
    made = trainer(tmp_path, model, loss=losses.MultipleNegativesRankingLoss, train=pairs(8), **more)
    rows = pairs(13).remove_columns("score")
    of_batches = [rows.select(range(i, min(i + 4, 13))) for i in range(0, 13, 4)]
    expected = sum(len(one) * made.evaluate(one)["eval_loss"] for one in of_batches) / 13
    stream = rows.to_iterable_dataset(num_shards=2)
    assert made.evaluate(stream)["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert made.evaluate({"x": stream})["eval_x_loss"] == pytest.approx(expected, rel=1e-6)
    anchors, positives = made.predict(stream).predictions
    assert len(anchors) == len(positives) == 13


def test_a_loss_by_dataset_says_how_rows_to_evaluate_are_given(tmp_path, model):
    loss = {"near": losses.CosineSimilarityLoss(model), "far": losses.CoSENTLoss(model)}
    made = trainer(tmp_path, model, loss=loss, train=by_name())
    for ask in (made.evaluate, made.predict):
        with pytest.raises(UsageError, match=r"by dataset \(near, far\) has none for rows that name no dataset"):
            ask(pairs(4))
    assert "eval_near_loss" in made.evaluate({"near": pairs(4)})


@pytest.mark.parametrize("loss", [losses.ContrastiveLoss, losses.MegaBatchMarginLoss])
def test_a_column_that_a_loss_of_pairs_would_leave_out_is_refused(tmp_path, model, loss):
    """As sentence-transformers' loss does; those that leave it out there do so here."""
    triples = pairs(8).add_column("negative", pairs(8, 8)["b"])
    for given in ({}, {"train": {"near": pairs(8), "far": triples}}):
        with pytest.raises(UsageError, match=f'{loss.__name__} reads a pair.*"negative"'):
            trainer(tmp_path, model, loss=loss, **({"train": triples} | given))
    trainer(tmp_path, model, loss=losses.CoSENTLoss, train=triples)


def test_an_order_by_lengths_is_refused_before_training(tmp_path, model):
    with pytest.raises(UsageError, match="train_sampling_strategy='group_by_length' orders rows by a length"):
        trainer(tmp_path, model, train_sampling_strategy="group_by_length")


def test_batches_in_another_order_are_refused(tmp_path, model):
    with pytest.raises(UsageError, match="dataloader_in_order=false hands over batches as workers end them"):
        trainer(tmp_path, model, dataloader_in_order=False, dataloader_num_workers=2)


def test_an_evaluator_that_training_never_asks_is_said(tmp_path, model, monkeypatch):
    said = []
    monkeypatch.setattr(evaluators.logger, "warning", said.append)
    rows = Dataset.from_dict({"anchor": ["a date", "parse"], "positive": ["text", "read"]})
    for strategy, number in (("no", 1), ("epoch", 0)):
        said.clear()
        args = DistTrainingArguments(tmp_path, use_cpu=True, report_to=[], eval_strategy=strategy)
        loss = losses.MultipleNegativesRankingLoss(model)
        DistTrainer(model, args, rows, loss=loss, evaluator=lambda model, **_: {"figure": 1.0})
        assert len(said) == number


@pytest.mark.parametrize("is_collective", [False, True])
def test_a_card_encodes_its_example_only_where_a_rank_has_a_whole_model(tmp_path, model, monkeypatch, is_collective):
    """It is written by one rank; a forward of that rank alone would wait for the others."""
    made = trainer(tmp_path / "out", model)
    monkeypatch.setattr(Strategy, "forwards_are_collective", is_collective)
    calls, forward = [], type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k))
    made.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "README.md").is_file() and bool(calls) is not is_collective
