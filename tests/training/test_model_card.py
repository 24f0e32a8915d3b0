"""The README.md that a run's folder ends with."""

import json
from pathlib import Path

import pytest

from tests.test_train_script import main, run_file  # noqa: F401

LORA = {"use_lora": True, "lora_r": 4, "lora_target_modules": ["query"], "learnable_temperature": False}


@pytest.mark.parametrize("fields", [{}, LORA, LORA | {"save_full_model": False}], ids=["whole", "lora", "adapters"])
def test_a_run_ends_with_a_card_that_says_what_was_made(main, run_file, tmp_path, fields):  # noqa: F811
    main(["--config", run_file(projection_dim=None, **fields)])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Model Card for Model ID" not in card and "More Information Needed" not in card
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert f"{report['trained_share']:.2%}" in card and (tmp_path / "out" / "run.json").exists()
    words = ["# out", "`bert`, not pretrained", "rows.jsonl", "run.json", "EmbeddingModel.from_pretrained"]
    words += ['`lora_target_modules` ["query"]'] if fields else []
    assert all(word in card for word in words), card
    metric, after = next((name, value) for name, value in report["after"].items() if value is not None)
    assert f"{metric} |" in card and f"{after:.4f}" in card


def test_a_card_that_somebody_wrote_stays(main, run_file, tmp_path):  # noqa: F811
    Path(tmp_path, "out").mkdir()
    Path(tmp_path, "out", "README.md").write_text("My own words.")
    main(["--config", run_file()])
    assert Path(tmp_path, "out", "README.md").read_text() == "My own words."
