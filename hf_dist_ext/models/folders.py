"""The folder of a model: one that is here, or the local copy of what lies on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError

HUB_IGNORE = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.bin", "*.safetensors"]
WITHOUT_WEIGHTS = ("Pooling", "Normalize")  # modules of sentence-transformers


def resolve_folder(name_or_path: str | Path, revision: str | None = None) -> Path:
    """A folder as it is, or the local copy of a hub model; `.bin` weights only where there are no safetensors: in the
    whole of it, or in one of its modules."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.is_file():
        raise UsageError(f"{path} is a file. Give the folder that holds config.json and the weights.")

    from huggingface_hub import snapshot_download

    def download(weights: str, **only: list[str]) -> Path:
        ignored = [pattern for pattern in HUB_IGNORE if pattern != weights]
        return Path(snapshot_download(str(name_or_path), revision=revision, ignore_patterns=ignored, **only))

    try:
        folder = download("*.safetensors")
        if not any(folder.rglob("*.safetensors")):
            return download("*.bin")
        # sentence-transformers 2 wrote the weights of a Dense module as .bin beside safetensors of the Transformer.
        modules = read_json(folder / "modules.json", missing_is_empty=True)
        paths = [one["path"] for one in modules if one["type"].rpartition(".")[2] not in WITHOUT_WEIGHTS]
        if lacking := [path for path in paths if not any((folder / path).glob("*.safetensors"))]:
            download("*.bin", allow_patterns=[str(Path(path, "pytorch_model*.bin")) for path in lacking])
        return folder
    except Exception as error:  # the hub client raises a different type for each of: no such name, no network, offline
        raise UsageError(
            f'Model "{name_or_path}" is neither a folder here nor available from the hub ({type(error).__name__}). '
            "Check the name and revision; offline (HF_HUB_OFFLINE), give a folder or a model already in the cache."
        ) from error


def read_json(path: Path, missing_is_empty: bool = False) -> Any:
    """UsageError for a file that is not there, or holds no JSON."""
    if missing_is_empty and not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Copy the whole folder again.") from error
