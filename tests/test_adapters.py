"""LoRA from the run file: what trains, what stays, what a folder holds, on one process and FSDP ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from hf_dist_ext.adapters import add_adapters, merged_weights
from hf_dist_ext.config import RunConfig
from hf_dist_ext.digits import build_processor
from hf_dist_ext.errors import UsageError
from hf_dist_ext.image_text_task import build_model
from hf_dist_ext.modeling import EmbeddingModel
from tests.launching import launch
from tests.test_stages import CONFIG, SCRIPT, main
from tests.tiny_models import WORDS, model_config, tiny_tokenizer
from tests.tiny_vision_language import tiny_llava

LLAVA = json.loads(CONFIG.read_text())["model_config"]


@pytest.fixture
def run_file(tmp_path):
    draw = torch.Generator().manual_seed(0)
    text = lambda n: " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw))  # noqa: E731
    rows = [{"query": f"{text(3)} {i}", "positive": f"{text(6)} {i}"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    torch.manual_seed(0)
    config = model_config("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    EmbeddingModel.from_config(config).save_pretrained(tmp_path / "base", tokenizer=tiny_tokenizer())

    def write(**more) -> Path:
        fields = {
            "model_name_or_path": str(tmp_path / "base"), "dataset_name": str(tmp_path / "rows.jsonl"),
            "eval_holdout": 8, "batch_size": 8, "gradient_cache_chunk_size": 3, "max_steps": 4, "save_steps": 2,
            "use_lora": True, "lora_r": 4, "lora_dropout": 0.1, "learning_rate": 1e-2, "use_cpu": True,
            "disable_tqdm": True, "report_to": "none", "output_dir": str(tmp_path / "out"),
        }  # fmt: skip
        (tmp_path / "run.json").write_text(json.dumps(fields | more))
        return tmp_path / "run.json"

    return write


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_adapters_train_with_a_gradient_cache_and_resume_bit_for_bit(run_file, tmp_path):
    path = run_file()
    main(path)
    out = tmp_path / "out"
    whole = adapters(out)
    assert whole and all("lora_" in name for name in whole)
    assert all(value.abs().sum() > 0 for name, value in whole.items() if "lora_B" in name), "they start at zero"
    report = json.loads((out / "metrics.json").read_text())
    assert 0 < report["trained_share"] < 0.2 and report["num_chunks"] > 3 and report["after"] != report["before"]
    model = PeftModel.from_pretrained(EmbeddingModel.from_pretrained(tmp_path / "base"), out)
    features = tiny_tokenizer()(["parse a date"], return_tensors="pt")
    features.pop("token_type_ids", None)
    with torch.no_grad():
        adapted = model(**features).embeddings
        with model.disable_adapter():
            assert not torch.allclose(adapted, model(**features).embeddings, atol=1e-4)
    shutil.rmtree(out / "checkpoint-4")
    main(path, "--resume_from_checkpoint", "true")
    again = adapters(out)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_adapters_of_two_processes_are_those_of_one(run_file, tmp_path, strategy):
    more = {"lora_dropout": 0.0, "save_strategy": "no", "max_steps": 2, "no_duplicates_in_batch": False}
    path = run_file(output_dir=str(tmp_path / "two"), batch_size=4, **more)
    launch("python", 1, SCRIPT, "--config", path, "--accelerate_config", strategy, "--num_processes", 2)
    main(run_file(output_dir=str(tmp_path / "alone"), **more))
    two, alone = adapters(tmp_path / "two"), adapters(tmp_path / "alone")
    assert two.keys() == alone.keys() and any(value.abs().sum() > 0 for name, value in alone.items() if "B" in name)
    for name, value in alone.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_adapters_under_ddp_resume_bit_for_bit(run_file, tmp_path):
    arguments = "--config", run_file(batch_size=4), "--accelerate_config", "ddp", "--num_processes", 2
    launch("python", 1, SCRIPT, *arguments)
    whole = adapters(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    launch("python", 1, SCRIPT, *arguments, "--resume_from_checkpoint", "true")
    again = adapters(tmp_path / "out")
    assert whole and all(torch.equal(again[name], value) for name, value in whole.items())


def test_in_a_vision_language_model_only_the_language_model_gets_adapters():
    config = RunConfig(task="image-text-to-text", model_config=LLAVA, use_lora=True)
    model = add_adapters(build_model(config, build_processor()), config)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains and all("language_model" in name and "lora_" in name for name in trains)
    config.lora_target_modules = ["fc1"]
    model = add_adapters(build_model(config, build_processor()), config)
    assert all("vision_tower" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_a_projector_trains_whole_beside_adapters(run_file, tmp_path):
    fields = {
        "task": "image-text-to-text", "model_name_or_path": None, "model_config": LLAVA, "dataset_name": "digits",
        "trainable_modules": ["projector"], "gradient_cache_chunk_size": ..., "eval_holdout": ...,
        "max_eval_samples": 4,
    }  # fmt: skip
    path = run_file(**{name: value for name, value in fields.items() if value is not ...})
    given = {k: v for k, v in json.loads(path.read_text()).items() if fields.get(k) is not ...}
    path.write_text(json.dumps(given))
    main(path)
    checkpoint = load_file(tmp_path / "out" / "checkpoint-4" / "trainable.safetensors")
    kinds = {"lora" if "lora_" in name else "projector" if "projector" in name else name for name in checkpoint}
    assert kinds == {"lora", "projector"}


@pytest.mark.parametrize("change, words", [
    ({"use_lora": False}, "lora_r=4 needs adapters"),
    ({"lora_r": 0}, "lora_r=0 must be at least 1"),
    ({"lora_dropout": 1.0}, "lora_dropout=1.0 must be"),
    ({"lora_target_modules": ["quary"]}, "lora_target_modules=['quary']"),
])  # fmt: skip
def test_mistakes_are_one_line(run_file, capsys, change, words):
    with pytest.raises(SystemExit):
        main(run_file(**change))
    assert words in capsys.readouterr().err


def test_a_model_without_the_usual_layers_says_so():
    with pytest.raises(UsageError, match="has no layer called"):
        add_adapters(torch.nn.Sequential(torch.nn.Linear(2, 2)), RunConfig(use_lora=True))


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_merged_weights_are_those_that_peft_merges_in_place(targets):
    torch.manual_seed(0)
    model = add_adapters(tiny_llava(), RunConfig(use_lora=True, lora_r=2, lora_alpha=6, lora_target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    found = merged_weights(model, model.state_dict())
    before = tiny_llava().state_dict()
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(found[name], before[name]) for name in found)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
