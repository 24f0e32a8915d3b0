"""Numbers of what rows may not share: those of comparing every pair, computed once per machine and mapped."""

from collections import Counter

import datasets
import numpy as np
import pytest

from hf_dist_ext.data import row_ids
from hf_dist_ext.data.row_ids import numbered, shared_ids


def pairs(rows: int = 3000) -> datasets.Dataset:
    """A tenth of the queries stands twice, some are another row's positive, one row is its own positive."""
    query = [f"wörter {i - 1 if i % 10 == 9 else i}" for i in range(rows)]
    positive = [query[i - 3] if i % 50 == 7 else f"about {i}" for i in range(rows)]
    positive[5] = query[5]
    return datasets.Dataset.from_dict({"query": query, "positive": positive, "group": [i // 2 for i in range(rows)]})


@pytest.fixture
def stores(tmp_path, monkeypatch):
    """Every dataset counts as a large one."""
    monkeypatch.setattr(row_ids, "STORED_ROWS", 1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "hf_dist_ext"


def check(ids: np.ndarray, rows: list[list]) -> None:
    """Naive: a value counts for its row once."""
    counts = Counter(value for row in rows for value in set(row))
    known: dict = {}
    for own, values in zip(ids.tolist(), rows, strict=True):
        for place, (number, value) in enumerate(zip(own, values, strict=True)):
            assert (number > 0) == (counts[value] > 1 and value not in values[:place])
            if number:
                assert known.setdefault(number, value) == value
    assert len(set(known.values())) == len(known)


def computed(data: datasets.Dataset, columns: list[str]) -> np.ndarray:
    return numbered(row_ids.content_hashes(data, columns))


@pytest.mark.parametrize("block", [16, 1 << 16])
def test_numbers_are_equal_where_texts_are_and_none_where_no_other_row_has_them(monkeypatch, block):
    monkeypatch.setattr(row_ids, "ROWS", block)
    data = pairs(300).select([*range(150, 300), *range(160), 5, 7])
    check(shared_ids(data, ["query", "positive"]), [[row["query"], row["positive"]] for row in data])
    check(shared_ids(data, ["query", "group"]), [[row["query"], row["group"]] for row in data])
    draw = np.random.default_rng(0).integers(-3, 200, size=(150, 3))
    check(numbered(draw), draw.tolist())
    assert numbered(np.zeros((0, 2), dtype=np.int64)).shape == (0, 2)


def test_a_large_dataset_is_numbered_once_and_mapped_afterwards(stores, monkeypatch):
    data = pairs()
    first = shared_ids(data, ["query", "positive"])
    assert isinstance(first, np.memmap) and np.array_equal(first, computed(data, ["query", "positive"]))
    (file,) = stores.glob("*.npy")
    monkeypatch.setattr(row_ids, "content_hashes", lambda *arguments: pytest.fail("hashed again"))
    assert np.array_equal(shared_ids(pairs(), ["query", "positive"]), first)
    monkeypatch.undo()
    monkeypatch.setattr(row_ids, "STORED_ROWS", 1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", stores.parent)
    others = data.select(range(1, 3000)), data.map(lambda row: {"query": row["query"] + "!"}), data.shuffle(seed=1)
    assert all(np.array_equal(shared_ids(d, ["query"]), computed(d, ["query"])) for d in others)
    assert len({*stores.glob("*.npy")}) == 4 and not [*stores.glob("*.unfinished")]


@pytest.mark.parametrize("bytes_left", [0, 50, 1000])
def test_a_torn_file_is_made_again(stores, bytes_left):
    data = pairs()
    first = np.array(shared_ids(data, ["query"]))
    (file,) = stores.glob("*.npy")
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:bytes_left])
    assert np.array_equal(shared_ids(data, ["query"]), first) and file.read_bytes() == whole


def test_a_folder_that_can_not_be_written_is_said_and_costs_time_only(stores, monkeypatch):
    stores.parent.mkdir()
    stores.write_text("a file, where the folder should be")
    data, said = pairs(100), []
    monkeypatch.setattr(row_ids.logger, "warning", said.append)
    assert np.array_equal(shared_ids(data, ["query"]), computed(data, ["query"]))
    assert "can not be kept in" in said[0] and "HF_DATASETS_CACHE" in said[0]


ROLE = {"role": "user", "content": "how do i parse a date"}


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (None, [[3, 1, 4], [3, 1], []]),  # token ids
        (None, [[ROLE], [ROLE, ROLE]]),  # messages
        (None, [ROLE, ROLE | {"role": "system"}]),
        (datasets.Array2D((2, 2), "int32"), [[[1, 2], [3, 4]], [[1, 2], [3, 5]]]),
    ],
)
def test_columns_that_hold_no_texts_are_numbered_by_what_they_hold(kind, others):
    values = [*others, others[0]]
    features = None if kind is None else datasets.Features({"query": kind})
    found = shared_ids(datasets.Dataset.from_dict({"query": values}, features=features), ["query"])
    assert found.ravel().tolist() == [1] + [0] * (len(others) - 1) + [1]


@pytest.mark.parametrize("nothing", [None, "", []])
def test_rows_without_a_negative_share_none(nothing):
    some = ["other"] if nothing == [] else "other"
    data = datasets.Dataset.from_dict({"query": list("abcd"), "negative": [nothing, nothing, some, some]})
    assert shared_ids(data, ["query", "negative"])[:, 1].tolist() == [0, 0, 1, 1]
