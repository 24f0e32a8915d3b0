"""`hf-dist mine` from a file of pairs to a file that a run trains on."""

import errno
import glob
import inspect
import json
import random
from pathlib import Path

import datasets
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from transformers import BertConfig, BertForSequenceClassification

from hf_dist_ext import cli
from hf_dist_ext.tasks import mine as mining
from hf_dist_ext.tasks.mine import WRITERS
from tests.test_train_script import main  # noqa: F401, a fixture
from tests.tiny_models import SMALL, WORDS, embedding_model, model_config, tiny_tokenizer


@pytest.fixture
def model(tmp_path) -> str:
    embedding_model(model_config("bert")).save_pretrained(str(tmp_path / "model"))
    return str(tmp_path / "model")


@pytest.fixture
def data(tmp_path) -> str:
    """Each query has two positives, each positive two rows; rows with one id are right for each other."""
    rows = [
        {
            "question": f"{WORDS[i // 2]} {WORDS[i // 4]} read",
            "answer": f"{WORDS[i % 12]} {WORDS[i % 5]}",
            "group": i // 8,
        }
        for i in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "pairs.jsonl")


def mine(data: str, output: Path, model: str, *more: str) -> list[dict]:
    columns = ["--anchor_column_name", "question", "--positive_column_name", "answer"]
    cli.main(["mine", "--model", model, "--data", data, "--output", str(output), *columns, *more])
    (split,) = datasets.load_dataset(
        output.suffix[1:].replace("jsonl", "json"), data_files=glob.escape(str(output))
    ).values()
    return list(split)


def pairs_of(data: str) -> list[dict]:
    return [json.loads(line) for line in Path(data).read_text().splitlines()]


THEIRS = {
    "plain": {},
    "margins": {"num_negatives": 2, "range_min": 1, "range_max": 9, "relative_margin": -0.05, "min_score": 0.1},
    "drawn": {"sampling_strategy": "random", "range_max": 8, "num_negatives": 2},
    "tuple": {"output_format": "n-tuple", "output_scores": True, "absolute_margin": 0.0, "num_negatives": 1},
    "pair": {"output_format": "labeled-pair", "query_prompt": "read ", "corpus_prompt_name": "document"},
    "list": {"output_format": "labeled-list", "max_score": 0.9999, "batch_size": 3, "faiss_batch_size": 5},
    "ranking": {"output_format": "n-tuple", "include_positives": True, "verbose": False},
}


@pytest.mark.parametrize("name", THEIRS)
def test_rows_are_those_of_mine_hard_negatives(tmp_path, model, data, name):
    options, words = THEIRS[name], []
    for option, value in options.items():
        words += [f"--{option}"] if value is True else [f"--no-{option}"] if value is False else [f"--{option}", value]
    found = mine(data, tmp_path / "mined.parquet", model, *map(str, words))
    random.seed(0)
    rows = datasets.Dataset.from_list(pairs_of(data)).select_columns(["question", "answer"])
    expected = mine_hard_negatives(rows, SentenceTransformer(model), **options)
    assert found == list(expected) and len(found) > 2


def test_every_option_of_mine_hard_negatives_is_one_of_the_command(monkeypatch):
    given = {}
    monkeypatch.setattr(mining, "main", lambda asked: given.update(vars(asked)))
    own = ["--model", "a", "--data", "b", "--output", "c", "--corpus", "d", "--cross_encoder", "e"]
    flags = ["--use_faiss", "--include_positives", "--output_scores", "--verbose", "--use_multi_process", "cpu"]
    names = {*inspect.signature(mine_hard_negatives).parameters} - {"dataset", "as_triplets", "margin"}
    choices = {"sampling_strategy": "top", "output_format": "n-tuple"}
    rest = names - {word[2:] for word in own + flags}
    cli.main(
        ["mine", *own, *flags, *(word for name in sorted(rest) for word in (f"--{name}", choices.get(name, "1")))]
    )
    assert names == {*given, *given["options"]} - {"options", "data", "output", "split", "id_column", "seed"}


@pytest.mark.parametrize("form, column", [("triplet", "negative"), ("n-tuple", "negative_1")])
def test_no_negative_shares_an_id_or_is_the_query_itself(tmp_path, model, data, form, column):
    rows = pairs_of(data)
    rows.append(rows[0] | {"answer": rows[5]["question"]})  # a query that is a document
    Path(data).write_text("\n".join(map(json.dumps, rows)))
    more = ["--output_format", form, "--num_negatives", "1" if form == "n-tuple" else "9"]
    before = mine(data, tmp_path / "before.jsonl", model, *more)
    after = mine(data, tmp_path / "after.jsonl", model, *more, "--id_column", "group")

    def right(query: str) -> set[str]:
        groups = {row["group"] for row in rows if row["question"] == query}
        return {row["answer"] for row in rows if row["group"] in groups} | {query}

    assert all(row["question"] != row[column] for row in before)
    kept = [row for row in before if row[column] not in right(row["question"])]
    assert after == kept and 0 < len(kept) < len(before)


@pytest.mark.parametrize("form, kind", [("triplet", "jsonl"), ("n-tuple", "parquet")])
def test_a_run_trains_on_the_file_as_the_last_line_says(main, tmp_path, model, data, form, kind, capsys):  # noqa: F811
    output = tmp_path / f"mined*[1].{kind}"  # no pattern
    mine(data, output, model, "--output_format", form, "--num_negatives", "2")
    printed = capsys.readouterr()
    assert f'"dataset_name": "{output}"' in printed.out
    printed_fields = json.loads("{" + printed.out.splitlines()[-1].partition("Train on it: ")[2] + "}")
    fields = printed_fields | {  # the held-out file is as the first one was, without negatives
        "model_name_or_path": model, "per_device_train_batch_size": 8, "eval_dataset_name": data,
        "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1,
        "output_dir": str(tmp_path / "out"), "use_cpu": True, "disable_tqdm": True, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(fields))
    main(["--config", str(tmp_path / "run.json")])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_a_cross_encoders_scores_stand_in_the_file(tmp_path, model, data):
    folder = tmp_path / "cross"
    BertForSequenceClassification(BertConfig(**SMALL, num_labels=1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    rows = mine(data, tmp_path / "mined.jsonl", model, "--cross_encoder", str(folder), "--output_scores")
    scores = CrossEncoder(str(folder)).predict([(row["question"], row["negative"]) for row in rows])
    assert [row["scores"][1] for row in rows] == pytest.approx(scores.tolist(), abs=1e-5)


def test_documents_of_a_corpus_are_negatives_too(tmp_path, model, data):
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"answer": f"only {word}"}) for word in WORDS))
    rows = mine(data, tmp_path / "mined.jsonl", model, "--corpus", str(tmp_path / "corpus.jsonl"))
    assert any(row["negative"].startswith("only ") for row in rows)


def test_kept_embeddings_are_those_of_one_model(tmp_path, model, data):
    first = mine(data, tmp_path / "first.jsonl", model, "--cache_folder", str(tmp_path / "cache"))
    torch.manual_seed(1)
    embedding_model(model_config("bert")).save_pretrained(str(model))
    alone, kept = (
        mine(data, tmp_path / f"{len(more)}.jsonl", model, *more)
        for more in ([], ["--cache_folder", str(tmp_path / "cache")])
    )
    assert kept == alone != first


@pytest.mark.parametrize(
    "more, words",
    [
        (["--negatives", "0"], "Closest: --num_negatives"),
        (["--anchor_column", "q"], "Closest: --anchor_column_name"),
        (["--num_negatives", "0"], "of sentence-transformers: num_negatives must be at least 1"),
        (["--range_min", "9", "--range_max", "9"], "range_min must be smaller than range_max"),
        (["--use_multi_process", "nonsense"], "--use_multi_process nonsense: "),
        (["--use_faiss"], "Please install `faiss`"),
        (["--id_column", "group", "--output_format", "labeled-list"], "--id_column goes with --output_format triplet"),
        (["--output", "mined.csv"], "written as .jsonl or .json or .parquet"),
        (["--output", "no/such/mined.jsonl"], "there is no folder"),
        (["--output", __file__.replace(".py", ".jsonl")], None),
        (["--anchor_column_name", "questoin"], "error: --anchor_column_name: "),
        (["--anchor_column_name", "questoin"], 'no column "questoin"'),
        (["--id_column", "groop"], "id_column"),
        (["--corpus", "nowhere.jsonl"], "there is no such file"),
        (["--corpus", "{tmp_path}/numbers.jsonl"], 'numbers.jsonl: column "answer" holds no text'),
        (["--split", "test"], '--split="test" is no split'),
        (["--model", "nowhere"], "nowhere"),
        (["--cross_encoder", "nowhere"], "--cross_encoder nowhere can not be loaded"),
        (["--relative_margin", "0.999"], "Widen ranks or margins"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_not_be_mined_is_refused(tmp_path, model, data, capsys, monkeypatch, more, words):
    monkeypatch.delenv("RANK", raising=False)
    if words is None:
        (tmp_path / "there.jsonl").write_text("")
        more, words = ["--output", str(tmp_path / "there.jsonl")], "exists. Give a new file"
    (tmp_path / "numbers.jsonl").write_text('{"answer": [1]}')
    with pytest.raises(SystemExit) as left:
        mine(data, tmp_path / "mined.jsonl", model, *(one.format(tmp_path=tmp_path) for one in more))
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_two_runs_at_a_time_write_a_whole_file_each(tmp_path, model, data, monkeypatch):
    plain, written = WRITERS[".jsonl"], []

    def write(rows, file) -> None:
        written.append(file.name)
        if len(written) == 1:
            mine(data, tmp_path / "mined.jsonl", model)
        plain(rows, file)

    monkeypatch.setitem(WRITERS, ".jsonl", write)
    assert mine(data, tmp_path / "mined.jsonl", model)
    assert len({*written}) == 2 and [path.name for path in tmp_path.glob("mined*")] == ["mined.jsonl"]


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, model, data, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def fill(rows, file) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(WRITERS, ".jsonl", fill)
    with pytest.raises(SystemExit):
        mine(data, tmp_path / "mined.jsonl", model)
    assert "mined.jsonl cannot be written: No space left on device." in capsys.readouterr().err
    assert not list(tmp_path.glob("mined*"))
