"""What a run file may hold, for people (`--help`) and for editors (`hf-dist config --schema`)."""

from __future__ import annotations

import textwrap
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import PRESET_SHORT_NAMES, fields_of_run_file
from hf_dist_ext.run.fields import UNKNOWN, describe, schema_of, show

_USAGE = """\
usage: hf-dist train RUN.json [--field value ...]
       python scripts/train_hf.py --config RUN.json [--field value ...]

The run file is one flat JSON or YAML object: any field of the sections below. A key that begins with _ is a comment.
On the command line every field is --field value: --field alone is true, a list is several words or JSON, an object is
JSON, null is null.
"""


def help_text(section: str | None = None) -> str:
    """The sections; the fields of one, found by the beginning of its name; or of "all". Raises UsageError."""
    groups: dict[str, list[str]] = {}
    for one in fields_of_run_file().values():
        groups.setdefault(one.group, []).append(one.name)
    if section is None:
        lines = [
            _USAGE,
            "Sections: --help SECTION prints one (the beginning of its name is enough), --help all all.",
            "",
        ]
        lines += [f"  {name:36}{_beginning(groups[name])}" for name in groups]
        return "\n".join(lines)
    wanted = [name for name in groups if section == "all" or name.lower().startswith(section.lower())]
    if not wanted:
        raise UsageError(f"--help {section}: there is no such section. Those there are: {', '.join(groups)}, or all.")
    return "\n".join([_USAGE, *(line for name in wanted for line in _section(name))])


def _beginning(fields: list[str]) -> str:
    return ", ".join(fields[:3]) + (f" and {len(fields) - 3} more" if len(fields) > 3 else "")


def _section(name: str) -> list[str]:
    """All fields of a section: type, default, effect."""
    lines = ["", f"{name}:"]
    for one in fields_of_run_file().values():
        if one.group == name:
            takes = describe(one.type)
            default = "" if one.default == UNKNOWN else f", default {show(one.default)}"
            lines.append(f"  --{one.name}: {takes if len(takes) < 80 else takes[:76] + ' ...'}{default}")
            lines += textwrap.wrap(one.help, 110, initial_indent="      ", subsequent_indent="      ")
    return lines


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a run file."""
    properties: dict[str, Any] = {"$schema": {"type": "string"}}
    for name, one in fields_of_run_file().items():
        properties[name] = schema_of(one.type, one.bounds) | {"description": one.help}
        if one.default != UNKNOWN:
            properties[name]["default"] = one.default
    presets = ["auto", *dict.fromkeys(PRESET_SHORT_NAMES.values()), *PRESET_SHORT_NAMES]
    properties["accelerate_config"]["examples"] = presets
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hf_dist_ext run",
        "type": "object",
        "properties": properties,
        "patternProperties": {"^_": {"description": "A comment."}},
        "additionalProperties": False,
    }
