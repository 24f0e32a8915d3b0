"""The run file and the command line -> `Run`: strict parsing, and errors that name the remedy.

    run = load_run(["--config", "configs/code_search.json", "--learning_rate", "2e-5"])
    run.options.temperature, run.training["learning_rate"], run.echo, run.flat()

The command line goes over the file. Types and bounds are checked, then rules between fields
(run/rules.py), the checkpoint to resume (checkpoints/folder.py) and stages (run/stages.py). Only the standard library
is imported, so that errors are instant. The first error is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from hf_dist_ext.checkpoints.folder import checkpoint_to_resume, decides_here, resume_or_start
from hf_dist_ext.errors import UsageError, closest
from hf_dist_ext.run import gone, other_names
from hf_dist_ext.run.config import PRESET_SHORT_NAMES, Run, RunConfig, fields_of_run_file
from hf_dist_ext.run.fields import Field, accepts, check_value, from_text, show
from hf_dist_ext.run.files import YAML, read_fields
from hf_dist_ext.run.help import help_text
from hf_dist_ext.run.rules import check_rules
from hf_dist_ext.run.stages import OF_THE_WHOLE_RUN, plan_stages

# Fields in which "~" is the home; names of data are opened in data/load.py.
PATHS = (
    "accelerate_config", "frozen_feature_cache", "image_folder", "model_name_or_path", "output_dir",
    "resume_from_checkpoint", "tokenizer_name",
)  # fmt: skip


def load_run(argv: list[str]) -> Run:
    """`--config run.json --field value ...` -> Run. `--help [section]` prints it and exits. Raises UsageError."""
    if asked := {"-h", "--help"}.intersection(argv):
        section = argv[argv.index(asked.pop()) + 1 :]
        print(help_text(" ".join(section) or None))
        sys.exit(0)
    path, overrides, taken_away = _parse_command_line(argv)
    of_file = {name: value for name, value in read_fields(path).items() if name not in taken_away}
    layers = [(of_file, str(path)), (overrides, "the command line")]
    run = _from_layers(path, layers)
    if run.options.stages is not None:
        # taken out of the stages, since run.json has them and these fields side by side, and `hf-dist resume` reads it
        over = {*_as_called_now(overrides), *taken_away}
        run.options.stages = run.given["stages"] = [_without(stage, over) for stage in run.options.stages]
        run.stages = plan_stages(run, layers, functools.partial(_from_layers, path))
    return run


def _without(stage: dict[str, Any], over: set[str]) -> dict[str, Any]:
    """A stage's fields but those that the command line sets, or takes away."""
    return {
        name: value
        for name, value in stage.items()
        if name in OF_THE_WHOLE_RUN or over.isdisjoint(_as_called_now({name: value}))
    }


def _from_layers(path: Path, layers: list[tuple[dict[str, Any], str]]) -> Run:
    """Fields in layers, each over those before it, with the words that say where it comes from."""
    given: dict[str, Any] = {}
    echo: list[str] = []
    for layer, origin in layers:
        for name, value in layer.items():
            _check(name, value, origin)
        given |= _as_called_now(layer)
    if (preset := PRESET_SHORT_NAMES.get(given.get("accelerate_config"))) is not None:
        echo.append(f"accelerate_config={show(given['accelerate_config'])} -> {show(preset)}")
        given["accelerate_config"] = preset
    return _assemble(path, given, echo)


def _as_called_now(layer: dict[str, Any]) -> dict[str, Any]:
    """transformers 5.23 calls gradient_checkpointing activation_checkpointing, and warns of the old name."""
    known, now = fields_of_run_file(), {}
    for name, value in layer.items():
        new = name.replace("gradient_checkpointing", "activation_checkpointing")
        if new == name or new not in known:
            now[name] = value
        elif new in layer and layer[new] != value:
            values = f"{name}={show(value)} and {new}={show(layer[new])}"
            raise UsageError(f"{values} are two names of one field. Keep one.")
        else:
            now[new] = value
    return now


def _assemble(path: Path, given: dict[str, Any], echo: list[str]) -> Run:
    given.setdefault("output_dir", str(Path("outputs", path.stem)))
    for name in PATHS:
        if isinstance(given.get(name), str):
            given[name] = os.path.expanduser(given[name])
    own = {one.name for one in dataclasses.fields(RunConfig)}
    config = RunConfig(**{name: value for name, value in given.items() if name in own})
    first = config.losses[0].get("loss") if config.losses else None
    loss = given.get("loss", first or ("infonce" if config.task == "embedding" else None))
    config.loss = None if loss == "none" else loss
    training = {name: value for name, value in given.items() if name not in own}
    run = Run(path, config, training, echo, given)
    if config.stages is not None:  # each stage is checked and resumed as a run of its own
        return run
    check_rules(run)
    if not decides_here():
        return run
    asked = training.pop("resume_from_checkpoint", None)
    if asked == "auto":
        asked = resume_or_start(training)
    checkpoint = checkpoint_to_resume(asked, Path(training["output_dir"]))
    if checkpoint is not None:  # true stays true: the trainer, which also knows the hashes, picks the newest complete
        training["resume_from_checkpoint"] = True if asked is True else str(checkpoint)
    return run


def _parse_command_line(argv: list[str]) -> tuple[Path, dict[str, Any], set[str]]:
    """`--config`, the values of all other flags by field name, and fields that `null` takes out of the file."""
    words: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in words:
                raise UsageError(f"The command line gives --{name} twice. Keep one.")
            words[name] = [value] if equals else []
        elif name:
            words[name].append(word)
        else:
            hint = f"Write: --config {word}" if word.endswith((".json", *YAML)) else "Write: --field value"
            raise UsageError(f"Unexpected argument {word!r}. {hint}")
    config = words.pop("config", [])
    if len(config) != 1:
        raise UsageError("--config takes one run file, such as --config configs/code_search.json. See --help.")
    values: dict[str, Any] = {}
    taken_away: set[str] = set()  # which have no null of their own: as if the file did not have them
    for name, tokens in words.items():
        takes = _field(name, "the command line").type
        if tokens == ["null"] and not accepts(takes, None):
            taken_away.add(name)
            continue
        try:
            values[name] = from_text(takes, tokens)
        except UsageError as error:
            raise UsageError(f"--{name}: {error}") from None
    return Path(config[0]), values, taken_away


def _field(name: str, origin: str) -> Field:
    if name in fields_of_run_file():
        return fields_of_run_file()[name]
    inner = name.rpartition(".")[2]  # as Hydra and OmegaConf name a field of a block
    if inner in gone.FIELDS:
        raise UsageError(f"{json.dumps(name)} in {origin}: {gone.FIELDS[inner]}")
    hint = _in_its_place(inner)
    raise UsageError(f'Unknown field {json.dumps(name)} in {origin}.{hint} (A comment begins with "_".)')


def _in_its_place(name: str) -> str:
    """What to write for a name that is no field, as the end of a message."""
    if name in other_names.ANSWERS:
        return f" {other_names.ANSWERS[name]}"
    return closest(name, fields_of_run_file()) or " See --help for all fields."


def _check(name: str, value: Any, origin: str) -> None:
    if isinstance(value, dict) and (name not in fields_of_run_file() or name == "fsdp"):
        unknown = [inner for inner in value if inner not in fields_of_run_file()]
        answers = [f" {json.dumps(inner)} is no field.{_in_its_place(inner)}" for inner in unknown]
        raise UsageError(
            f"{name}={show(value)} in {origin} is a block, and the run file is flat: write its fields without "
            f"{json.dumps(name)} around them.{''.join(answers[:1])}"
        )
    if isinstance(value, str) and (name, value) in gone.VALUES:
        raise UsageError(f"{name}={show(value)} in {origin}: {gone.VALUES[name, value]}")
    check_value(_field(name, origin), value, origin)
