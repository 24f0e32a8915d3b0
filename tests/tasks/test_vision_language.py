"""Texts, pictures and both in one run file: a vision-language model embeds them, and its folder answers elsewhere."""

import io
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import transformer
from transformers import AutoConfig, AutoModel, AutoProcessor

from hf_dist_ext.checkpoints.sentence_model import write
from hf_dist_ext.data.collator import CONSTANTS
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks.embedding import _collator as collator_of
from tests.tasks.test_stages import main
from tests.tiny_models import embedding_model, loaded, write_fields
from tests.tiny_processors import FAMILIES, WORDS, picture, tiny_vision_language

COLUMNS = {"query": {"image": "photo", "text": "question"}, "positive": "answer", "negative": "wrong"}


def folder_of(family: str, path: Path) -> None:
    """A model folder as the hub has them."""
    processor, config = tiny_vision_language(family)
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(**config)).save_pretrained(path)
    processor.save_pretrained(path)


@pytest.fixture
def run_file(tmp_path):
    def write(family: str = "llava", **more) -> Path:
        folder_of(family, tmp_path / "model")
        (tmp_path / "photos").mkdir(exist_ok=True)
        words, rows = WORDS.split(), []
        for number in range(16):
            picture(number % 10, 16 + number % 3).save(tmp_path / "photos" / f"{number}.png")
            rows.append({
                "question": f"which {words[number % 20]}" if number % 3 else "",
                "photo": f"{number}.png" if number % 4 else None,
                "answer": f"{words[number]} boat", "wrong": f"{words[number]} tree",
            })  # fmt: skip
        rows[12]["question"] = "which boat"
        rows[0]["question"] = "which tree"
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        fields = {
            "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "rows.jsonl"),
            "columns": COLUMNS, "image_folder": str(tmp_path / "photos"), "pooling": "last", "eval_holdout": 4,
            "prompts": {"query": "find it", "positive": "", "negative": ""}, "per_device_train_batch_size": 4,
            "gradient_cache_chunk_size": 3, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2,
            "output_dir": str(tmp_path / "out"),
        }  # fmt: skip
        return write_fields(tmp_path, **fields | more)

    return write


def changed_parts(before: Path, after: Path) -> set[str]:
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys()
    parts = {"vision_tower": "vision", "multi_modal_projector": "projector", "language_model": "language"}
    return {parts[key.split(".")[0]] for key in old if not torch.equal(old[key], new[key])}


VALUES = [
    "a red boat",
    picture(3),
    {"image": picture(4, 24), "text": "which one"},
    {"text": "of two pictures", "image": picture(5)},
    "a tree " * 4,
]


def assert_same_elsewhere(folder: Path, values: list = VALUES) -> None:
    """sentence-transformers answers as the model that was trained does, with the prompts of the folder."""
    ours, theirs = loaded(folder), SentenceTransformer(str(folder), device="cpu")
    collate = collator_of(ours, ["query", "positive"], {"query": "find it", "positive": ""})
    for column, answer in (("query", theirs.encode_query), ("positive", theirs.encode_document)):
        batch = collate([{"query": value, "positive": value} for value in values])
        with torch.no_grad():
            expected = embedder_of(ours).call(ours, batch[column], column, batch[CONSTANTS][column])
        assert expected.std(dim=0).max() > 1e-3
        found = torch.as_tensor(answer(values))
        assert (found - expected).abs().max() < 1e-5


def test_a_run_of_rows_with_texts_and_pictures_trains_and_its_folder_answers_elsewhere(run_file, tmp_path, caplog):
    main(run_file(eval_holdout=12))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "sentence-transformers" and "### Training Dataset" in card.text
    assert "## This run" in card.text and "PIL." not in card.content and "Traceback" not in caplog.text
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["num_chunks"] > 3 and 0 < report["after"]["mrr@10"] <= 1
    assert changed_parts(tmp_path / "model", tmp_path / "out") == {"vision", "projector", "language"}
    assert_same_elsewhere(tmp_path / "out")


def folder_for_others(family: str, folder: Path, **options) -> tuple[Path, object]:
    """Written as a run writes it, and its processor."""
    processor, config = tiny_vision_language(family)
    torch.manual_seed(0)
    with mock.patch.object(AutoProcessor, "from_pretrained", lambda *arguments, **options: processor):
        model = embedding_model(config, tokenizer=processor, **{"pooling": "last"} | options)
    describe(model, prompts={"query": "find it", "document": ""})
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=0.2)  # Gemma's projection would hide the pictures
    write(model, folder)
    return folder, processor


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_every_family_answers_elsewhere(family, tmp_path, monkeypatch):
    """Processors that need torchvision for videos are handed over: what is tested is what goes in and comes out."""
    folder, processor = folder_for_others(family, tmp_path)
    monkeypatch.setattr(transformer.AutoProcessor, "from_pretrained", lambda *arguments, **options: processor)
    assert_same_elsewhere(folder)


def assert_same_vectors_elsewhere(folder: Path) -> None:
    """MultiVectorEncoder gives every token of words and pictures the vector that our model does."""
    ours, theirs = loaded(folder), MultiVectorEncoder(str(folder), device="cpu")
    collate = collator_of(ours, ["query", "positive"], {"query": "find it", "positive": ""})
    batch = collate([{"query": value, "positive": value} for value in VALUES])
    for column, answer in (("query", theirs.encode_query), ("positive", theirs.encode_document)):
        with torch.no_grad():
            found = embedder_of(ours).call(ours, batch[column], column, batch[CONSTANTS][column])
        rows = [vectors[mask] for vectors, mask in zip(found["vectors"], found["mask"], strict=True)]
        assert len({len(row) for row in rows}) > 3 and rows[1].shape[1] == 8 and rows[1].std(dim=0).max() > 1e-3
        for row, expected in zip(answer(VALUES), rows, strict=True):
            assert row.shape == expected.shape and (torch.as_tensor(row) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_folder_of_token_vectors_answers_elsewhere(family, tmp_path, monkeypatch):
    folder, processor = folder_for_others(family, tmp_path, pooling="tokens", projection_dim=8)
    monkeypatch.setattr(transformer.AutoProcessor, "from_pretrained", lambda *arguments, **options: processor)
    assert_same_vectors_elsewhere(folder)


def test_late_interaction_trains_adapters_and_projection_and_its_folder_answers_elsewhere(run_file, tmp_path):
    """As ColQwen and ColPali are trained."""
    main(run_file(
        loss="late_interaction", pooling="tokens", projection_dim=8, use_lora=True, lora_r=2,
        trainable_modules=["projection"], save_full_model=True, save_strategy="no",
    ))  # fmt: skip
    assert changed_parts(tmp_path / "model", tmp_path / "out") == {"language"}
    assert_same_vectors_elsewhere(tmp_path / "out")


def test_long_texts_are_cut_as_elsewhere(tmp_path):
    folder, _ = folder_for_others("llava", tmp_path)
    model = loaded(folder)
    describe(model, max_length=14)
    write(model, folder)
    assert_same_elsewhere(folder, ["a red green small round boat tree house which digit", "a boat"])


def test_a_run_is_resumed_and_ends_with_the_same_weights(run_file, tmp_path):
    path = run_file(frozen_modules=["vision"], save_full_model=True)
    main(path)
    assert changed_parts(tmp_path / "model", tmp_path / "out") == {"projector", "language"}
    whole = load_file(tmp_path / "out" / "model.safetensors")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    main(path, "--resume_from_checkpoint", "true")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[key], value) for key, value in whole.items())


def test_adapters_lie_on_the_language_part_and_go_on_from_their_folder(run_file, tmp_path):
    main(run_file(use_lora=True, lora_r=2, save_strategy="no"))
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert names and all("language_model" in name for name in names)
    assert_same_elsewhere(tmp_path / "out")
    further = {"model_name_or_path": str(tmp_path / "out"), "output_dir": str(tmp_path / "further")}
    main(run_file(save_strategy="no", **further))
    assert "projector" in changed_parts(tmp_path / "model", tmp_path / "further")


def test_options_of_the_processor_stay_with_the_folder(run_file, tmp_path):
    options = {"chat_template": {"add_generation_prompt": True}}
    main(run_file(processing_kwargs=options, max_steps=1, save_strategy="no"))
    said = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert said["processing_kwargs"] == options and "message" in said["modality_config"]
    assert_same_elsewhere(tmp_path / "out")
    further = {"model_name_or_path": str(tmp_path / "out"), "output_dir": str(tmp_path / "further")}
    main(run_file(max_steps=1, save_strategy="no", **further))
    again = json.loads((tmp_path / "further" / "sentence_bert_config.json").read_text())
    assert again["processing_kwargs"] == options


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_texts_and_pictures_become_one(run_file, tmp_path, streaming):
    run_file()
    run = RunConfig(
        dataset_name=str(tmp_path / "rows.jsonl"), columns=COLUMNS, image_folder=str(tmp_path / "photos"),
        streaming=streaming,
    )  # fmt: skip
    train, _ = load_datasets(run)
    rows = sorted(train, key=lambda row: row["positive"]) if streaming else list(train)
    assert {tuple(row) for row in rows} == {("query", "positive", "negative")}
    assert {tuple(row["query"]) for row in rows} == {("image", "text")}
    lacking = [row["query"]["image"] is None for row in rows]
    assert sum(lacking) == 4 and sum(row["query"]["text"] == "" for row in rows) == 4
    assert all(row["query"]["image"] is None or row["query"]["image"].size[1] == 16 for row in rows)


def test_bytes_and_stored_pictures_are_read(run_file, tmp_path):
    file = io.BytesIO()
    picture(7).save(file, "PNG")
    rows = {"text": ["a", "b"], "drawn": [file.getvalue()] * 2, "found": [picture(1), picture(2)]}
    datasets.Dataset.from_dict(rows).cast_column("found", datasets.Image()).to_parquet(tmp_path / "rows.parquet")
    both = {"text": "text", "image": "found"}
    run = RunConfig(
        dataset_name=str(tmp_path / "rows.parquet"), columns={"query": both, "positive": "drawn"},
        image_columns=["positive"],
    )  # fmt: skip
    train, _ = load_datasets(run)
    assert train[0]["positive"].tobytes() == picture(7).tobytes()
    assert train[1]["query"]["text"] == "b" and train[1]["query"]["image"].tobytes() == picture(2).tobytes()


def test_rows_that_share_a_picture_are_held_out_together(run_file, tmp_path):
    run_file()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["photo"] = f"{number % 5}.png" if number % 5 else "10.png"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = RunConfig(
        dataset_name=str(tmp_path / "rows.jsonl"), columns=COLUMNS, image_folder=str(tmp_path / "photos"),
        eval_holdout=6,
    )  # fmt: skip
    held, kept = ({row["query"]["image"].tobytes() for row in split} for split in load_datasets(run))
    assert held and kept and not held & kept


@pytest.mark.parametrize("changes, words", [
    ({"columns": {"query": {"text": "question", "sound": "photo"}, "positive": "answer"}}, "It takes {\"text\""),
    ({"columns": {"query": {"text": "question", "image": "fhoto"}, "positive": "answer"}},
     'has no column "fhoto". .* Closest: "photo"'),
    ({"processing_kwargs": {"images": {}}}, 'processing_kwargs has no "images"'),
    ({"processing_kwargs": {"video": {}}}, 'processing_kwargs has "video", and rows hold texts and pictures alone'),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_training(run_file, changes, words, capsys):
    with pytest.raises((UsageError, SystemExit)) as caught:
        main(run_file(**changes))
    assert re.search(words, str(caught.value) + capsys.readouterr().err)


def test_a_template_that_drops_the_prompt_is_refused(run_file, tmp_path, capsys):
    path = run_file()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[-1]['content'][0]['text'] }}")
    with pytest.raises((UsageError, SystemExit)) as caught:
        main(path)
    assert 'so the prompt of "query" would be lost' in str(caught.value) + capsys.readouterr().err


def test_a_row_without_text_and_picture_is_named(run_file, tmp_path, capsys):
    path = run_file()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows[5] |= {"question": "", "photo": ""}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises((UsageError, SystemExit)) as caught:
        main(path)
    assert "row 5" in str(caught.value) + capsys.readouterr().err
