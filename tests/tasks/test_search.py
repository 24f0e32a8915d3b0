"""Search over files: words find pictures, pictures find texts and pictures."""

import gzip
import json
from pathlib import Path

import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize
from transformers import AutoProcessor, CLIPModel

from hf_dist_ext import cli
from hf_dist_ext.data.code_search import train_tokenizer
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.tasks.search import search, texts_of
from tests.tiny_models import embedding_model, loaded, model_config, save_dual_encoder

CAPTIONS = ["parse a date", "read text file", "sort the numbers by key"]


@pytest.fixture
def pairs(tmp_path) -> Path:
    """The folder of a run of towers, with random weights."""
    folder = tmp_path / "model"
    save_dual_encoder("clip", tmp_path / "start")
    model = loaded(tmp_path / "start", normalize=True)
    describe(model, max_length=8, prompts={"query": "search : "})
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def pictures(tmp_path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(["a.png", "b.jpg", "more/c.PNG"]):
        Image.new("RGB", (20, 20), (number * 90, 255 - number * 90, 80)).save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    return folder


def naive(pairs: Path, words: str, files: list[Path], asked: Path | None = None) -> list[float]:
    """Scores of pictures, by model and processor of transformers."""
    model, processor = CLIPModel.from_pretrained(pairs).eval(), AutoProcessor.from_pretrained(pairs)

    def of_pictures(paths):
        images = [Image.open(path).convert("RGB") for path in paths]
        pixels = processor.image_processor(images=images, return_tensors="pt").pixel_values
        return normalize(model.get_image_features(pixel_values=pixels).pooler_output)

    if asked is None:
        tokens = processor.tokenizer([words], truncation=True, max_length=8, return_tensors="pt")
        given = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
        question = normalize(model.get_text_features(**given).pooler_output)
    else:
        question = of_pictures([asked])
    return (of_pictures(files) @ question[0]).tolist()


def test_words_and_pictures_find_pictures(pairs, pictures):
    files = [pictures / name for name in ("a.png", "b.jpg", "more/c.PNG")]
    words = "read a date into list of lines by key"
    for queries, asked in (([words], None), ([], files[1])):
        scores = naive(pairs, f"search : {words}", files, asked)
        expected = sorted(zip(scores, map(str, files), strict=True), reverse=True)
        (found,) = search(str(pairs), queries, pictures, None, asked, 5)
        assert [path for _, path in found] == [path for _, path in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert found[0] == (pytest.approx(1.0, abs=1e-5), str(files[1])), "a picture finds itself"
    assert len({round(score, 4) for score, _ in found}) == 3


def test_a_picture_finds_texts(pairs, pictures, tmp_path, capsys):
    lines = tmp_path / "names.txt"
    lines.write_text("\n\n".join(CAPTIONS))
    expected = [naive(pairs, text, [pictures / "a.png"])[0] for text in CAPTIONS]
    best = CAPTIONS[expected.index(max(expected))]
    (found,) = search(str(pairs), [], lines, None, pictures / "a.png", 5)
    assert found[0] == (pytest.approx(max(expected), abs=1e-5), best) and len(found) == 3
    command = ["search", "--model", str(pairs), "--data", str(lines), "--image", str(pictures / "a.png")]
    cli.main([*command, "--top_k", "1"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and str(pictures / "a.png") in printed[0] and best in printed[1]


def test_pictures_that_cannot_be_read_are_left_out_with_one_warning(pairs, pictures, caplog):
    (expected,) = search(str(pairs), ["parse"], pictures, None, None, 5)
    (pictures / "0.png").write_text("no picture")
    (pictures / "more" / "torn.jpg").write_bytes((pictures / "b.jpg").read_bytes()[:200])
    assert search(str(pairs), ["parse"], pictures, None, None, 5) == [expected]
    (said,) = [record.message for record in caplog.records if "left out" in record.message]
    assert said.startswith(f"2 of 5 pictures are left out of the search. The first: the picture {pictures / '0.png'}")


def test_a_text_model_searches_the_rows_of_a_file_for_every_query(tmp_path):
    tokenizer = train_tokenizer(CAPTIONS * 5, vocab_size=400)
    config = model_config("bert", vocab_size=len(tokenizer), max_position_embeddings=64)
    model = embedding_model(config, tokenizer=tokenizer)
    describe(model, max_length=60, prompts={"query": "search ", "document": "text "})
    model.save_pretrained(str(tmp_path / "model"))
    rows = [{"id": f"d{number}", "text": text, "number": number} for number, text in enumerate(CAPTIONS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    served, queries = SentenceTransformer(str(tmp_path / "model")), ["by key", "read a date"]
    expected = served.similarity(served.encode_query(queries), served.encode_document(CAPTIONS)).tolist()
    found = search(str(tmp_path / "model"), queries, tmp_path / "rows.jsonl", None, None, 5)
    for scores, of_query in zip(expected, found, strict=True):
        best = sorted(zip(scores, CAPTIONS, strict=True), reverse=True)
        assert [text for _, text in of_query] == [text for _, text in best]
        assert [score for score, _ in of_query] == pytest.approx([score for score, _ in best], abs=1e-6)


@pytest.mark.parametrize("name, content", [
    ("a.txt", b"\xef\xbb\xbf" + "one \u2028 line\r\n\r\nNA\r\n".encode()),
    ("a.txt.gz", gzip.compress("one \u2028 line\nNA".encode(), mtime=0)),
    ("a[1].csv", "text\none \u2028 line\nNA\n".encode()),
])  # fmt: skip
def test_texts_are_those_of_the_file_that_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a1.csv").write_text("text\nanother file's")  # which a pattern would find
    assert texts_of(tmp_path / name, None) == ["one \u2028 line", "NA"]


@pytest.mark.parametrize("change, words", [
    ({"data": "nowhere"}, "no such file or folder"),
    ({"data": "empty"}, "there is no picture below"),
    ({"data": "empty.txt"}, "holds no text"),
    ({"data": "two.jsonl"}, "text columns a, b. Name one as --column"),
    ({"data": "two.jsonl", "column": "c"}, "text columns a, b. Name one as --column"),
    ({"data": "latin.jsonl"}, "latin.jsonl.*utf-8"),
    ({"data": "broken"}, "broken/a.png cannot be read"),
    ({"data": "two.jsonl", "column": "a", "queries": [], "image": "broken/a.png"}, "broken/a.png cannot be read"),
    ({"model": "text_model"}, "text_model embeds no pictures"),
    ({"model": "part"}, "part holds a trained part alone. Search with what hf-dist merge makes of it"),
    ({"model": "empty", "data": "two.jsonl"}, 'model "empty" cannot be loaded'),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(pairs, pictures, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "broken", "part"):
        Path(folder).mkdir()
    embedding_model(model_config("bert")).save_pretrained("text_model")
    Path("part", "adapter_config.json").write_text("{}")
    Path("broken", "a.png").write_text("no picture")
    Path("empty.txt").write_text("\n \n")
    Path("two.jsonl").write_text('{"a": "x", "b": "y", "number": 1}\n')
    Path("latin.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1"))
    given = {"model": pairs, "queries": ["parse"], "image": None, "data": pictures, "column": None} | change
    data, image = Path(given["data"]), given["image"] and Path(given["image"])
    with pytest.raises(UsageError, match=words):
        search(str(given["model"]), given["queries"], data, given["column"], image, 5)
