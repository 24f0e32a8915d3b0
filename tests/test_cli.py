"""`hf-dist`: what it prints, and that it is instant."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from hf_dist_ext import cli, train


def test_the_schema_is_printed_as_json(capsys):
    cli.main(["config", "--schema"])
    schema = json.loads(capsys.readouterr().out)
    assert {"temperature", "learning_rate", "per_device_train_batch_size"} <= set(schema["properties"])


def test_a_run_is_explained_with_its_overrides(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"dataset_name": "code-search", "model_config": {"model_type": "bert"}, "hub_token": "hf_x"}),
        encoding="utf-8",
    )
    words = [
        "--per_device_train_batch_size",
        "8",
        "--gradient_accumulation_steps=2",
        "--accelerate_config",
        "ddp",
        "--use_cpu",
    ]
    cli.main(["config", str(path), *words])
    said, brace, text = capsys.readouterr().out.partition("{")
    said, text = said.splitlines(), brace + text
    assert said[0] == '# accelerate_config="ddp" -> "multi_gpu_ddp"'
    assert said[1:] == [
        "# processes: 2 (multi_gpu_ddp), no GPU visible: on the CPU",
        "# over the file: per_device_train_batch_size, gradient_accumulation_steps, accelerate_config, use_cpu",
        f"# data: code-search. It was not opened; hf-dist train {path} --max_steps 1 --output_dir NEW checks "
        "all of it.",
        "# batch: 32 rows per update = 8 x 2 devices x 2 accumulated",
        "# order of rows: random, seed 42, equal texts in different batches",
        "# trains: all of the model",
    ]
    assert json.loads(text)["per_device_train_batch_size"] == 8 and json.loads(text)["hub_token"] == "***"


@pytest.mark.parametrize("fields, words", [
    ({"accelerate_config": "multi_gpu_tp", "num_processes": 4, "streaming": True, "max_steps": 5, "data_seed": 7},
     ["= 8 x 2 devices x 1", "a stream, shuffled with seed 7"]),
    ({"streaming": True, "max_steps": 5, "train_sampling_strategy": "sequential"}, ["a stream, as its files have it"]),
    ({"trainable_modules": ["projection"], "no_duplicates_in_batch": False, "gradient_cache_chunk_tokens": 64},
     ["trains: only projection", "random, seed 42\n", "chunks of 64 tokens"]),
    ({"lr_scale_rule": "sqrt", "lr_base_batch_size": 2, "learning_rate": 1e-5},
     ["learning rate: 2e-05, from 1e-05 for 2 rows (sqrt)"]),
    ({"use_lora": True, "lora_r": 4}, ["trains: adapters of rank 4"]),
    ({"accelerate_config": "multi_gpu_pp"}, ["processes: none here. multi_gpu_pp starts processes for pipelines"]),
])  # fmt: skip
def test_what_a_run_comes_to_is_said_in_words(tmp_path, capsys, fields, words):
    given = {"dataset_name": "code-search", "model_config": {"model_type": "bert"}, "use_cpu": True}
    (tmp_path / "run.json").write_text(json.dumps(given | fields), encoding="utf-8")
    cli.main(["config", str(tmp_path / "run.json")])
    said = capsys.readouterr().out
    assert [one for one in words if one not in said] == []


@pytest.mark.parametrize("fields, words", [
    ({"dataset_name": "pairs.json", "eval_dataset_name": "code-search"}, "pairs.json, code-search. It was not opened"),
    ({"datasets": [{"dataset_name": "some/one", "weight": 1}, {"dataset_name": "pairs.json", "weight": 1}]},
     "some/one, pairs.json. It was"),
    ({"dataset_name": "nowhere.jsonl"}, "error: .*: nowhere.jsonl is no file or folder here; paths start at /"),
    ({"dataset_name": "code-search", "eval_dataset_name": "./no"}, "error: .*: ./no is no file or folder here"),
])  # fmt: skip
def test_data_that_is_not_here_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch, fields, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.json").write_text("[]")
    (tmp_path / "run.json").write_text(json.dumps({"model_config": {"model_type": "bert"}, "use_cpu": True} | fields))
    with pytest.raises(SystemExit) if "error" in words else contextlib.nullcontext():
        cli.main(["config", "run.json"])
    assert re.search(words, "".join(capsys.readouterr()))


def test_presets_are_listed_with_their_short_names(capsys):
    cli.main(["presets"])
    output = capsys.readouterr().out
    for words in ("single_gpu (single)", "multi_gpu_ddp (ddp)", "multi_gpu_fsdp (fsdp, fsdp2)", "auto"):
        assert words in output


@pytest.mark.parametrize("words", ["config --schema", "presets", "train --help all", "plan --help"])
def test_a_reader_that_has_gone_ends_a_command_quietly(words):
    """As `| head` does, sooner: nobody reads the pipe from the beginning, nor what is flushed at the end."""
    reads, writes = os.pipe()
    os.close(reads)
    source = "import sys; from hf_dist_ext.cli import main; main(sys.argv[1:])"
    ended = subprocess.run([sys.executable, "-c", source, *words.split()], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert ended.stderr.decode() == ""
    assert ended.returncode in (
        (0, 141) if words == "plan --help" else (141,)
    )  # argparse ignores what it cannot print


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_freed_memory_is_joined_unless_the_user_configures_the_allocator(monkeypatch, given):
    for name in ("", "CUDA_", "HIP_"):
        monkeypatch.delenv(f"PYTORCH_{name}ALLOC_CONF", raising=False)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    with pytest.raises(SystemExit):
        train.main(["--config", "there is no such file"])
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == {given or "PYTORCH_ALLOC_CONF": "max_split_size_mb:64" if given else "expandable_segments:True"}


def test_datasets_draws_its_bars_on_a_terminal_only(monkeypatch, capsys):
    """It reads the variable when it is imported, which no command has done by then."""
    name = "HF_DATASETS_DISABLE_PROGRESS_BARS"
    for has_terminal in (True, False):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda has=has_terminal: has, raising=False)
        cli.main(["presets"])
        assert os.environ.pop(name, None) == (None if has_terminal else "1")


@pytest.mark.parametrize("kind", ["text", "image-text"])
def test_init_says_what_pictures_need(monkeypatch, tmp_path, capsys, kind):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cli.main(["init", kind, str(tmp_path / kind)])
    assert ("pip install 'hf_dist_ext[image]'" in capsys.readouterr().out) is (kind == "image-text")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["config", "--explain", "nowhere.json"], "error: --config nowhere.json: no such file"),
        (["presets", "--loud"], "unexpected arguments: --loud"),
        (["search", "--model", "out", "--top_k", "0", "x"], "--top_k 0"),
        (["audit", "run.json", "--rows", "-1"], "--rows -1 is not a positive number"),
        (["search", "--model", "out", "--image", "a.png"], "--image goes with --data"),
        (["search", "--model", "out", "--column", "text", "x"], "--column text names a column of a data file"),
        (["search", "--model", "out", "--data", ".", "--column", "text", "x"], "--column text names a column of"),
        (["search", "--model", "out", "x", " "], "Ask with words, which must not be empty, or with --image"),
        (["search", "--model", "out", "--data", ".", "--image", "a.png", "x"], "or with --image, one of the two"),
        (["config"], "takes a run file"),
        (["trian", "run.json"], "Closest: train."),
        (["plan", "--confg", "run.json"], "required: --config"),
        (["plan", "run.json", "--num_devices", "two"], "invalid int value: 'two'"),
        (["plan", "run.json", "--interconnect", "nvlnk"], "Closest: nvlink."),
        ([], "required"),
    ],
)
def test_mistakes_exit_with_code_2(monkeypatch, capsys, argv, words):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("HF_DIST_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and words in said and said.startswith("error: ") and said.count("\n") == 1
