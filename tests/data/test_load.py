"""Datasets from every source, the column map, what is refused, and the collator."""

import gzip
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_dist_ext.data.code_search import train_tokenizer
from hf_dist_ext.data.collator import content_id
from hf_dist_ext.data.columns import column_names
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.data.row_ids import numbered, shared_ids
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.data.stream_readers import Blocks, Readers
from hf_dist_ext.errors import UsageError, in_short
from hf_dist_ext.run.config import RunConfig
from tests.launching import environment

ROWS = [{"query": f"query number {i}", "positive": f"document number {i}", "other": i} for i in range(12)]


@pytest.fixture(scope="module", autouse=True)
def quiet_and_private_cache(tmp_path_factory):
    datasets.disable_progress_bars()
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([row["query"] + " " + row["positive"] for row in ROWS], vocab_size=300)


def write(path, rows=ROWS):
    """The rows in the format that the file's name says."""
    dataset = datasets.Dataset.from_list(rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    elif path.suffix == ".arrow":
        dataset.save_to_disk(str(path.parent / "saved"))
        next((path.parent / "saved").glob("*.arrow")).rename(path)
    elif path.suffix == ".jsonl":
        dataset.to_json(str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        getattr(dataset, f"to_{path.suffix[1:]}")(str(path))
    return str(path)


def load(name, **options):
    return load_datasets(RunConfig(dataset_name=str(name), **options))


def refusal(name, **options):
    with pytest.raises(UsageError) as error:
        load(name, **options)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# Sources -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.parquet", "a.arrow", "a.jsonl.gz"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_file_format_gives_the_same_rows(tmp_path, name, streaming):
    train, evaluation = load(write(tmp_path / name), streaming=streaming)
    assert evaluation is None
    rows = sorted(list(train), key=lambda row: int(row["query"].split()[-1]))  # a stream is shuffled
    assert rows == [{"query": row["query"], "positive": row["positive"]} for row in ROWS]


def test_a_folder_and_a_saved_dataset_have_their_splits(tmp_path):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl")
    write(tmp_path / "folder" / "test.jsonl", ROWS[:3])
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    for name in ("folder", "saved"):
        train, evaluation = load(tmp_path / name, eval_split="test")
        assert (len(train), len(evaluation)) == (12, 3)
    stream, _ = load(tmp_path / "saved", streaming=True)
    assert len(list(stream)) == 12


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, caplog):
    for name in ("train-0.jsonl", "deeper/train-1.jsonl", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name)
    (tmp_path / "notes.json").write_text("{}")
    assert len(load(tmp_path)[0]) == 2 * len(ROWS) and not caplog.records
    for name in ("more.jsonl", "other.parquet"):
        write(tmp_path / name)
    assert len(load(tmp_path)[0]) == 2 * len(ROWS)
    (said,) = caplog.messages
    assert "2 of its data files" in said and "such as more.jsonl" in said


def test_evaluation_rows_come_from_another_file_or_are_held_out_the_same_way_each_time(tmp_path):
    name, other = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", ROWS[:2])
    assert load(name, eval_dataset_name=other)[1]["query"][:] == ["query number 0", "query number 1"]
    assert load(name)[1] is None
    train, evaluation = load(name, eval_holdout=4)
    again, evaluation_again = load(name, eval_holdout=4)
    assert (len(train), len(evaluation)) == (8, 4)
    assert not set(train["query"]) & set(evaluation["query"])
    assert train[:] == again[:] and evaluation[:] == evaluation_again[:]
    stream, stream_evaluation = load(name, eval_holdout=4, streaming=True)
    assert len(list(stream)) == 8 and [row["query"] for row in stream_evaluation] == [r["query"] for r in ROWS[:4]]


@pytest.mark.parametrize("names", [("question", "answer"), ("query", "positive")])
def test_an_evaluation_file_has_the_names_of_the_training_file_or_of_the_run_and_perhaps_no_negatives(tmp_path, names):
    rows = [{"question": f"q{i}", "answer": f"a{i}", "wrong": f"w{i}"} for i in range(4)]
    other = [dict(zip(names, (f"held {i}", f"out {i}"), strict=True)) for i in range(3)]
    run = {"columns": {"query": "question", "positive": "answer", "negative": "wrong"}}
    name = write(tmp_path / "b.jsonl", other)
    train, evaluation = load(write(tmp_path / "a.jsonl", rows), eval_dataset_name=name, **run)
    assert train.column_names == ["query", "positive", "negative"] and evaluation.column_names == ["query", "positive"]
    assert evaluation["positive"][:] == ["out 0", "out 1", "out 2"]
    write(tmp_path / "b.jsonl", [*other, dict.fromkeys(names, "")])
    message = refusal(tmp_path / "a.jsonl", eval_dataset_name=name, **run)
    assert message.startswith(f"{name}, row 3 (counted"), "no split, which a file has not"


def pairs_of(rows):
    return {(row["query"], row["positive"]) for row in rows}


def test_no_held_out_pair_is_trained_on_under_another_number(tmp_path):
    # each pair three times, with another negative, as files of triplets have them; queries and documents of others too
    pairs = [(k // 4, {"query": f"query {k // 2}", "positive": f"document {k % 7}"}) for k in range(14)]
    name = write(tmp_path / "a.jsonl", [row | {"negative": f"{i}", "id": k} for i in range(3) for k, row in pairs])
    train, evaluation = load(name, eval_holdout=25)
    assert (len(train), len(evaluation)) == (18, 24)
    assert pairs_of(train).isdisjoint(pairs_of(evaluation))
    assert set(train["query"]) & set(evaluation["query"]), "another pair of the same query may be held out"
    train, evaluation = load(name, eval_holdout=25, id_column="id")
    assert len(evaluation) == 18 and set(train["id"]).isdisjoint(evaluation["id"])


@pytest.mark.parametrize("lost", [0, 3])
def test_a_stream_loses_the_rows_of_held_out_pairs_alone(tmp_path, caplog, lost):
    """Rows of other pairs share a query, a document, a label or a further column with a held-out one."""
    pairs = [(k % 5, k) for k in range(40)] + [(k, k) for k in range(lost)]
    rows = [{"query": f"q{q}", "positive": f"d{d}", "label": d % 2, "source": "web"} for q, d in pairs]
    name = write(tmp_path / "a.jsonl", rows)
    for options in ({}, {"loss": "CoSENTLoss"}):
        train, evaluation = load(name, eval_holdout=7, streaming=True, **options)
        held, trained = pairs_of(evaluation.to_list()), pairs_of(train.to_list())
        assert len(held) == 7 and len(train.to_list()) == 33 and held.isdisjoint(trained)
    said = [message for message in caplog.messages if "left out" in message]
    assert len(said) == 2 * bool(lost)
    for message in said:
        assert f"{lost} of the next {33 + lost} rows" in message and "the same query and positive" in message


def test_the_number_of_rows_is_limited(tmp_path):
    name = write(tmp_path / "a.jsonl")
    train, evaluation = load(name, eval_dataset_name=name, max_train_samples=5, max_eval_samples=100)
    assert (len(train), len(evaluation)) == (5, 12)
    assert len(list(load(name, max_train_samples=5, streaming=True)[0])) == 5


def test_a_stream_is_shuffled_anew_each_epoch_and_by_the_seed(tmp_path):
    stream_of = RunConfig(dataset_name=write(tmp_path / "a.jsonl"), streaming=True)
    stream, _ = load_datasets(stream_of)
    first = [row["query"] for row in stream]
    stream.set_epoch(1)
    second = [row["query"] for row in stream]
    assert sorted(first) == sorted(second) and first != second
    orders = [[row["query"] for row in load_datasets(stream_of, seed=seed)[0]] for seed in (42, 7)]
    assert orders[0] == first and sorted(orders[1]) == sorted(first) and orders[1] not in (first, second)
    in_order, _ = load_datasets(replace(stream_of, shuffle_buffer_rows=1))
    assert [row["query"] for row in in_order] == [row["query"] for row in ROWS] != first


# Columns -------------------------------------------------------------------------------------------------------------

QUESTIONS = [
    {"id": i // 2, "question": f"q{i}", "answer": f"a{i}", "n1": f"n{i}", "n2": f"m{i}" if i else None}
    for i in range(4)
]
COLUMNS = {"query": "question", "positive": "answer", "negative": ["n1", "n2"]}


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_renamed_ordered_and_joined(tmp_path, streaming):
    name = write(tmp_path / "a.jsonl", QUESTIONS)
    train, _ = load(name, columns=COLUMNS, id_column="id", streaming=streaming)
    run = RunConfig(columns=COLUMNS, id_column="id")
    assert column_names(run, train) == ["query", "positive", "negative"]
    rows = sorted(train, key=lambda row: row["query"])
    assert rows[0] == {"query": "q0", "positive": "a0", "negative": ["n0"], "id": 0}  # one negative is missing
    assert rows[3] == {"query": "q3", "positive": "a3", "negative": ["n3", "m3"], "id": 1}


def test_the_first_of_many_rows_may_all_lack_negatives(tmp_path):
    rows = [QUESTIONS[1] | {"n1": None, "n2": ""}] * 1001 + QUESTIONS
    train, _ = load(write(tmp_path / "a.jsonl", rows), columns=COLUMNS)
    assert train[0]["negative"] == [] and train[1004]["negative"] == ["n3", "m3"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("columns", "first"), [
    ({"query": "positive", "positive": "query"}, ("document number 0", "query number 0")),
    ({"left": "query", "right": "query"}, ("query number 0", "query number 0")),
    ({"query": "positive", "answer": "query"}, ("document number 0", "query number 0")),
], ids=["swapped", "twice", "one takes the other's name"])  # fmt: skip
def test_columns_can_be_swapped_and_used_twice(tmp_path, columns, first, streaming):
    train, _ = load(write(tmp_path / "a.jsonl"), columns=columns, streaming=streaming)
    rows = sorted(train, key=lambda row: str(row))
    assert dict(zip(columns, first, strict=True)) in rows and all(list(row) == list(columns) for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_pictures_that_a_dataset_keeps_undecoded_are_pictures_and_may_take_a_text_columns_name(tmp_path, streaming):
    features = datasets.Features(
        {"query": datasets.Value("string"), "positive": datasets.Image(mode="L", decode=False)}
    )
    rows = datasets.Dataset.from_dict({"query": ["a"] * 3, "positive": [Image.new("RGB", (4, 4))] * 3}, features)
    rows.save_to_disk(str(tmp_path / "rows"))
    for columns in (
        None,
        {"positive": "query", "query": "positive"},
        {"query": "query", "positive": {"image": "positive"}},
    ):
        train, _ = load(tmp_path / "rows", streaming=streaming, columns=columns)
        (row, *_) = train
        pictures = [one.get("image") if isinstance(one, dict) else one for one in row.values() if one != "a"]
        assert [(picture.size, picture.mode) for picture in pictures] == [((4, 4), "L")]


def test_an_empty_name_of_a_picture_in_a_stream_is_said(tmp_path):
    name = write(tmp_path / "a.jsonl", [{"query": "a", "positive": ""}])
    with pytest.raises(UsageError, match="the name of the image file is empty"):
        list(load(name, streaming=True, image_columns=["positive"], image_folder=str(tmp_path))[0])


@pytest.mark.parametrize("streaming", [False, True])
def test_the_names_of_sentence_transformers_are_taken(tmp_path, streaming):
    rows = [{f"negative_{n}": f"n{n}" for n in (1, 2, 10)} | {"positive": "p", "anchor": f"a{i}"} for i in range(3)]
    train, _ = load(write(tmp_path / "a.jsonl", rows), streaming=streaming)
    assert column_names(RunConfig(), train) == ["query", "positive", "negative"]
    first = min(train, key=lambda row: row["query"])
    assert first == {"query": "a0", "positive": "p", "negative": ["n1", "n2", "n10"]}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", ["a.csv", "folder", "with_readme"])
def test_the_texts_of_csv_stay_texts_in_a_file_and_in_a_folder(tmp_path, place, streaming):
    """pandas reads "NA" as missing and 007 as 7."""
    lines = "id,query,positive,label\n007,NA,null,1\n7,nan,12,0\n"
    (tmp_path / "a.csv").write_text(lines)
    for name in ("folder", "with_readme"):
        (tmp_path / name / "deeper").mkdir(parents=True)
        (tmp_path / name / "deeper" / "a.csv").write_text(lines)
    (tmp_path / "with_readme" / "README.md").write_text(
        "---\nconfigs:\n- config_name: b\n  data_files: deeper/*\n---\n"
    )
    run = RunConfig(dataset_name=str(tmp_path / place), id_column="id", loss="CoSENTLoss", streaming=streaming)
    rows = sorted(load_datasets(run)[0], key=lambda row: row["id"])
    kept = [("007", "NA", "null", 1), ("7", "nan", "12", 0)]
    assert [(row["id"], row["query"], row["positive"], row["label"]) for row in rows] == kept


STRANGE = [
    "pairs[1]",
    "a*b",
    "q?",
    "{c}",
    "h#x",
    "p%20",
    "with space",
    "\u00fc\u4e2d",
    ".hidden",
    "c:d",
    "~x",
    "back\\slash",
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stem", STRANGE)
def test_a_path_is_that_file_and_no_pattern(tmp_path, stem, streaming, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in ("pairs1", "aXb", "qx", "c", "p "):
        write(tmp_path / f"{other}.jsonl", [{"query": "another file's", "positive": "p"}])
    write(tmp_path / f"{stem}.jsonl", [{"query": stem, "positive": "p"}])
    for name in (f"{stem}.jsonl", str(tmp_path / f"{stem}.jsonl")):
        assert [row["query"] for row in load(name, streaming=streaming)[0]] == [stem]


@pytest.mark.parametrize("name", ["json", "csv", "text", "./json", "json/", "imagefolder"])
def test_a_folder_may_be_called_as_a_kind_of_file(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "other.jsonl", [{"query": "not in the folder", "positive": "p"}])
    (tmp_path / name).mkdir()
    write(tmp_path / name / "own.jsonl", [{"query": "own", "positive": "p"}])
    assert load(name)[0]["query"][:] == ["own"]


def test_what_datasets_would_look_up_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data1", "data[1]", "a::b", "squad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"query": "q", "positive": "p"}')
    write(tmp_path / "other.jsonl")
    assert 'there is no file or folder "json" here' in refusal("json")
    for name in ("data[1]", tmp_path / "data[1]"):
        assert "as a pattern" in refusal(name)
    for name in ("a::b", "a::b/a.jsonl"):
        assert 'since "::" stands in it' in refusal(name)
    assert "has no revisions" in refusal("squad@main")
    assert "no such file or folder" in refusal(f"file://{tmp_path}/other.jsonl")
    assert "no such file or folder" in refusal("~nobody-at-all/other.jsonl")


def test_a_file_that_changed_under_its_time_is_read_anew(tmp_path):
    for place in (tmp_path / "a.jsonl", tmp_path / "folder" / "a.jsonl"):
        place.parent.mkdir(exist_ok=True)
        for query in ("one", "two"):
            write(place, [{"query": query, "positive": "p"}])
            os.utime(place, ns=(10**18, 10**18))
            name = place if place.parent == tmp_path else place.parent
            assert load(name)[0]["query"][:] == [query]


# Refusals ------------------------------------------------------------------------------------------------------------


NOWHERE = """
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.local_files import config_file
from hf_dist_ext.run.config import RunConfig
from tests.launching import environment
from tests.tiny_models import loaded

name = "nobody-at-all/nothing-here"
for load in (
    lambda: load_datasets(RunConfig(dataset_name=name)),
    lambda: loaded(name),
    lambda: config_file(name),
):
    try:
        load()
    except UsageError as error:
        assert name in str(error), error
    else:
        raise SystemExit("not refused")
"""


@pytest.mark.slow  # the hub is asked again and again, with waits between
def test_what_is_nowhere_is_named_without_being_told_that_there_is_no_network():
    online = environment(HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    subprocess.run([sys.executable, "-c", NOWHERE], check=True, env=online)


def test_what_is_not_there_is_named(tmp_path):
    name = write(tmp_path / "a.jsonl", QUESTIONS)
    assert "no such file or folder" in refusal(tmp_path / "missing.jsonl")
    assert "can not read this kind" in refusal(
        write(tmp_path / "a.parquet") and (tmp_path / "a.parquet").rename(tmp_path / "a.xyz")
    )
    for path in ("held_out.txt", "data/held_out.tsv", "held_out.jsonl.gz", "data/held_out.zip", "~/held-out", "a/b/c"):
        assert "no such file or folder" in refusal(path), "nothing that looks like a file is asked of the hub"
    assert "could not be loaded: it is no file or folder here" in refusal("nobody-at-all/nothing-here")
    assert "dataset_name is missing" in str(pytest.raises(UsageError, load_datasets, RunConfig()).value)
    assert "Splits: train. eval_holdout=N keeps" in refusal(name, eval_split="test", columns=COLUMNS)
    assert "Splits: train." in refusal(name, train_split="training", columns=COLUMNS)
    message = refusal(name, columns={"query": "questions", "positive": "answer"})
    assert 'no column "questions". Columns: id, question, answer, n1, n2. Closest: "question".' in message
    assert "has the columns id, question" in refusal(name)
    assert "no column" in refusal(name, columns=COLUMNS, id_column="group")
    assert "Keep one" in refusal(name, columns=COLUMNS, eval_holdout=2, eval_split="test")
    assert "Hold out fewer" in refusal(name, columns=COLUMNS, eval_holdout=4)
    assert "reserved" in refusal(name, columns={"query": "question", "ids": "answer"})
    assert "Only negatives may be several" in refusal(name, columns={"query": ["question"], "positive": "answer"})
    assert "are needed" in refusal(name, columns={"query": "question"})


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_that_only_later_rows_have_are_named(tmp_path, workers):
    """`datasets` takes the columns of a JSON file from its first 10 MB."""
    rows = [{"query": "q" * 6_000_000, "positive": "p"}] * 2 + [{"query": "q", "positive": "p", "negative": "n"}]
    name = tmp_path / "a.jsonl"
    name.write_text("\n".join(map(json.dumps, rows)))
    words = 'its first rows have the columns positive, query, later ones negative, positive, query. Write "negative"'
    assert words in refusal(name)
    stream = load_datasets(RunConfig(dataset_name=str(name), streaming=True))[0]
    loader = torch.utils.data.DataLoader(Blocks(Readers(stream, 1), [0], 0, 0, None), None, num_workers=workers)
    with pytest.raises(UsageError) as error:
        list(itertools.islice(loader, 2))
    assert str(in_short(error.value)).startswith(f"the stream: {words}")


@pytest.mark.parametrize("first, later, kind", [([], ["n"], "string"), (None, ["n"], "list<item: string>")])
def test_a_column_without_a_value_in_its_first_rows_is_named(tmp_path, first, later, kind):
    rows = [{"query": "q" * 6_000_000, "positive": "p", "negative": first}] * 2
    rows += [{"query": "q", "positive": "p", "negative": later}]
    name = tmp_path / "a.jsonl"
    name.write_text("\n".join(map(json.dumps, rows)))
    words = f"and holds {kind} later. Move a row with a value to the top of the (first) file. Columns without one"
    assert words in refusal(name) and refusal(name).endswith('there: "negative".')
    stream = load_datasets(RunConfig(dataset_name=str(name), streaming=True))[0]
    loader = torch.utils.data.DataLoader(Blocks(Readers(stream, 1), [0], 0, 0, None), None)
    with pytest.raises(UsageError) as error:
        list(itertools.islice(loader, 2))
    assert words in str(error.value) and str(error.value).endswith('there: "negative".')
    name.write_text("\n".join(map(json.dumps, rows[::-1])))  # as the message advises
    assert load(name)[0]["negative"][:] == [later, first, first]


def test_an_empty_dataset_is_refused(tmp_path):
    datasets.Dataset.from_dict({"query": [], "positive": []}).to_parquet(str(tmp_path / "a.parquet"))
    assert "is empty" in refusal(tmp_path / "a.parquet")
    assert "is empty" in refusal(tmp_path / "a.parquet", streaming=True)
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text("")
        assert "is empty" in refusal(tmp_path / name)
    (tmp_path / "folder").mkdir()
    assert "could not be loaded" in refusal(tmp_path / "folder")
    (tmp_path / "broken.jsonl").write_text('{"query": "a"\n{]')
    assert "could not be loaded" in refusal(tmp_path / "broken.jsonl")


def test_a_file_of_another_encoding_or_sign_is_refused(tmp_path, caplog):
    lines = ['{"query": "plain", "positive": "b"}', '{"query": "caf\u00e9", "positive": "b"}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    of_row, of_file = 'row 1 (counted from 0), column "query": the text is not UTF-8', "could not be loaded"
    found = refusal(tmp_path / "a.jsonl")  # datasets 4.8.0 sees it while it reads the file
    assert of_row in found or of_file in found
    (tmp_path / "a.csv").write_bytes("query,positive\na,b\ncaf\u00e9,b".encode("latin-1"))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "wide.jsonl").write_bytes("\n".join(lines).encode("utf-16"))
    (tmp_path / "torn.csv.gz").write_bytes(gzip.compress(b"query,positive" * 99)[:20])
    for name in ("a.csv", "a.csv.gz", "wide.jsonl", "torn.csv.gz"):
        found = refusal(tmp_path / name)
        assert name in found and "could not be loaded: " in found
    stream = load_datasets(RunConfig(dataset_name=str(tmp_path / "a.jsonl"), streaming=True))[0]
    with pytest.raises(UsageError, match=r"the stream is not UTF-8 text: .* byte 0xe9"):
        list(Blocks(Readers(stream, 1), [0], 0, 0, None))
    (tmp_path / "semi.csv").write_text("query;positive\na;b")
    assert "its columns seem to be divided by ';'" in refusal(tmp_path / "semi.csv")
    assert not caplog.records, "one line, the error's"


@pytest.mark.parametrize("value", ["7", "NaN", '["x"]'])
def test_a_row_of_another_type_is_named(tmp_path, value):
    lines = ['{"query": "a", "positive": "b"}'] * 3 + [f'{{"query": {value}, "positive": "b"}}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    message = refusal(tmp_path / "a.jsonl")
    assert 'a.jsonl (train), row 3 (counted from 0), column "query": ' in message and "is no text" in message


def test_negatives_under_two_kinds_of_names_are_not_taken_in_part(tmp_path):
    rows = [{**row, "negative": "x", "negative_2": "z", "negative_1": "y"} for row in ROWS]
    path = write(tmp_path / "a.jsonl", rows)
    assert "has the column negative, and negative_1, negative_2 too. Say which are meant: columns={" in refusal(path)
    columns = {"query": "query", "positive": "positive", "negative": ["negative", "negative_1"]}
    train, _ = load_datasets(RunConfig(dataset_name=str(path), columns=columns))
    assert train[0]["negative"] == ["x", "y"]


def test_a_row_may_have_no_negative(tmp_path, tokenizer):
    negatives = [{**row, "negative": ["x", "y"] if i != 5 else [[], None][i % 2]} for i, row in enumerate(ROWS)]
    train, _ = load(write(tmp_path / "a.parquet", negatives))
    assert len(train) == len(ROWS)
    fixed = datasets.Features({key: datasets.Value("string") for key in ("query", "positive")})
    fixed["negative"] = datasets.List(datasets.Value("string"), length=2)
    rows = {"query": ["a", "b"], "positive": ["c", "d"], "negative": [["x", None], [None, ""]]}
    datasets.Dataset.from_dict(rows, features=fixed).save_to_disk(str(tmp_path / "fixed"))
    train, _ = load(tmp_path / "fixed")
    collator = ContrastiveCollator(tokenizer, column_names(RunConfig(), train))
    batch, alone = collator([train[0], train[1]]), collator([train[1]])
    assert len(batch["negative"]["input_ids"]) == 1 and len(alone["negative"]["input_ids"]) == 0
    assert alone["negative"].keys() == alone["positive"].keys() and len(alone["ids"]["negative"]) == 0


BLANK = " \n\t\u3000"


def test_a_text_of_white_space_is_an_empty_one(tmp_path, tokenizer):
    """In a file and in a stream; among negatives it is none, and it is no id."""
    rows = [dict(row, negative=["x", BLANK]) for row in ROWS]
    name = write(tmp_path / "a.jsonl", [*rows[:7], dict(rows[7], positive=BLANK)])
    assert 'row 7 (counted from 0), column "positive": every row needs a positive' in refusal(name)
    collator = ContrastiveCollator(tokenizer, ["query", "positive", "negative"])
    with pytest.raises(UsageError, match='"positive" holds an empty text'):
        collator(list(load(name, streaming=True)[0]))
    without = write(tmp_path / "b.csv", [dict(row, negative=BLANK) for row in ROWS])
    assert "no row has a negative" in refusal(without)
    train, _ = load(write(tmp_path / "c.jsonl", rows))
    assert texts_of(tokenizer, collator(list(train))["negative"]) == ["x"] * len(ROWS)
    columns = {"query": "query", "positive": "positive", "negative": ["first", "second"]}
    rows = [dict(row, first=BLANK, second="y") for row in ROWS]
    assert load(write(tmp_path / "d.jsonl", rows), columns=columns)[0]["negative"][0] == ["y"]
    groups = write(tmp_path / "e.csv", [dict(row, group=BLANK) for row in ROWS])
    assert 'id_column "group" is empty' in refusal(groups, id_column="group")


def test_a_row_without_text_is_named(tmp_path):
    rows = [dict(row) for row in ROWS]
    rows[7]["positive"] = None
    assert 'row 7 (counted from 0), column "positive": every row needs a positive' in refusal(
        write(tmp_path / "a.jsonl", rows)
    )
    rows[7]["positive"] = ""
    assert "row 7" in refusal(write(tmp_path / "b.parquet", rows))
    message = refusal(write(tmp_path / "c.jsonl"), columns={"query": "query", "positive": "other"})
    assert 'column "other"' in message and "holds int64" in message and "row 0" in message
    negatives = [{**row, "negative": []} for row in ROWS]
    assert 'column "negative": no row has a negative' in refusal(write(tmp_path / "d.parquet", negatives))
    for row in (2, 5, 9):
        rows[row]["query"] = " "
    name, text = write(tmp_path / "e.jsonl", rows), 'row 2 (counted from 0), column "query": every row needs a query'
    counted = "Rows that cannot be used: 4 (2, 5, 7, 9)"
    message = refusal(name)
    assert text in message and message.endswith(f"{counted}.")
    with pytest.raises(UsageError, match=re.escape(f"{counted}, more than max_bad_rows=3.")):
        load_datasets(RunConfig(dataset_name=name), max_bad_rows=3)
    assert len(load_datasets(RunConfig(dataset_name=name), max_bad_rows=4)[0]) == len(rows)
    message = refusal(write(tmp_path / "a.jsonl"), eval_dataset_name=name)
    assert text in message and message.endswith(f"{counted}.")
    groups = [{**row, "group": i if i != 2 else None} for i, row in enumerate(ROWS)]
    assert 'row 2 (counted from 0): id_column "group"' in refusal(
        write(tmp_path / "f.jsonl", groups), id_column="group"
    )
    groups = [{**row, "group": f"g{i}" if i != 5 else ""} for i, row in enumerate(ROWS)]
    assert 'row 5 (counted from 0): id_column "group" is empty' in refusal(
        write(tmp_path / "g.csv", groups), id_column="group"
    )


# The collator --------------------------------------------------------------------------------------------------------


def collate(tokenizer, rows, **options):
    return ContrastiveCollator(tokenizer, [name for name in rows[0] if name != "group"], **options)(rows)


def texts_of(tokenizer, features):
    return [text.strip() for text in tokenizer.batch_decode(features["input_ids"], skip_special_tokens=True)]


def test_rows_become_features_and_ids_with_negatives_flattened_row_by_row(tokenizer):
    rows = [
        {"query": "query 0", "positive": "document number 0", "negative": ["number 1", "number 2"], "group": 5},
        {"query": "query 1", "positive": "query 0", "negative": ["number 3"], "group": 5},
    ]
    batch = collate(tokenizer, rows, id_column="group")
    assert list(batch) == ["query", "positive", "negative", "ids"]
    assert texts_of(tokenizer, batch["negative"]) == ["number 1", "number 2", "number 3"]
    assert set(batch["query"]) == {"input_ids", "attention_mask"}
    for column in ("query", "positive", "negative"):
        assert batch[column]["input_ids"].shape == batch[column]["attention_mask"].shape
        assert len(batch["ids"][column]) == len(batch[column]["input_ids"])
    assert batch["ids"]["query"][0] == batch["ids"]["positive"][1]  # equal text, equal id, whatever the column
    assert batch["ids"]["query"][0] != batch["ids"]["query"][1]
    assert batch["ids"]["group"].tolist() == [content_id(5)] * 2
    gaps = collate(
        tokenizer, [{"query": "a", "positive": "b", "negative": negatives} for negatives in (["x", None], [])]
    )
    assert texts_of(tokenizer, gaps["negative"]) == ["x"]
    single = collate(tokenizer, [{"query": "a", "positive": "b", "negative": "c"}])
    assert list(single) == ["query", "positive", "negative", "ids"] and len(single["negative"]["input_ids"]) == 1
    without = ContrastiveCollator(tokenizer, ["query", "positive", "negative"])([{"query": "a", "positive": "b"}])
    assert list(without) == ["query", "positive", "ids"]


@pytest.mark.parametrize("order", [1, -1])
def test_negatives_of_some_rows_count_wherever_these_stand_in_the_batch(tokenizer, order):
    rows = [{"query": "a", "positive": "b"}, {"query": "c", "positive": "d", "negative": ["x", "y"]}][::order]
    collator = ContrastiveCollator(tokenizer, ["query", "positive", "negative"])
    assert texts_of(tokenizer, collator(rows)["negative"]) == ["x", "y"]
    del rows[0]["positive"]
    with pytest.raises(UsageError, match='no column "positive", only query'):
        collator([rows[1], rows[0]])


def test_padding_prompts_and_lengths_are_per_column(tokenizer):
    rows = [{"query": "number 1", "positive": "document number 1 " * 20}, {"query": "number", "positive": "number"}]
    batch = collate(tokenizer, rows, max_length={"positive": 8}, prompts={"query": "query "})
    assert texts_of(tokenizer, batch["query"])[0] == "query number 1"
    assert batch["positive"]["attention_mask"].sum(dim=1).tolist() == [8, 3]
    plain = collate(tokenizer, rows)
    assert torch.equal(plain["ids"]["query"], batch["ids"]["query"])  # of the raw text
    tokenizer.padding_side = "left"
    try:
        assert collate(tokenizer, rows)["query"]["attention_mask"][1, 0] == 0
    finally:
        tokenizer.padding_side = "right"


def test_ids_are_the_same_in_every_process_and_fit_63_bits():
    code = "from hf_dist_ext.data.collator import content_id; print([content_id(f'text {i}') for i in range(50)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ids = [content_id(f"text {i}") for i in range(50)]
    assert out.strip() == str(ids)
    assert len(set(ids)) == 50 and all(0 <= value < 2**63 for value in ids) and max(ids) > 2**61


def test_loader_workers_give_the_same_batches_under_fork_and_spawn(tokenizer):
    collator = ContrastiveCollator(tokenizer, ["query", "positive"])
    rows = datasets.Dataset.from_list(ROWS).select_columns(["query", "positive"])
    expected = list(torch.utils.data.DataLoader(rows, batch_size=6, collate_fn=collator))
    assert len(expected) == 2 and expected[0]["query"]["input_ids"].any()
    for method in set(multiprocessing.get_all_start_methods()) & {"fork", "spawn"}:
        loader = torch.utils.data.DataLoader(
            rows, batch_size=6, collate_fn=collator, num_workers=1, multiprocessing_context=method
        )
        for batch, reference in zip(loader, expected, strict=True):
            for column in reference:
                for name, value in reference[column].items():
                    assert torch.equal(batch[column][name], value)


class PixelProcessor:
    """The smallest image processor: the pixels themselves."""

    def __call__(self, images, return_tensors):
        return {"pixel_values": torch.stack([torch.from_numpy(np.array(image)) for image in images]), "sizes": [1]}


def test_images_go_through_the_processor(tokenizer, tmp_path):
    images = [Image.new("RGB", (2, 3), color) for color in ("red", "blue", "red")]
    rows = [{"query": f"number {i}", "positive": image} for i, image in enumerate(images)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "images"))
    train, _ = load(tmp_path / "images")
    batch = ContrastiveCollator(tokenizer, ["query", "positive"], processor=PixelProcessor())(list(train))
    assert list(batch["positive"]) == ["pixel_values"] and batch["positive"]["pixel_values"].shape == (3, 3, 2, 3)
    ids = batch["ids"]["positive"].tolist()
    assert ids[0] == ids[2] != ids[1]
    assert shared_ids(train, ["query", "positive"]).tolist() == [[0, 1], [0, 0], [0, 1]]
    with pytest.raises(UsageError, match="no image processor"):
        ContrastiveCollator(tokenizer, ["query", "positive"])(list(train))


def test_what_is_equal_for_the_sampler_is_equal_for_the_collator(tokenizer):
    dataset = datasets.Dataset.from_list([{**row, "negative": "x", "group": row["other"] // 2} for row in ROWS])
    dataset = datasets.concatenate_datasets([dataset, dataset.select([2, 0])])
    ids = ContrastiveCollator(tokenizer, ["query", "positive", "negative"], id_column="group")(list(dataset))["ids"]
    of_collator = torch.stack([ids["query"], ids["positive"], ids["group"]], dim=1).numpy()
    of_sampler = shared_ids(dataset, ["query", "positive", "group"])
    assert np.array_equal(numbered(of_collator) > 0, of_sampler > 0)
    equal = of_collator[:, None, :, None] == of_collator[None, :, None, :]  # (rows, rows, columns, columns)
    for i, j in np.argwhere(~np.eye(len(dataset), dtype=bool)):
        shared = (of_sampler[i][:, None] == of_sampler[j][None]) & (of_sampler[i][:, None] > 0)
        assert np.array_equal(shared.any(), equal[i, j].any())


def test_bad_rows_and_options_are_refused_by_the_collator(tokenizer):
    with pytest.raises(UsageError, match="no column of this run: query, positive"):
        ContrastiveCollator(tokenizer, ["query", "positive"], prompts={"querry": "x"})
    with pytest.raises(UsageError, match="not text"):
        collate(tokenizer, [{"query": "a", "positive": None}])
    with pytest.raises(UsageError, match="not text"):
        collate(tokenizer, [{"query": 3, "positive": "a"}])
    for group in (None, ""):  # as a stream may have them
        with pytest.raises(UsageError, match='id_column "group" is null or empty'):
            collate(tokenizer, [{"query": "b", "positive": "a", "group": group}], id_column="group")


def test_a_stream_trains_on_no_held_row_that_has_no_picture_nor_on_one_with_its_id(tmp_path):
    pictures = [Image.new("RGB", (4, 4), (9 * i, 0, 0)) if i % 2 else None for i in range(8)]
    columns = {"query": [f"q {i}" for i in range(8)], "text": [f"t {i}" for i in range(8)], "picture": pictures}
    features = datasets.Features(
        {**dict.fromkeys(("query", "text"), datasets.Value("string")), "picture": datasets.Image()}
    )
    datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "both.parquet")
    both = {"query": "query", "positive": {"text": "text", "image": "picture"}}
    run = RunConfig(dataset_name=str(tmp_path / "both.parquet"), streaming=True, eval_holdout=3, columns=both)
    train, held = ([row["query"] for row in rows] for rows in load_datasets(run, seed=None))
    assert held == columns["query"][:3] and train == columns["query"][3:]

    rows = [{"query": f"q {i}", "positive": f"p {i}", "group": f"g{i % 4}"} for i in range(12)]
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "rows.csv")
    run = RunConfig(dataset_name=str(tmp_path / "rows.csv"), streaming=True, eval_holdout=2, id_column="group")
    train, held = ({row["group"] for row in rows} for rows in load_datasets(run, seed=None))
    assert (held, train) == ({"g0", "g1"}, {"g2", "g3"})


def test_a_text_that_is_not_utf8_is_refused_with_max_bad_rows_too(tmp_path):
    lines = ['{"query": "a", "positive": "b"}', '{"query": "caf\u00e9", "positive": "c"}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(UsageError, match="is not UTF-8"):
        load_datasets(RunConfig(dataset_name=str(tmp_path / "a.jsonl")), max_bad_rows=1)
