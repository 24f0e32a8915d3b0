"""docs/migrate-from-trainer.md: its script leaves the same bits with the stock classes and with ours."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.distributed.forked import run_python
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "migrate-from-trainer.md").read_text(encoding="utf-8")
IMPORTS = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
(CLASSIFIER,) = re.findall(r"<!-- test: migrate -->\n```python\n(.*?)```", PAGE, re.DOTALL)
CLOCKS = re.compile("runtime|per_second")


def leave(script: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """The weights at the end, and what was logged, without times."""
    folder.mkdir()
    history = json.loads(run_python(script, cwd=folder).splitlines()[-1])
    (weights,) = folder.glob("outputs/*/model.safetensors")
    return load_file(weights), [{k: v for k, v in line.items() if not CLOCKS.search(k)} for line in history]


def test_the_script_leaves_the_same_bits(tmp_path):
    body = CLASSIFIER.replace("Trainer, TrainingArguments, ", "", 1)
    assert body != CLASSIFIER
    weights, history = leave(CLASSIFIER, tmp_path / "stock")
    ours, our_history = leave(IMPORTS + body, tmp_path / "ours")
    assert list(tmp_path.glob("ours/outputs/*/checkpoint-*/manifest.json"))  # it was ours that ran
    assert not list(tmp_path.glob("stock/outputs/*/checkpoint-*/manifest.json"))
    losses = [line["loss"] for line in history if "loss" in line]
    assert len(losses) > 4 and len(set(losses)) == len(losses)
    assert history == our_history
    assert weights.keys() == ours.keys() and all(torch.equal(weights[name], ours[name]) for name in weights)
