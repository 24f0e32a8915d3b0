"""Files of a run's model that lie here, in a folder or the hub's cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hf_dist_ext.errors import UsageError

PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def config_file(name_or_path: str, revision: str | None = None) -> Path:
    """The config.json of a model's backbone, fetched from the hub where it is not here. Raises UsageError: there is
    none."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        return _cached(name_or_path, "config.json", revision) or _fetched(name_or_path, revision)
    modules = folder / "modules.json"  # sentence-transformers may keep the backbone in a folder of its own
    if modules.is_file() and not (folder / "config.json").is_file():
        folder = folder / json.loads(modules.read_text(encoding="utf-8"))[0]["path"]
    if not (folder / "config.json").is_file():
        raise UsageError(f'model "{name_or_path}" has no config.json, so its size is not known. Give a model folder.')
    return folder / "config.json"


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

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


def processor_file(name_or_path: str, revision: str | None) -> Path | None:
    """Where the sizes of the model's pictures stand."""
    found = (model_file(name_or_path, name, revision) for name in PROCESSORS)
    return next((path for path in found if path is not None), None)
