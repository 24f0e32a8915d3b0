"""docs/migrate-from-trainer.md: its scripts leave the same bits with the stock classes and with ours."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.forked import run_python
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "migrate-from-trainer.md").read_text(encoding="utf-8")
IMPORTS = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
(CLASSIFIER,) = re.findall(r"<!-- test: migrate -->\n```python\n(.*?)```", PAGE, re.DOTALL)
LANGUAGE_MODEL = CLASSIFIER
for there, here in (
    ("BertConfig, BertForSequenceClassification", "LlamaConfig, LlamaForCausalLM"),
    ("(tokens[:, 0] > 25).astype(int)", "tokens"),
    ("BertConfig(", "LlamaConfig("),
    ("num_labels=2", "attention_dropout=0.1"),
    ("BertForSequenceClassification(config)", "LlamaForCausalLM(config)"),
):
    assert LANGUAGE_MODEL.count(there) == 1
    LANGUAGE_MODEL = LANGUAGE_MODEL.replace(there, here)
CLOCKS = re.compile("runtime|per_second")


def leave(script: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """The weights at the end, and what was logged, without times."""
    folder.mkdir()
    history = json.loads(run_python(script, cwd=folder).splitlines()[-1])
    (weights,) = folder.glob("outputs/*/model.safetensors")
    return load_file(weights), [{k: v for k, v in line.items() if not CLOCKS.search(k)} for line in history]


@pytest.mark.parametrize(
    "script", [CLASSIFIER, pytest.param(LANGUAGE_MODEL, marks=pytest.mark.slow)], ids=["classifier", "language model"]
)
def test_the_script_leaves_the_same_bits(script, tmp_path):
    body = script.replace("Trainer, TrainingArguments, ", "", 1)
    assert body != script
    weights, history = leave(script, tmp_path / "stock")
    ours, our_history = leave(IMPORTS + body, tmp_path / "ours")
    assert list(tmp_path.glob("ours/outputs/*/checkpoint-*/manifest.json"))  # it was ours that ran
    assert not list(tmp_path.glob("stock/outputs/*/checkpoint-*/manifest.json"))
    losses = [line["loss"] for line in history if "loss" in line]
    assert len(losses) > 4 and len(set(losses)) == len(losses)
    assert history == our_history
    assert weights.keys() == ours.keys() and all(torch.equal(weights[name], ours[name]) for name in weights)
