"""The run files of configs/gpus, with a tiny model and a few rows in place of theirs: checked, planned, trained."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
)

from hf_dist_ext.planner import described
from hf_dist_ext.planner.catalog import GIB, Hardware
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.run.help import json_schema
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks import trace_pictures
from tests.tasks.test_stages import changed, main, weights
from tests.tiny_models import CHECKPOINTING
from tests.tiny_processors import LAYERS, SIDE, WORDS, picture, tiny_tokenizer, tiny_vision_language

FOLDER = Path(__file__).parents[2] / "configs" / "gpus"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
PRESETS = {
    "clip_ddp": "multi_gpu_ddp",
    "qwen3_vl_2b_ddp": "multi_gpu_ddp",
    "qwen3_vl_8b_lora_fsdp": "multi_gpu_fsdp",
    "llava_two_stages": "multi_gpu_fsdp",
}
TRAINED = {"clip_ddp": 1.0, "qwen3_vl_2b_ddp": 1.0, "qwen3_vl_8b_lora_fsdp": 0.5, "llava_two_stages": 0.9}  # at most


def clip(folder: Path) -> None:
    tokenizer = tiny_tokenizer(max_length=32)
    text = LAYERS | {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "bos_token_id": None}
    text |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = LAYERS | {"image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size=SIDE, crop_size=SIDE).save_pretrained(folder)


def vision_language(family: str, folder: Path):
    processor, config = tiny_vision_language(family)
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(name): the model "model" and the data that a run file names, in the folder that the test is in."""
    monkeypatch.chdir(tmp_path)
    for folder in ("data/pictures", "data/pages"):
        Path(folder).mkdir(parents=True)
        for number in range(10):
            picture(number, 32, 32).save(f"{folder}/{number}.png")
    words = WORDS.split()
    turns = [{"from": "human", "value": "<image>\nwhich digit is this"}, {"from": "gpt", "value": "a red boat"}]
    rows = {
        "captions.jsonl": [{"caption": f"a {words[i]} {words[-i]}", "file": f"{i % 10}.png"} for i in range(16)],
        "pages.jsonl": [{"question": f"which {words[i]}", "page": f"{i % 10}.png"} for i in range(16)],
        "captions.json": [{"image": f"{i}.png", "conversations": turns} for i in range(8)],
        "instructions.json": [{"image": f"{i}.png", "conversations": turns} for i in range(8)],
    }
    for name, content in rows.items():
        text = json.dumps(content) if name.endswith(".json") else "\n".join(map(json.dumps, content))
        Path("data", name).write_text(text)

    def make(name: str) -> Path:
        torch.manual_seed(0)
        if name.startswith("clip"):
            clip(Path("model"))
        else:
            processor = vision_language("qwen3_vl" if name.startswith("qwen") else "llava", Path("model"))
            # Qwen's needs torchvision for videos
            monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *arguments, **options: processor)
        return FOLDER / f"{name}.json"

    return make


@pytest.mark.parametrize("name", FILES)
def test_a_run_file_at_real_size_is_read_checked_and_planned(name, stand_in, monkeypatch):
    monkeypatch.setattr(trace_pictures, "PICTURE", 32)  # the tiny model's rows have no room for more
    path, preset = stand_in(name), PRESETS[name]
    fields = json.loads(path.read_text())
    jsonschema.Draft202012Validator(json_schema()).validate(fields)
    assert fields["bf16"] and fields["model_name_or_path"].count("/") == 1
    run = load_run(["--config", str(path), "--model_name_or_path", "model"])
    for stage in run.stages or [run]:
        described.check_data(stage)
        assert stage.options.accelerate_config == preset and stage.training["bf16"]
    plan = make_plan(run, Hardware(num_devices=8, memory_bytes=80 * GIB), may_halve_frozen=False)
    assert plan.best is not None and preset not in [one.preset for one in plan.options if one.why_not], plan.reasons
    parameters = plan.work.parameters().values()
    share = sum(one.elements for one in parameters if one.trains) / sum(one.elements for one in parameters)
    assert share == 1.0 if TRAINED[name] == 1.0 else 0 < share < TRAINED[name]
    assert [stage.training[CHECKPOINTING] for stage in run.stages] in ([], [True, True])


def qwen_of(width: int, layers: int, heads: int, inner: int, *vision: int) -> dict:
    text = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }
    text |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768}
    tower = dict(zip(("depth", "hidden_size", "intermediate_size"), vision, strict=True))
    return {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower | {"out_hidden_size": width}}


SIZES = {  # of the models that the files name
    "clip_ddp": {"model_type": "clip"},
    "qwen3_vl_2b_ddp": qwen_of(2048, 28, 16, 6144, 24, 1024, 4096),
    "qwen3_vl_8b_lora_fsdp": qwen_of(4096, 36, 32, 12288, 27, 1152, 4304),
    "llava_two_stages": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_run_file_at_real_size_fits_eight_devices_of_80_gib_as_it_stands(name, stand_in):
    words = ["--model_name_or_path", "null", "--model_config", json.dumps(SIZES[name]), "--dtype", "null"]
    run = load_run(["--config", str(stand_in(name)), *words])
    for stage in run.stages or [run]:
        plan = make_plan(stage, Hardware(num_devices=8, memory_bytes=80 * GIB), may_halve_frozen=False)
        assert [one.strategy.name for one in plan.options if one.preset == PRESETS[name] and one.fits], plan.reasons


SMALL = {
    "use_cpu": True, "accelerate_config": "single_gpu", "dataloader_num_workers": 0, "max_steps": 2,
    "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2,
    "save_strategy": "no", "eval_strategy": "no", "output_dir": "out",
}  # fmt: skip
OF_PAIRS = {"per_device_train_batch_size": 4, "gradient_cache_chunk_size": 2, "eval_holdout": 4}
OF_QWEN = {"processing_kwargs": {"image": {"size": {"shortest_edge": 256, "longest_edge": 1024}}}, "max_length": 128}


@pytest.mark.parametrize("name", FILES)
def test_a_run_file_at_real_size_trains_a_tiny_model(name, stand_in):
    more = SMALL | {"model_name_or_path": "model"} | (OF_QWEN if name.startswith("qwen") else {})
    more |= {"per_device_train_batch_size": 2} if name.startswith("llava") else OF_PAIRS
    main(stand_in(name), *(word for field, value in more.items() for word in (f"--{field}", as_word(value))))
    report = json.loads(Path("out/metrics.json").read_text())
    if name.startswith("llava"):
        shares = [stage["trained_share"] for stage in report["stages"]]
        assert 0 < shares[0] < 0.1 < shares[1] < 1
        assert changed(weights(Path("model")), weights(Path("out"))) == {"projector", "language"}
    elif "lora" in name:
        assert [*Path("out").glob("**/adapter_model.safetensors")]
    else:
        assert report["num_chunks"] > 1


def as_word(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)
