"""Frozen features on disk: one tensor per input, found by what the input is, not by where it stood.

    store = FeatureStore(folder); store.add(keys, features); store.flush(); store.load(); store.get(keys)

(1) a key is a hash of one row's tensors as the model takes them, padding left out; so another image size, prompt,
    tokenizer or row is another key and can never be answered with old features
(2) features are appended to shards, safetensors files with `keys` (n, 16) in bytes and `features` (n, ...). A shard's
    name is random, so that several jobs can fill one folder at once, and it appears when the shard is complete, so
    that neither a kill nor a full disk leaves half of one
(3) every process reads the keys of all shards into one sorted table, 24 bytes per row, and maps the features it needs;
    the key that stands beside a feature must be the one that was asked for

The folder is for one frozen part with one set of weights: `part_digest` names it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from hf_dist_ext.engine.columns import TOKEN_AXIS_KEYS
from hf_dist_ext.errors import UsageError

SHARD_BYTES = 64 * 2**20
# attributes that change no feature; the last three sentence-transformers fills while it runs
NO_SETTINGS = {
    *vars(nn.Module()), "gradient_checkpointing",
    "_prompt_length_mapping", "_method_signature_cache", "_chat_template_suffix_cache",
}  # fmt: skip
KEY = "S16"  # numpy compares such bytes in order


# ---- (1) ----


def row_keys(features: Mapping[str, torch.Tensor], salt: str = "", keeps_left_padding: bool = True) -> list[bytes]:
    """16 bytes per row (first axis). `keeps_left_padding`: positions count from the left edge, so that the number of
    padding tokens before a row is part of what it is."""
    mask = features.get("attention_mask")
    names = sorted(name for name, value in features.items() if isinstance(value, torch.Tensor))
    num_rows = len(features[names[0]])
    hashes = [hashlib.blake2b(salt.encode(), digest_size=16) for _ in range(num_rows)]
    for name in names:
        value = features[name].detach().cpu()
        if len(value) != num_rows:
            raise UsageError(
                f"frozen_feature_cache: {name} {tuple(value.shape)} does not hold one entry for each of {num_rows} "
                "rows, so its features can not be told apart by row. Switch the cache off for this model."
            )
        is_tokens = mask is not None and name in TOKEN_AXIS_KEYS and value.shape[:2] == mask.shape[:2]
        for i, row in enumerate(value):
            if is_tokens:
                real = mask[i].cpu().bool()
                if keeps_left_padding:
                    hashes[i].update(int(real.int().argmax()).to_bytes(4, "little"))
                row = row[real]
            hashes[i].update(f"{name} {row.dtype} {tuple(row.shape)};".encode())
            hashes[i].update(_bytes(row))
    return [row_hash.digest() for row_hash in hashes]


def part_digest(modules: Iterable[nn.Module], model: nn.Module, *facts: Any) -> str:
    """What the features depend on beside the input: weights, buffers, the settings of each module, code, precision."""
    versions = torch.__version__, transformers.__version__
    digest = hashlib.blake2b(repr([versions, _code(type(model)), *facts]).encode(), digest_size=16)
    for module in modules:
        for name, one in module.named_modules():
            digest.update(repr([name, _code(type(one)), one.extra_repr(), _settings(one)]).encode())
        for name, tensor in sorted({**dict(module.named_parameters()), **dict(module.named_buffers())}.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(_bytes(tensor.detach().cpu()))
    return digest.hexdigest()


@functools.cache
def _code(kind: type) -> list[str]:
    """The names of a class and of those that it inherits from, with their text; of torch and transformers the versions
    tell it."""
    found = []
    for one in kind.__mro__[:-1]:
        found.append(f"{one.__module__}.{one.__qualname__}")
        if one.__module__.partition(".")[0] not in ("torch", "transformers"):
            with contextlib.suppress(OSError, TypeError):  # typed into an interpreter
                found.append(inspect.getsource(one))
    return found


def _settings(module: nn.Module) -> str:
    """The attributes of a module, of which its forward may read any (pooling, normalize, an activation)."""
    own = {name: value for name, value in vars(module).items() if name not in NO_SETTINGS}

    def in_words(value: Any) -> Any:
        if hasattr(value, "to_dict"):
            return value.to_dict()
        return getattr(value, "__qualname__", type(value).__qualname__)

    return json.dumps(own, sort_keys=True, skipkeys=True, default=in_words)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


# ---- (2), (3) ----


class FeatureStore:
    """Shards of one folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.shards: list[Path] = []
        # Of all known rows, sorted by key: the key, and (number of the shard, row of the shard).
        self.keys, self.places = np.empty(0, dtype=KEY), np.empty((0, 2), dtype=np.int32)
        self._pending: dict[bytes, torch.Tensor] = {}
        self._added: set[bytes] = set()  # by this process, until its shards are loaded
        self._open: dict[Path, Any] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.load()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # file handles do not travel to data loader processes

    def __contains__(self, key: bytes) -> bool:
        return key in self._added or self._place(key) is not None

    def __len__(self) -> int:
        return len(self.keys)

    def load(self) -> None:
        """Read the keys of shards that are not known yet. Of a row that several shards hold, the one whose name comes
        first counts, on every process and in every later run."""
        known, keys, places = set(self.shards), [self.keys], [self.places]
        for path in sorted(self.folder.glob("features-*.safetensors")):
            if path in known:
                continue
            try:
                with safe_open(path, "np") as shard:
                    keys.append(np.ascontiguousarray(shard.get_tensor("keys")).view(KEY)[:, 0])
            except SafetensorError as error:
                raise UsageError(f"{path} is no complete shard of features ({error}). Delete it.") from error
            rows = np.arange(len(keys[-1]), dtype=np.int32)
            places.append(np.stack([np.full_like(rows, len(self.shards)), rows], axis=1))
            self.shards.append(path)
        if len(self.shards) == len(known):
            return
        all_keys, all_places = np.concatenate(keys), np.concatenate(places)
        of_name = np.argsort(np.argsort([path.name for path in self.shards]))  # a shard's place by name
        order = np.lexsort((all_places[:, 1], of_name[all_places[:, 0]]))
        self.keys, first = np.unique(all_keys[order], return_index=True)
        self.places = all_places[order][first]

    def _place(self, key: bytes) -> tuple[int, int] | None:
        """Number of the shard, row of the shard."""
        first, end = (int(np.searchsorted(self.keys, np.array(key, KEY), side)) for side in ("left", "right"))
        return tuple(self.places[first].tolist()) if first < end else None

    def get(self, keys: Sequence[bytes]) -> torch.Tensor:
        """(n, ...) features in the order of the keys, which must all be there."""
        if not keys:  # a column of which this batch has no row
            return self.get([self.keys[:1].tobytes()])[:0]  # tolist() cuts zeros off a key's end
        rows = []
        for key in keys:
            shard, i = self._place(key)
            path = self.shards[shard]
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            stored = self._open[path].get_slice("keys")
            if i >= stored.get_shape()[0] or stored[i].numpy().tobytes() != key:
                raise UsageError(
                    f"{path} no longer holds the row it held when this run began: another program replaced it. Delete "
                    f"{self.folder} and start again; its features are computed anew."
                )
            rows.append(self._open[path].get_slice("features")[i])
        return torch.stack(rows)

    def add(self, keys: Sequence[bytes], features: torch.Tensor) -> None:
        """Features (n, ...) of new keys; written when a shard is full, or by `flush`."""
        for key, row in zip(keys, features.cpu(), strict=True):
            if key not in self:
                self._pending[key] = row.clone()
                self._added.add(key)
        if len(self._pending) * features[:1].nbytes >= SHARD_BYTES:
            self._write()

    def flush(self) -> None:
        """Write what is waiting, and find all of it from now on."""
        self._write()
        self.load()
        self._added.clear()

    def _write(self) -> None:
        """Raises UsageError when the disk is full; nothing half-written stays."""
        if not self._pending:
            return
        shapes = {tuple(row.shape) for row in self._pending.values()}
        if len(shapes) > 1:
            raise UsageError(
                f"frozen_feature_cache: features of different shapes, {sorted(shapes)[:3]}. Inputs of one size are "
                "needed; switch the cache off for this model."
            )
        path = self.folder / f"features-{uuid.uuid4().hex}.safetensors"
        unfinished = path.with_suffix(".unfinished")
        keys = torch.frombuffer(bytearray(b"".join(self._pending)), dtype=torch.uint8).view(-1, 16)
        try:
            save_file({"keys": keys, "features": torch.stack([*self._pending.values()])}, unfinished)
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise UsageError(
                f"frozen_feature_cache: {path} can not be written ({error}). Rows that are stored are kept for the "
                "next run; make room, or give another folder."
            ) from error
        self._pending = {}
