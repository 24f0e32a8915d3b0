"""Corpora as BEIR and MTEB write them, and what of them is refused before training."""

import gzip
import json

import pytest
from PIL import Image

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.errors import UsageError
from tests.retrieval_data import corpus, write_beir, write_lines, write_mteb, write_pictures


def read(path, **more):
    (data,) = read_evaluations([{"type": "retrieval", "path": str(path), **more}])
    return data


def content(data) -> tuple:
    """Queries, documents, and the pairs of texts that belong together."""
    documents = dict(zip(data.corpus_ids, data.corpus, strict=True))
    pairs = {(data.queries[q], documents[d]) for q, of in data.relevant.items() for d in of}
    return list(data.queries.values()), list(documents.values()), pairs


def test_both_layouts_say_the_same(tmp_path):
    queries, documents, right = corpus()
    expected = {(queries[q], documents[d]) for q, of in right.items() for d in of}
    beir, mteb = read(write_beir(tmp_path / "b", *corpus())), read(write_mteb(tmp_path / "m", *corpus()))
    for data in (beir, mteb):
        found = content(data)
        assert found == ([queries[q] for q in right], list(documents.values()), expected), "no query without an answer"
        assert data.corpus_ids == list(documents)
    assert beir.options.name == "b" and mteb.options.name == "m"


def test_the_texts_of_csv_stay_texts_beside_its_scores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("sentence1,sentence2,score,rating\nNA,007,x,1\nnull,b,y,0.5\n")
    given = {"type": "sts", "path": "rows.csv", "columns": {"score": "rating"}}
    (found,) = read_evaluations([given])
    assert found.columns == {"sentence1": ["NA", "null"], "sentence2": ["007", "b"], "score": [1, 0.5]}


def test_files_may_be_packed_and_qrels_without_a_header(tmp_path):
    plain = content(read(write_beir(tmp_path, *corpus())))
    for path in (*tmp_path.glob("*.jsonl"), *tmp_path.glob("qrels/*.tsv")):
        text = path.read_text()
        if path.suffix == ".tsv":
            text = text.partition("\n")[2]
        with gzip.open(f"{path}.gz", "wt") as file:
            file.write(text)
        path.unlink()
    assert content(read(tmp_path)) == plain


def test_the_split_chooses_the_qrels(tmp_path):
    queries, documents, right = corpus()
    dev = dict(list(right.items())[:3])
    write_beir(tmp_path, queries, documents, dev, split="dev")
    assert len(read(tmp_path).queries) == 3, "the only one"
    write_beir(tmp_path, queries, documents, right, split="test")
    assert len(read(tmp_path).queries) == len(right) and len(read(tmp_path, split="dev").queries) == 3
    with pytest.raises(UsageError, match='evaluation "x": qrels: there is no split "train", but dev, test'):
        read(tmp_path, split="train", name="x")


def test_a_folder_that_has_changed_is_read_again(tmp_path):
    """datasets' cache takes folders of one name for the same, whose README.md names the same files."""
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        for text in ("red", "green"):
            folder = write_mteb(tmp_path / place / "docs", {"q": "a"}, {"1": f"{text} {place}"}, {"q": ["1"]})
            assert read(folder).corpus == [f"{text} {place}"]


def test_a_corpus_may_be_pictures(tmp_path):
    pictures = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(3)]
    data = read(write_pictures(tmp_path / "pictures", pictures, {"q": "red"}, {"q": ["1"]}))
    assert [image.getpixel((0, 0))[0] for image in data.corpus[1:3]] == [1, 2]
    assert data.queries == {"q": "red"} and data.relevant == {"q": {"1"}} and data.corpus_ids == ["0", "1", "2"]


def append(name: str, row) -> object:
    def change(folder) -> None:
        with open(folder / name, "a") as file:
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")

    return change


def latin(name: str) -> object:
    """Every q becomes a letter of another encoding."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes().replace(b"q", b"\xe9"))


@pytest.mark.parametrize("change, words", [
    (append("qrels/test.tsv", "q0\td999\t1"), r'qrels name 1 id\(s\) that are not in corpus, such as "d999"'),
    (append("qrels/test.tsv", "q99\td1\t1"), r'qrels name 1 id\(s\) that are not in queries, such as "q99"'),
    (append("qrels/test.tsv", "q0 d1 1"), r"line \d+: \['q0 d1 1'\] is not a query, a document and a score"),
    (latin("qrels/test.tsv"), r"test.tsv is not UTF-8 text: .* byte 0xe9"),
    (latin("queries.jsonl"), r"queries.jsonl cannot be read: .*UTF8"),
    (lambda folder: write_lines(folder / "corpus.jsonl", [{"_id": d, "body": "b"} for d in corpus()[1]]),
     'corpus: no row has a "text" or a "title"'),
    (append("corpus.jsonl", {"_id": "d7", "text": "again"}), 'corpus: the id "d7" stands in 2 rows'),
    (append("queries.jsonl", {"_id": "q7", "text": "again"}), 'queries: the id "q7" stands in 2 rows'),
    (append("corpus.jsonl", {"text": "no id"}), "corpus: 1 of 102 rows have no _id"),
    (append("corpus.jsonl", {"_id": 7, "text": "a number"}), "corpus.jsonl cannot be read: .*Every line is an object"),
    (lambda folder: (folder / "queries.jsonl").unlink(), "has no queries.jsonl"),
    (lambda folder: (folder / "qrels" / "test.tsv").unlink(), "has no qrels"),
    (lambda folder: (folder / "qrels" / "test.tsv").write_text("q0\td1\t0\n"), "no line of qrels has a score above 0"),
    (lambda folder: (folder / "qrels" / "test.tsv").write_text(""), "no line of qrels has a score above 0"),
    (lambda folder: write_lines(folder / "queries.jsonl", [{"_id": q, "text": " "} for q in corpus()[0]]),
     'queries have no text, such as "q1"'),
])  # fmt: skip
def test_what_cannot_be_is_refused(change, words, tmp_path):
    change(write_beir(tmp_path, *corpus()))
    with pytest.raises(UsageError, match=words):
        read(tmp_path)


PAIRS = [{"sentence1": "a", "sentence2": "b", "score": 1}, {"sentence1": "c", "sentence2": "a", "score": 2.5}]


def test_rows_are_read_by_the_names_of_an_evaluation(tmp_path):
    write_lines(tmp_path / "pairs.jsonl", PAIRS)
    (data,) = read_evaluations([{"type": "sts", "path": str(tmp_path / "pairs.jsonl")}])
    assert data.columns == {"sentence1": ["a", "c"], "sentence2": ["b", "a"], "score": [1, 2.5]}
    assert data.options.name == "pairs"


@pytest.mark.parametrize("kind, rows, words", [
    ("sts", [{**PAIRS[0], "score": None}, PAIRS[1]], r'row 0 \(counted from 0\): "score" is None, which is no number'),
    ("sts", [PAIRS[0], PAIRS[0]], "all scores are equal"),
    ("sts", [{**PAIRS[0], "sentence2": " "}, PAIRS[1]], "\"sentence2\" is ' ', which is no text"),
    ("triplet", PAIRS, r'columns\["anchor"\]: .* has no column "anchor"'),
])  # fmt: skip
def test_rows_that_cannot_be_are_refused(kind, rows, words, tmp_path):
    write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UsageError, match=f'evaluation "rows": .*{words}'):
        read_evaluations([{"type": kind, "path": str(tmp_path / "rows.jsonl")}])


def test_other_data_is_refused_with_the_layouts(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"query": "a", "positive": "b"}])
    with pytest.raises(UsageError, match="has the configurations default. Retrieval needs a folder"):
        read(tmp_path)


def test_a_copy_beside_a_file_of_beir_is_not_read_in_its_place(tmp_path):
    folder = write_beir(tmp_path / "b", *corpus())
    expected, qrels = content(read(folder)), folder / "qrels" / "test.tsv"
    for name in ("test.tsv.bak", "test.tsv~", "test.easy.tsv"):
        qrels.with_name(name).write_text("\n".join(qrels.read_text().splitlines()[:3]) + "\n")
    assert content(read(folder)) == expected
    assert len(content(read(folder, split="test.easy"))[2]) == 2
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        file.write((folder / "corpus.jsonl").read_text())
    with pytest.raises(UsageError, match="has corpus.jsonl and corpus.jsonl.gz"):
        read(folder)
    clone = write_mteb(tmp_path / "clone", {"q": "a"}, {"1": "red"}, {"q": ["1"]})
    (clone / "corpus.jsonl.gz").write_bytes(b"")
    assert read(clone).corpus == ["red"], "its README.md says which file is meant"


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path, caplog):
    for name, numbers in {"part-0": range(6), "test-1": range(6, 9)}.items():
        rows = [{"sentence1": f"a{i}", "sentence2": "b", "score": i} for i in numbers]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    (found,) = read_evaluations([{"type": "sts", "path": str(tmp_path)}])
    assert len(found.columns["score"]) == 3 and "such as part-0.jsonl" in caplog.text
