"""The run file: what is accepted, what it becomes, and that every refusal names its remedy in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from hf_dist_ext import failures
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.folder import check_output_dir, checkpoint_to_resume, missing_from_checkpoint
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import config, fields, help, other_names, rules
from hf_dist_ext.run.read import load_run

MINIMAL = {"dataset_name": "code-search", "model_config": {"model_type": "bert"}}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load("--field", "value", key=value): a run from a JSON of MINIMAL and the keys, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DIST_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def load(*argv, **keys):
        Path("my_run.json").write_text(json.dumps(MINIMAL | keys), encoding="utf-8")
        return load_run(["--config", "my_run.json", *argv])

    return load


def error_of(call, *argv, **keys) -> str:
    with pytest.raises(UsageError) as caught:
        call(*argv, **keys)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_fields_go_to_the_run_or_to_the_training_arguments(load):
    run = load(temperature=0.1, learning_rate=2e-5, _note="a comment")
    assert run.options.temperature == 0.1 and run.options.loss == "infonce" and run.options.task == "embedding"
    assert run.training == {"learning_rate": 2e-5, "output_dir": str(Path("outputs", "my_run"))}
    assert run.echo == [] and run.path == Path("my_run.json")


@pytest.mark.parametrize("again", [["--max_steps", "3"], ["--max-steps=2"]])
def test_a_field_given_twice_on_the_command_line_is_an_error(load, again):
    assert error_of(load, "--max_steps", "2", *again) == "The command line gives --max_steps twice. Keep one."


def test_null_takes_a_field_of_the_file_away_whatever_the_field_takes(load):
    run = load("--num_train_epochs", "null", "--max_grad_norm", "null", num_train_epochs=3, max_grad_norm=4.0, seed=1)
    assert run.given == load(seed=1).given and run.training["seed"] == 1
    assert load("--run_name", "null", run_name="a").given["run_name"] is None


def test_reading_fields_agrees_with_the_imported_dataclasses():
    import dataclasses

    from transformers import TrainingArguments

    ours = config.fields_of_run_file()
    theirs = {one.name: one for one in dataclasses.fields(TrainingArguments) if one.init}
    assert len(theirs) > 100 and set(theirs) <= set(ours)
    compared = 0
    for name, one in theirs.items():
        if one.default is dataclasses.MISSING or ours[name].default == fields.UNKNOWN:
            continue
        assert ours[name].default == one.default, name
        assert ours[name].help == one.metadata["help"].replace("%%", "%"), name
        compared += 1
    assert compared > 100
    run_fields = {one.name: one for one in dataclasses.fields(config.RunConfig)}
    for name, one in run_fields.items():
        assert (ours[name].default, ours[name].help) == (one.default, one.metadata["help"])
        assert fields.accepts(ours[name].type, one.default), name


def test_our_training_fields_are_read_from_source():
    source = Path(config.__file__).parents[1] / "training" / "arguments.py"
    ours = fields.read_fields(source, "DistTrainingArguments")
    assert {"gradient_cache_chunk_size", "gradient_cache_chunk_tokens", "overwrite_output_dir"} <= set(ours)
    assert all(one.help for one in ours.values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learning_rate", "2e-5"], {"learning_rate": 2e-5}),
        (["--learning-rate=1"], {"learning_rate": 1}),
        (["--bf16"], {"bf16": True}),
        (["--bf16", "false"], {"bf16": False}),
        (["--max_steps", "-1"], {"max_steps": -1}),
        (["--report_to", "wandb", "tensorboard"], {"report_to": ["wandb", "tensorboard"]}),
        (["--report_to", '["wandb"]'], {"report_to": ["wandb"]}),
        (["--report_to", "none"], {"report_to": "none"}),
        (["--lr_scheduler_kwargs", '{"num_cycles": 2}'], {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        (["--matryoshka_dims", "64", "32"], {"matryoshka_dims": [64, 32]}),
        (["--matryoshka_dims", "64"], {"matryoshka_dims": [64]}),
        (["--matryoshka_dims", "null"], {"matryoshka_dims": None}),
        (["--max_length", "128"], {"max_length": 128}),
        (["--max_length", '{"query": 64}'], {"max_length": {"query": 64}}),
        (["--run_name", "null"], {"run_name": None}),
        (["--run_name", "12"], {"run_name": "12"}),
        (["--run_name=--odd"], {"run_name": "--odd"}),
        (["--save_total_limit", "null"], {"save_total_limit": None}),
        (["--gradient_cache_chunk_size", "auto"], {"gradient_cache_chunk_size": "auto"}),
        (["--gradient_cache_chunk_size", "32"], {"gradient_cache_chunk_size": 32}),
        (["--gradient_cache_packing", "auto"], {"gradient_cache_packing": "auto"}),
        (["--gradient_cache_packing", "true"], {"gradient_cache_packing": True}),
        (["--fsdp_config", "fsdp.json"], {"fsdp_config": "fsdp.json"}),
    ],
)
def test_command_line_values_have_the_field_s_type(load, words, expected):
    run = load(*words)
    for name, value in expected.items():
        found = run.given[name]
        assert found == value and type(found) is type(value)


def test_the_command_line_goes_over_the_file(load):
    run = load("--seed", "7", "--temperature", "0.2", seed=1, temperature=0.1, weight_decay=0.5)
    assert (run.training["seed"], run.options.temperature, run.training["weight_decay"]) == (7, 0.2, 0.5)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shuffle_buffer_rows": 100}, ["shuffle_buffer_rows=100 has no effect without streaming"]),
        ({"shuffle_buffer_rows": 0, "streaming": True}, ["shuffle_buffer_rows=0", "at least 1"]),
        ({"streaming": True}, ["Set max_steps"]),
        ({"save_full_model": False}, ["save_full_model=false has no effect"]),
        ({"group_by_length": True}, ["gradient_cache_sort"]),
        ({"train_sampling_strategy": "group_by_length"}, ["a length that the rows of a run file do not have"]),
        ({"num_train_epoch": 8}, ["num_train_epoch", "my_run.json", "num_train_epochs"]),
        ({"temprature": 0.1}, ["temperature"]),
        ({"seed": "8"}, ["seed", '"8"', "text", "int"]),
        ({"seed": 8.0}, ["8.0", "a float", "int"]),
        ({"seed": True}, ["true", "int"]),
        ({"bf16": 1}, ["1", "an int", "true/false"]),
        ({"learning_rate": None}, ["null", "float"]),
        ({"matryoshka_dims": [64, "32"]}, ["a list of int"]),
        ({"matryoshka_dims": []}, ["must not be empty"]),
        ({"matryoshka_dims": [64, 0]}, ["at least 1"]),
        ({"columns": {"query": 3}}, ["an object of"]),
        ({"pooling": "max"}, ['"max"', '"mean"', '"cls"']),
        ({"eval_strategy": "step"}, ['"step"', '"steps"']),
        ({"optim": "adamw_torch_fuzed"}, ["adamw_torch_fused", "closest"]),
        ({"log_level": "loud"}, ['"warning"']),
        ({"parallelism_config": {"tp_size": 2}}, ["ParallelismConfig", "JSON"]),
        ({"gradient_cache_chunk_size": 0}, ["=0", "at least 1", '"auto"', "null"]),
        ({"gradient_cache_chunk_size": -3}, ["=-3", "at least 1"]),
        ({"gradient_cache_chunk_size": 2.5}, ["=2.5", "int", '"auto"']),
        ({"gradient_cache_chunk_size": "big"}, ['"big"', "int", '"auto"']),
        ({"gradient_cache_chunk_size": True}, ["true", "int"]),
        ({"gradient_cache_chunk_size": 8, "loss": None}, ["gradient_cache_chunk_size=8", "loss", "infonce"]),
        ({"gradient_cache_chunk_size": "auto", "loss": "none"}, ["gradient_cache_chunk_size", "loss"]),
        ({"loss": None}, ["loss is null", "infonce"]),
        ({"temperature": 0}, ["temperature=0", "above 0"]),
        ({"temperature": -1}, ["above 0"]),
        ({"per_device_train_batch_size": 0}, ["at least 1"]),
        ({"max_length": {"query": 0}}, ["at least 1"]),
        ({"bf16": True, "fp16": True}, ["bf16", "fp16"]),
        ({"model_name_or_path": "x"}, ["model_config", "Both"]),
        ({"model_config": {"hidden_size": 3}}, ["model_type"]),
        ({"dataset_name": None}, ["dataset_name", "code-search"]),
        ({"eval_holdout": 5, "eval_split": "test"}, ["eval_holdout", "eval_split"]),
        ({"deepspeed": "zero.json"}, ["deepspeed", "pip install"]),
    ],
)
def test_wrong_values_are_refused_with_the_remedy(load, monkeypatch, keys, words):
    monkeypatch.setattr(rules.deepspeed_install, "find_spec", lambda name: None)
    message = error_of(load, **keys)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seeed", "1"], ["seeed", "the command line", '"seed"']),
        (["--seed"], ["--seed", "value is missing", "int"]),
        (["--seed", "1", "2"], ["a list", "int"]),
        (["--seed", "x"], ['"x"', "int"]),
        (["--columns", '{"query": '], ["--columns", "not JSON", "column"]),
        (["--bf16", "maybe"], ['"maybe"', "true/false"]),
    ],
)
def test_wrong_words_on_the_command_line_are_refused(load, argv, words):
    message = error_of(load, *argv)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "seed": 1,\n}', ["is not JSON: line ", "no trailing comma"]),  # Python 3.13 points at the comma
        ('{\n  "seed": 1\n  "max_steps": 2}', ["line 3", "column 3"]),
        ('{"seed": 1} x', ["line 1", "column 13"]),
        ('{"seed": 1, "seed": 2}', ['"seed"', "twice"]),
        ('{"columns": {"query": "a", "query": "b"}}', ['"query"', "twice"]),
        ("[1]", ["a list", "object"]),
        ('{"temperature": NaN}', ["NaN", "finite"]),
        ('{"temperature": 1e999}', ["finite"]),
        ("", ["line 1", "column 1"]),
        ('{"columns": ' + "[" * 100_000, ["too deeply"]),
    ],
)
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    message = error_of(load_run, ["--config", str(path)])
    for word in words:
        assert word in message, message


def test_a_missing_file_is_refused_with_the_nearest_one(load, tmp_path):
    load()
    assert "my_run.json" in error_of(load_run, ["--config", "my_rum.json"])
    assert "no such file" in error_of(load_run, ["--config", "nowhere/x.json"])
    assert "cannot be read" in error_of(load_run, ["--config", str(tmp_path)])
    assert "--config" in error_of(load_run, [])
    assert "--config my_run.json" in error_of(load_run, ["my_run.json"])
    Path("latin.json").write_bytes(b'{"run_name": "\xe9"}')
    assert "UTF-8" in error_of(load_run, ["--config", "latin.json"])


def test_the_short_name_of_a_preset_is_mapped_and_echoed(load):
    for given, preset in {"single": "single_gpu", "fsdp2": "multi_gpu_fsdp"}.items():
        run = load(accelerate_config=given)
        assert run.options.accelerate_config == run.given["accelerate_config"] == preset
        assert [line.partition("=")[0] for line in run.echo] == ["accelerate_config"]
    assert load("--accelerate_config", "ddp", accelerate_config="fsdp").options.accelerate_config == "multi_gpu_ddp"
    assert load(accelerate_config="multi_gpu_ddp").echo == []


def test_secrets_are_neither_echoed_nor_stored(load):
    run = load(hub_token="hf_secret")
    assert run.training["hub_token"] == "hf_secret"
    assert run.flat()["hub_token"] == "***" and "hf_secret" not in json.dumps(run.flat()) + " ".join(run.echo)
    assert "12345" not in error_of(load, hub_token=12345)


def test_a_path_may_begin_in_the_home(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    run = load(model_name_or_path="~/models", output_dir="~/out", model_config=None)
    assert run.options.model_name_or_path == f"{tmp_path}/models" and run.training["output_dir"] == f"{tmp_path}/out"


CHECKPOINT_FILES = ["model.safetensors", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


def make_checkpoint(folder: Path, without: str = "", is_committed: bool = False) -> Path:
    folder.mkdir(parents=True)
    for name in CHECKPOINT_FILES:
        if name != without:
            (folder / name).write_text("{}", encoding="utf-8")
    if is_committed:
        number = manifest.step_of(folder)
        facts = {"step": number, "generation": number, "run_id": "mine"}
        manifest.commit(folder, manifest.record(folder, manifest.files_in(folder)), facts)
    return folder


def test_resume_takes_the_newest_complete_checkpoint_and_never_starts_afresh(load):
    assert "no checkpoint-N folder" in error_of(load, "--resume_from_checkpoint")
    assert "no such folder" in error_of(load, resume_from_checkpoint="gone")
    unmarked = make_checkpoint(Path("outputs/my_run/checkpoint-8"))
    message = error_of(load, "--resume_from_checkpoint")
    assert "no complete checkpoint" in message and f"--resume_from_checkpoint {unmarked}" in message
    assert load(resume_from_checkpoint=str(unmarked)).training["resume_from_checkpoint"] == str(unmarked)
    make_checkpoint(Path("outputs/my_run/checkpoint-9"), is_committed=True)
    newest = make_checkpoint(Path("outputs/my_run/checkpoint-10"), is_committed=True)
    assert load("--resume_from_checkpoint").training["resume_from_checkpoint"] is True
    assert load(resume_from_checkpoint=str(newest)).training["resume_from_checkpoint"] == str(newest)
    assert "resume_from_checkpoint" not in load(resume_from_checkpoint=False).training
    (newest / "optimizer.pt").unlink()
    message = error_of(load, resume_from_checkpoint=str(newest))
    assert "optimizer.pt is missing" in message and "checkpoint-10" in message and "checkpoint-9" in message
    passed_over = {}
    assert checkpoint_to_resume(True, newest.parent, passed_over) == newest.parent / "checkpoint-9"
    assert passed_over.pop(newest) == "optimizer.pt is missing"
    assert passed_over == {unmarked: "no manifest.json: the save did not end, or another program wrote it"}
    check_output_dir(load("--resume_from_checkpoint").training)


@pytest.mark.parametrize("lost", CHECKPOINT_FILES)
def test_each_part_of_a_checkpoint_is_missed(tmp_path, lost):
    assert missing_from_checkpoint(make_checkpoint(tmp_path / "whole")) == []
    assert len(missing_from_checkpoint(make_checkpoint(tmp_path / "torn", without=lost))) == 1
    empty = make_checkpoint(tmp_path / "empty")
    (empty / lost).write_bytes(b"")
    assert len(missing_from_checkpoint(empty)) == 1


def test_a_shard_that_the_index_names_is_missed(tmp_path):
    folder = make_checkpoint(tmp_path / "c", without="model.safetensors")
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    (folder / names["a"]).write_text("x", encoding="utf-8")
    assert missing_from_checkpoint(folder) == [f"{names['b']} is missing"]


@pytest.mark.parametrize("mark", ["checkpoint-3/x", "metrics.json", "model.safetensors", "adapter_model.safetensors"])
def test_an_output_dir_with_another_run_is_refused(load, mark):
    path = Path("outputs/my_run", mark)
    path.parent.mkdir(parents=True)
    path.write_text("{}", encoding="utf-8")
    message = error_of(check_output_dir, load().training)
    assert mark.split("/")[0] in message and "--overwrite_output_dir" in message
    assert ("--resume_from_checkpoint" in message) == mark.startswith("checkpoint")
    check_output_dir(load("--overwrite_output_dir").training)
    check_output_dir(load("--output_dir", "elsewhere").training)


def test_an_occupied_output_dir_is_told_with_its_newest_checkpoint(load):
    for step in (9, 10, 100):
        make_checkpoint(Path(f"outputs/my_run/checkpoint-{step}"))
    assert "another run (checkpoint-100)" in error_of(check_output_dir, load().training)


def test_an_output_dir_may_be_continued_but_not_from_elsewhere(load):
    inside, outside = make_checkpoint(Path("outputs/my_run/checkpoint-3")), make_checkpoint(Path("old/checkpoint-3"))
    check_output_dir(load(resume_from_checkpoint=str(inside)).training)
    assert "not in it" in error_of(check_output_dir, load(resume_from_checkpoint=str(outside)).training)
    check_output_dir(load("--output_dir", "new", resume_from_checkpoint=str(outside)).training)
    Path("new/runs").mkdir(parents=True)
    check_output_dir(load("--output_dir", "new").training)


def test_the_schema_accepts_runs_and_refuses_what_load_run_refuses():
    schema = help.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    good = MINIMAL | {
        "$schema": "run.schema.json",
        "_comment": ["anything"],
        "per_device_train_batch_size": 8,
        "gradient_cache_chunk_size": "auto",
        "max_length": {"query": 64},
        "columns": {"query": "a", "negative": ["b", "c"]},
        "report_to": None,
        "accelerate_config": "ddp",
        "resume_from_checkpoint": True,
    }
    assert list(validator.iter_errors(good)) == []
    bad = [{"temprature": 1}, {"seed": "1"}, {"seed": True}, {"gradient_cache_chunk_size": "big"}]
    bad += [
        {"gradient_cache_chunk_size": 0},
        {"gradient_cache_chunk_size": 2.5},
        {"optim": "adam"},
        {"learning_rate": -1.0},
    ]
    bad += [{"temperature": 0}, {"matryoshka_dims": []}, {"pooling": None}, {"columns": {"query": 1}}]
    for keys in bad:
        assert list(validator.iter_errors(MINIMAL | keys)), keys
    for name, one in config.fields_of_run_file().items():
        described = schema["properties"][name]
        assert described["description"] == one.help
        if "default" in described and one.default is not None:
            jsonschema.Draft202012Validator(described).validate(one.default)


def test_help_is_grouped_and_names_every_field():
    text = help.help_text("all")
    for name in config.fields_of_run_file():
        assert re.search(rf"^  --{name}:", text, re.MULTILINE), name
    positions = [text.index(title) for title in ("Model:", "Data:", "Loss:", "Gradient cache", "Optimizer:")]
    assert positions == sorted(positions)


def test_help_is_found_by_the_beginning_of_a_section(capsys):
    for section in {one.group for one in config.fields_of_run_file().values()}:
        assert section in help.help_text()
    assert "--temperature:" in help.help_text("loss") and "--lora_r:" not in help.help_text("loss")
    with pytest.raises(UsageError, match="no such section"):
        help.help_text("lossy")
    for words in (["--help", "gradient", "cache"], ["--config", "run.json", "-h", "gradient"]):
        with pytest.raises(SystemExit) as stopped:
            load_run(words)
        assert stopped.value.code == 0 and "--gradient_cache_chunk_size:" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "output"), [(None, "error: no\n"), ("0", "error: no\n")])
def test_a_usage_error_is_one_line_and_exit_code_2(monkeypatch, capsys, rank, output):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("HF_DIST_DEBUG", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stopped, failures.exit_on_usage_error():
        raise UsageError("no")
    assert stopped.value.code == 2 and capsys.readouterr().err == output


def test_other_ranks_let_rank_0_speak_first(monkeypatch, capsys):
    waited = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(failures.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as stopped, failures.exit_on_usage_error():
        raise UsageError("no")
    assert stopped.value.code == 2 and waited == [failures.SAME_LINE_SECONDS] and "rank 1" in capsys.readouterr().err


@pytest.mark.parametrize(("of_rank_0", "says"), [("no", False), ("no more", True)])
def test_other_ranks_are_silent_when_rank_0_said_the_same_but_has_not_ended(
    tmp_path, monkeypatch, capsys, of_rank_0, says
):
    for rank, message in (("0", of_rank_0), ("1", "no")):
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        monkeypatch.setattr(failures.time, "sleep", lambda seconds: None)
        with pytest.raises(SystemExit) as stopped, failures.exit_on_usage_error():
            raise UsageError(message)
    assert stopped.value.code == 2 and (tmp_path / "1" / "error.json").exists()
    assert capsys.readouterr().err == f"error: {of_rank_0}\n" + "error (rank 1): no\n" * says


def test_a_process_that_takes_too_long_ends_also_when_the_notes_of_all_are_gone_with_the_rank_that_kept_them(
    monkeypatch, capsys
):
    class Gone:
        def set(self, *arguments):
            raise RuntimeError("Connection reset by peer")

    def end(code: int):
        raise SystemExit(code)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(failures.os, "_exit", end)
    monkeypatch.setattr(failures, "PEER_SECONDS", 0)
    with pytest.raises(SystemExit) as ended:
        failures.Watchdog(lambda: 3.0, Gone())._expire(3.0)
    assert ended.value.code == 1 and "error (rank 1): nothing was finished for 3 s: step " in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("HF_DIST_DEBUG", "1")
    with pytest.raises(UsageError), failures.exit_on_usage_error():
        raise UsageError("no")


def test_loading_a_run_imports_neither_torch_nor_transformers(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(MINIMAL), encoding="utf-8")
    code = (
        "import sys\nfrom hf_dist_ext.run.read import load_run\nload_run(['--config', sys.argv[1]])\n"
        "assert not {'torch', 'transformers', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_yaml_is_read_as_json_is(tmp_path, monkeypatch):
    """PyYAML alone takes 3e-3 for text and 2026-01-02 for a date. Bare words are YAML's: `no` is false."""
    monkeypatch.chdir(tmp_path)
    lines = ["# a comment", "_: another", "dataset_name: code-search", "model_config: {model_type: bert}"]
    lines += ["run_name: 2026-01-02", "learning_rate: 3e-3", "weight_decay: 1.5e-5", "temperature: .5"]
    lines += ["save_strategy: 'no'", "symmetric: true", "max_steps: 10", "eval_split: null"]
    lines += ["matryoshka_dims:", "  - 64", "  - 32"]
    Path("run.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = {
        "dataset_name": "code-search", "model_config": {"model_type": "bert"}, "run_name": "2026-01-02",
        "learning_rate": 3e-3, "weight_decay": 1.5e-5, "temperature": 0.5, "save_strategy": "no", "symmetric": True,
        "max_steps": 10, "eval_split": None, "matryoshka_dims": [64, 32], "output_dir": "outputs/run",
    }  # fmt: skip
    Path("run.json").write_text(json.dumps(values), encoding="utf-8")
    given = [load_run(["--config", name]).given for name in ("run.yaml", "run.json")]
    assert given[0] == given[1] == values
    assert all(type(given[0][name]) is type(value) for name, value in values.items())


@pytest.mark.parametrize("text, words", [
    ("seed: 1\nseed: 2", '"seed" twice'),
    ("columns: {query: a, query: b}", '"query" twice'),
    ("seed: [1\nb: 2", "not YAML: line 2, column 2"),
    ("learning_rate: .nan", "must be a finite number"),
    ("learning_rate: 1e999", "must be a finite number"),
    ("save_strategy: no", 'save_strategy=false .* takes "no"'),
    ("seed: !!python/object/apply:os.getcwd []", "not YAML"),
    ("- seed", "holds a list"),
    ("3: 4", "holds the field 3"),
])  # fmt: skip
def test_what_is_wrong_in_yaml_is_one_error(tmp_path, text, words):
    (tmp_path / "run.yml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        load_run(["--config", str(tmp_path / "run.yml")])


@pytest.mark.parametrize("name, words", [
    ("learnin_rate", 'Closest: "learning_rate"'),
    ("tau", "See --help for all fields"),  # like many names, and like none
])  # fmt: skip
def test_an_unknown_name_is_answered_by_its_spelling(load, name, words):
    assert words in error_of(load_run, ["--config", "run.json", f"--{name}", "1"])


@pytest.mark.parametrize("name", other_names.ANSWERS)
def test_a_name_of_other_projects_is_answered_by_what_to_write_here(load, name):
    known, answer = config.fields_of_run_file(), other_names.ANSWERS[name]
    assert name not in known, "it is a field: its answer is never given"
    assert answer in error_of(load_run, ["--config", "run.json", f"--{name}", "a=b"])
    assert answer in error_of(load, fsdp={"seed": 1, name: 2})
    for field in re.findall(r'"(\w+)":|Use (\w+)|(?<![-"])\b([a-z]+_[a-z_]+)\b(?!")', answer):
        assert "".join(field) in known, field
    values = {}
    for written in re.findall(r'"\w+": (?:"[^"]*"|\[[^]]*\]|true|\d+(?:\.\d+)?)', answer):
        values |= json.loads("{" + written + "}")
    load(**values | ({"bf16": False} if "fp16" in values else {}))  # what it says to write is accepted


def test_names_that_are_like_no_field_or_like_a_wrong_one_have_answers():
    names = "use_gradient_cache use_fsdp loss_type precision gradient_clip save_top_k strategy sharding_strategy "
    names += "fsdp_sharding_strategy checkpoint_dir freeze_vision freeze_gemma_language num_gpus num_nodes max_epochs "
    names += "total_steps tp_size pp_size zero_stage world_size use_flash_attention config_override"
    assert not {*names.split()} - {*other_names.ANSWERS}


@pytest.mark.parametrize("block", ["training", "fsdp", "optimizer"])
def test_a_block_of_fields_is_answered_with_the_flat_form(load, block):
    message = error_of(load, **{block: {"learning_rate": 1e-4, "seed": 1}})
    assert "the run file is flat" in message and '"learning_rate"' in message and f'"{block}"' in message
    assert load(fsdp="full_shard").training["fsdp"] == "full_shard"


def test_a_field_with_the_name_of_a_block_before_it_is_answered_too(load):
    assert 'Closest: "learning_rate"' in error_of(load_run, ["--config", "run.json", "--training.learnin_rate", "1"])


def test_both_names_of_activation_checkpointing_are_one_field(load, recwarn):
    from transformers import TrainingArguments

    from tests.tiny_models import CHECKPOINTING

    run = load(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert run.given[CHECKPOINTING] and run.training[f"{CHECKPOINTING}_kwargs"] == {"use_reentrant": False}
    assert getattr(TrainingArguments(**run.training, use_cpu=True), CHECKPOINTING)
    assert not [one for one in recwarn if "deprecated" in str(one.message)]
    if CHECKPOINTING == "activation_checkpointing":
        with pytest.raises(UsageError, match="two names of one field"):
            load(gradient_checkpointing=True, activation_checkpointing=False)


def test_a_scale_in_the_place_of_a_temperature_is_recognized(load):
    assert "1 / scale: 0.05" in error_of(load, temperature=20)
    assert load(temperature=20, normalize=False).options.temperature == 20  # scores of any size
