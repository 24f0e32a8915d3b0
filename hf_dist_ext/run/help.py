"""What a run file may hold, for people (`--help`) and for editors (`hf-dist config --schema`)."""

from __future__ import annotations

import textwrap
from typing import Any

from hf_dist_ext.run.config import BOUNDS, all_fields
from hf_dist_ext.run.fields import UNKNOWN, describe, parse_type, schema_of, show
from hf_dist_ext.run.short_names import PRESET_SHORT_NAMES, SHORT_BOUNDS, SHORT_NAMES

_USAGE = """\
usage: python scripts/train_hf.py --config run.json [--field value ...]

The JSON file is flat: any field below. A key that begins with _ is a comment. On the command line every field is
--field value: --field alone is true, a list is several words or JSON, an object is JSON, null is null.
"""


def help_text() -> str:
    """All fields in groups, ours first: type, default, effect."""
    lines, group = [_USAGE], None
    for one in all_fields().values():
        if one.group != group:
            group = one.group
            lines += ["", f"{group}:"]
        takes = describe(one.type)
        default = "" if one.default == UNKNOWN else f", default {show(one.default)}"
        lines.append(f"  --{one.name}: {takes if len(takes) < 80 else takes[:76] + ' ...'}{default}")
        lines += textwrap.wrap(one.help, 110, initial_indent="      ", subsequent_indent="      ")
    lines += ["", "Short names:"]
    lines += [f"  --{name}: {describe(parse_type(row[0]))} -> {row[1]}" for name, row in SHORT_NAMES.items()]
    lines += [f"  --accelerate_config {short} -> {preset}" for short, preset in PRESET_SHORT_NAMES.items()]
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a run file."""
    properties: dict[str, Any] = {"$schema": {"type": "string"}}
    for name, one in all_fields().items():
        properties[name] = schema_of(one.type, BOUNDS.get(name, {})) | {"description": one.help}
        if one.default != UNKNOWN:
            properties[name]["default"] = one.default
    presets = ["auto", *dict.fromkeys(PRESET_SHORT_NAMES.values()), *PRESET_SHORT_NAMES]
    properties["accelerate_config"]["examples"] = presets
    for name, (takes, meaning, *_) in SHORT_NAMES.items():
        bounds = SHORT_BOUNDS.get(name, BOUNDS.get(meaning, {}))
        properties[name] = schema_of(parse_type(takes), bounds) | {"description": f"Short name: sets {meaning}."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hf_dist_ext run",
        "type": "object",
        "properties": properties,
        "patternProperties": {"^_": {"description": "A comment."}},
        "additionalProperties": False,
    }
