"""The commit record of a checkpoint: `manifest.json`, the last file that is written.

(1) every file is read back once: its size, its SHA-256, and fsync
(2) the manifest names them all; it is written in place and fsynced, then the folders: now the checkpoint exists
(3) a folder whose manifest is missing, damaged, or names files that are gone, short or altered is no checkpoint
(4) a run that starts afresh among checkpoints of an earlier one writes down which those are; nothing resumes or
    rotates them by itself
(5) rotation counts and deletes complete checkpoints only; folders that were not committed are never touched

Nothing is staged and renamed: a kill at any moment leaves a folder without a manifest, and the older checkpoints as
they were. Rotation after the commit means that there is one complete checkpoint from the first save on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError

MANIFEST = "manifest.json"
DELETED = "manifest.deleted.json"  # what a manifest is called while rotation deletes its folder
EARLIER = "earlier_checkpoints.json"  # in output_dir: (4)
FORMAT = 1
HASH = "sha256"  # of hashlib's the fastest but SHA-1 where the processor has instructions for it: 1.7 GB/s on one core
BLOCK, READERS = 1 << 20, 4

# (1) ---------------------------------------------------------------------------------------------------------------


def files_in(folder: str | Path) -> list[str]:
    """Every file below a folder but the manifest, by its path in it with forward slashes, sorted."""
    folder = Path(folder)
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in found if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def record(folder: str | Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """name -> {"size", "sha256"} of files that are safely on the disk when this returns."""
    names = list(names)
    with ThreadPoolExecutor(READERS) as readers:  # hashing and reading run without the interpreter's lock
        return dict(zip(names, readers.map(lambda name: _read(Path(folder, name), sync=True), names), strict=True))


def _read(path: Path, sync: bool = False) -> dict[str, Any]:
    digest, size, block = hashlib.new(HASH), 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
        if sync:
            os.fsync(file.fileno())  # flushes what any process of this machine wrote to the file
    return {"size": size, HASH: digest.hexdigest()}


# (2) ---------------------------------------------------------------------------------------------------------------


def commit(folder: str | Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the manifest: `files` of `record`, and what else is to be known of the checkpoint (`facts`, JSON-able)."""
    folder = Path(folder)
    content = {"format": FORMAT, "saved_at": time.time(), **facts, "files": dict(sorted(files.items()))}
    content["checksum"] = _checksum(content)
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in {folder / Path(name).parent for name in files} | {folder, folder.parent}:
        _sync_folder(path)


def withdraw(folder: str | Path) -> None:
    """Make a folder empty and no checkpoint, before another one of the same step is written there."""
    folder = Path(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.is_dir():
        _sync_folder(folder)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == DELETED):  # that mark last
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.new(HASH, json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # a folder can not be opened there
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems do not know it for folders; the files are synchronised either way
        pass
    finally:
        os.close(handle)


# (3) ---------------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> dict[str, Any] | None:
    """What the manifest says; None without one. UsageError when it is damaged or of a newer format."""
    path = Path(folder, MANIFEST)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise UsageError(f"{path} is torn or damaged. Use another checkpoint.")
    if content.get("format", 0) > FORMAT:
        raise UsageError(f"{path} has format {content['format']}, this version reads {FORMAT}. Update hf_dist_ext.")
    if content.get("checksum") != _checksum(content):
        raise UsageError(f"{path} was altered after it was written. Use another checkpoint.")
    return content


def problems(folder: str | Path, manifest: Mapping[str, Any], hashes: bool = True, share: slice = slice(None)) -> list:
    """What is missing, of another size, or (with `hashes`) altered, in words. `share`: check only these files."""
    found = []
    for name, entry in list(manifest["files"].items())[share]:
        path = Path(folder, name)
        if not path.is_file():
            found.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry["size"]:
            found.append(f"{name} has {size} bytes instead of {entry['size']}")
        elif hashes and _read(path)[HASH] != entry[HASH]:
            found.append(f"{name} was altered")
    return found


def why_incomplete(folder: str | Path, hashes: bool = False) -> str:
    """Why a folder is no complete checkpoint, in words; empty when it is one."""
    try:
        manifest = read(folder)
    except UsageError as error:
        return str(error).partition(". ")[0]
    if manifest is None:
        return f"no {MANIFEST}: the save did not end, or another program wrote it"
    return ", ".join(problems(folder, manifest, hashes))


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The `checkpoint-N` folders, oldest first, by the time of their commit, or else of their last new file.

    The time counts, not the number: who went back to step 3 and trained on wants that, not the abandoned step 9.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: (_saved_at(path), step_of(path)))


def step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def _saved_at(folder: Path) -> float:
    with contextlib.suppress(UsageError):
        if content := read(folder):
            return content["saved_at"]
    return folder.stat().st_mtime


# (4) ---------------------------------------------------------------------------------------------------------------


def set_aside(output_dir: str | Path, but: str | Path | None = None) -> list[Path]:
    """Write down that the checkpoints which are there now, `but` one, are an earlier run's; returns those that were
    not known as such."""
    output_dir = Path(output_dir)
    earlier = [path for path in checkpoints_in(output_dir) if but is None or path.resolve() != Path(but).resolve()]
    new = [path for path in earlier if not is_of_earlier_run(path)]
    if earlier:
        with open(output_dir / f"{EARLIER}.new", "w", encoding="utf-8") as file:
            json.dump({path.name: _saved_at(path) for path in earlier}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, output_dir / EARLIER)
        _sync_folder(output_dir)
    else:
        (output_dir / EARLIER).unlink(missing_ok=True)
    return new


def is_of_earlier_run(folder: str | Path) -> bool:
    """Whether a checkpoint was there before this run, or the one it continues, started afresh."""
    folder = Path(folder)
    try:
        earlier = json.loads((folder.parent / EARLIER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        raise UsageError(f"{folder.parent / EARLIER} is damaged. Give the path of the checkpoint to resume.") from None
    return folder.name in earlier and earlier[folder.name] == _saved_at(folder)


def why_passed_over(folder: str | Path) -> str:
    """Why a run that looks for its own newest checkpoint does not take this one, in words; empty when it may."""
    if is_of_earlier_run(folder):
        return "of an earlier run in this folder, which a later one replaced"
    return why_incomplete(folder)


# (5) ---------------------------------------------------------------------------------------------------------------


def rotate(output_dir: str | Path, limit: int | None, keep: Iterable[str | Path | None] = ()) -> list[Path]:
    """Delete the oldest complete checkpoints until `limit` are left; returns what was deleted.

    Never the newest, never one of `keep` (the best), never a folder that was not committed or is an earlier run's.
    A deletion that was interrupted is finished.
    """
    if not limit or limit < 0:
        return []
    kept = {Path(path).resolve() for path in keep if path is not None}
    complete = [path for path in checkpoints_in(output_dir) if not why_passed_over(path)]
    may_go = [path for path in complete[:-1] if path.resolve() not in kept]
    deleted = may_go[: max(len(complete) - limit, 0)]
    for path in deleted:
        os.replace(path / MANIFEST, path / DELETED)
    for path in checkpoints_in(output_dir):
        if (path / DELETED).is_file():
            withdraw(path)
            path.rmdir()
    return deleted
