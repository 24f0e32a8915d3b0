"""Search over files: words find pictures, pictures find texts and pictures; the index knows when it is out of date."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize
from transformers import AutoProcessor, CLIPModel

from hf_dist_ext import cli
from hf_dist_ext.data.code_search import train_tokenizer
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks import search
from hf_dist_ext.tasks.adapters import adapt
from hf_dist_ext.tasks.rows import read_rows
from tests.tiny_models import embedding_model, loaded, model_config, save_dual_encoder

CAPTIONS = ["parse a date", "read text file", "sort the numbers by key"]


@pytest.fixture
def pairs(tmp_path) -> Path:
    """The folder of a run of towers, with random weights."""
    folder = tmp_path / "index" / "model"
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
    for question, asked in ((words, None), ("", files[1])):
        scores = naive(pairs, f"search : {words}", files, asked)
        expected = sorted(zip(scores, map(str, files), strict=True), reverse=True)
        found = search.find(str(pairs), question, asked and str(asked), str(pictures))
        assert [path for _, path in found] == [path for _, path in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert found[0] == (pytest.approx(1.0, abs=1e-5), str(files[1])), "a picture finds itself"
    assert len({round(score, 4) for score, _ in found}) == 3


def test_a_picture_finds_texts(pairs, pictures, tmp_path, capsys):
    lines = tmp_path / "names.txt"
    lines.write_text("\n\n".join(CAPTIONS))
    expected = [naive(pairs, text, [pictures / "a.png"])[0] for text in CAPTIONS]
    best = CAPTIONS[expected.index(max(expected))]
    found = search.find(str(pairs), "", str(pictures / "a.png"), str(lines))
    assert found[0] == (pytest.approx(max(expected), abs=1e-5), best) and len(found) == 3
    command = ["search", "--model", str(pairs), "--data", str(lines), "--image", str(pictures / "a.png")]
    cli.main([*command, "--top_k", "1"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and str(pictures / "a.png") in printed[0] and best in printed[1]


def test_vectors_are_computed_once_and_again_after_a_change(pairs, pictures, monkeypatch):
    embedded = []

    def count(plain):
        def encode(self, values, **options):
            embedded.append(len(values) if isinstance(values, list) else 1)
            return plain(self, values, **options)

        return encode

    for name in ("encode_query", "encode_document"):
        monkeypatch.setattr(SentenceTransformer, name, count(getattr(SentenceTransformer, name)))

    def scores() -> list[float]:
        embedded.clear()
        return sorted(score for score, _ in search.find(str(pairs), "parse", None, str(pictures)))

    first = scores()
    assert embedded == [3, 1]
    assert scores() == first and embedded == [1], "the question alone"
    Image.new("RGB", (20, 20), (7, 8, 99)).save(pictures / "a.png")
    os.utime(pictures / "a.png", ns=(1, 1))
    assert scores() != first and embedded == [3, 1], "a picture has changed"
    model = SentenceTransformer(str(pairs), device="cpu")
    with torch.no_grad():
        model[0].model.visual_projection.weight.neg_()
    model.save_pretrained(str(pairs))
    assert scores() != first and embedded == [3, 1], "the model has changed"
    before = scores()
    assert embedded == [1]
    (index,) = (pairs / "index").iterdir()
    index.write_bytes(index.read_bytes()[:100])
    assert scores() == before and embedded == [3, 1], "the index was torn"
    with torch.no_grad():
        model[0].model.visual_projection.weight.neg_()
    weights = pairs / "model.safetensors"
    stat = weights.stat()
    model.save_pretrained(str(pairs))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert scores() != before and embedded == [3, 1], "the model has changed, and its time was set back"
    assert scores() and embedded == [1] and len(list((pairs / "index").iterdir())) == 1


def test_two_searches_at_a_time_write_an_index_each(pairs, pictures, monkeypatch, caplog):
    plain, written = safetensors.torch.save_file, []

    def find() -> list:
        return search.find(str(pairs), "parse", None, str(pictures))

    def save_file(tensors, path, *more):
        written.append(path)
        Path(path).write_bytes(b"half of it")
        if len(written) == 1:
            find()
        plain(tensors, path, *more)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    first = find()
    assert len({*written}) == 2 and "cannot be written" not in caplog.text
    assert find() == first and len(written) == 2, "the index is whole"
    assert len(list((pairs / "index").iterdir())) == 1


def test_a_text_model_searches_the_rows_of_a_file(tmp_path):
    tokenizer = train_tokenizer(CAPTIONS * 5, vocab_size=400)
    config = model_config("bert", vocab_size=len(tokenizer), max_position_embeddings=64)
    model = embedding_model(config, tokenizer=tokenizer)
    describe(model, max_length=60, prompts={"query": "search ", "document": "text "})
    model.save_pretrained(str(tmp_path / "model"))
    rows = [{"text": text, "number": number} for number, text in enumerate(CAPTIONS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    served = SentenceTransformer(str(tmp_path / "model"))
    vectors, question = served.encode_document(CAPTIONS), served.encode_query("by key")
    expected = served.similarity(question, vectors)[0].tolist()
    for _ in range(2):  # the second time from the index
        found = search.find(str(tmp_path / "model"), "by key", None, str(tmp_path / "rows.jsonl"))
        assert found == sorted(zip(expected, CAPTIONS, strict=True), reverse=True)


def test_what_an_editor_adds_to_a_file_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "one \u2028 line\r\ntwo\r\n".encode())
    assert search.texts_of(read_rows(tmp_path / "a.txt"), "a.txt") == ["one \u2028 line", "two"]


@pytest.mark.parametrize("change, words", [
    ({"question": " "}, "words or with --image"),
    ({"image": "a.png"}, "words or with --image"),
    ({"data": "nowhere"}, "no such file or folder"),
    ({"data": "empty"}, "there is no picture below"),
    ({"data": "empty.txt"}, "holds no text"),
    ({"data": "two.jsonl"}, "text columns a, b. Name one as --column"),
    ({"data": "two.jsonl", "column": "c"}, "text columns a, b. Name one as --column"),
    ({"data": "broken"}, "broken/a.png cannot be read"),
    ({"model": "text_model"}, "text_model embeds no pictures"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(pairs, pictures, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "broken"):
        Path(folder).mkdir()
    text_model = embedding_model(model_config("bert"))
    text_model.save_pretrained("text_model")
    Path("broken", "a.png").write_text("no picture")
    Path("empty.txt").write_text("\n \n")
    Path("two.jsonl").write_text('{"a": "x", "b": "y", "number": 1}\n')
    given = {"model": str(pairs), "question": "parse", "image": None, "data": str(pictures)} | change
    with pytest.raises(UsageError, match=words):
        search.find(*(given[name] for name in ("model", "question", "image", "data")), given.get("column"))


def test_the_index_beside_adapters_knows_when_their_base_has_changed(tmp_path):
    torch.manual_seed(0)
    base = embedding_model(model_config("bert", hidden_dropout_prob=0.0))
    base.save_pretrained(str(tmp_path / "base"))
    adapted = loaded(tmp_path / "base")
    adapt(adapted, RunConfig(use_lora=True))
    adapted.save_pretrained(str(tmp_path / "model"))
    files = [tmp_path / "model" / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    (tmp_path / "texts.txt").write_text("\n".join(CAPTIONS))

    def scores() -> list[float]:
        found = search.find(str(tmp_path / "model"), "by key", None, str(tmp_path / "texts.txt"))
        return [score for score, _ in sorted(found, key=lambda one: one[1])]

    first, kept = scores(), list((tmp_path / "model" / "index").iterdir())
    written = kept[0].stat().st_mtime_ns
    assert scores() == first and kept[0].stat().st_mtime_ns == written, "from the index"
    before = [path.read_bytes() for path in files]
    with torch.no_grad():
        base[0].model.get_input_embeddings().weight.neg_()
    base.save_pretrained(str(tmp_path / "base"))
    assert [path.read_bytes() for path in files] == before, "the adapters are as they were"
    served = SentenceTransformer(str(tmp_path / "model"))
    vectors, question = served.encode_document(sorted(CAPTIONS)), served.encode_query("by key")
    expected = served.similarity(question, vectors)[0].tolist()
    assert scores() == pytest.approx(expected, abs=1e-6) and expected != pytest.approx(first, abs=1e-3)

    base = embedding_model(model_config("bert", num_hidden_layers=1))
    base.save_pretrained(str(tmp_path / "base"))
    with pytest.raises(UsageError, match="of its adapters do not fit the base model"):
        scores()


def test_the_index_of_a_model_whose_chat_template_changed_is_made_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    facts = set()
    for text in ("{{ messages }}", "{{ messages }}!"):
        (tmp_path / "chat_template.jinja").write_text(text)
        facts.add(search.facts_of_model(tmp_path))
    assert len(facts) == 2
