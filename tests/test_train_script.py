"""scripts/train_hf.py as a user runs it, in this process: a small run on local files, and its one-line errors."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from tests.tiny_models import WORDS, model_config, tiny_tokenizer

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train_hf.py"


@pytest.fixture
def main(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK"))]:
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("train_hf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def run_file(tmp_path):
    """A function that writes a run file for a tiny model and 40 local rows; keyword arguments go over the defaults."""
    draw = torch.Generator().manual_seed(0)
    text = lambda n: " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw))  # noqa: E731
    rows = [{"question": f"{text(3)} {i}", "answer": f"{text(6)} {i}", "wrong": [text(4), text(5)]} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def write(**more) -> str:
        fields = {
            "_": "a comment", "model_config": model_config("bert"), "tokenizer_name": str(tmp_path / "tokenizer"),
            "dataset_name": str(tmp_path / "rows.jsonl"), "eval_holdout": 8, "prompts": {"query": "search : "},
            "columns": {"query": "question", "positive": "answer", "negative": "wrong"},
            "batch_size": 16, "gradient_cache_chunk_size": 5, "max_steps": 3, "output_dir": str(tmp_path / "out"),
            "learnable_temperature": True, "projection_dim": 16, "save_steps": 2, "logging_steps": 1, "use_cpu": True,
            "disable_tqdm": True, "report_to": "none",
        }  # fmt: skip
        fields = {key: value for key, value in (fields | more).items() if value is not ...}
        (tmp_path / "run.json").write_text(json.dumps(fields))
        return str(tmp_path / "run.json")

    return write


def test_a_run_on_local_files_ends_with_a_model_others_load(main, run_file, tmp_path, capsys):
    main(["--config", run_file(), "--learning_rate", "1e-3"])
    printed = capsys.readouterr().out
    assert "per_device_train_batch_size" in printed and "EmbeddingModel.from_pretrained" in printed
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["world_size"] == 1 and report["contrastive_batch_size"] == 16 and report["num_chunks"] == 13
    assert set(report["before"]) == set(report["after"]) == {"mrr@10", "ndcg@10", "recall@1", "recall@10"}
    assert report["train_seconds"] > 0 and all(0 <= value <= 1 for value in report["after"].values())

    from sentence_transformers import SentenceTransformer

    from hf_dist_ext.modeling import EmbeddingModel

    model = EmbeddingModel.from_pretrained(tmp_path / "out")
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    features = tiny_tokenizer()(["search : parse a date"], return_tensors="pt")
    with torch.no_grad():
        ours = model(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).embeddings
    theirs = served.encode(["parse a date"], prompt_name="query", convert_to_tensor=True)
    assert ours.shape == (1, 16) and torch.allclose(ours, theirs, atol=1e-6)


def test_a_run_is_resumed_from_its_newest_checkpoint(main, run_file, tmp_path):
    main(["--config", run_file()])
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    for name in ("metrics.json", "model.safetensors"):
        (tmp_path / "out" / name).unlink()
    import shutil

    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    main(["--config", run_file(), "--resume_from_checkpoint", "true"])
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole


def test_a_stream_is_trained_on(main, run_file, tmp_path):
    main(["--config", run_file(streaming=True, eval_holdout=..., max_steps=2)])
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["contrastive_batch_size"] == 16 and report["after"]["mrr@10"] is None


@pytest.mark.parametrize("change, words", [
    ({"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl"),
    ({"columns": {"query": "question", "positive": "anwser"}}, "answer"),
    ({"batch_size": 1000}, "fewer than one global batch"),
    ({"tokenizer_name": "no/such/folder"}, "tokenizer"),
    ({"tokenizer_name": ...}, "tokenizer_name"),
    ({"gradient_cache_chunk_size": 0}, "gradient_cache_chunk_size"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3}, "round multiple"),
    ({"model_config": {"model_type": "bort"}}, "bort"),
    ({"resume_from_checkpoint": "gone/checkpoint-3"}, "no such folder"),
])  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(main, run_file, capsys, change, words):
    with pytest.raises(SystemExit) as exit_:
        main(["--config", run_file(**change)])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0], error
    assert "Traceback" not in error


def test_an_empty_dataset_and_a_second_run_are_refused(main, run_file, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    for change, words in (({"dataset_name": str(tmp_path / "empty.jsonl")}, "empty"), ({}, "another run")):
        if not change:
            (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
        with pytest.raises(SystemExit) as exit_:
            main(["--config", run_file(**change)])
        assert exit_.value.code == 2 and words in capsys.readouterr().err
