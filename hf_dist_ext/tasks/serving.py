"""The model of a folder as the commands use it: sentence-transformers' own, wherever that opens the folder.

    model = load_for_serving("outputs/code_search")
    model.encode_query([...]), model.encode_document([...]), model.similarity(queries, documents)

A part of a model, such as a trained projection, is merged into a folder that is removed again once it is loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from hf_dist_ext.checkpoints.merge import is_part, merge
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import WEIGHTS
from hf_dist_ext.models.folders import read_json, resolve_folder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

ONE_VECTOR = "SentenceTransformer"


def load_for_serving(name: str) -> SentenceTransformer:
    """The model of a run's folder, of one of sentence-transformers or transformers, or of a hub id, on the accelerator
    where there is one. UsageError for what gives no vector per row, and for what cannot be loaded."""
    folder = resolve_folder(name)
    if not is_part(folder):
        return _opened(folder, name)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place, "model")
        merge(folder, whole)
        if not (whole / "modules.json").is_file():
            raise UsageError(f"{name} is not of a text embedding model. Give the folder of one.")
        return _opened(whole, name)


def require_devices(option: str, names: Sequence[str]) -> None:
    """UsageError for a device that is not here, before a pool of processes begins."""
    for name in names:
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"{option} {name}: {str(error).splitlines()[0]}") from error


def require_new(output: Path, endings: Iterable[str], content: str) -> None:
    """UsageError, before anything is computed, for a file that `content` is not to be written to."""
    if output.suffix not in endings:
        raise UsageError(f"--output {output}: {content} are written as {' or '.join(endings)}. Give such a name.")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.absolute().parent}. Make it first.")
    if output.exists():
        raise UsageError(f"--output {output} exists. Give a new file, or remove it.")


def not_written(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror or error}. Give an --output where there is room.")


def _opened(folder: Path, name: str) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    settings = read_json(folder / "config_sentence_transformers.json", missing_is_empty=True)
    if (kind := settings.get("model_type", ONE_VECTOR)) != ONE_VECTOR:
        raise UsageError(
            f"{name} is a {kind}, and here rows are compared by one dense vector each. Use {kind} of "
            "sentence-transformers, which loads the folder."
        )
    try:
        model = SentenceTransformer(str(folder))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise UsageError(f'model "{name}" cannot be loaded: {error}') from error
    if (folder / WEIGHTS).is_file():
        _check_adapters(model, folder)
    return model


def _check_adapters(model: SentenceTransformer, folder: Path) -> None:
    """transformers leaves out, with a warning alone, the adapters of layers that the base lacks."""
    from peft import get_peft_model_state_dict

    with safe_open(folder / WEIGHTS, "pt") as file:
        missing = len([*file.keys()]) - len(get_peft_model_state_dict(model.transformers_model))
    if missing:
        raise UsageError(
            f"{folder}: {abs(missing)} of its adapters do not fit the base model. Use the base that "
            "adapter_config.json names, as it was when the adapters were trained."
        )
