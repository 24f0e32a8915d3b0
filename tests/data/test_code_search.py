"""The built-in dataset: what a pair is, that the split is honest, that everything repeats; its tokenizer."""

import logging
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_dist_ext import cli
from hf_dist_ext.data.code_search import load_code_search, one_row_per_query, read_functions, train_tokenizer
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import from_run
from hf_dist_ext.tasks import search
from tests.tiny_models import embedding_model, model_config

MODULE = '''
import functools

def greet(name):
    """Say hello
    to someone.

    More about it.
    """
    def polite():
        """An inner function."""
        return 1
    return "hello " + name

class Box:
    "A class."
    if True:
        @functools.cache
        def open(self):
            """Öffne the box."""; return 2

        async def close(self):
            # a comment stays
            "Close the box."
            return 3

    class Lid:
        def lift(self):
            """Lift the lid."""
            return 4

def undocumented(): return 5
def only_a_docstring():
    """There is nothing to find here."""
def same_query(x):
    """Close the BOX."""
    return x
'''


@pytest.fixture
def library(tmp_path):
    (tmp_path / "pack" / "test").mkdir(parents=True)
    (tmp_path / "a.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "pack" / "__init__.py").write_text('def greet2(name):\n    """Another."""\n    return 6\n')
    (tmp_path / "pack" / "copy.py").write_text(
        'if 1:\n  def greet2(name):\n      """Copied."""\n      return 6\n'
        "def latin():\n    '''Read it.'''\n    return '\u00fc'\n".replace("\u00fc", "ue")
    )
    (tmp_path / "pack" / "test" / "test_a.py").write_text('def f():\n    """A test."""\n    return 7\n')
    (tmp_path / "z.py").write_text("def broken(:\n")
    return tmp_path


@pytest.fixture(scope="module")
def standard_library():
    return load_code_search()


def test_a_pair_is_the_first_paragraph_and_the_function_without_it(library):
    rows = {row["name"]: row for row in read_functions(library)}
    assert list(rows) == ["a.greet", "a.Box.open", "a.Box.close", "a.Box.Lid.lift", "a.same_query"] + [
        "pack.greet2",
        "pack.copy.latin",
    ]
    assert rows["a.greet"]["query"] == "Say hello to someone."
    greet = 'def greet(name):\n    def polite():\n        """An inner function."""\n        return 1\n'
    assert rows["a.greet"]["positive"] == greet + '    return "hello " + name'
    assert (rows["a.greet"]["path"], rows["a.greet"]["line"]) == ("a.py", 4)
    assert rows["a.Box.open"]["query"] == "Öffne the box."
    assert rows["a.Box.open"]["positive"] == "@functools.cache\ndef open(self):return 2"
    assert rows["a.Box.close"]["positive"] == "async def close(self):\n    # a comment stays\n    return 3"
    assert rows["a.Box.Lid.lift"]["positive"] == "def lift(self):\n    return 4"
    queries = [row["query"] for row in one_row_per_query(list(rows.values()))]
    assert "Close the box." in queries and "Close the BOX." not in queries


def test_unreadable_files_are_skipped_and_counted(library, caplog):
    with caplog.at_level(logging.INFO, logger="hf_dist_ext.data.code_search"):
        read_functions(library)
    assert "1 files could not be parsed: z.py" in caplog.text


def test_no_source_or_too_few_rows_is_refused(tmp_path, library):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="without its library's source"):
        load_code_search(root=tmp_path / "empty")
    with pytest.raises(UsageError, match="held_out=6 of 6 code-search rows"):
        load_code_search(held_out=6, root=library)
    assert len(load_code_search(held_out=2, root=library)["test"]) == 2


def test_no_query_or_document_of_the_test_split_is_in_train(standard_library):
    train, test = standard_library["train"], standard_library["test"]
    assert len(test) == 500 and len(train) > 2000
    assert train.column_names == test.column_names == ["query", "positive", "name", "path", "line"]

    def words(texts):
        return {" ".join(text.split()).casefold() for text in texts}

    assert len(words(test["query"])) == len(words(test["positive"])) == 500
    assert not words(test["query"]) & words(train["query"])
    assert not words(test["positive"]) & words(train["positive"])
    for row in test.select(range(50)):
        assert row["query"] not in " ".join(row["positive"].split()) or len(row["query"]) < 20  # it is cut out


def test_dataset_and_tokenizer_are_the_same_in_another_process():
    root = str(Path(sysconfig.get_path("stdlib")) / "email")  # a part is enough, and fast
    code = (
        "import sys; from hf_dist_ext.data.code_search import load_code_search, train_tokenizer; "
        f"data = load_code_search(held_out=50, root={root!r}); "
        "tokenizer = train_tokenizer([*data['train']['query'], *data['train']['positive']]); "
        "print([data['train'][:], data['test'][:], tokenizer.backend_tokenizer.to_str()])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={**os.environ, **changes})
        for changes in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C", "RAYON_NUM_THREADS": "1"})
    ]
    assert len(runs[0].stdout) > 10_000 and runs[0].stdout == runs[1].stdout


def test_identifiers_are_cut_into_the_words_that_a_docstring_uses(tmp_path):
    texts = ["read the http header of version 2", "parse a date string", "def xml parser"] * 5
    tokenizer = train_tokenizer(texts, vocab_size=600)
    words = tokenizer("read http header v 2").input_ids
    assert tokenizer("readHTTPHeader_v2").input_ids == tokenizer("__READ_HTTP__header(V2)").input_ids == words
    assert tokenizer("XMLParser").input_ids == tokenizer("xml parser").input_ids
    assert tokenizer.unk_token_id not in tokenizer("Zürich 東京").input_ids  # bytes know every text
    assert tokenizer("(xml, [parser]) = {'xml'}").input_ids == tokenizer("xml parser xml").input_ids
    assert tokenizer.decode(tokenizer("parse_date").input_ids, skip_special_tokens=True).strip() == "parse date"
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("readHTTPHeader_v2").input_ids == words and loaded.model_max_length == tokenizer.model_max_length
    assert (loaded.pad_token, loaded.unk_token, loaded.cls_token, loaded.sep_token) == (
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
    )
    assert words[0] == loaded.cls_token_id and words[-1] == loaded.sep_token_id


def test_search_ranks_the_functions_of_a_saved_model_for_every_query(tmp_path, library, capsys, monkeypatch):
    tokenizer = train_tokenizer([row["positive"] for row in read_functions(library)], vocab_size=400)
    config = model_config("bert", vocab_size=len(tokenizer), max_position_embeddings=64)
    torch.manual_seed(0)
    model = embedding_model(config, tokenizer=tokenizer)
    from_run.describe(model, 60, {"query": "def "})
    model.save_pretrained(str(tmp_path / "model"))
    rows = {row["name"]: row for row in read_functions(library)}
    wanted = [rows[name] for name in ("a.Box.Lid.lift", "a.same_query")]
    questions = [row["positive"].removeprefix("def ") for row in wanted]
    monkeypatch.setattr(search, "read_functions", lambda: [*rows.values()])
    cli.main(["search", "--model", str(tmp_path / "model"), "--top_k", "3", *questions])
    printed = capsys.readouterr().out
    for row, question in zip(wanted, questions, strict=True):
        head, _, results = printed.partition(f'"{question}", in ')[2].partition("\n")
        assert head == f"{sysconfig.get_path('stdlib')}:"
        assert results.startswith(f"1.000  {row['name']}  a.py:{row['line']}\n       {row['query']}\n")
    scores = [float(score) for score in re.findall(r"^(-?\d\.\d{3})  \w", printed, re.MULTILINE)]
    assert len(scores) == 6 and scores[:3] == sorted(scores[:3], reverse=True)
