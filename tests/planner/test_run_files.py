"""The run files of configs/gpus, with a tiny model and a few rows in place of theirs, are checked and planned."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPConfig

from hf_dist_ext.data.digits import build_processor
from hf_dist_ext.planner import described
from hf_dist_ext.planner.catalog import GIB, Hardware
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.run.help import json_schema
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks import trace_pictures
from tests.tiny_models import CHECKPOINTING
from tests.tiny_processors import tiny_vision_language
from tests.tiny_vision_language import tiny_llava

FOLDER = Path(__file__).parents[2] / "configs" / "gpus"
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip(folder: Path) -> None:
    CLIPConfig(
        text_config=LAYERS | {"vocab_size": 64}, vision_config=LAYERS | {"image_size": 16, "patch_size": 8},
        projection_dim=16,
    ).save_pretrained(folder)  # fmt: skip


def vision_language(folder: Path) -> None:
    processor, config = tiny_vision_language("qwen3_vl")
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def llava(folder: Path) -> None:
    tiny_llava().save_pretrained(folder)
    build_processor().save_pretrained(folder)


ROWS = {
    "data/captions.jsonl": [{"caption": f"a boat {i}", "file": "a.png"} for i in range(3)],
    "data/pages.jsonl": [{"question": f"which boat {i}", "page": "a.png"} for i in range(3)],
    "data/captions.json": None,
    "data/instructions.json": None,
}
TURNS = [{"from": "human", "value": "<image>\nwhich"}, {"from": "gpt", "value": "a boat"}]


@pytest.mark.parametrize("name, model, preset, trains", [
    ("clip_ddp", clip, "multi_gpu_ddp", 1.0),
    ("qwen3_vl_2b_ddp", vision_language, "multi_gpu_ddp", 1.0),
    ("qwen3_vl_8b_lora_fsdp", vision_language, "multi_gpu_fsdp", 0.5),
    ("llava_two_stages", llava, "multi_gpu_fsdp", 0.9),
])  # fmt: skip
def test_a_run_file_at_real_size_is_read_checked_and_planned(name, model, preset, trains, tmp_path, monkeypatch):
    fields = json.loads((FOLDER / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(json_schema()).validate(fields)
    assert fields["bf16"] and fields["model_name_or_path"].count("/") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace_pictures, "PICTURE", 32)  # the tiny model's rows have no room for more
    Path("data/pictures").mkdir(parents=True)
    Path("data/pages").mkdir()
    for folder in ("data/pictures", "data/pages"):
        Image.new("RGB", (32, 32)).save(f"{folder}/a.png")
    for path, rows in ROWS.items():
        rows = rows or [{"image": "a.png", "conversations": TURNS}] * 3
        text = json.dumps(rows) if path.endswith(".json") else "\n".join(map(json.dumps, rows))
        Path(path).write_text(text)
    model(Path("model"))
    run = load_run(["--config", str(FOLDER / f"{name}.json"), "--model_name_or_path", "model"])
    for stage in run.stages or [run]:
        described.check_data(stage)
        assert stage.options.accelerate_config == preset and stage.training["bf16"]
    plan = make_plan(run, Hardware(num_devices=8, memory_bytes=80 * GIB), may_halve_frozen=False)
    assert plan.best is not None and preset not in [one.preset for one in plan.options if one.why_not], plan.reasons
    parameters = plan.work.parameters().values()
    share = sum(one.elements for one in parameters if one.trains) / sum(one.elements for one in parameters)
    assert share == 1.0 if trains == 1.0 else 0 < share < trains
    if run.stages:
        assert [bool(stage.training.get(CHECKPOINTING)) for stage in run.stages] == [False, True]


def test_every_run_file_of_the_folder_is_tested():
    tested = {mark.args[1][i][0] for mark in test_a_run_file_at_real_size_is_read_checked_and_planned.pytestmark
              for i in range(len(mark.args[1]))}  # fmt: skip
    assert tested == {path.stem for path in FOLDER.glob("*.json")}
