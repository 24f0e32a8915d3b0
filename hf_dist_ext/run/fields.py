"""What a dataclass's fields take, read from its source text: strict types without importing torch.

Importing transformers to learn the fields of `TrainingArguments` costs seconds; reading its source costs milliseconds,
so `--help` and errors are instant, and every field of the installed version is known, not a list copied from one.

`read_fields` parses the file with `ast` and collects name, annotation, default, help and `# --- group ---`. An
annotation becomes a tuple of alternatives (`parse_type`), such as `("int", None)` and `("literal", "auto")`, by which
`accepts` checks a JSON value and `schema_of` writes JSON Schema.
"""

import ast
import contextlib
import difflib
import functools
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError, closest

# One alternative of a type: (kind, detail). Kinds: "bool", "int", "float", "str", "null", "any" (detail None);
# "literal" (the value); "list", "dict" (the Type of the items); "object" (the name of a class JSON cannot express).
Type = tuple[tuple[str, Any], ...]

UNKNOWN = "<computed>"  # a default that is an expression, such as one that depends on the torch version
_SIMPLE = {name: (name, None) for name in ("bool", "int", "float", "str")} | {"None": ("null", None)}


@dataclass(frozen=True)
class Field:
    """One field as a user meets it; `group` is the `# --- group ---` comment above it in the source, `bounds` are in
    the words of JSON Schema."""

    name: str
    type: Type
    default: Any = None
    help: str = ""
    group: str = ""
    bounds: dict[str, Any] = field(default_factory=dict)


def source_of(module: str) -> Path:
    """The file of `package.module` inside an installed package, which is found but not imported."""
    package, _, inner = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"The package {package} is not installed in this Python. Run: pip install -e .")
    return Path(spec.submodule_search_locations[0], *inner.split(".")).with_suffix(".py")


@functools.cache
def parsed(path: Path) -> tuple[ast.Module, list[str]]:
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def read_fields(path: Path, class_name: str) -> dict[str, Field]:
    """The fields of a dataclass, those of its parents in the same file first; empty when the class is not there."""
    module, lines = parsed(path)
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        return {}
    fields: dict[str, Field] = {}
    for base in classes[class_name].bases:
        if isinstance(base, ast.Name):
            fields |= read_fields(path, base.id)
    enums = functools.partial(_enum_values, path)
    for node in classes[class_name].body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if "ClassVar" in ast.dump(node.annotation):
            continue
        name, options, metadata = node.target.id, {"default": node.value}, {}
        if isinstance(node.value, ast.Call):
            options = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if getattr(node.value.func, "id", "") == "option":  # RunConfig's shorthand: option(default, help)
                options["default"], metadata["help"] = node.value.args
            elif isinstance(options.get("metadata"), ast.Dict):
                metadata = dict(zip(map(_value, options["metadata"].keys), options["metadata"].values, strict=True))
        if _value(options.get("init")) is False:
            continue
        fields[name] = Field(
            name,
            _field_type(node.annotation, metadata, enums),
            _default(options),
            # argparse needs percent signs doubled in help texts; here they are plain text
            str(_value(metadata.get("help"), "")).replace("%%", "%"),
            _group(lines, node.lineno),
        )
    return fields


def _field_type(annotation: ast.expr, metadata: dict, enums) -> Type:
    alternatives = parse_type(annotation, enums)
    choices = _value(metadata.get("choices"), None)
    if isinstance(choices, list):
        alternatives = tuple(a for a in alternatives if a[0] != "str") + tuple(("literal", c) for c in choices)
    if _value(metadata.get("const")) is True and ("bool", None) not in alternatives:
        alternatives = (("bool", None), *alternatives)  # a bare `--fsdp` means true, whatever the annotation says
    return alternatives


def _default(options: dict[str, ast.expr]) -> Any:
    factory = options.get("default_factory")
    if factory is not None:
        return {"list": [], "dict": {}}.get(getattr(factory, "id", ""), UNKNOWN)
    return _value(options.get("default"), UNKNOWN)


def _value(node: ast.expr | None, otherwise: Any = None) -> Any:
    """The constant an expression stands for, a product of two numbers included, or `otherwise`."""
    if node is None:
        return otherwise
    try:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return ast.literal_eval(node.left) * ast.literal_eval(node.right)
        return ast.literal_eval(node)
    except ValueError:
        return otherwise


def _group(lines: list[str], line_number: int) -> str:
    """The nearest `# --- title ---` above a line of a class body."""
    for line in reversed(lines[: line_number - 1]):
        if match := re.match(r"\s+# -{3} (.+?) -{3}", line):
            return match[1]
        if line.startswith("class "):
            break
    return ""


def _enum_values(path: Path, name: str) -> list[str] | None:
    """The string values of an Enum that a file defines or imports from a neighbour; None when it is no such class."""
    for node in parsed(path)[0].body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if not any("Enum" in ast.dump(base) for base in node.bases):
                return None
            return [_value(item.value) for item in node.body if isinstance(item, ast.Assign)]
        if isinstance(node, ast.ImportFrom) and node.level and any(alias.name == name for alias in node.names):
            folder = path.parents[node.level - 1]
            neighbour = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            return _enum_values(neighbour, name) if neighbour.is_file() else None
    return None


def parse_type(annotation: ast.expr | str, enums=lambda name: None) -> Type:
    """An annotation (`int | Literal["auto"] | None`, `Optional[list[str]]`, an Enum's name) as alternatives."""
    if isinstance(annotation, str):
        annotation = ast.parse(annotation, mode="eval").body
    kinds = list(dict.fromkeys(_alternatives(annotation, enums)))
    if any(kind == "enum" for kind, _ in kinds):  # `SchedulerType | str` takes the enum's values, not any text
        values = [value for kind, detail in kinds if kind == "enum" for value in detail]
        kinds = [a for a in kinds if a[0] not in ("enum", "str")] + [("literal", value) for value in values]
    return tuple(kinds)


def _alternatives(node: ast.expr, enums) -> list[tuple[str, Any]]:
    if isinstance(node, ast.Constant):
        if node.value is None:
            return [("null", None)]
        return _alternatives(ast.parse(node.value, mode="eval").body, enums)
    if isinstance(node, ast.BinOp):
        return _alternatives(node.left, enums) + _alternatives(node.right, enums)
    if isinstance(node, ast.Subscript):
        name = getattr(node.value, "id", getattr(node.value, "attr", ""))
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            return [("literal", _value(item)) for item in items]
        if name in ("Optional", "Union"):
            null = [("null", None)] if name == "Optional" else []
            return [a for item in items for a in _alternatives(item, enums)] + null
        if name in ("list", "List", "tuple", "Tuple", "Sequence"):
            return [("list", parse_type(items[0], enums))]
        if name in ("dict", "Dict", "Mapping"):
            return [("dict", parse_type(items[-1], enums))]
        return [("object", name)]
    name = getattr(node, "id", getattr(node, "attr", ""))
    if name in _SIMPLE:
        return [_SIMPLE[name]]
    if name in ("list", "dict"):
        return [(name, (("any", None),))]
    if name == "Any":
        return [("any", None)]
    values = enums(name)
    return [("enum", tuple(values))] if values else [("object", name)]


def describe(alternatives: Type) -> str:
    """A type in the words of a JSON file: `int, "auto" or null`."""
    names = {"bool": "true/false", "str": "text", "any": "any value", "null": "null"}
    words = []
    for kind, detail in sorted(alternatives, key=lambda a: a[0] == "null"):
        if kind == "literal":
            words.append(json.dumps(detail))
        elif kind == "list":
            words.append(f"a list of {describe(detail)}" if detail[0][0] != "any" else "a list")
        elif kind == "dict":
            words.append(f"an object of {describe(detail)}" if detail[0][0] != "any" else "an object")
        elif kind == "object":
            words.append(f"a Python {detail}, which JSON cannot hold")
        else:
            words.append(names.get(kind, kind))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


_PYTHON = {"int": int, "str": str, "bool": bool, "list": list, "dict": dict}


def accepts(alternatives: Type, value: Any) -> bool:
    """Strict: true is not 1, 8.0 is not an int, "8" is not a number; an int is a float."""
    for kind, detail in alternatives:
        if kind == "any" or (kind == "null" and value is None):
            return True
        if kind == "literal" and type(value) is type(detail) and value == detail:
            return True
        if kind == "float" and type(value) in (int, float):
            return True
        if kind in _PYTHON and type(value) is _PYTHON[kind]:
            items = value if kind == "list" else value.values() if kind == "dict" else ()
            if all(accepts(detail, item) for item in items):
                return True
    return False


def from_text(takes: Type, words: list[str]) -> Any:
    """The value that words of the command line stand for: JSON where the field takes its value, else text. Several
    words are a list. What the field does not take is handed on. Raises UsageError."""
    item = next((detail for kind, detail in takes if kind == "list"), None)
    if not words:
        if not accepts(takes, True):
            raise UsageError(f"a value is missing; it takes {describe(takes)}.")
        return True
    if len(words) > 1:
        return [from_text(item, [word]) for word in words] if item else words
    text, value = words[0], words[0]
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError as error:
        with contextlib.suppress(ValueError):  # JSON has no .5
            value = float(text)
        if text[:1] in ("[", "{") and not accepts(takes, text):
            raise UsageError(f"{text} is not JSON: {error.msg} at column {error.colno}.") from None
    if accepts(takes, value) and not isinstance(value, str):
        return value
    if accepts(takes, text):
        return text
    return [from_text(item, [text])] if item else value


def check_value(one: Field, value: Any, where: str) -> None:
    """UsageError for a value that a field does not take. `where`: it was given."""
    if not accepts(one.type, value):
        takes, choices = describe(one.type), [detail for kind, detail in one.type if kind == "literal"]
        if len(choices) > 12:
            near = [name for name in choices if name.startswith(str(value))]
            near += difflib.get_close_matches(str(value), choices, 3, 0.8)
            takes = f"one of {len(choices)} names"
            takes += f"; closest: {', '.join(map(json.dumps, near[:3]))}" if near else " that --help all lists"
        raise UsageError(f"{one.name}={show(value, one.name)} in {where} is {kind_of(value)}; it takes {takes}.")
    if broken := out_of_bounds(value, one.bounds):
        others = [json.dumps(detail) for kind, detail in one.type if kind in ("literal", "null")]
        raise UsageError(f"{one.name}={show(value)} {' or '.join([broken, *others])} (in {where}).")


def check_entry(entry: Mapping[str, Any], where: str, takes: Mapping[str, Field], else_: str = "") -> None:
    """UsageError for an entry of a list that has a field of another name or a value that it does not take. `else_`:
    what another name may be, too."""
    for name, value in entry.items():
        if name.startswith("_"):
            continue
        if name not in takes:
            hint = closest(name, takes) or f" It takes {', '.join(takes)}."
            raise UsageError(f"{where} has no field {json.dumps(name)}{else_}.{hint}")
        check_value(takes[name], value, where)


def check_name(name: Any, field: str, earlier: Sequence[str], may_have: str = "") -> str:
    """The name of an entry of the list `field`, which comes after those of the `earlier` ones. UsageError where it can
    not stand in names of figures and folders, or is not the only one. `may_have`: beside letters, digits, "_", "-"."""
    where = f"{field}[{len(earlier)}]"
    if not isinstance(name, str) or not re.fullmatch(rf"[A-Za-z0-9][\w{may_have}-]*", name):
        signs = ", ".join(map(json.dumps, ["_", "-", *may_have]))
        raise UsageError(f"{where} has name={json.dumps(name)}. Give it a name of letters, digits and {signs}.")
    if name in earlier:
        other = f"{field}[{earlier.index(name)}]"
        raise UsageError(f'{where} is called "{name}", and so is {other}. Give one of them another name.')
    return name


def schema_of(alternatives: Type, bounds: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a type; `bounds` (minimum, ...) go to the alternatives they can hold for."""
    numbers, lists = ("int", "float"), ("list",)
    literals = [detail for kind, detail in alternatives if kind == "literal"]
    parts: list[dict[str, Any]] = [{"enum": literals}] if literals else []
    names = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "null": "null"}
    for kind, detail in alternatives:
        part: dict[str, Any] = {}
        if kind in names:
            part = {"type": names[kind]}
        elif kind == "list":
            part = {"type": "array", "items": schema_of(detail, bounds)}
        elif kind == "dict":
            part = {"type": "object", "additionalProperties": schema_of(detail, bounds)}
        elif kind in ("literal", "object"):
            continue
        part |= {key: limit for key, limit in bounds.items() if kind in (lists if key == "minItems" else numbers)}
        parts.append(part)
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def out_of_bounds(value: Any, bounds: dict[str, Any]) -> str | None:
    """What a value breaks of its bounds, in words; the items of lists and objects are held to them too."""
    if isinstance(value, (list, dict)):
        if len(value) < bounds.get("minItems", 0):
            return "must not be empty"
        items = value.values() if isinstance(value, dict) else value
        return next((broken for item in items if (broken := out_of_bounds(item, bounds))), None)
    if type(value) not in (int, float):
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return "must be a finite number"
    tests = {
        "minimum": (value.__ge__, "at least"),
        "exclusiveMinimum": (value.__gt__, "above"),
        "exclusiveMaximum": (value.__lt__, "below"),
    }
    broken = any(key in bounds and test(bounds[key]) is False for key, (test, _) in tests.items())
    words = [f"{word} {bounds[key]}" for key, (_, word) in tests.items() if key in bounds]
    return "must be " + " and ".join(words) if broken else None


def is_secret(name: str) -> bool:
    """Values of such fields are never printed or stored."""
    return name.endswith(("_token", "_key", "password"))


def show(value: Any, name: str = "") -> str:
    """A value as the JSON file writes it, short enough for one line of an error."""
    text = "***" if is_secret(name) and value is not None else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 80 else text[:76] + " ..."


def kind_of(value: Any) -> str:
    """What a JSON value is, in the words of `describe`."""
    names = {bool: "true/false", int: "an int", float: "a float", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
