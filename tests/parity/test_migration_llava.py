"""docs/migrate-from-llava.md: its parts become a model, and its run file trains what LLaVA's scripts train."""

import json
import re

import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)

from hf_dist_ext.run import examples
from tests.distributed.forked import run_python, train_hf
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "migrate-from-llava.md").read_text(encoding="utf-8")
PARTS, RUN = re.findall(r"<!-- test: migrate -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
ONE_UPDATE = {
    "trainable_modules": ["projector"], "per_device_train_batch_size": 10, "max_steps": 1, "optim": "sgd",
    "learning_rate": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0,
    "save_strategy": "no", "save_full_model": True, "output_dir": "outputs/once",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page's blocks were run."""
    folder = tmp_path_factory.mktemp("llava")
    examples.copy("projector", folder)
    torch.manual_seed(0)
    size = len(AutoProcessor.from_pretrained(folder / "processor").tokenizer)
    text = LlamaConfig(vocab_size=size - 1, max_position_embeddings=64, **SMALL)  # the mark of a picture is added
    LlamaForCausalLM(text).save_pretrained(folder / "models" / "language")
    vision = CLIPVisionConfig(image_size=8, patch_size=2, **SMALL)
    CLIPVisionModel(vision).save_pretrained(folder / "models" / "vision")
    assert "weights" in run_python(PARTS, cwd=folder)
    (folder / "run.json").write_text(RUN)
    run_python(train_hf, "--config", "run.json", cwd=folder)
    return folder


def weights(path) -> dict[str, torch.Tensor]:
    return LlavaForConditionalGeneration.from_pretrained(path).state_dict()


def part(name: str) -> str:
    parts = ("multi_modal_projector", "vision_tower")
    return next((part for part in parts if part in name), "language")


@pytest.mark.slow
def test_each_stage_trains_what_its_script_trains(folder):
    base = weights(folder / "models" / "llava")
    for name, held in CLIPVisionModel.from_pretrained(folder / "models" / "vision").state_dict().items():
        assert torch.equal(base[f"model.vision_tower.{name}"], held)
    first, second = weights(folder / "outputs" / "llava" / "stage_0_pretrain"), weights(folder / "outputs" / "llava")
    assert moved(base, first) == {"multi_modal_projector"}
    assert moved(first, second) == {"multi_modal_projector", "language"}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {part(name) for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.slow
def test_one_update_is_the_gradient_of_the_ten_rows(folder):
    run = {name: value for name, value in json.loads(RUN).items() if name != "stages"} | ONE_UPDATE
    (folder / "once.json").write_text(json.dumps(run))
    run_python(train_hf, "--config", "once.json", cwd=folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder / "models" / "llava")
    processor = AutoProcessor.from_pretrained(folder / "models" / "llava")
    total, tokens = 0.0, 0
    for row in map(json.loads, (folder / "conversations.jsonl").read_text().splitlines()):
        question, answer = (turn["value"].removeprefix("<image>\n") for turn in row["conversations"])
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        told = [*asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        picture = Image.open(folder / "images" / row["image"])
        prompt, whole = (
            processor(
                text=processor.apply_chat_template(turns, add_generation_prompt=turns is asked),
                images=picture, return_tensors="pt",
            )
            for turns in (asked, told)
        )  # fmt: skip
        logits = model(**whole).logits[0, :-1]
        start = prompt["input_ids"].shape[1]
        labels = whole["input_ids"][0, start:]
        total += torch.nn.functional.cross_entropy(logits[start - 1 :], labels, reduction="sum")
        tokens += len(labels)
    (total / tokens).backward()
    trained = weights(folder / "outputs" / "once")
    for name, weight in model.named_parameters():
        if part(name) == "multi_modal_projector":
            assert weight.grad.norm() > 1e-3
            torch.testing.assert_close(weight.detach() - trained[name], weight.grad, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(trained[name], weight)


def test_the_run_file_has_the_stages_of_the_scripts():
    stages = json.loads(RUN)["stages"]
    assert [stage["trainable_modules"] for stage in stages] == [["projector"], ["projector", "language"]]
    assert [stage["learning_rate"] for stage in stages] == [1e-3, 2e-5]  # pretrain.sh and finetune.sh of LLaVA 1.5
