"""The commit record of a checkpoint: `manifest.json`, the last file that is written.

Before a save its folder is emptied and marked as unfinished. When the files are written, every one is read back once:
its size, its SHA-256, and fsync. The manifest names them all. It is written last, under the mark's name, fsynced and
renamed: now the checkpoint exists. A folder whose manifest is missing, damaged, or names files that are gone, short or
altered is no checkpoint.

`generation` says which checkpoint is newer: it is one more than the greatest in the output folder at the time of the
save, and no clock is asked.

`run_id` says which run a checkpoint is of. A start afresh, and one from another checkpoint than the newest (a branch),
begins a new run; its `parent` is the checkpoint it began from. Where a run begins among checkpoints of others,
`current_run.json` names it, so that a run which is stopped before its first save is known too. Checkpoints of other
runs are not resumed or rotated by themselves. Rotation counts and deletes complete checkpoints of the current run
only; folders that were not committed, and links, are never touched.

A checkpoint is proved when an update after it was finite: its weights are not ruined. No checkpoint is written while
updates are skipped, so one that is followed by another of its run is proved, and only the newest may not be. Rotation
keeps the newest that is proved.

Nothing but the manifest is staged and renamed: a kill at any moment leaves a folder without a manifest, and the older
checkpoints as they were. Rotation after the commit means that there is one complete checkpoint from the first save on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
UNFINISHED = "manifest.unfinished.json"  # in a folder that is being written
DELETED = "manifest.deleted.json"  # what a manifest is called while rotation deletes its folder
RUN = "current_run.json"  # in output_dir, which run its checkpoints are of
FORMAT = 1
HASH = "sha256"  # of hashlib's the fastest but SHA-1 where the processor has instructions for it: 1.7 GB/s on one core
BLOCK, READERS = 1 << 20, 4

Place = tuple[int, int]  # generation and step: where a checkpoint stands in the order of a folder

# ---- the folder and its files ----


def begin(folder: str | Path) -> None:
    """Make a folder for a save: empty but for the mark that its save has not ended."""
    folder = Path(folder)
    if folder.is_symlink():
        folder.unlink()  # what it points to is somebody else's
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).is_file():
        os.replace(folder / MANIFEST, folder / UNFINISHED)
    else:
        (folder / UNFINISHED).touch()
    sync_folder(folder)
    _empty(folder, but=UNFINISHED)


def files_in(folder: str | Path) -> list[str]:
    """Every file below a folder but the manifest, by its path in it with forward slashes, sorted."""
    folder = Path(folder)
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in (MANIFEST, UNFINISHED))


def record(folder: str | Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """name -> {"size", "sha256"} of files that are safely on the disk when this returns."""
    names = list(names)
    with ThreadPoolExecutor(READERS) as readers:  # hashing and reading run without the interpreter's lock
        return dict(zip(names, readers.map(lambda name: _read(Path(folder, name), sync=True), names), strict=True))


def _read(path: Path, sync: bool = False) -> dict[str, Any]:
    hashed, size, block = hashlib.new(HASH), 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            hashed.update(block[:count])
            size += count
        if sync:
            os.fsync(file.fileno())  # flushes what any process of this machine wrote to the file
    return {"size": size, HASH: hashed.hexdigest()}


# ---- the commit ----


def commit(folder: str | Path, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the manifest: `files` of `record`, and what else is to be known of the checkpoint (`facts`, JSON-able)."""
    folder = Path(folder)
    content = {"format": FORMAT, "saved_at": time.time(), **facts, "files": dict(sorted(files.items()))}
    content["checksum"] = _checksum(content)
    for path in {folder / Path(name).parent for name in files}:
        sync_folder(path)
    _write(folder / MANIFEST, folder / UNFINISHED, content)
    sync_folder(folder.parent)


def _write(path: Path, staged: Path, content: Mapping[str, Any]) -> None:
    """A small JSON file that is whole whenever it is there."""
    with open(staged, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
    sync_folder(path.parent)


def _empty(folder: Path, but: str = "") -> None:
    for path in sorted(folder.iterdir(), key=lambda path: path.name == DELETED):  # that mark last
        if path.name != but:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _checksum(content: Mapping[str, Any]) -> str:
    return digest({name: value for name, value in content.items() if name != "checksum"})


def digest(content: Any) -> str:
    return hashlib.new(HASH, json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems do not know it for folders; the files are synchronised either way
        pass
    finally:
        os.close(handle)


# ---- reading ----


def read(folder: str | Path) -> dict[str, Any] | None:
    """What the manifest says; None without one. UsageError when it is damaged or of a newer format."""
    path = Path(folder, MANIFEST)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). Use another checkpoint.") from error
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
    wrong = []
    for name, entry in list(manifest["files"].items())[share]:
        path = Path(folder, name)
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry["size"]:
            wrong.append(f"{name} has {size} bytes instead of {entry['size']}")
        elif hashes and _read(path)[HASH] != entry[HASH]:
            wrong.append(f"{name} was altered")
    return wrong


def why_incomplete(folder: str | Path, hashes: bool = False) -> str:
    """Why a folder is no complete checkpoint, in words; empty when it is one."""
    try:
        manifest = read(folder)
    except UsageError as error:
        return str(error).partition(". ")[0]
    if manifest is None:
        other = "" if is_unfinished(folder) else ", or another program wrote it"
        return f"no {MANIFEST}: the save did not end{other}"
    return ", ".join(problems(folder, manifest, hashes))


def is_unfinished(folder: str | Path) -> bool:
    """Whether a save of ours has begun there and not ended."""
    return Path(folder, UNFINISHED).is_file() and not Path(folder, MANIFEST).is_file()


# ---- which checkpoint is newer, and of which run ----


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The `checkpoint-N` folders, oldest first; those without a readable manifest come last, in the order of steps.

    The generation counts, not the step: who went back to step 3 and trained on wants that, not the abandoned step 9.
    """
    return History(folder).paths


def step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def place(content: Mapping[str, Any]) -> Place:
    return content["generation"], content["step"]


def identity(content: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a checkpoint from every other one, of its manifest."""
    return {name: content.get(name) for name in ("run_id", "generation", "step")}


class History:
    """What the manifests of an output folder and its `current_run.json` say, read once.

    `paths`: its checkpoint folders in order; `run`: the current run's id, its parent, and the folders without a
    manifest that were there when it began.
    """

    def __init__(self, output_dir: str | Path):
        self.output_dir = Path(output_dir)
        folders = (path for path in self.output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
        self.manifests = {path: _readable(path) for path in folders if path.is_dir()}
        self.paths = sorted(self.manifests, key=self._order)
        self.run = self._current_run()
        self._line = self._places_of_runs()

    def next_generation(self) -> int:
        return 1 + max((content["generation"] for content in self._contents()), default=0)

    def is_of_earlier_run(self, path: Path) -> bool:
        """Whether a checkpoint is of a run that the current one replaced, or was left when a run went back."""
        content = self.manifests[path]
        if content is None:
            return path.name in self.run["replaces"]
        return place(content) > self._line.get(content["run_id"], (-1, -1))

    def why_passed_over(self, path: Path) -> str:
        """Why a run that looks for its own newest checkpoint does not take this one, in words; empty when it may."""
        if not self.is_of_earlier_run(path):
            return why_incomplete(path)
        if (content := self.manifests[path]) is not None and content["run_id"] in self._line:
            return "the run went back to an older one"
        return "of an earlier run in this folder, which a later one replaced"

    def _contents(self) -> list[dict[str, Any]]:
        return [content for path in self.paths if (content := self.manifests[path])]

    def _order(self, path: Path) -> tuple[bool, int, int]:
        content = self.manifests[path]
        return (True, 0, step_of(path)) if content is None else (False, *place(content))

    def _current_run(self) -> dict[str, Any]:
        path = self.output_dir / RUN
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # the run began in an empty folder, or its checkpoints were copied here
            newest = (self._contents() or [{"run_id": ""}])[-1]
            known = {name: newest.get(name) for name in ("run_id", "parent", "began_from_weights")}
            return {"replaces": [], **known}
        except ValueError:
            raise UsageError(f"{path} is damaged. Delete it and give the path of the checkpoint to resume.") from None

    def _places_of_runs(self) -> dict[str, Place]:
        """run_id -> the last place of that run which the current one continues; the current one's own have no end."""
        parents = {content["run_id"]: content.get("parent") for content in self._contents()}
        branch, run_id, parent, last = {}, self.run["run_id"], self.run["parent"], (1 << 62, 0)
        while run_id not in branch:
            branch[run_id] = last
            if parent is None:
                break
            run_id, last = parent["run_id"], (parent["generation"], parent["step"])
            parent = parents.get(run_id)
        return branch


def _readable(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(UsageError):
        content = read(folder)
        return content if content and "generation" in content else None  # else what `save_model` wrote there
    return None


# ---- a run begins ----


def new_run(
    parent: Path | None = None, replaces: Iterable[str] = (), has_weights_only: bool = False
) -> dict[str, Any]:
    """What `current_run.json` says of a run that starts afresh, or from the checkpoint `parent`, or from its weights
    alone."""
    content = None if parent is None else _readable(parent)
    origin = None if content is None else identity(content)
    run = {"run_id": uuid.uuid4().hex, "parent": origin, "replaces": list(replaces)}
    return run | {"began_from_weights": has_weights_only}


def begin_run(output_dir: str | Path, parent: Path | None = None, has_weights_only: bool = False) -> dict[str, Any]:
    """A new run writes in `output_dir` from now on; returns what its manifests say of it."""
    history = History(output_dir)
    unmarked = [path for path in history.paths if history.manifests[path] is None and path != parent]
    run = new_run(parent, [path.name for path in unmarked], has_weights_only)
    if history.paths or Path(output_dir, RUN).exists():  # else its own checkpoints will say all of it
        write_run(output_dir, run)
    return run


def write_run(output_dir: str | Path, run: Mapping[str, Any]) -> None:
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    _write(Path(output_dir, RUN), Path(output_dir, f"{RUN}.new"), run)


# ---- rotation ----


def rotate(
    output_dir: str | Path, limit: int | None, keep: Iterable[str | Path | None] = (), is_proved: bool = True
) -> list[Path]:
    """Delete the oldest complete checkpoints until `limit` are left; returns what was deleted.

    Never the newest that is proved (`is_proved`: the newest of all is), never one of `keep` (the best), never a link,
    a folder that was not committed or one of another run. A deletion that was interrupted is finished. What cannot be
    deleted is a warning: the save itself went well.
    """
    if not limit or limit < 0:
        return []
    history = History(output_dir)
    kept = {Path(path).resolve() for path in keep if path is not None}
    paths = [path for path in history.paths if not path.is_symlink()]
    complete = [path for path in paths if not history.why_passed_over(path)]
    may_go = [path for path in complete[: -1 if is_proved else -2] if path.resolve() not in kept]
    chosen, deleted = may_go[: max(len(complete) - limit, 0)], []
    for path in paths:
        try:
            if path in chosen:
                os.replace(path / MANIFEST, path / DELETED)
            if (path / DELETED).is_file():
                _empty(path)
                path.rmdir()
                deleted.append(path)
        except OSError as error:
            logger.warning(f"{path} is more than save_total_limit={limit} allows, and cannot be deleted: {error}")
    return deleted
