"""Torch's distributed checkpoints are looked at before they are read, so that nothing in them is run.

Their file `.metadata` is a pickle, which can name any function to call: only the classes that such a file is made of
may stand in it. Values that are no tensors lie in the other files as pickles too, which torch reads with
`weights_only=False`: each must be one that `weights_only=True` reads. What has passed may be read by torch and
accelerate as they like.

Everything else that a resume reads, Trainer reads with `weights_only` or is no pickle; DeepSpeed's files are pickles
of any kind. `trust_checkpoint` switches the checks off.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from hf_dist_ext.errors import UsageError

# ---- .metadata ----

_METADATA = {
    "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
    "Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING",
}  # fmt: skip
ALLOWED = {
    "torch.distributed.checkpoint.metadata": _METADATA,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},  # Python 3.13
}


def _enum_member(kind: Any, name: str) -> Any:
    """What `getattr` may do: Python 3.11.0 to 3.11.3 write a member of an enum as `getattr(its class, its name)`."""
    if kind is not dcp.metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise UsageError(
            f"a checkpoint's .metadata would read {name} of {kind!r}, which is no part of such a file. If you made it "
            "yourself, set trust_checkpoint=true."
        )
    return kind[name]


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise UsageError(
            f"a checkpoint's .metadata would run {module}.{name}, which is no part of such a file. If you made it "
            "yourself, set trust_checkpoint=true."
        )


# ---- a checkpoint ----


def check(checkpoint: Path, trust: bool) -> None:
    """UsageError for a distributed checkpoint in this folder or below that would run something when it is read."""
    for path in [] if trust else _metadata_below(checkpoint):
        with open(path, "rb") as file:
            metadata = MetadataUnpickler(file).load()
        for index, stored in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata.get(index.fqn), dcp.metadata.BytesStorageMetadata):
                _check_value(index.fqn, path.parent / stored.relative_path, stored)


def _metadata_below(folder: Path) -> Iterator[Path]:
    """Also behind links, since whoever reads follows them."""
    seen: set[str] = set()
    for inner, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(inner)) in seen:
            folders.clear()
        else:
            seen.add(real)
            yield from (Path(inner, name) for name in names if name.endswith(".metadata"))


def _check_value(name: str, path: Path, stored: Any) -> None:
    with open(path, "rb") as file:
        file.seek(stored.offset)
        content = io.BytesIO(file.read(stored.length))
    try:
        torch.load(content, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"a checkpoint's {name} is no plain value: {str(error).splitlines()[0]} If you made it yourself, set "
            "trust_checkpoint=true."
        ) from error


def read_entries(folder: Path, trust: bool) -> dict[str, Any]:
    """name -> what `.metadata` says of it."""
    check(folder, trust)
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def load(state: dict[str, Any], folder: Path, trust: bool) -> None:
    """`dcp.load` into the tensors of `state`; every rank calls it."""
    check(folder, trust)
    dcp.load(state, checkpoint_id=folder)
