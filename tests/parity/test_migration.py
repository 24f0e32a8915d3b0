"""A script with either trainer, and the run file that says the same: what they set and what they reach."""

import ast
import json
from pathlib import Path

import pytest
import torch

from hf_dist_ext.data.code_search import load_code_search, train_tokenizer
from tests.distributed.forked import run_python, train_hf
from tests.launching import ROOT
from tests.tiny_models import embedding_model

pytest.importorskip("sentence_transformers")

SCRIPT = (ROOT / "tests" / "parity" / "migration_script.py").read_text(encoding="utf-8")
RUN = (ROOT / "tests" / "parity" / "migration_run.json").read_text(encoding="utf-8")
FIGURE = "functions_cosine_ndcg@10"
NOISE = 0.04  # another order of the rows changes the figure by about 0.02


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_inputs(folder: Path) -> None:
    """The pairs, the evaluation and the model that script and run file name."""
    splits = load_code_search()
    pairs = [{"docstring": row["query"], "function": row["positive"]} for row in splits["train"]]
    (folder / "data" / "functions" / "qrels").mkdir(parents=True)
    write_lines(folder / "data" / "pairs.jsonl", pairs)
    for name, column in (("queries", "query"), ("corpus", "positive")):
        rows = [{"_id": f"{name[0]}{i}", "text": text} for i, text in enumerate(splits["test"][column])]
        write_lines(folder / "data" / "functions" / f"{name}.jsonl", rows)
    right = [f"q{i}\tc{i}\t1\n" for i in range(len(splits["test"]))]
    (folder / "data" / "functions" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(right))
    tokenizer = train_tokenizer(text for pair in pairs for text in pair.values())
    config = {
        "model_type": "bert", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256, "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = embedding_model(config, tokenizer=tokenizer)
    model.save_pretrained(str(folder / "models" / "base"))


@pytest.mark.slow
def test_script_and_run_file_reach_the_same_figure(tmp_path):
    write_inputs(tmp_path)
    theirs = float(run_python(SCRIPT, cwd=tmp_path).split()[-1])
    renamed = SCRIPT.replace("outputs/theirs", "outputs/renamed").replace(
        "SentenceTransformerTrainer(", "DistTrainer("
    )
    swapped = float(run_python(f"from hf_dist_ext import DistTrainer\n{renamed}", cwd=tmp_path).split()[-1])
    (tmp_path / "run.json").write_text(RUN)
    run_python(train_hf, "--config", "run.json", cwd=tmp_path)
    report = json.loads((tmp_path / "outputs" / "ours" / "metrics.json").read_text())
    before, ours = report["before"][FIGURE], report["after"][FIGURE]
    print(f"before {before:.4f}, script {theirs:.4f}, with DistTrainer {swapped:.4f}, run file {ours:.4f}")
    assert min(theirs, ours, swapped) > before + 0.2 and max(abs(theirs - ours), abs(theirs - swapped)) < NOISE


def test_the_run_file_sets_what_the_script_sets():
    calls = [node for node in ast.walk(ast.parse(SCRIPT)) if isinstance(node, ast.Call)]
    keywords = {getattr(call.func, "id", ""): call.keywords for call in calls}
    said = {one.arg: one.value for one in keywords["SentenceTransformerTrainingArguments"]}
    given = {name: ast.literal_eval(value) for name, value in said.items() if isinstance(value, ast.Constant)}
    run = json.loads(RUN)
    apart = {name for name, value in given.items() if run.get(name) != value}
    assert len(given) > 10 and apart == {"output_dir", "metric_for_best_model"}
    assert given["metric_for_best_model"] == f"eval_{run['metric_for_best_model']}" == f"eval_{FIGURE}"
    of_loss = {one.arg: one.value.value for one in keywords["CachedMultipleNegativesRankingLoss"]}
    assert (run["temperature"], run["gradient_cache_chunk_size"]) == (1 / of_loss["scale"], of_loss["mini_batch_size"])
