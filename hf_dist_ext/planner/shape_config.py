"""A model's configuration as plain JSON, complete: what is not written comes from transformers' source text.

It is `model_config` of the run file, in a folder, in the hub's cache, or one small file fetched from the hub.
config.json leaves out what equals the class's default, and a run file leaves out more. The defaults are read from the
source of the configuration class (`fields.read_fields`), since importing transformers takes seconds. Names that differ
between families (n_layers, dim, ...) are added under their usual ones.
"""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import UNKNOWN, parsed, read_fields, source_of


def read_model_config(
    model_config: Mapping[str, Any] | None, name_or_path: str | None, revision: str | None = None
) -> dict[str, Any]:
    """The complete configuration of a run's model, with `tiles_of_picture`. Raises UsageError: there is none."""
    if model_config is not None:
        return with_defaults(model_config)
    config = with_defaults(_from_folder(name_or_path, revision))
    if (tiles := _tiles_of_picture(config["model_type"], name_or_path, revision)) is not None:
        config["tiles_of_picture"] = tiles
    return config


def _from_folder(name_or_path: str | None, revision: str | None) -> dict[str, Any]:
    assert name_or_path is not None
    folder = Path(name_or_path)
    if not folder.is_dir():
        return _read(_from_hub(name_or_path, revision))
    modules = folder / "modules.json"  # sentence-transformers may keep the backbone in a folder of its own
    if modules.is_file() and not (folder / "config.json").is_file():
        folder = folder / json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
    if not (folder / "config.json").is_file():
        raise UsageError(f'model "{name_or_path}" has no config.json, so its size is not known. Give a model folder.')
    return _read(folder / "config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Give a complete model folder.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise UsageError(f'{path} has no "model_type". Give the folder of a transformers model.')
    return content


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    if cached := _cached(name, "config.json", revision):
        return cached
    try:
        # Asks once: without a connection a download asks six times, over 25 seconds.
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # offline, no such model, gated: huggingface_hub has a class for each
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        why = " ".join(str(error).split())[:160]
        raise UsageError(
            f'the config.json of "{name}" is neither in the hub cache nor to be had{offline}: {why}. '
            "Fetch it once with a connection, or give model_config or a folder."
        ) from None


def _cached(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub model that was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file, revision=revision) if name.count("/") < 2 else None
    return Path(path) if isinstance(path, str) else None


def model_file(name_or_path: str, file: str, revision: str | None) -> Path | None:
    """A file of a model's folder, or of a hub model that was fetched before; None: it is not here."""
    if not name_or_path:
        return None
    path = Path(name_or_path, file) if Path(name_or_path).is_dir() else _cached(name_or_path, file, revision)
    return path if path is not None and path.is_file() else None


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with every default of its class, parts (text_config, vision_config) included."""
    model_type = config["model_type"]
    try:
        defaults, renamed, parts = class_defaults(model_type)
    except UsageError:
        if "auto_map" in config:  # a model with code of its own, whose configuration writes all of its fields
            return dict(config)
        raise
    complete = {**defaults, **{renamed.get(name, name): value for name, value in config.items()}}
    for name, (kind, more) in parts.items():
        given = complete.get(name) or {}
        kind = given.get("model_type", kind)
        complete[name] = with_defaults({**(given or more), "model_type": kind})
    for usual, own in renamed.items():
        complete[usual] = complete[own] if own in complete else complete.get(usual)
    return complete


@functools.cache
def class_defaults(model_type: str) -> tuple[dict[str, Any], dict[str, str], dict[str, tuple[str, dict]]]:
    """(default of every field, usual name -> the class's own, part -> (model type, its defaults)) of a model type."""
    path, node = _config_class(model_type)
    defaults = {name: one.default for name, one in read_fields(path, node.name).items() if one.default != UNKNOWN}
    renamed = _assigned(node, "attribute_map")
    parts: dict[str, tuple[str, dict]] = {}
    for name in ("sub_configs", "sub_configs_defaults"):
        if isinstance(value := _assigned(node, name), ast.Dict):
            parts |= _parts(value, path)
    return defaults, ast.literal_eval(renamed) if renamed else {}, parts


def _assigned(node: ast.ClassDef, name: str) -> ast.expr | None:
    """What a class's body assigns to a name."""
    assignments = (statement for statement in node.body if isinstance(statement, ast.Assign))
    return next((one.value for one in assignments if getattr(one.targets[0], "id", "") == name), None)


def _parts(node: ast.Dict, path: Path) -> dict[str, tuple[str, dict]]:
    parts = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = ast.literal_eval(key)
        if isinstance(value, ast.Name) and value.id != "AutoConfig":
            parts[name] = (_model_type_of(path, value.id), {})
        elif isinstance(value, ast.Call):
            words = {one.arg: one.value for one in value.keywords}
            more = ast.literal_eval(words["init_kwargs"]) if "init_kwargs" in words else {}
            if isinstance(words.get("model_type"), ast.Constant):
                parts[name] = (words["model_type"].value, more)
            # transformers 5.20 writes the class so too. Remove when the minimum is 5.21.
            elif isinstance(kind := words.get("config_class"), ast.Name) and kind.id != "AutoConfig":
                parts[name] = (_model_type_of(path, kind.id), more)
    return parts


def _config_class(model_type: str) -> tuple[Path, ast.ClassDef]:
    """The class of a model type; a part such as clip_vision_model is in the file of the whole."""
    models = source_of("transformers.models.auto.configuration_auto").parent.parent
    words = model_type.replace("-", "_").split("_")
    for count in range(len(words), 0, -1):
        stem = "_".join(words[:count])
        path = models / stem / f"configuration_{stem}.py"
        if path.is_file():
            for node in _classes(path):
                if _model_type(node) == model_type:
                    return path, node
    raise UsageError(f'model_type="{model_type}" is not one of the installed transformers. Check its name.')


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in parsed(path)[0].body if isinstance(node, ast.ClassDef)]


def _model_type(node: ast.ClassDef) -> str | None:
    return getattr(_assigned(node, "model_type"), "value", None)


def _model_type_of(path: Path, class_name: str) -> str:
    return next((_model_type(node) for node in _classes(path) if node.name == class_name), None) or class_name


def _tiles_of_picture(model_type: str, name_or_path: str | None, revision: str | None) -> int | None:
    """Images that the tower sees of one picture at most, the whole picture made small included; None: not known."""
    if model_type not in ("idefics3", "smolvlm", "internvl"):
        return None
    processor = _processor_file(str(name_or_path), revision)
    if processor is None:
        return None
    if model_type == "internvl":  # its processor cuts, whatever the image processor's own default is
        most = processor.get("max_patches", 12) if processor.get("crop_to_patches", True) else 1
        return most + (most > 1)
    if not processor.get("do_image_splitting", True):
        return 1
    tile = (processor.get("max_image_size") or {}).get("longest_edge")
    side = (processor.get("size") or {}).get("longest_edge")
    return None if not tile or not side else (-(-side // tile)) ** 2 + (side > tile)


def _processor_file(name_or_path: str, revision: str | None) -> dict[str, Any] | None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := model_file(name_or_path, name, revision)) is not None:
            content = json.loads(path.read_text(encoding="utf-8"))
            return content.get("image_processor", content)
    return None
