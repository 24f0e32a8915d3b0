"""`hf-dist`: what it prints, and that it is instant."""

import json
import sys
import types

import pytest

from hf_dist_ext import cli


def test_the_schema_is_printed_as_json(capsys):
    cli.main(["config", "--schema"])
    schema = json.loads(capsys.readouterr().out)
    assert {"temperature", "learning_rate", "batch_size"} <= set(schema["properties"])


def test_a_run_is_explained_with_its_overrides(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"dataset_name": "code-search", "model_config": {"model_type": "bert"}, "hub_token": "hf_x"}),
        encoding="utf-8",
    )
    cli.main(["config", "--explain", str(path), "--batch_size", "8"])
    echo, _, text = capsys.readouterr().out.partition("\n")
    assert echo == "# batch_size=8 -> per_device_train_batch_size=8"
    assert json.loads(text)["per_device_train_batch_size"] == 8 and json.loads(text)["hub_token"] == "***"


def test_presets_are_listed_with_their_short_names(capsys):
    cli.main(["presets"])
    output = capsys.readouterr().out
    for words in ("single_gpu (single)", "multi_gpu_ddp (ddp)", "multi_gpu_fsdp (fsdp, fsdp2)", "auto"):
        assert words in output


def test_search_hands_its_words_to_the_search_module(monkeypatch):
    calls = []
    search = types.SimpleNamespace(main=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "hf_dist_ext.tasks.search", search)
    cli.main(["search", "--model", "out", "--top_k", "3", "parse", "a date string"])
    assert calls == [("out", "parse a date string", 3)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["config", "--explain", "nowhere.json"], "error: --config nowhere.json: no such file"),
        (["presets", "--loud"], "unexpected arguments: --loud"),
        (["search", "--model", "out", "--top_k", "0", "x"], "--top_k 0"),
        (["search", "--model", "out", "--image", "a.png"], "--image goes with --data"),
        (["config"], "required"),
        ([], "required"),
    ],
)
def test_mistakes_exit_with_code_2(monkeypatch, capsys, argv, words):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("HF_DIST_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2 and words in capsys.readouterr().err
