"""Task "image-text-to-text" as a user runs it on local files, rows with and without pictures; its one-line errors."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, Qwen2VLConfig

from hf_dist_ext.data.digits import WORDS, build_processor
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks import image_text
from tests.distributed.forked import launch, train_hf
from tests.tasks.test_stages import CONFIG, main
from tests.tiny_models import write_fields
from tests.tiny_processors import tiny_vision_language

KEPT = ("task", "model_config", "per_device_eval_batch_size")


@pytest.fixture
def run_file(tmp_path):
    """Rows in LLaVA's form, the second half of them without a picture, in batches of two as they come."""
    rows = []
    for number in range(8):
        Image.new("L", (8, 8), number * 20).save(tmp_path / f"{number}.png")
        has_picture = number < 4
        asked = ("<image>\n" if has_picture else "") + "which digit is this ?"
        row = {
            "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": f"this is {WORDS[number]}"}]
        }
        rows.append(row | ({"image": f"{number}.png"} if has_picture else {}))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    build_processor().save_pretrained(tmp_path / "processor")

    def write(**more) -> Path:
        fields = {key: value for key, value in json.loads(CONFIG.read_text()).items() if key in KEPT} | {
            "dataset_name": str(tmp_path / "rows.json"), "image_folder": str(tmp_path),
            "tokenizer_name": str(tmp_path / "processor"), "trainable_modules": ["projector"],
            "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "num_train_epochs": 1,
            "learning_rate": 1e-2, "weight_decay": 0.0, "output_dir": str(tmp_path / "out"), "save_strategy": "no",
            "logging_steps": 1,
        }  # fmt: skip
        return write_fields(tmp_path, **fields | more)

    return write


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_batches_without_a_picture_train_like_any_other(run_file, tmp_path):
    main(run_file(eval_dataset_name=str(tmp_path / "rows.json"), generate_max_new_tokens=3))
    assert len(losses(tmp_path / "out")) == 4 and all(loss > 0 for loss in losses(tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert 0 < report["trained_share"] < 0.06 and set(report["after"]) == {"loss", "answer_accuracy"}


def test_ranks_without_a_picture_wait_for_nobody(run_file, tmp_path):
    """Two FSDP processes, one row each: in the last steps one rank has a picture and the other has none."""
    rows = json.loads((tmp_path / "rows.json").read_text())
    mixed = [rows[i] for i in (0, 4, 1, 5, 6, 2, 7, 3)]
    (tmp_path / "rows.json").write_text(json.dumps(mixed))
    path = run_file(per_device_train_batch_size=1, frozen_parts_fsdp="shard")
    launch("multi_gpu_fsdp", 2, train_hf, "--config", path)
    sharded = losses(tmp_path / "out")
    main(run_file(output_dir=str(tmp_path / "alone")))
    assert len(sharded) == 4 and sharded == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)
    ours, alone = (LlavaForConditionalGeneration.from_pretrained(tmp_path / name) for name in ("out", "alone"))
    for (name, one), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("change, words", [
    ({"temperature": 0.1}, 'temperature=0.1 belongs to task "embedding"'),
    ({"loss": "infonce"}, 'loss="infonce" is a loss over embeddings'),
    ({"max_length": {"query": 3}}, "max_length is an object"),
    ({"prompts": {"query": "x"}}, 'prompts={"query": "x"}: with task'),
    ({"tokenizer_name": None}, "needs a processor: set tokenizer_name"),
    ({"tokenizer_name": "no/such"}, 'Tokenizer "no/such" is neither a folder here nor available from the hub'),
    ({"image_folder": "nowhere"}, 'image_folder="nowhere" is no folder'),
    ({"model_config": {"model_type": "bert"}}, "model_config cannot be built"),
    ({"task": "embedding", "trainable_modules": None, "image_folder": None, "generate_max_new_tokens": 3},
     'generate_max_new_tokens=3 belongs to task "image-text-to-text"'),
])  # fmt: skip
def test_mistakes_are_one_line(run_file, capsys, monkeypatch, change, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it asks the hub, and waits for it
    with pytest.raises(SystemExit) as exit_:
        main(run_file(**change))
    assert exit_.value.code == 2 and words in capsys.readouterr().err


def test_a_processor_with_a_video_part_says_what_it_lacks(run_file, tmp_path, capsys):
    try:
        import torchvision  # noqa: F401

        pytest.skip("torchvision is here")
    except ImportError:
        pass
    folder = tmp_path / "qwen"
    build_processor().tokenizer.save_pretrained(folder)
    kind = {"processor_class": "Qwen2VLProcessor"}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(kind | {"image_processor_type": "Qwen2VLImageProcessor"})
    )
    (folder / "processor_config.json").write_text(json.dumps(kind))
    Qwen2VLConfig().save_pretrained(folder)
    with pytest.raises(SystemExit):
        main(run_file(tokenizer_name=str(folder)))
    assert "Processors with a video part need torchvision" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_rows_to_evaluate_on_may_call_their_columns_as_the_run_does(tmp_path, monkeypatch, ending):
    write = getattr(datasets.Dataset, "to_parquet" if ending == "parquet" else "to_json")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    picture = str(tmp_path / "a.png")
    asked = {"photo": picture, "question": "what ?", "reply": "a cat"}
    for name, row in (("train", asked), ("eval", {"image": picture, "prompt": "which colour ?", "answer": "grey"})):
        write(datasets.Dataset.from_list([row]), tmp_path / f"{name}.{ending}")
    options = RunConfig(
        task="image-text-to-text", dataset_name=str(tmp_path / f"train.{ending}"),
        eval_dataset_name=str(tmp_path / f"eval.{ending}"),
        columns={"image": "photo", "prompt": "question", "answer": "reply"},
    )  # fmt: skip
    monkeypatch.setattr(image_text, "load_processor", lambda config: tiny_vision_language("llava")[0])
    monkeypatch.setattr(image_text, "build_model", lambda *arguments: torch.nn.Identity())
    args = SimpleNamespace(max_bad_rows=0, seed=1, data_seed=None, train_sampling_strategy="random")
    parts = image_text.build(SimpleNamespace(options=options), args)
    read = lambda collator, rows: collator.reader.read(rows[0])  # noqa: E731
    trained, held = (
        read(parts.data_collator, parts.train_dataset),
        read(parts.trainer_options["eval_collator"], parts.eval_dataset),
    )
    assert [len(one.images) for one in (trained, held)] == [1, 1]
    assert [one.messages[0]["content"][-1]["text"] for one in (trained, held)] == ["what ?", "which colour ?"]
