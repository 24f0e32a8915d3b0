"""What 0.3 took out is refused in one sentence, which says what to do instead."""

import json

import pytest

from hf_dist_ext import cli
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import gone
from hf_dist_ext.run.config import fields_of_run_file
from hf_dist_ext.run.read import load_run


def asked(tmp_path, **fields) -> list[str]:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"dataset_name": "code-search", **fields}), encoding="utf-8")
    return ["--config", str(path)]


@pytest.mark.parametrize("name", gone.FIELDS)
def test_a_field_that_is_gone_is_refused_with_what_to_do(name, tmp_path):
    assert name not in fields_of_run_file()
    with pytest.raises(UsageError) as refusal:
        load_run(asked(tmp_path, **{name: "auto"}))
    assert str(refusal.value).endswith(gone.FIELDS[name])


@pytest.mark.parametrize("name, value", gone.VALUES)
def test_a_value_that_is_gone_is_refused_with_what_to_do(name, value, tmp_path):
    for in_file, flags in (({name: value}, []), ({}, [f"--{name}", value])):
        with pytest.raises(UsageError) as refusal:
            load_run([*asked(tmp_path, **in_file), *flags])
        assert str(refusal.value).endswith(gone.VALUES[name, value])


@pytest.mark.parametrize("name", gone.COMMANDS)
def test_a_command_that_is_gone_is_refused_with_what_to_do(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--model", "folder"])
    assert end.value.code == 2 and capsys.readouterr().err.rstrip().endswith(gone.COMMANDS[name])


@pytest.mark.parametrize("name", gone.EVALUATIONS)
def test_an_evaluation_that_is_gone_is_refused_with_what_to_do(name, tmp_path):
    for entry in ({"type": name, "path": "a/b"}, {"type": "retrieval", "path": "a/b", name: 8}):
        with pytest.raises(UsageError) as refusal:
            load_run(asked(tmp_path, evaluations=[entry]))
        assert str(refusal.value).endswith(gone.EVALUATIONS[name])
