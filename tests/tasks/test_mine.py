"""`hf-dist mine` from a file of pairs to a file that a run trains on."""

import errno
import glob
import json
from pathlib import Path

import datasets
import pytest
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertForSequenceClassification

from hf_dist_ext import cli
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.tasks.mine import WRITERS
from tests.test_train_script import main  # noqa: F401, a fixture
from tests.tiny_models import SMALL, WORDS, model_config, tiny_tokenizer


@pytest.fixture
def model(tmp_path) -> str:
    EmbeddingModel.from_config(model_config("bert")).save_pretrained(tmp_path / "model", tokenizer=tiny_tokenizer())
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
    columns = ["--query_column", "question", "--positive_column", "answer", "--id_column", "group"]
    cli.main(["mine", "--model", model, "--data", data, "--output", str(output), *columns, *more])
    (split,) = datasets.load_dataset(
        output.suffix[1:].replace("jsonl", "json"), data_files=glob.escape(str(output))
    ).values()
    return list(split)


def check(rows: list[dict], negatives: int) -> None:
    assert len(rows) == 24 and 0 < max(len(row["negative"]) for row in rows) <= negatives
    for row in rows:
        groups = {other["group"] for other in rows if other["question"] == row["question"]}
        right = {other["answer"] for other in rows if other["question"] == row["question"] or other["group"] in groups}
        assert not right.intersection(row["negative"]) and len(set(row["negative"])) == len(row["negative"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_file_holds_no_positive_as_a_negative_and_a_run_trains_on_it(main, tmp_path, model, data, kind, capsys):  # noqa: F811
    output = tmp_path / f"mined*[1].{kind}"  # no pattern
    check(mine(data, output, model, "--negatives", "3", "--relative_margin", "none"), 3)
    printed = capsys.readouterr()
    assert f'"dataset_name": "{output}"' in printed.out and "negatives per query" in printed.out
    assert "mining" not in printed.err, "a progress bar where there is no terminal"
    printed_fields = json.loads("{" + printed.out.splitlines()[-1].partition("Train on it: ")[2] + "}")
    fields = printed_fields | {  # the held-out file is as the first one was, without negatives
        "model_name_or_path": model, "id_column": "group", "batch_size": 8, "eval_dataset_name": data,
        "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1,
        "output_dir": str(tmp_path / "out"), "use_cpu": True, "disable_tqdm": True, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(fields))
    main(["--config", str(tmp_path / "run.json")])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_a_folder_that_we_do_not_read_is_read_by_sentence_transformers(tmp_path, model, data, capsys):
    other = SentenceTransformer(model)
    other[1].pooling_mode = "max"
    other.save(str(tmp_path / "max"))
    check(mine(data, tmp_path / "mined.jsonl", str(tmp_path / "max"), "--relative_margin", "none"), 5)
    assert "sentence-transformers loads this folder instead" in capsys.readouterr().out


def test_a_cross_encoders_scores_stand_in_the_file(tmp_path, model, data):
    folder = tmp_path / "cross"
    BertForSequenceClassification(BertConfig(**SMALL, num_labels=1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    more = ["--cross_encoder", str(folder), "--relative_margin", "none"]
    rows = mine(data, tmp_path / "mined.jsonl", model, *more)
    check(rows, 5)
    for row in rows:
        assert len(row["scores"]) == 1 + len(row["negative"])
        assert row["scores"][1:] == sorted(row["scores"][1:], reverse=True)


def test_documents_of_a_corpus_are_negatives_too(tmp_path, model, data):
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"answer": f"only {word}"}) for word in WORDS))
    more = ["--corpus", str(tmp_path / "corpus.jsonl"), "--negatives", "20", "--relative_margin", "none"]
    rows = mine(data, tmp_path / "mined.jsonl", model, *more)
    check(rows, 20)
    assert any(text.startswith("only ") for row in rows for text in row["negative"])


@pytest.mark.parametrize(
    "more, words",
    [
        (["--negatives", "0"], "--negatives 0"),
        (["--rank_min", "9", "--rank_max", "9"], "holds no rank"),
        (["--rank_max", "4"], "asks for more than the 4 ranks"),
        (["--relative_margin", "1.5"], "a share of the positive's score"),
        (["--output", "mined.csv"], "a row holds a list of negatives"),
        (["--output", "no/such/mined.jsonl"], "there is no folder"),
        (["--output", __file__.replace(".py", ".jsonl")], None),
        (["--query_column", "questoin"], "error: --query_column: "),
        (["--query_column", "questoin"], 'no column "questoin"'),
        (["--id_column", "groop"], "id_column"),
        (["--corpus", "nowhere.jsonl"], "there is no such file"),
        (["--corpus", "{tmp_path}/numbers.jsonl"], 'numbers.jsonl: column "answer" holds no text'),
        (["--split", "test"], '--split="test" is no split'),
        (["--model", "nowhere"], "nowhere"),
        (["--cross_encoder", "nowhere"], "--cross_encoder nowhere can not be loaded"),
        (["--relative_margin", "0.999"], "Widen one of them"),
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
    check(mine(data, tmp_path / "mined.jsonl", model), 5)
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
