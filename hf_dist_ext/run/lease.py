"""One run per output_dir: a lock of the system on its file `_run.lease`, which the system drops with its holder.

(1) a run locks the file as long as it lives: a launcher before any rank exists, else the first process. What the file
    says (host, pid, since when) only informs; who ends removes it
(2) a launcher names its token in the environment: by it rank 0 knows that the folder is its own
(3) a run asks again before every commit: somebody may have deleted the file, and another run taken the folder

A forked child (a worker that loads data) drops its copy of the lock, so that it can not outlive its parent's run.
No torch here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import RunError, UsageError

NAME = "_run.lease"  # what begins with "_" Trainer never pushes to the hub
TOKEN = "HF_DIST_LEASE"  # environment: the launcher's token
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks answers

_held: dict[Path, Lease] = {}


class Lease:
    """Of one folder, until `release` or the end of this process. `lock`: the descriptor of the locked file; None: the
    launcher has it. `made`: folders that did not exist before; those still empty at the end go with it."""

    def __init__(self, path: Path, token: str, lock: int | None, made: Sequence[Path]):
        self.path, self.token, self._lock, self._made = path, token, lock, made
        atexit.register(self.release)
        os.register_at_fork(after_in_child=self._forget)

    def check(self) -> None:
        """(3): RunError when the folder is another run's by now."""
        if not self.path.exists():  # somebody emptied the folder
            before, self._lock = self._lock, _lock(self.path, self.token)
            if before is not None:
                os.close(before)
        elif (owner := _read(self.path)).get("token") != self.token:
            raise RunError(
                f"{self.path.parent} was taken over by {_owner(owner)}, as {NAME} of this run was deleted. This run "
                "writes nothing more there. Let the other one go on, or stop it and resume."
            )

    def release(self) -> None:
        if _held.get(self.path.parent) is not self:
            return
        if self._lock is not None and _read(self.path).get("token") == self.token:
            with contextlib.suppress(OSError):  # the folder is gone, or has files
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()
        self._forget()

    def _forget(self) -> None:
        """In a forked child: closing its copy of the descriptor leaves the parent's lock alone."""
        if _held.get(self.path.parent) is self:
            del _held[self.path.parent]
            atexit.unregister(self.release)
            if self._lock is not None:
                os.close(self._lock)


def take(output_dir: str | os.PathLike) -> Lease:
    """The lease of a folder; the one this process has, if it has it. Raises UsageError when another run holds it."""
    folder = Path(output_dir).resolve()
    if folder in _held:
        return _held[folder]
    path, token, lock = folder / NAME, os.environ.get(TOKEN), None
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if token is None or _read(path).get("token") != token:  # (2)
            token = uuid.uuid4().hex
            lock = _lock(path, token)
    except OSError as error:
        words = error.strerror or error
        raise UsageError(f"output_dir={folder} can not be written: {words}. Give another --output_dir.") from error
    _held[folder] = Lease(path, token, lock, made)
    return _held[folder]


@contextlib.contextmanager
def held(output_dir: str | os.PathLike) -> Iterator[None]:
    """The lease while inside, and as long as before when this process had it before."""
    had_it = Path(output_dir).resolve() in _held
    lease = take(output_dir)
    try:
        yield
    finally:
        if not had_it:
            lease.release()


@contextlib.contextmanager
def all_released() -> Iterator[None]:
    """At the end no folder is held by this process: a run that was refused, or has ended, leaves no file of it."""
    try:
        yield
    finally:
        for lease in list(_held.values()):
            lease.release()


def check() -> None:
    """(3), of every folder that this process holds: call it right before a commit."""
    for lease in list(_held.values()):
        lease.check()


def _lock(path: Path, token: str) -> int:
    """The descriptor of the locked file, which then says whose it is. Raises UsageError when another run holds it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                if isinstance(error, BlockingIOError):
                    _refuse(path)
                raise
            _say(f"{path.parent} has no locks. Start no other run in it meanwhile.")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)  # its last owner has just removed it
    if owner := _read(path):
        _say(f"took over {path.parent} from {_owner(owner)}, which has ended")
    says = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "token": token,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, (json.dumps(says) + "\n").encode(), 0)
    return file


def _read(path: Path) -> dict[str, Any]:
    """Empty: there is no file, someone is just making it, or it is none of ours."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _owner(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another run"


def _refuse(path: Path) -> None:
    owner = _read(path)
    since = f" since {owner['since']}" if "since" in owner else ""
    raise UsageError(
        f"output_dir={path.parent} is in use by {_owner(owner)}{since}. Stop that run, or give another --output_dir."
    )


def _say(text: str) -> None:
    print(f"hf-dist: {text}", file=sys.stderr, flush=True)
