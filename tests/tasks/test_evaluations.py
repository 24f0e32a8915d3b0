"""Evaluations of a run file: before, while and after training, in the report and in the model's card."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.retrieval_data import corpus, write_beir, write_pictures, write_rows
from tests.tasks.test_image_pairs import run_file as pairs_file  # noqa: F401, a fixture
from tests.test_train_script import main, run_file  # noqa: F401, fixtures


def lines_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_runtime" in line]


def test_a_run_without_held_out_rows_is_judged_by_its_evaluations(main, run_file, tmp_path, capsys):  # noqa: F811
    write_beir(tmp_path / "docs", *corpus(9, 30))
    write_rows(tmp_path, 12)
    names = {"sentence1": "my_sentence1", "sentence2": "my_sentence2", "score": "my_score"}
    evaluations = [
        {"type": "retrieval", "path": str(tmp_path / "docs")},
        {"type": "sts", "path": str(tmp_path / "sts.jsonl"), "columns": names},
    ]
    more = {"eval_holdout": ..., "evaluations": evaluations, "eval_strategy": "steps", "eval_steps": 2}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "sts_spearman_cosine"}
    main(["--config", run_file(**more)])
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    shown = [*[f"docs_cosine_{name}" for name in ("recall@10", "ndcg@10", "mrr@10", "map@100")], "sts_spearman_cosine"]
    assert list(report["before"]) == list(report["after"]) == shown
    lines = lines_of(tmp_path / "out")
    assert [line["step"] for line in lines][:2] == [0, 2]
    for when, line in (("before", lines[0]), ("after", lines[-1])):
        assert report[when] == {name: line[f"eval_{name}"] for name in shown}
    assert "eval_loss" not in lines[0] and "eval_docs_cosine_accuracy@3" in lines[0]
    card, printed = (tmp_path / "out" / "README.md").read_text(), capsys.readouterr().out
    assert "| held out | before | after |" in card
    assert f"| sts_spearman_cosine | {report['before']['sts_spearman_cosine']:.4f} |" in card
    assert " docs_cosine_map@100 " in printed
    assert not [name for name in ("accuracy@3", "pearson", "sequential_score") if name in printed]
    best = max(lines[1:-1], key=lambda line: line["eval_sts_spearman_cosine"])  # the first of those that are equal
    value = best["eval_sts_spearman_cosine"]
    assert report["best"] == {"step": best["step"], "figure": "sts_spearman_cosine", "value": value}
    kept = f"kept the weights of step {best['step']}, the best sts_spearman_cosine ({value:.4g})"
    assert kept in printed.splitlines() and f"{kept}." in card and "](metrics.png)" in card
    assert "out/loss.png" in printed and "out/metrics.png" in printed and (tmp_path / "out" / "metrics.png").exists()


def test_a_wrong_entry_ends_the_run_with_one_line(main, run_file, tmp_path, capsys):  # noqa: F811
    entry = {"type": "retrieval", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(SystemExit) as left:
        main(["--config", run_file(eval_holdout=..., evaluations=[entry])])
    assert left.value.code == 2 and "rows.jsonl is a file. Retrieval needs a folder" in capsys.readouterr().err
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_words_look_for_pictures(main, pairs_file, tmp_path):  # noqa: F811
    """Queries go to the text tower, a corpus of pictures to the image tower."""
    pictures = [Image.new("RGB", (20, 20), (i * 10, 255 - i * 10, 80)) for i in range(24)]
    queries, right = {"a": "sort the keys", "b": "a list"}, {"a": ["3"], "b": ["7"]}
    folder = write_pictures(tmp_path / "pictures", pictures, queries, right)
    given = {"type": "retrieval", "path": str(folder), "mrr_at_k": [24]}
    main(["--config", str(pairs_file(evaluations=[given], max_steps=1, save_strategy="no"))])
    (folder,) = {path.parent for path in tmp_path.rglob("metrics.jsonl")}
    assert all(1 / 24 <= line["eval_pictures_cosine_mrr@24"] <= 1 for line in lines_of(folder))
