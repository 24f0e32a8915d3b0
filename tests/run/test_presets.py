"""The accelerate presets: valid for accelerate, without keys that do nothing, found under every name."""

import re

import pytest
import yaml

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import presets
from hf_dist_ext.run.config import PRESET_SHORT_NAMES

NAMES = sorted(presets.presets())


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_the_preset_and_every_key_has_an_effect(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = presets.find_preset(name)
    load_config_from_file(str(path))  # raises for keys that it does not know
    defaults = vars(launch_command_parser().parse_args(["script.py"]))
    content = presets.load_preset(path)
    # use_cpu is read by name, and a DeepSpeed entry by its name there
    for key in set(content) - {"distributed_type", "fsdp_config", "parallelism_config", "deepspeed_config", "use_cpu"}:
        # the launcher copies a key of the file only over an argument that is None
        assert key in defaults and defaults[key] is None, f"{key} is silently ignored"
    for key in content.get("parallelism_config", {}):
        assert key in defaults, f"{key} is silently ignored"
    for key in content.get("fsdp_config", {}):
        # without a flag of its own, but read from the file (utils/launch.py, FSDP_IGNORED_MODULES)
        assert key in defaults or key == "fsdp_ignored_modules", f"{key} reaches nobody"
    for key in content.get("deepspeed_config", {}):
        assert key in defaults, f"{key} reaches nobody"


def launched(name: str) -> tuple:
    """What the launcher makes of the preset: its arguments, and the environment of a process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(presets.find_preset(name)), "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments, prepare_multi_gpu_env(arguments)


def test_the_launcher_turns_the_fsdp_preset_into_version_2_and_whole_checkpoints():
    arguments, env = launched("fsdp")
    wanted = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    assert {name: env.get(name) for name in wanted} == wanted
    assert arguments.nproc_per_node == "2"


@pytest.mark.parametrize(("name", "devices", "runs", "words"), [
    ("single_gpu", 0, True, "on the CPU"),
    ("multi_gpu_fsdp", 0, True, "gloo"),
    ("multi_gpu_fsdp", 8, True, "8 GPU"),
    ("cpu", 8, True, "gloo"),
    ("multi_gpu_hsdp", 2, False, "4 processes"),
    ("multi_node_ddp", 8, False, "2 machines"),
    ("deepspeed_zero2", 8, False, "deepspeed"),
])  # fmt: skip
def test_what_this_machine_can_run_is_said(monkeypatch, name, devices, runs, words):
    monkeypatch.setattr(presets.deepspeed_install, "find_spec", lambda module: None)
    line = presets.runs_here(presets.find_preset(name), devices)
    assert line.startswith("yes") is runs and words in line


def test_the_frozen_preset_sets_the_default_of_its_field(monkeypatch, tmp_path):
    from hf_dist_ext.training.arguments import DistTrainingArguments

    name = "FSDP_IGNORED_MODULES"
    for value in (launched("multi_gpu_fsdp_frozen_replicated")[1][name], "some.module"):
        monkeypatch.setenv(name, value)
        fields = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
        is_ours = value == "frozen parts"
        assert DistTrainingArguments(**fields).frozen_parts_fsdp == ("replicate" if is_ours else "auto")
        assert DistTrainingArguments(**fields, frozen_parts_fsdp="shard").frozen_parts_fsdp == "shard"


@pytest.mark.parametrize("short", PRESET_SHORT_NAMES)
def test_short_names_and_paths_lead_to_the_same_file(short):
    path = presets.find_preset(short)
    assert path == presets.find_preset(PRESET_SHORT_NAMES[short]) == presets.find_preset(str(path))
    assert path.is_file() and presets.is_shipped(path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("multi_gpu_ddb", ['"multi_gpu_ddp"', "single_gpu", "auto"]),
        ("zzz", ["multi_gpu_ddp", "multi_gpu_fsdp", "single_gpu"]),
        ("nowhere/mine.yaml", ["no such file", "multi_gpu_ddp"]),
    ],
)
def test_an_unknown_preset_lists_the_known_ones(asked, words):
    with pytest.raises(UsageError) as caught:
        presets.find_preset(asked)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("a: [1", "line 1, column"), ("[1]", "distributed_type"), ("", "no dist")]
)
def test_a_file_that_is_no_accelerate_configuration_is_refused(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    assert not presets.is_shipped(path)
    with pytest.raises(UsageError, match=re.escape(words)):
        presets.load_preset(path)


def test_every_preset_explains_itself():
    for name in NAMES:
        path = presets.find_preset(name)
        lines = path.read_text(encoding="utf-8").splitlines()
        assert f"accelerate launch --config_file configs/accelerate/{name}.yaml" in "\n".join(lines)
        told = presets.explained(path)
        assert told[0] == presets.presets()[name] and len(told) > 5
        assert 20 < len(told[0]) < 110 and told[0].endswith(".")
        assert all(sum(line.startswith(word) for line in told) == 1 for word in ("sharded: ", "sent per step: "))
        assert isinstance(yaml.safe_load("\n".join(lines)), dict)
