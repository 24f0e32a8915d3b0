"""A run file as text -> its fields: JSON, or YAML where its name ends in .yaml or .yml. Which values are paths."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import kind_of

YAML = (".yaml", ".yml")
_FILE_OF_DATA = re.compile(r"\.(jsonl?|csv|tsv|txt|parquet|arrow|zip|gz)$")
_NUMBER_WITH_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


def looks_like_a_path(name: str) -> bool:
    """Whether what is not here is a mistake, and no name that the hub is to be asked for."""
    return name.startswith((".", "~", "/")) or name.count("/") > 1 or bool(_FILE_OF_DATA.search(name))


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a run file, without comments. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = _parse_yaml(path, text) if path.suffix in YAML else _parse_json(path, text)
    except FileNotFoundError:
        names = [one.name for one in path.parent.glob("*") if one.suffix in (".json", *YAML)]
        near = difflib.get_close_matches(path.name, names, 1, 0.4)
        hint = f"Closest: {path.parent / near[0]}" if near else "Give the path of a JSON or YAML file."
        raise UsageError(f"--config {path}: no such file. {hint}") from None
    except RecursionError:
        raise UsageError(f"{path} nests lists or objects too deeply to be read. Mend it.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}. Give a JSON or YAML file.") from None
    if not isinstance(content, dict):
        shape = "field: value" if path.suffix in YAML else '{"field": value, ...}'
        raise UsageError(f"{path} holds {kind_of(content)}, not an object. Write {shape}.")
    if wrong := [name for name in content if not isinstance(name, str)]:
        raise UsageError(f"{path} holds the field {wrong[0]!r}, which is no name. Write its name in quotes.")
    return {name: value for name, value in content.items() if not name.startswith("_") and name != "$schema"}


def _once(path: Path, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    names = [name for name, _ in pairs]
    if double := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{path} gives {json.dumps(double[0])} twice. Keep one.")
    return dict(pairs)


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}. Mend it there; JSON has no "
            'trailing comma and no // comment (a key that begins with "_" is one).'
        ) from None


def _parse_yaml(path: Path, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once(path, [(self.construct_object(name, deep=True), None) for name, _ in node.value])
            return super().construct_mapping(node, deep)

    # YAML 1.1 takes 1e-5 for text, and what looks like a date for one
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER_WITH_EXPONENT, list("-+0123456789"))
    Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        at = getattr(error, "problem_mark", None)
        place = f"line {at.line + 1}, column {at.column + 1}: " if at else ""
        raise UsageError(f"{path} is not YAML: {place}{getattr(error, 'problem', None) or error}. Mend it.") from None
