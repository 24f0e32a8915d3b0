"""The README.md that a run's folder ends with: true, valid for the hub, and its lines of Python run."""

import importlib.util
import json
import random
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from sentence_transformers.base.model_card import BaseModelCardData

from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.replay import ReplayError
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.run.read import load_run
from hf_dist_ext.training import model_card
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from hf_dist_ext.training.sentence_trainer import parts_of
from hf_dist_ext.training.trainer import DistTrainer
from tests.sentence_models import picture_model, pictures
from tests.test_train_script import main, run_file  # noqa: F401, fixtures
from tests.tiny_models import WORDS, embedding_model, model_config

LORA = {"use_lora": True, "lora_r": 4, "lora_target_modules": ["query"], "learnable_temperature": False}


def of_adapters(folder: Path) -> dict:
    """Fields of a run that ends with adapters on a base that lies there."""
    embedding_model(model_config("bert")).save_pretrained(str(folder / "base"))
    without = dict.fromkeys(("model_config", "tokenizer_name", "projection_dim"), ...)
    return LORA | without | {"model_name_or_path": str(folder / "base"), "save_full_model": False}


def run_examples(card: str, capsys) -> str:
    """What the card's lines of Python print."""
    codes = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    capsys.readouterr()
    for code in codes:
        exec(compile(code, "card", "exec"), {})
    return capsys.readouterr().out if codes else ""


@pytest.mark.parametrize("fields", [{}, LORA, LORA | {"save_full_model": False}], ids=["whole", "lora", "adapters"])
def test_a_run_ends_with_a_card_that_says_what_was_made(
    main,  # noqa: F811
    run_file,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    fields,
):
    """The last one without matplotlib: the card then says nothing of a picture."""
    is_part = fields.get("save_full_model") is False  # and the base of these adapters lies nowhere
    find = importlib.util.find_spec
    without = {"matplotlib": lambda *more: None} if is_part else {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: without.get(name, find)(name, *more))
    main(["--config", run_file(projection_dim=None, **fields)])
    out = tmp_path / "out"
    card, report = (out / "README.md").read_text(), json.loads((out / "metrics.json").read_text())
    assert "Model Card for Model ID" not in card and "More Information Needed" not in card
    assert f"{report['trained_share']:.2%}" in card and (out / "run.json").exists()
    assert 0 < report["trained_parameters"] <= report["parameters"]
    words = [
        "# SentenceTransformer",
        "`bert`, not pretrained",
        "rows.jsonl",
        "run.json",
        "* Size: 32 training samples",
    ]
    words += ["**Output Dimensionality:** 32 dimensions", "Full Model Architecture", '| `query` | "search : " |']
    words += ["reimers-2019", "- PyTorch: 2", '"max_steps": 3']
    words += [f"({report['trained_parameters']:,} of {report['parameters']:,})", "Processes: 1 (cpu)"]
    words += ['"lora_target_modules": ['] if fields else []
    words += ["differed by at most 0.0e+00 of", "(`replay_error`)."]
    assert not [word for word in words if word not in card], card
    assert card.count(model_card.MARK) == 1
    theirs, _, ours = card.partition(model_card.MARK)
    metric, after = next((name, value) for name, value in report["after"].items() if value is not None)
    assert f"{metric} |" in ours and f"{after:.4f}" in ours and "## This run" not in theirs
    assert ("](loss.png)" in ours) is (out / "loss.png").exists() is not is_part
    assert is_part or Image.open(out / "loss.png").size[0] > 300

    data = ModelCard.load(out / "README.md").data
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == pytest.approx(report["after"], abs=1e-6) and len(found) == 4
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    tags = {"sentence-transformers", "dataset_size:32", "loss:InfoNCELoss", "hf_dist_ext", "generated_from_trainer"}
    assert tags <= set(data.tags) and ("lora" in data.tags) is bool(fields) and data.base_model is None
    if not is_part:
        assert "tensor([[" in run_examples(card, capsys)


def test_after_a_resume_the_card_has_one_section_of_the_whole_run(main, run_file, tmp_path):  # noqa: F811
    """With the largest difference of both passes since the beginning."""
    given = run_file(save_steps=1, max_steps=2, logging_steps=1, replay_tolerance=0.5)
    with mock.patch.object(ReplayError, "largest", torch.tensor(0.25)):
        main(["--config", given])
    first = (tmp_path / "out" / "README.md").read_text()
    main(["--config", given, "--max_steps", "4", "--resume_from_checkpoint", "true"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count(model_card.MARK) == card.count("## This run") == 1 and '"max_steps": 4' in card != first
    assert card.startswith("---\n") and card.count("\n# ") == first.count("\n# ")
    assert "at most 2.5e-01 of" in card and "(`replay_error`; `replay_tolerance` 0.5)" in card
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert len(data.eval_results) == 4 and data.tags.count("hf_dist_ext") == 1


def test_a_run_draws_the_same_random_numbers_with_and_without_examples_on_its_card(
    main,  # noqa: F811
    run_file,  # noqa: F811
    monkeypatch,
):
    drawn = []
    for name in ("set_widget_examples", "evaluate"):
        if name == "evaluate":
            monkeypatch.setattr(BaseModelCardData, "set_widget_examples", lambda self, dataset: None)
        plain = DistTrainer.train
        monkeypatch.setattr(
            DistTrainer, "train", lambda self, _plain=plain, **given: (drawn.append(random.random()), _plain(self))[1]
        )
        main(["--config", run_file(max_steps=1, save_strategy="no"), "--overwrite_output_dir"])
        monkeypatch.setattr(DistTrainer, "train", plain)
    assert drawn[0] == drawn[1]


def test_the_card_of_adapters_loads_them_on_their_base(main, run_file, tmp_path, capsys):  # noqa: F811
    main(["--config", run_file(**of_adapters(tmp_path))])
    card = (tmp_path / "out" / "README.md").read_text()
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.library_name == "sentence-transformers" and "lora" in data.tags and data.base_model is None
    assert "tensor([[" in run_examples(card, capsys) and f"Made from `{tmp_path / 'base'}`" in card


def test_the_card_of_a_dual_encoder_embeds_words_and_pictures(main, run_file, tmp_path, capsys, monkeypatch):  # noqa: F811
    picture_model(tmp_path / "parts").save_pretrained(str(tmp_path / "model"))
    for number, picture in enumerate(pictures(16)):
        picture.save(tmp_path / f"{number}.png")
    rows = [{"caption": f"{WORDS[n % 12]} {n}", "file": f"{n}.png"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "pairs.jsonl")}
    given |= {
        "columns": {"query": "caption", "positive": "file"},
        "image_columns": ["positive"],
        "per_device_train_batch_size": 4,
    }
    given |= dict.fromkeys(("model_config", "tokenizer_name", "projection_dim", "prompts"), ...)
    main(["--config", run_file(**given, image_folder=str(tmp_path))])
    card = (tmp_path / "out" / "README.md").read_text()
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert "**Supported Modalities:** Text, Image" in card and (tmp_path / "out" / "assets").is_dir()
    monkeypatch.chdir(tmp_path / "out")  # where its example looks for pictures
    assert "tensor([[" in run_examples(card, capsys)


@pytest.mark.parametrize("encoding, adapts", [("utf-8", False), ("latin-1", False), ("utf-8", True)])
def test_a_card_that_somebody_wrote_stays_and_the_run_says_so(
    main,  # noqa: F811
    run_file,  # noqa: F811
    tmp_path,
    caplog,
    encoding,
    adapts,
):
    """peft would add its own lines to it, and not every file is UTF-8."""
    card = tmp_path / "out" / "README.md"
    card.parent.mkdir()
    card.write_text("Mine, naïve.", encoding=encoding)
    main(["--config", run_file(**(of_adapters(tmp_path) if adapts else {}))])
    assert (card.parent / "adapter_config.json").exists() is adapts
    assert card.read_text(encoding=encoding) == "Mine, naïve."
    assert not Path(tmp_path, "out", "loss.png").exists()
    assert "README.md was written by hand, so it stays" in caplog.text


def test_the_head_names_what_is_on_the_hub_and_no_path(main, run_file, tmp_path):  # noqa: F811
    main(["--config", run_file(save_strategy="no", max_steps=1, eval_strategy="no")])
    given = {"model_config": ..., "model_name_or_path": "intfloat/e5-small-v2", "columns": ...}
    sources = [{"dataset_name": name} for name in ("sentence-transformers/all-nli@main", "code-search")]
    sources.append({"dataset_name": str(tmp_path / "rows.jsonl")})
    given |= {"datasets": sources, "dataset_name": ..., "eval_holdout": ...}
    (tmp_path / "sts.jsonl").write_text("{}")
    given["evaluations"] = [{"type": "sts", "name": "sts", "path": str(tmp_path / "sts.jsonl")}]
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    report["after"] = {"sts_spearman_cosine": 0.5, "mrr@10": 0.25}
    report["before"] = {}
    model_card.write(tmp_path / "out", load_run(["--config", run_file(**given)]), report, [])
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.base_model == "intfloat/e5-small-v2" and data.datasets == ["sentence-transformers/all-nli"]
    assert [one.metric_type for one in data.eval_results if one.dataset_type == "held-out"][-1] == "mrr@10"
    assert "sts_spearman_cosine" not in [one.metric_type for one in data.eval_results], "their evaluator says it"
    (tmp_path / "out" / "README.md").unlink()  # as where their card could not be written
    model_card.write(tmp_path / "out", load_run(["--config", run_file(**given)]), report, [])
    assert ModelCard.load(tmp_path / "out" / "README.md").data.library_name == "sentence-transformers"


def test_another_name_takes_the_folders_place_where_the_model_is_loaded(tmp_path):
    card = tmp_path / "README.md"
    loads = 'SentenceTransformer("{0}") AutoModel.from_pretrained("{0}")\n'
    text = loads + '"output_dir": "outputs/x"'
    card.write_text(f"{model_card.MARK}\n{text.format('outputs/x')}")
    model_card.named(tmp_path, "someone/model")
    assert card.read_text() == f"{model_card.MARK}\n{text.format('someone/model')}"
    card.write_text(text.format("outputs/x"))
    model_card.named(tmp_path, "someone/model")
    assert card.read_text() == text.format("outputs/x"), "written by hand"


def test_a_card_names_the_loss_and_those_inside_of_it():
    theirs = SentenceTransformersLoss("MatryoshkaLoss", 8, loss="CoSENTLoss", matryoshka_dims=[8, 4])
    names = [type(one).__name__ for one in parts_of(theirs)]
    assert names == ["MatryoshkaLoss", "CoSENTLoss"] and parts_of(None) == []
    several = SumOfLosses({"dense": InfoNCELoss(), "second": SigmoidLoss(), "scores": theirs})
    assert [type(one).__name__ for one in parts_of(several)] == ["InfoNCELoss", "SigmoidLoss", *names]
