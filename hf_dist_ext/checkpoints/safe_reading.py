"""Reading torch's distributed checkpoints without running what they say.

Their file `.metadata` is a pickle, which can name any function to call: here only the classes that such a file is made
of are found. Values that are no tensors lie in the other files as pickles too, which torch reads with
`weights_only=False`; here that is True.

Everything else that a resume reads, Trainer reads with `weights_only` or is no pickle; DeepSpeed's files are pickles
of any kind. `trust_checkpoint` switches the checks off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner

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


class SafeReader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata = MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta = dataclasses.replace(metadata.storage_meta, load_id=self.load_id)
        return metadata


# ---- values that are no tensors ----


class SafePlanner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        try:
            safe = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"a checkpoint's {read_item.dest_index.fqn} is no plain value: {str(error).splitlines()[0]} If you "
                "made it yourself, set trust_checkpoint=true."
            ) from error
        again = io.BytesIO()
        torch.save(safe, again)  # plain values now: the parent may read them as it likes
        again.seek(0)
        super().load_bytes(read_item, again)


def read_entries(folder: Any, trust: bool) -> dict[str, Any]:
    """name -> what `.metadata` says of it."""
    reader = dcp.FileSystemReader(folder) if trust else SafeReader(folder)
    return reader.read_metadata().state_dict_metadata


def check_metadata(checkpoint: Path, trust: bool) -> None:
    """UsageError for a `.metadata` below `checkpoint` that would run something; where torch meets one it says that it
    found no metadata, after much else."""
    for path in [] if trust else checkpoint.rglob("*.metadata"):
        with open(path, "rb") as file:
            MetadataUnpickler(file).load()


def load(state: dict[str, Any], folder: Any, trust: bool) -> None:
    """`dcp.load` into the tensors of `state`; every rank calls it."""
    reader, planner = (dcp.FileSystemReader, dcp.DefaultLoadPlanner) if trust else (SafeReader, SafePlanner)
    check_metadata(Path(folder), trust)
    with _usage_errors_shown():
        dcp.load(state, storage_reader=reader(folder), planner=planner())


@contextlib.contextmanager
def _usage_errors_shown() -> Iterator[None]:
    try:
        yield
    except dcp.CheckpointException as error:  # torch gathers what went wrong on all ranks
        for cause, _ in error.failures.values():
            if isinstance(cause, UsageError):
                raise cause from None
        raise


@contextlib.contextmanager
def read_safely(trust: bool) -> Iterator[None]:
    """While inside, accelerate reads through the classes above.

    accelerate 1.15 makes reader and planner itself (fsdp_utils.py, load_fsdp_model) and takes no other.
    """
    if trust:
        yield
        return
    before = dcp.FileSystemReader, default_planner.DefaultLoadPlanner
    dcp.FileSystemReader, default_planner.DefaultLoadPlanner = SafeReader, SafePlanner
    try:
        with _usage_errors_shown():
            yield
    finally:
        dcp.FileSystemReader, default_planner.DefaultLoadPlanner = before
