"""docs/migrate-from-gradcache.md: its loop, the loop with another call, and its run file train the same weights."""

import json
import random
import re

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from tests.distributed.forked import run_python, train_hf
from tests.launching import ROOT
from tests.tiny_models import SMALL, WORDS, tiny_tokenizer

PAGE = (ROOT / "docs" / "migrate-from-gradcache.md").read_text(encoding="utf-8")
LOOP, CALL, RUN = re.findall(r"<!-- test: migrate -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)

# What the library promises, without its means: the gradient of the whole batch at once.
WHOLE_BATCH = """
import sys, types

class GradCache:
    def __init__(self, models, chunk_sizes, loss_fn, get_rep_fn):
        self.models, self.loss_fn, self.get_rep_fn = models, loss_fn, get_rep_fn

    def __call__(self, *inputs):
        embeddings = [self.get_rep_fn(model(**features)) for model, features in zip(self.models, inputs)]
        loss = self.loss_fn(*embeddings)
        loss.backward()
        return loss.detach()

try:
    import grad_cache
except ImportError:
    sys.modules["grad_cache"] = types.ModuleType("grad_cache")
    sys.modules["grad_cache"].GradCache = GradCache
"""


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(0)
    (tmp_path / "data").mkdir()
    with open(tmp_path / "data" / "pairs.jsonl", "w", encoding="utf-8") as file:
        for _ in range(150):
            row = {name: " ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for name in ("query", "positive")}
            file.write(json.dumps(row) + "\n")
    torch.manual_seed(0)
    config = BertConfig(
        **SMALL | {"max_position_embeddings": 64}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    BertModel(config).save_pretrained(tmp_path / "models" / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "models" / "base")
    return tmp_path


@pytest.mark.slow
def test_loop_call_and_run_file_train_the_same_weights(folder):
    losses = [json.loads(run_python(code, cwd=folder).splitlines()[-1]) for code in (WHOLE_BATCH + LOOP, CALL)]
    (folder / "run.json").write_text(RUN)
    run_python(train_hf, "--config", "run.json", cwd=folder)
    lines = [json.loads(line) for line in (folder / "outputs" / "run" / "metrics.jsonl").read_text().splitlines()]
    losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 3 and losses[0][0] != losses[0][1]
    torch.testing.assert_close(losses[1:], [losses[0]] * 2, rtol=1e-4, atol=0)

    models = [AutoModel.from_pretrained(folder / name) for name in ("models/base", "outputs/loop", "outputs/call")]
    models.append(AutoModel.from_pretrained(folder / "outputs" / "run"))
    base, loop, *others = (
        torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "pooler" not in n]) for model in models
    )
    moved = (loop - base).norm()
    assert moved > 0.1
    for other in others:
        print(f"{(other - loop).norm() / moved:.1e} of what training moved")
        assert (other - loop).norm() < 5e-2 * moved
        # Adam makes a step of 1e-3 of a gradient that is rounding alone, of either sign
        assert ((other - loop).abs() > 1e-4).float().mean() < 1e-2


def test_the_run_file_sets_what_the_loop_sets():
    run = json.loads(RUN)
    said = {
        "learning_rate": r"lr=([\d.e-]+)",
        "gradient_cache_chunk_size": r"chunk_sizes=(\d+)",
        "per_device_train_batch_size": r"range\(0, len\(rows\), (\d+)\)",
        "max_length": r"max_length=(\d+)",
        "temperature": r"documents\.T / ([\d.]+)",
    }
    assert {name: float(re.search(pattern, LOOP)[1]) for name, pattern in said.items()} == {n: run[n] for n in said}
