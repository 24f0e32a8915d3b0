"""`hf-dist encode`: the embeddings of training and of sentence-transformers, in the order of the rows."""

import errno
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.quantization import quantize_embeddings

from hf_dist_ext import cli
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.tasks import encode
from hf_dist_ext.tasks.encode import Encode
from hf_dist_ext.tasks.rows import open_picture, read_rows
from tests.tasks.test_folders import write_run
from tests.tasks.test_search import pairs, pictures  # noqa: F401, fixtures
from tests.tasks.test_stages import main as train
from tests.tiny_models import WORDS, embed, embedding_model, loaded, model_config, tiny_tokenizer

COUNT = 23
PROMPTS = {"query": "search : ", "document": "text ", "STS": "key by "}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with prompts and two lengths, and a file of texts beside it."""
    torch.manual_seed(0)
    model = embedding_model(model_config("bert"), projection_dim=16)
    describe(model, {"query": 6, "positive": 11}, PROMPTS)
    model.save_pretrained(str(tmp_path / "model"))
    draw = np.random.default_rng(0)
    rows = [{"_id": f"d{i}", "text": " ".join(draw.choice(WORDS, draw.integers(1, 14))), "n": i} for i in range(COUNT)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def texts_of(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]


def encoded(folder: Path, name: str = "out.npy", data: str = "rows.jsonl", **options) -> np.ndarray:
    encode.main(Encode(str(folder / "model"), str(folder / data), str(folder / name), **options))
    return np.load(folder / name)


def as_trained(folder: Path, column: str, texts: list[str]) -> np.ndarray:
    """What a training step computes of the column."""
    prompts, lengths = {"query": PROMPTS["query"], "positive": PROMPTS["document"]}, {"query": 6, "positive": 11}
    features = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], prompts, lengths).features(column, texts)
    with torch.no_grad():
        return embed(loaded(folder / "model"), **features).numpy()


def test_embeddings_are_those_of_training_and_of_sentence_transformers(folder, monkeypatch):
    monkeypatch.setattr(encode, "BATCHES_PER_WINDOW", 2)
    sizes, plain = [], SentenceTransformer.encode
    served, texts = SentenceTransformer(str(folder / "model"), device="cpu"), texts_of(folder)
    given = {
        "query": (served.encode_query(texts), as_trained(folder, "query", texts)),
        "document": (served.encode_document(texts), as_trained(folder, "positive", texts)),
    }
    counted = lambda self, inputs, **given: (sizes.append(len(inputs)), plain(self, inputs, **given))[1]  # noqa: E731
    monkeypatch.setattr(SentenceTransformer, "encode", counted)
    for name, expected in given.items():
        found = encoded(folder, f"{name}.npy", prompt_name=name, batch_size=5)
        assert found.dtype == np.float32 and found.shape == (COUNT, 16)
        for one in expected:
            np.testing.assert_allclose(found, one, atol=1e-6)
    assert sizes == [1, 10, 10, 3] * 2, "no more than a window of texts is held"
    assert not np.allclose(np.load(folder / "query.npy"), np.load(folder / "document.npy"), atol=1e-3)
    others = {"plain": ({}, {}), "STS": ({"prompt_name": "STS"},) * 2, "own": ({"prompt": "read "},) * 2}
    for name, (ours, theirs) in others.items():
        np.testing.assert_allclose(encoded(folder, f"{name}.npy", **ours), served.encode(texts, **theirs), atol=1e-6)
    assert not list(folder.glob("*.unfinished"))


def test_of_trained_parts_texts_without_a_role_have_the_length_of_the_longest_column(folder):
    """A checkpoint of what was trained alone, whose length is one per column, and the whole model that merge makes."""
    (folder / "run").mkdir()
    path = write_run(
        folder / "run", model_name_or_path=str(folder / "model"), max_length={"query": 6, "positive": 11}, max_steps=2,
        trainable_modules=["projection"], learning_rate=1e-1,
    )  # fmt: skip
    train(path)
    models = {"part": folder / "run" / "out" / "checkpoint-2", "merged": folder / "whole"}
    assert not (models["part"] / "modules.json").is_file(), "only what was trained is there"
    merge(models["part"], models["merged"])
    given = [str(folder / "rows.jsonl"), "--column", "text", "--output"]
    for name, model in models.items():
        cli.main(["encode", "--model", str(model), *given, str(folder / f"{name}.npy")])
    found = np.load(folder / "part.npy")
    np.testing.assert_allclose(found, np.load(folder / "merged.npy"), atol=1e-6)
    assert not np.allclose(found, encoded(folder, "before.npy"), atol=1e-3), "something trained"


def test_an_output_is_written_by_one_process_at_a_time(folder, monkeypatch):
    expected, plain = encoded(folder, "alone.npy"), encode._encode
    (folder / "out.npy.unfinished").write_text("what a kill has left")

    def second_starts(*given):
        with pytest.raises(UsageError, match="out.npy is being written by another hf-dist encode. Wait for it"):
            encoded(folder, prompt="read ")
        plain(*given)

    monkeypatch.setattr(encode, "_encode", second_starts)
    np.testing.assert_array_equal(encoded(folder), expected)
    assert not list(folder.glob("*.unfinished"))


def test_what_was_written_since_the_start_is_not_written_over(folder, monkeypatch):
    plain = encode._encoder
    monkeypatch.setattr(encode, "_encoder", lambda *given: (np.save(folder / "out.npy", COUNT), plain(*given))[1])
    with pytest.raises(UsageError, match="out.npy exists"):
        encoded(folder)
    assert np.load(folder / "out.npy") == COUNT and not list(folder.glob("*.unfinished"))


def test_the_default_prompt_of_a_folder_is_put_before_texts(folder):
    path, texts = folder / "model" / "config_sentence_transformers.json", texts_of(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"default_prompt_name": "STS"}))
    served = SentenceTransformer(str(folder / "model"), device="cpu")
    np.testing.assert_allclose(encoded(folder), served.encode(texts), atol=1e-6)
    np.testing.assert_allclose(encoded(folder, "none.npy", prompt=""), served.encode(texts, prompt=""), atol=1e-6)
    assert not np.allclose(np.load(folder / "out.npy"), np.load(folder / "none.npy"), atol=1e-3)


def test_a_text_is_cut_where_positions_end_of_a_tokenizer_without_a_limit(tmp_path):
    torch.manual_seed(0)
    embedding_model(model_config("bert"))[0].model.save_pretrained(tmp_path / "model")
    tiny_tokenizer(max_length=int(1e30)).save_pretrained(tmp_path / "model")  # 40 positions
    (tmp_path / "rows.txt").write_text("sort the\n" + "parse a date " * 60)
    expected = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(["sort the", "parse a date " * 60])
    assert np.abs(encoded(tmp_path, data="rows.txt") - expected).max() < 1e-6


@pytest.mark.parametrize("precision", ["float16", "int8", "uint8", "binary", "ubinary"])
def test_dimensions_and_precisions_are_those_of_sentence_transformers(folder, precision, monkeypatch):
    monkeypatch.setattr(encode, "ROWS_PER_GROUP", 7)
    served = SentenceTransformer(str(folder / "model"), device="cpu")
    whole = encoded(folder, "whole.npy", dims=8)
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)
    expected = served.encode(texts_of(folder), truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    found = encoded(folder, "out.npy", dims=8, precision=precision)
    expected = whole.astype(precision) if precision == "float16" else quantize_embeddings(whole, precision)
    assert found.dtype == expected.dtype and np.array_equal(found, expected) and len(np.unique(found)) > 9
    if "int8" in precision:  # the same steps for other rows
        (folder / "few.txt").write_text("\n".join(texts_of(folder)[:3]))
        ranges = str(folder / "out.ranges.npy")
        few = encoded(folder, "few.npy", "few.txt", dims=8, precision=precision, ranges=ranges)
        assert np.array_equal(few, found[:3])


def test_a_parquet_file_keeps_the_ids_in_row_groups(folder, monkeypatch):
    monkeypatch.setattr(encode, "ROWS_PER_GROUP", 10)
    whole = encoded(folder)
    given = {"default": {}, "number": {"id_column": "n"}, "bits": {"precision": "ubinary"}}
    for name, options in given.items():
        path = folder / f"{name}.parquet"
        encode.main(Encode(str(folder / "model"), str(folder / "rows.jsonl"), str(path), **options))
        table = pq.read_table(path)
        column = options.get("id_column", "_id")
        ids = list(range(COUNT)) if column == "n" else [f"d{i}" for i in range(COUNT)]
        assert table[column].to_pylist() == ids and pq.ParquetFile(path).num_row_groups == 3
        expected = np.packbits(whole > 0, axis=-1) if name == "bits" else whole
        assert np.array_equal(np.stack(table["embedding"].to_numpy()), expected)


def test_lines_of_a_text_file_stay_lines_also_when_they_are_empty(folder):
    texts = ["parse a date", "", "sort", "", "by key"]
    (folder / "lines.txt").write_text("\n".join(texts))
    with gzip.open(folder / "lines.csv.gz", "wt") as file:
        file.write("\n".join(["words", "parse a date", '""', "sort", '""', "by key"]))
    served = SentenceTransformer(str(folder / "model"), device="cpu")
    (folder / "windows.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode())
    for data in ("lines.txt", "lines.csv.gz", "windows.txt"):
        found = encoded(folder, f"{data}.npy", data)
        np.testing.assert_allclose(found, served.encode(texts), atol=1e-6)


@pytest.mark.parametrize("kind, lines", [("txt", ["NA", "007"]), ("csv", ["text", "NA", "007"])])
def test_a_path_of_data_is_no_pattern(tmp_path, kind, lines):
    (tmp_path / f"a[1].{kind}").write_text("\n".join(lines))
    (tmp_path / f"a1.{kind}").write_text("\n".join([*lines, "another file's"]))
    rows = read_rows(tmp_path / f"a[1].{kind}")
    assert rows.take(0, 9) == ["NA", "007"]


LATIN = {
    "a.txt": "plain\ncaf\u00e9", "a.csv": "id,text\n1,caf\u00e9", "a.jsonl": '{"text": "a"}\n{"text": "caf\u00e9"}',
    "id.jsonl": '{"text": "a", "id": "b"}\n{"text": "a", "id": "\u00e9"}',
}  # fmt: skip


@pytest.mark.parametrize("name", [*LATIN, "a.txt.gz", "torn.txt.gz", "plain.csv.gz"])
def test_a_file_that_is_no_text_is_told_with_its_place(tmp_path, name):
    content = LATIN.get(name.removesuffix(".gz"), "").encode("latin-1")
    words = rf"{re.escape(name)}.* is not UTF-8 text: line 2, byte {content.find(0xE9)} of the file is 0xe9"
    if name == "a.txt.gz":
        content = gzip.compress(content)
    elif name.endswith(".gz"):
        content = gzip.compress(bytes(range(32, 127)) * 9)[:60] if name.startswith("torn") else b"id,text"
        words = rf"{re.escape(name)}.* cannot be unpacked: .* Give a whole .gz file"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_rows(tmp_path / name)


def test_a_pair_of_towers_encodes_pictures_and_texts(pairs, pictures, tmp_path, capsys):  # noqa: F811
    (tmp_path / "names.txt").write_text("parse\nread a date")
    model, command = SentenceTransformer(str(pairs), device="cpu"), ["encode", "--model", str(pairs), "--output"]
    cli.main([*command, str(tmp_path / "pictures.parquet"), str(pictures), "--batch_size", "2"])
    cli.main([*command, str(tmp_path / "names.npy"), str(tmp_path / "names.txt")])
    table = pq.read_table(tmp_path / "pictures.parquet")
    paths = [str(pictures / name) for name in ("a.png", "b.jpg", "more/c.PNG")]
    assert table["path"].to_pylist() == paths and "3 rows, 16 dimensions" in capsys.readouterr().out
    images = [open_picture(Path(path)) for path in paths]
    np.testing.assert_allclose(np.stack(table["embedding"].to_numpy()), model.encode(images), atol=1e-6)
    np.testing.assert_allclose(np.load(tmp_path / "names.npy"), model.encode(["parse", "read a date"]), atol=1e-6)
    other = Encode(str(pairs), str(tmp_path / "names.txt"), str(tmp_path / "other.npy"), prompt="key ")
    encode.main(other)
    assert not np.allclose(np.load(tmp_path / "other.npy"), np.load(tmp_path / "names.npy"), atol=1e-3)


def test_two_processes_write_what_one_writes(folder):
    one, two = (encoded(folder, f"{len(more)}.npy", **more) for more in ({}, {"devices": ["cpu", "cpu"]}))
    assert len(one) == COUNT and np.allclose(one, two, atol=1e-6)


def test_a_launchers_processes_are_told_of_the_commands_own(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="Start it without a launcher, with --devices"):
        encoded(folder)


@pytest.mark.parametrize("change, words", [
    ({"output": "out.txt"}, r"written as .npy or .parquet"),
    ({"output": "there.npy"}, "exists. Give a new file"),
    ({"output": "nowhere/out.npy"}, "there is no folder"),
    ({"batch_size": 0}, "--batch_size 0 is not"),
    ({"dims": 17}, "have 16 dimensions"),
    ({"prompt": "a", "prompt_name": "query"}, "Give one of them"),
    ({"prompt_name": "nonsense"}, "are query, document, STS"),
    ({"id_column": "_id"}, "holds numbers alone"),
    ({"output": "out.parquet", "id_column": "key"}, 'no column "key"'),
    ({"ranges": "there.npy"}, "--ranges goes with"),
    ({"ranges": "there.npy", "precision": "int8"}, "these embeddings need"),
    ({"ranges": "no.npy", "precision": "int8"}, "no such file. An int8"),
    ({"devices": ["cpu", "nonsense"]}, "--devices nonsense: "),
    ({"data": "nowhere.jsonl"}, "no such file or folder"),
    ({"data": "lines.txt", "column": "text"}, "has no columns"),
    ({"data": "nulls.jsonl", "column": "a"}, r'row 1 \(counted from 0\): column "a" is null'),
    ({"data": "nulls.jsonl"}, "text columns a, b. Name one as --column"),
    ({"data": "pictures"}, "model embeds no pictures"),
    ({"data": "pictures", "column": "a"}, "folder of pictures"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(folder, pictures, monkeypatch, change, words):  # noqa: F811
    monkeypatch.chdir(folder)
    np.save("there.npy", np.zeros((2, 3)))
    Path("lines.txt").write_text("parse")
    Path("nulls.jsonl").write_text('{"a": "x", "b": "y"}\n{"a": null, "b": "y"}\n')
    given = {"model": "model", "data": "rows.jsonl", "output": "out.npy"} | change
    with pytest.raises(UsageError, match=words):
        encode.main(Encode(**given))
    assert not list(folder.glob("*.unfinished"))


@pytest.mark.parametrize(
    "place, name, more",
    [
        ("os.posix_fallocate", "out.npy", {}),
        ("pyarrow.parquet.ParquetWriter", "o.parquet", {}),
        ("pyarrow.parquet.ParquetWriter", "o.parquet", {"precision": "int8"}),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(folder, monkeypatch, place, name, more):
    def fill(*arguments) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place, fill)
    before = set(folder.iterdir())
    with pytest.raises(UsageError, match="cannot be written: No space left on device. Give an --output where"):
        encoded(folder, name, **more)
    assert set(folder.iterdir()) == before


def test_no_more_pictures_than_a_batch_for_each_process_are_decoded_at_once(pairs, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "many").mkdir()
    for i in range(7):
        Image.new("RGB", (20, 20), (i * 30, 0, 80)).save(tmp_path / "many" / f"{i}.png")
    sizes, plain = [], SentenceTransformer.encode
    counted = lambda self, inputs, **given: (sizes.append(len(inputs)), plain(self, inputs, **given))[1]  # noqa: E731
    monkeypatch.setattr(SentenceTransformer, "encode", counted)
    encode.main(Encode(str(pairs), str(tmp_path / "many"), str(tmp_path / "out.npy"), batch_size=3))
    assert sizes == [1, 3, 3, 1] and np.load(tmp_path / "out.npy").shape[0] == 7


def test_the_ranges_of_another_output_stay(folder):
    encoded(folder, "out.npy", precision="int8")
    before = (folder / "out.ranges.npy").read_bytes()
    (folder / "few.txt").write_text("\n".join(texts_of(folder)[:3]))
    asked = [str(folder / name) for name in ("model", "few.txt", "out.parquet")]
    with pytest.raises(UsageError, match="out.ranges.npy exists, of another output"):
        encode.main(Encode(*asked, precision="uint8"))
    assert (folder / "out.ranges.npy").read_bytes() == before and not (folder / "out.parquet").exists()
