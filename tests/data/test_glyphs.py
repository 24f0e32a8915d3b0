"""The built-in pictures of characters: names fit pictures, what is held out is nowhere in train, the run learns."""

import json
import sys
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from sentence_transformers import SentenceTransformer
from transformers import AutoProcessor

from hf_dist_ext.data import glyphs, load
from hf_dist_ext.data.glyphs import build_processor, load_glyphs, look_alike, one_row_per_picture
from hf_dist_ext.errors import UsageError
from tests.launching import ROOT
from tests.tasks.test_stages import main
from tests.tiny_models import loaded, write_fields

CONFIG = ROOT / "configs" / "glyph_search.json"
ONE_MODEL = ROOT / "configs" / "glyph_vlm.json"


@pytest.fixture(scope="module")
def splits():
    return load_glyphs()


def pixels(rows) -> np.ndarray:
    return np.stack([np.asarray(picture, dtype=np.float32) / 255 for picture in rows["positive"]])  # (N, 32, 32)


def test_a_name_is_that_of_the_character_and_the_picture_shows_it(splits):
    ink = {}
    for split in splits.values():
        assert split["query"][:] == [unicodedata.name(character).lower() for character in split["character"]]
        first = split.filter(lambda font: font == glyphs.FONTS[0], input_columns="font")
        ink |= dict(zip(first["query"], pixels(first), strict=True))
    assert {picture.shape for picture in ink.values()} == {(glyphs.SIDE, glyphs.SIDE)}
    assert min(picture.sum() for picture in ink.values()) > 0
    dots = [(len(name.partition("-")[2]), picture.sum()) for name, picture in ink.items() if "dots-" in name]
    assert len(dots) > 200 and np.corrcoef(np.array(dots).T)[0, 1] > 0.99, "Braille has ink for each dot it names"
    block = ink["full block"] > 0
    assert (ink["lower half block"] > 0)[: glyphs.SIDE // 3].sum() == 0 < block[: glyphs.SIDE // 3].sum()
    middle = glyphs.SIDE // 2
    heads = [ink[f"{side}wards arrow"].sum(0).argmax() for side in ("left", "right")]
    assert heads[0] < middle < heads[1], "drawn the right way round"


def test_held_out_characters_are_nowhere_in_train(splits):
    train, test = splits["train"], splits["test"]
    assert len(test) == 500 and len(train) > 4000
    for column in ("query", "character"):
        assert not set(train[column]) & set(test[column])
    files = [split.cast_column("positive", datasets.Image(decode=False))["positive"] for split in (test, train)]
    here, there = ({file["bytes"] for file in some} for some in files)  # one encoder made all: equal where pixels are
    assert not here & there and len(there) > 4000
    assert len(here) == len(test), "a name has one right picture"


def test_of_characters_with_one_picture_the_first_is_kept(splits):
    rows = [row for split in splits.values() for row in zip(split["query"], split["font"], strict=True)]
    names = {name for name, font in rows if font == glyphs.FONTS[0]}
    assert "latin capital letter a" in names and not names & {
        "greek capital letter alpha",
        "cyrillic capital letter a",
    }


def test_a_picture_that_is_nearly_a_held_out_one_is_not_in_train(monkeypatch):
    rows = {row["query"]: row for row in one_row_per_picture(glyphs.draw_font())}
    io, diaeresis = rows["cyrillic capital letter io"], rows["latin capital letter e with diaeresis"]
    assert io["positive"].tobytes() != diaeresis["positive"].tobytes(), "else the test shows nothing"
    others = [rows[name] for name in ("latin capital letter e with acute", "greek small letter alpha", "digit one")]
    assert look_alike([diaeresis, *others], [io]).tolist() == [True, False, False, False]
    monkeypatch.setattr(glyphs, "draw_font", lambda file: [row | {"font": file} for row in (io, diaeresis, *others)])
    lengths = set()
    for seed in range(8):
        split = load_glyphs(held_out=1, seed=seed)
        is_twin = split["test"]["query"][0] in (io["query"], diaeresis["query"])
        assert len(split["train"]) == (3 if is_twin else 4)
        lengths.add(len(split["train"]))
    assert lengths == {3, 4}


def test_the_split_repeats_and_its_size_and_seed_are_choices(monkeypatch):
    rows = glyphs.draw_font()[:400]  # a part is enough, and fast
    monkeypatch.setattr(glyphs, "draw_font", lambda file: [row | {"font": file} for row in rows])
    seeds = (42, 42, 1)
    first, again, other = (load_glyphs(held_out=40, seed=seed)["test"]["query"][:] for seed in seeds)
    assert first == again != other and len(first) == len(other) == 40
    with pytest.raises(UsageError, match="held_out=400 of .* glyph-search rows leaves none"):
        load_glyphs(held_out=400)


def test_the_processor_knows_the_words_of_train_and_leaves_pictures_as_they_are(splits):
    processor = build_processor(splits["train"]["query"])
    tokens = processor.tokenizer.tokenize
    assert tokens("BRAILLE pattern dots-16") == ["braille", "pattern", "dots", "1", "6"]
    assert tokens("canadian syllabics pwii") == ["canadian", "syllabics", "p", "##w", "##i", "##i"]
    ends = processor.tokenizer(["greek small letter alpha"])["input_ids"][0]
    assert ends[0] == processor.tokenizer.bos_token_id and ends[-1] == processor.tokenizer.eos_token_id
    row = splits["test"].select([0])
    features = processor.image_processor(images=row["positive"][:], return_tensors="np")[
        "pixel_values"
    ]  # (1, 3, S, S)
    assert np.allclose(features[0], np.broadcast_to(pixels(row) * 2 - 1, (3, 32, 32)), atol=1e-6)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r'pip install -e "\.\[images\]"'):
        load_glyphs()


# ---- the run ----


@pytest.fixture
def run_file(tmp_path, splits, monkeypatch):
    """configs/glyph_search.json with other fields, on the rows that are read already."""
    monkeypatch.setitem(load.BUILT_IN_PAIRS, glyphs.NAME, lambda: splits)

    def write(config: Path = CONFIG, **fields) -> Path:
        own = {"output_dir": str(tmp_path / "out")}
        return write_fields(tmp_path, **json.loads(config.read_text()) | own | fields)

    return write


def test_two_updates_train_both_towers_and_the_folder_reads_names(run_file, tmp_path, splits):
    main(run_file(max_steps=2, per_device_train_batch_size=16, max_eval_samples=40, warmup_steps=0, logging_steps=1))
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["contrastive_batch_size"] == 16 and report["trained_share"] == 1.0
    assert 0 < report["after"]["recall@10"] <= 1 and report["after"] != report["before"]

    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    text = model.transformers_model.config.text_config
    tokenizer = build_processor(splits["train"]["query"]).tokenizer
    assert (text.vocab_size, text.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    vectors = model.encode(["latin small letter a", "latin small letter b"])
    assert abs(vectors[0] - vectors[1]).max() > 1e-3, "the text tower reads the token that ends a name"


def test_two_updates_of_one_model_for_both(run_file, tmp_path):
    """A picture is 16 tokens of a language model, whose vocabulary is the processor's."""
    few = {"max_steps": 2, "per_device_train_batch_size": 16, "max_eval_samples": 40, "warmup_steps": 0}
    main(run_file(ONE_MODEL, **few, logging_steps=1))
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["contrastive_batch_size"] == 16 and report["after"] != report["before"]
    model = loaded(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    config = model.transformers_model.config
    assert config.get_text_config().vocab_size == len(processor.tokenizer)
    features = processor(text=[glyphs.IMAGE_TOKEN], images=[Image.new("L", (32, 32)).convert("RGB")])
    assert features["input_ids"][0].count(config.image_token_id) == 16


@pytest.mark.slow
def test_one_model_finds_pictures_of_characters_that_were_never_seen(run_file, tmp_path):
    main(run_file(ONE_MODEL))
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["before"]["recall@10"] < 0.1 and report["after"]["recall@10"] >= 0.5


@pytest.mark.slow
def test_words_find_pictures_of_characters_that_were_never_seen(run_file, tmp_path):
    main(run_file())
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["before"]["recall@10"] < 0.1
    assert report["after"]["recall@1"] >= 0.35 and report["after"]["recall@10"] >= 0.70
