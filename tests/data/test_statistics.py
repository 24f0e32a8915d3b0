"""Statistics of training rows are those of the rows, in words."""

import datasets
from PIL import Image

from hf_dist_ext.data.mixture import Mixture
from hf_dist_ext.data.statistics import CHARACTERS, describe, short
from tests.tiny_models import WORDS, tiny_tokenizer


def rows(count: int = 9) -> datasets.Dataset:
    given = {
        "query": [" ".join(WORDS[: 1 + i % 3]) for i in range(count)],
        "negative": [["parse", "a date"][: 1 + i % 2] for i in range(count)],
        "positive": [Image.new("RGB", (10 + i, 20)) for i in range(count)],
        "label": [0.5 * i for i in range(count)],
    }
    features = datasets.Features(
        query=datasets.Value("string"), negative=datasets.List(datasets.Value("string")), positive=datasets.Image(),
        label=datasets.Value("float32"),
    )  # fmt: skip
    return datasets.Dataset.from_dict(given, features)


def test_columns_are_described_by_what_they_hold():
    (found,) = describe(rows(), tiny_tokenizer())
    assert found.rows == 9 and found.name == ""
    assert found.columns == {
        "query": "texts of 3 to 5 (mean 4) tokens",  # with the two that the tokenizer adds
        "negative": "lists of 1 to 2 (mean 1.4444) texts of 3 to 4 (mean 3.3077) tokens",
        "positive": "pictures, 10 to 18 (mean 14) x 20 pixels",
        "label": "numbers, 0 to 4 (mean 2)",
    }
    assert describe(rows(), None)[0].columns["query"] == "texts of 5 to 12 (mean 8) characters"


def test_examples_are_spread_over_the_rows_and_cut_short():
    (found,) = describe(rows(), tiny_tokenizer())
    assert [row["query"] for row in found.examples] == [rows()[i]["query"] for i in (0, 4, 8)]
    assert found.examples[1]["positive"] == "a picture of 14 x 20 pixels"
    assert found.examples[1]["negative"] == '["parse"]'
    long = "word\n" * 100
    assert short(long) == ("word " * 100)[:CHARACTERS] + "..."


def test_a_picture_that_cannot_be_read_is_left_out():
    given = rows().to_dict()
    given["positive"][4] = {"bytes": b"no picture", "path": None}
    (found,) = describe(datasets.Dataset.from_dict(given, rows().features), None)
    assert found.columns["positive"] == "pictures, 10 to 18 (mean 14) x 20 pixels"
    assert found.examples[1]["positive"] == "a picture"


def test_sources_are_described_one_by_one_and_a_stream_is_not_read():
    found = describe(Mixture({"a": rows(), "b": rows(4)}, [0.5, 0.5]), tiny_tokenizer())
    assert [(one.name, one.rows) for one in found] == [("a", 9), ("b", 4)]

    def never():
        raise AssertionError("read")
        yield {}

    stream = datasets.IterableDataset.from_generator(never, features=datasets.Features(query=datasets.Value("string")))
    (found,) = describe(stream, tiny_tokenizer())
    assert found.rows is None and found.columns == {"query": "read as a stream"} and found.examples == []
