"""A run file with several datasets: prompts, columns, evaluation and log of each, and what is refused."""

import json
import re

import datasets
import pytest
import torch

from hf_dist_ext.data.collator import CONSTANTS, CUTS
from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import hardware_of
from hf_dist_ext.run.read import load_run
from hf_dist_ext.run.sources import sources_of
from hf_dist_ext.tasks import embedding, parts
from hf_dist_ext.tasks.parts import make_arguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.retrieval_data import write_beir
from tests.test_train_script import main  # noqa: F401, a fixture
from tests.tiny_models import WORDS, loaded, model_config, tiny_tokenizer, write_fields


@pytest.fixture
def run_file(tmp_path):
    """A function that writes a run file with three datasets; keyword arguments go over the defaults."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    texts = [" ".join(WORDS[(i + k) % len(WORDS)] for k in range(4)) for i in range(40)]
    tables = {
        "pairs": [{"query": f"{text} {i}", "positive": f"read {text} {i}"} for i, text in enumerate(texts)],
        "triplets": [{"q": f"{t} {i}", "p": f"sort {t} {i}", "n": [t, "text"]} for i, t in enumerate(texts[:24])],
        "code.search": [{"query": f"{t} {i}", "positive": f"list {t} {i}", "id": i} for i, t in enumerate(texts[:20])],
    }
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(**more) -> str:
        fields = {
            "model_config": model_config("bert"), "tokenizer_name": str(tmp_path / "tokenizer"),
            "datasets": [
                {"dataset_name": str(tmp_path / "pairs.jsonl"), "eval_holdout": 8},
                {"dataset_name": str(tmp_path / "triplets.jsonl"), "prompts": {"query": "search : "},
                 "eval_holdout": 4, "columns": {"query": "q", "positive": "p", "negative": "n"}, "_": "a comment"},
                {"dataset_name": str(tmp_path / "code.search.jsonl"), "name": "code", "id_column": "id"},
            ],
            "prompts": {"query": "parse "}, "max_length": {"query": 8, "positive": 8, "negative": 6},
            "per_device_train_batch_size": 8, "gradient_cache_chunk_size": 5, "num_train_epochs": 1,
            "output_dir": str(tmp_path / "out"), "logging_steps": 1, "save_strategy": "no",
        }  # fmt: skip
        return str(write_fields(tmp_path, **fields | more))

    return write


def test_each_dataset_brings_its_columns_prompts_and_evaluation(main, run_file, tmp_path, monkeypatch):  # noqa: F811
    seen, step = {}, DistTrainer.training_step

    def noting(self, model, inputs, *more):
        texts = self.processing_class.batch_decode(inputs["query"]["input_ids"], skip_special_tokens=True)
        columns = [name for name in inputs if name not in (CUTS, CONSTANTS)]
        seen.setdefault(inputs["ids"][SOURCE], []).append((columns, {text.split()[0] for text in texts}))
        assert ("group" in inputs["ids"]) == (inputs["ids"][SOURCE] == "code")
        return step(self, model, inputs, *more)

    monkeypatch.setattr(DistTrainer, "training_step", noting)
    main(["--config", run_file(eval_strategy="steps", eval_steps=4)])
    columns = {name: {" ".join(names) for names, _ in of} for name, of in seen.items()}
    assert columns == {
        "pairs": {"query positive ids"}, "triplets": {"query positive negative ids"}, "code": {"query positive ids"},
    }  # fmt: skip
    prompts = {name: set.union(*(words for _, words in of)) for name, of in seen.items()}
    assert prompts == {"pairs": {"parse"}, "triplets": {"search"}, "code": {"parse"}}
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    for figures in (report["before"], report["after"]):
        assert {name.rpartition("_")[0] for name in figures} == {"pairs", "triplets"}
        assert len(figures) == 8 and None not in figures.values()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line if name.startswith("loss_")} == {
        "loss_pairs", "loss_triplets", "loss_code",
    }  # fmt: skip
    saved = loaded(tmp_path / "out").prompts
    assert saved["query"] == "parse " and saved["triplets_query"] == "search : "
    assert "triplets.jsonl" in (tmp_path / "out" / "README.md").read_text()


def test_a_stream_is_shuffled_with_the_seed_of_the_run_and_not_where_an_order_is_asked_for(run_file, tmp_path):
    pairs = {"datasets": ..., "dataset_name": str(tmp_path / "pairs.jsonl"), "max_steps": 1, "streaming": True}

    def built(**fields):
        run = load_run(["--config", run_file(max_length=8, **fields)])
        return embedding.build(run, make_arguments(run)).train_dataset

    def order(**fields) -> list[str]:
        return [row["query"] for row in built(**pairs, **fields)]

    in_order = [json.loads(line)["query"] for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert order(train_sampling_strategy="sequential") == in_order
    assert order(seed=1) == order(seed=3, data_seed=1) != order(seed=3)
    assert sorted(order(seed=3)) == sorted(in_order) != in_order
    of_several = [{"dataset_name": str(tmp_path / "pairs.jsonl"), "weight": 1}]
    sources = [built(datasets=of_several, streaming=True, max_steps=1, seed=seed).sources for seed in (1, 3)]
    assert [[row["query"] for row in one["pairs"]] for one in sources] == [order(seed=1), order(seed=3)]


def test_a_source_is_the_file_with_its_fields_over_it(run_file):
    run = load_run(["--config", run_file(datasets_temperature=2.0, max_train_samples=30)])
    pairs, triplets, code = sources_of(run.options)
    assert [one.name for one in (pairs, triplets, code)] == ["pairs", "triplets", "code"]
    assert [one.config.prompts["query"] for one in (pairs, triplets, code)] == ["parse ", "search : ", "parse "]
    assert pairs.config.max_train_samples == 30 and pairs.config.datasets is None
    assert (pairs.config.eval_holdout, code.config.eval_holdout, code.config.id_column) == (8, None, "id")


@pytest.mark.parametrize("has_device, method, fields, workers", [
    (True, "fork", {}, 2),
    (True, "fork", {"dataloader_num_workers": 0}, 0),
    (True, "fork", {"streaming": True, "max_steps": 1, "datasets": ..., "dataset_name": "pairs.jsonl"}, 0),
    (True, "fork", {"use_cpu": True}, 0),
    (True, "spawn", {}, 0),
    (False, "fork", {}, 0),
])  # fmt: skip
def test_an_accelerator_gets_its_batches_from_workers(run_file, monkeypatch, has_device, method, fields, workers):
    class Given(Exception):
        pass

    def note(**training):
        raise Given(training)

    monkeypatch.setattr(parts, "DistTrainingArguments", note)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_device)
    monkeypatch.setattr(parts.multiprocessing, "get_all_start_methods", lambda: [method, "fork"])
    with pytest.raises(Given) as given:
        make_arguments(load_run(["--config", run_file(**{"use_cpu": False} | fields)]))
    assert given.value.args[0]["dataloader_num_workers"] == workers


def test_a_plan_counts_the_largest_row_of_any_dataset(run_file):
    run = load_run(["--config", run_file()])
    plan = make_plan(run, hardware_of(1, 8.0, 1, None))
    assert any('counted with batches of "triplets"' in note for note in plan.notes)


def test_streams_are_drawn_by_weights(main, run_file, tmp_path):  # noqa: F811
    fields = json.loads(open(run_file()).read())["datasets"]
    weighted = [one | {"weight": weight} for one, weight in zip(fields, (3, 1, 1), strict=True)]
    main(["--config", run_file(datasets=weighted, streaming=True, max_steps=3)])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sum(any(name.startswith("loss_") for name in line) for line in lines) == 3
    assert any("eval_triplets_mrr@10" in line for line in lines)


def test_labels_and_corpora_are_read_with_several_datasets(main, run_file, tmp_path, monkeypatch):  # noqa: F811
    """A loss of sentence-transformers, of labels that each dataset calls otherwise."""
    for name in "ab":
        rows = [{"query": f"{w} {i}", "positive": f"text {w}", f"rated_{name}": i / 30} for i, w in enumerate(WORDS)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows * 2)))
    given = [{"dataset_name": str(tmp_path / f"{name}.jsonl"), "label_column": f"rated_{name}", "eval_holdout": 8}
             for name in "ab"]  # fmt: skip
    labels, step = {}, DistTrainer.training_step

    def noting(self, model, inputs, *more):
        labels.setdefault(inputs["ids"][SOURCE], []).extend(inputs["targets"]["label"].tolist())
        return step(self, model, inputs, *more)

    monkeypatch.setattr(DistTrainer, "training_step", noting)
    words = {word: word for word in WORDS}
    write_beir(tmp_path / "words", words, {word: f"text {word}" for word in words}, {word: [word] for word in words})
    corpora = {"type": "retrieval", "name": "words", "path": str(tmp_path / "words")}
    main(["--config", run_file(datasets=given, loss="CoSENTLoss", max_length=8, evaluations=[corpora])])
    assert set(labels) == {"a", "b"} and all(max(of) > 0.1 for of in labels.values())
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert any(name.startswith("a_spearman") for name in report["after"])
    assert any(name.startswith("words_") for name in report["after"]) and None not in report["after"].values()


def first(**fields):
    """The first dataset with other fields."""
    return lambda given: [given[0] | fields, *given[1:]]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"dataset_name": "code-search"}, 'dataset_name="code-search" beside datasets'),
        ({"eval_dataset_name": "x.jsonl"}, "beside datasets: of which of them?"),
        ({"datasets": []}, r"datasets=\[\] is empty"),
        ({"datasets": ...}, "dataset_name is not given"),
        ({"datasets": ..., "dataset_name": "x.jsonl", "datasets_temperature": 2.0}, "has no effect without datasets"),
        ({"datasets": first(weight=1)}, r"datasets\[1\] has no weight, and others have one"),
        ({"datasets": lambda given: [one | {"weight": 1} for one in given], "datasets_temperature": 2.0},
         "draws by size, but datasets have weights"),
        ({"datasets": first(weight=0)}, "weight=0 must be above 0"),
        ({"datasets": first(weight="much")}, 'weight="much" in .* is text'),
        ({"datasets_temperature": 0}, "datasets_temperature=0 must be above 0"),
        ({"streaming": True, "max_steps": 5}, "a stream has no size to draw by"),
        ({"train_sampling_strategy": "sequential"}, "is an order over all rows"),
        ({"datasets": first(columsn={"query": "q"})}, 'has no field "columsn".* Closest: "columns"'),
        ({"datasets": first(learning_rate=1e-3)}, 'has no field "learning_rate", or it holds for the whole run'),
        ({"datasets": first(gradient_cache_chunk_size=2)}, 'has no field "gradient_cache_chunk_size"'),
        ({"datasets": first(prompts="search")}, r'prompts="search" in datasets\[0\] is text'),
        ({"datasets": first(dataset_name="")}, r"datasets\[0\] has no dataset_name"),
        ({"datasets": first(name="code")}, r'datasets\[2\] is called "code", and so is datasets\[0\]'),
        ({"datasets": first(name="a b")}, 'has name="a b". Give it a name of letters'),
        ({"datasets": first(eval_split="test")}, "has eval_holdout, which takes rows from its train split"),
        ({"datasets": first(columns={"question": "query", "answer": "positive"})},
         "Call the query and its positive alike"),
        ({"loss": None, "gradient_cache_chunk_size": ...}, "datasets needs a loss over embeddings"),
        ({"image_columns": ["positive"]}, "does not work with datasets, which hold texts"),
        ({"frozen_feature_cache": "cache", "frozen_modules": ["embeddings"]}, "does not work with datasets"),
        ({"task": "image-text-to-text", "gradient_cache_chunk_size": ...}, 'belongs to task "embedding"'),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)  # fmt: skip
def test_what_can_not_be_is_refused_while_the_file_is_read(run_file, fields, words):
    given = json.loads(open(run_file()).read())["datasets"]
    fields = {name: value(given) if callable(value) else value for name, value in fields.items()}
    with pytest.raises(UsageError, match=words):
        load_run(["--config", run_file(**fields)])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"per_device_train_batch_size": 32}, '"triplets" has 20 rows, fewer than one global batch of 32'),
        ({"prompts": {"querry": "x"}}, 'prompts has "querry", which is no column of this run'),
        ({"max_length": {"querry": 8}}, 'max_length has "querry", which is no column of this run'),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
         'metric_for_best_model="loss" is a figure of all.*"pairs_loss"'),
        ({"datasets": first(columns={"query": "query", "positive": "positive", "dataset_name": "positive"})},
         'has a column called "dataset_name"'),
        ({"model_config": {"model_type": "clip"}}, "embeds pictures, and tokenizer_name=.*without an image processor"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)  # fmt: skip
def test_what_the_rows_can_not_be_is_refused_before_training(main, run_file, fields, words, capsys):  # noqa: F811
    given = json.loads(open(run_file()).read())["datasets"]
    fields = {name: value(given) if callable(value) else value for name, value in fields.items()}
    with pytest.raises(SystemExit) as left:
        main(["--config", run_file(**fields)])
    error = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 2 and re.search(words, error), error


def test_pictures_are_refused(main, run_file, tmp_path, capsys):  # noqa: F811
    rows = {"query": ["a", "b"] * 8, "positive": [{"bytes": b"", "path": None}] * 16}
    features = datasets.Features({"query": datasets.Value("string"), "positive": datasets.Image()})
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "pictures")
    with pytest.raises(SystemExit):
        main(["--config", run_file(datasets=[{"dataset_name": str(tmp_path / "pictures")}])])
    assert 'column "positive" of "pictures" holds pictures' in capsys.readouterr().err
