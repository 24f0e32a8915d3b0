"""The accelerate presets: valid for accelerate, without keys that do nothing, found under every name."""

import re

import pytest
import yaml

from hf_dist_ext import presets
from hf_dist_ext.errors import UsageError
from hf_dist_ext.short_names import PRESET_SHORT_NAMES

NAMES = sorted(presets.presets())


def test_the_three_presets_exist_with_a_line_each():
    assert {"single_gpu", "multi_gpu_ddp", "multi_gpu_fsdp"} <= set(NAMES)
    for description in presets.presets().values():
        assert 20 < len(description) < 110 and description.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_the_preset_and_every_key_has_an_effect(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = presets.find_preset(name)
    load_config_from_file(str(path))  # raises for keys that it does not know
    defaults = vars(launch_command_parser().parse_args(["script.py"]))
    content = presets.load_preset(path)
    for key in set(content) - {"distributed_type", "fsdp_config", "parallelism_config"}:
        # the launcher copies a key of the file only over an argument that is None
        assert key in defaults and defaults[key] is None, f"{key} is silently ignored"
    for key in content.get("parallelism_config", {}):
        assert key in defaults, f"{key} is silently ignored"
    for key in content.get("fsdp_config", {}):
        assert key in defaults, f"{key} reaches nobody"


def test_the_launcher_turns_the_fsdp_preset_into_version_2_and_whole_checkpoints(monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(presets.find_preset("fsdp")), "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    env = prepare_multi_gpu_env(arguments)
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


@pytest.mark.parametrize("short", PRESET_SHORT_NAMES)
def test_short_names_and_paths_lead_to_the_same_file(short):
    path = presets.find_preset(short)
    assert path == presets.find_preset(PRESET_SHORT_NAMES[short]) == presets.find_preset(str(path))
    assert path.is_file() and presets.is_shipped(path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("multi_gpu_dpp", ['"multi_gpu_ddp"', "single_gpu", "auto"]),
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
        assert sum(line.lstrip().startswith("#") for line in lines) >= 3
        assert isinstance(yaml.safe_load("\n".join(lines)), dict)
