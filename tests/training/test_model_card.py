"""The README.md that a run's folder ends with: true, valid for the hub, and its lines of Python run."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from PIL import Image
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.run.read import load_run
from hf_dist_ext.training import model_card
from hf_dist_ext.training.card_metadata import metadata
from hf_dist_ext.training.citations import citations_of, names_of
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
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
    words = ["# out", "`bert`, not pretrained", "rows.jsonl", "run.json", "import SentenceTransformer"]
    words += [
        "Training data: 32 rows.",
        "| query | texts of",
        "32 dimensions, mean pooling",
        '| `query` | "search : " |',
    ]
    words += ["oord2018representation", "gao2021scaling", "* torch: 2", '"max_steps": 3']
    words += [f"({report['trained_parameters']:,} of {report['parameters']:,})", "Processes: 1 (cpu)"]
    words += ['`lora_target_modules` ["query"]'] if fields else []
    words += ["This folder holds what was trained"] if is_part else ['| `query` | "search : " |']
    assert not [word for word in words if word not in card], card
    metric, after = next((name, value) for name, value in report["after"].items() if value is not None)
    assert f"{metric} |" in card and f"{after:.4f}" in card
    assert ("](loss.png)" in card) is (out / "loss.png").exists() is not is_part
    assert is_part or Image.open(out / "loss.png").size[0] > 300

    data = ModelCard.load(out / "README.md").data
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == pytest.approx(report["after"], abs=1e-6) and len(found) == 4
    if not is_part:
        assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
        assert {"sentence-transformers", "dataset_size:32", "loss:InfoNCELoss"} <= set(data.tags)
        assert "tensor([[" in run_examples(card, capsys)


def test_the_card_of_adapters_loads_them_on_their_base(main, run_file, tmp_path, capsys):  # noqa: F811
    main(["--config", run_file(**of_adapters(tmp_path))])
    card = (tmp_path / "out" / "README.md").read_text()
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.library_name == "sentence-transformers" and "lora" in data.tags and data.base_model is None
    assert "tensor([[" in run_examples(card, capsys) and f"Made from `{tmp_path / 'base'}`" in card


def test_the_card_of_a_dual_encoder_embeds_words_and_pictures(main, run_file, tmp_path, capsys):  # noqa: F811
    picture_model(tmp_path / "parts").save_pretrained(str(tmp_path / "model"))
    for number, picture in enumerate(pictures(16)):
        picture.save(tmp_path / f"{number}.png")
    rows = [{"caption": f"{WORDS[n % 12]} {n}", "file": f"{n}.png"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "pairs.jsonl")}
    given |= {"columns": {"query": "caption", "positive": "file"}, "image_columns": ["positive"], "batch_size": 4}
    given |= dict.fromkeys(("model_config", "tokenizer_name", "projection_dim", "prompts"), ...)
    main(["--config", run_file(**given, image_folder=str(tmp_path))])
    card = (tmp_path / "out" / "README.md").read_text()
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert "| positive | pictures, 16 x 16 pixels |" in card and "a picture of 16 x 16 pixels" in card
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


def test_the_head_names_what_is_on_the_hub_and_no_path(run_file, tmp_path):  # noqa: F811
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "modules.json").write_text("[]")
    given = {"model_config": ..., "model_name_or_path": "intfloat/e5-small-v2", "columns": ...}
    sources = [{"dataset_name": name} for name in ("sentence-transformers/all-nli@main", "code-search")]
    sources.append({"dataset_name": str(tmp_path / "rows.jsonl")})
    given |= {"datasets": sources, "dataset_name": ..., "eval_holdout": ...}
    (tmp_path / "sts.jsonl").write_text("{}")
    given["evaluations"] = [{"type": "sts", "name": "sts", "path": str(tmp_path / "sts.jsonl")}]
    data = metadata(folder, load_run(["--config", run_file(**given)]), {"sts_spearman_cosine": 0.5}, [], None)
    assert data.base_model == "intfloat/e5-small-v2" and data.to_dict()["base_model_relation"] == "finetune"
    assert data.datasets == ["sentence-transformers/all-nli"]
    (result,) = data.eval_results
    assert (result.task_type, result.dataset_name) == ("semantic-similarity", "sts")
    assert (result.metric_type, result.metric_value) == ("spearman_cosine", 0.5)


def test_another_name_takes_the_folders_place_where_the_model_is_loaded(tmp_path):
    card = tmp_path / "README.md"
    loads = 'SentenceTransformer("{0}") AutoModel.from_pretrained("{0}")\nhf-dist search --model {0} "words"\n'
    text = loads + '"output_dir": "outputs/x"'
    card.write_text(f"{model_card.MARK}\n{text.format('outputs/x')}")
    model_card.named(tmp_path, "someone/model")
    assert card.read_text() == f"{model_card.MARK}\n{text.format('someone/model')}"
    card.write_text(text.format("outputs/x"))
    model_card.named(tmp_path, "someone/model")
    assert card.read_text() == text.format("outputs/x"), "written by hand"


def test_what_is_cited_is_the_loss_and_what_is_inside_of_it():
    assert [entry.partition(",")[0] for entry in citations_of(InfoNCELoss(matryoshka_dims=[4]), True)] == [
        "@misc{oord2018representation", "@misc{kusupati2022matryoshka", "@misc{gao2021scaling",
    ]  # fmt: skip
    theirs = SentenceTransformersLoss("MatryoshkaLoss", 8, loss="CoSENTLoss", matryoshka_dims=[8, 4])
    entries = citations_of(theirs, False)
    assert names_of(theirs) == ["MatryoshkaLoss", "CoSENTLoss"] and len(entries) == 2
    assert CoSENTLoss(None).citation.strip() in entries and "kusupati" in entries[0]
    assert citations_of(None, False) == names_of(None) == []
    several = SumOfLosses({"dense": InfoNCELoss(), "second": SigmoidLoss(), "scores": theirs})
    assert names_of(several)[:2] == ["InfoNCELoss", "SigmoidLoss"] and names_of(several)[2:] == names_of(theirs)
    assert citations_of(several, False) == [
        *citations_of(InfoNCELoss(), False), *citations_of(SigmoidLoss(), False), *citations_of(theirs, False)
    ]  # fmt: skip
