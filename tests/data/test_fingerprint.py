"""Ranks compare the content of their rows: not where they lie, and not how they are stored."""

import datasets
import pytest

from hf_dist_ext.data.fingerprint import content_digest

ROWS = {
    "q": ["a", None, "ccc", "d"],
    "n": [["x", "y"], None, [], ["z", None]],
    "s": [{"u": 1, "v": "k"}, {"u": 2, "v": None}, None, {"u": 3, "v": "m"}],
    "f": [1.5, None, 2.0, 3.0],
    "b": [True, False, None, True],
}
FEATURES = datasets.Dataset.from_dict(ROWS).features


def of(rows: dict) -> datasets.Dataset:
    return datasets.Dataset.from_dict(rows, features=FEATURES)


@pytest.mark.parametrize("column, row, value", [
    ("q", 0, "b"), ("q", 1, ""), ("n", 0, ["x", "z"]), ("n", 0, ["xy"]), ("n", 2, None), ("s", 0, {"u": 1, "v": "l"}),
    ("f", 0, 1.25), ("f", 1, 0.0), ("b", 1, True), ("b", 2, False),
])  # fmt: skip
def test_every_value_counts(column, row, value):
    other = {name: list(values) for name, values in ROWS.items()}
    other[column][row] = value
    assert content_digest(of(other)) != content_digest(of(ROWS))


def test_rows_in_several_pieces_are_the_same_rows_and_another_order_is_not():
    whole = of(ROWS)
    pieces = [of({name: values[i : i + 2] for name, values in ROWS.items()}) for i in (0, 2)]
    assert content_digest(datasets.concatenate_datasets(pieces)) == content_digest(whole)
    assert content_digest(whole.select([1, 0, 2, 3])) != content_digest(whole)
    assert content_digest({"one": whole}) != content_digest({"two": whole})


def test_a_picture_counts_by_its_bytes_or_the_name_of_its_file():
    def digest(path: str, content: bytes | None) -> str:
        features = datasets.Features({"i": datasets.Image()})
        return content_digest(datasets.Dataset.from_dict({"i": [{"bytes": content, "path": path}]}, features=features))

    assert digest("/a/x.png", b"1") == digest("/b/y.png", b"1") != digest("/a/x.png", b"2")
    assert digest("/a/x.png", None) == digest("/b/x.png", None) != digest("/a/z.png", None)
