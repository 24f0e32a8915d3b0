"""One run per output_dir: a lock of the system, which drops it with its holder.

(1) a run takes a folder by locking its file `_run.lease`, exclusively for a moment, which fails while any process of
    another run holds it; then it keeps a shared lock. What the file says (host, pid, since when) only informs
(2) a launcher takes the lock before any rank exists, and names its token in the environment; rank 0 shares the lock by
    this token, so that the lock lives on when only the launcher is killed. Whoever owns it last removes the file
(3) the owner asks again before every commit: somebody may have deleted the file, and another run taken the folder

Some file systems have no locks that other hosts see: there a run says that it can not know of runs on other hosts. A
forked child (a worker that loads data) drops its copy of the lock, so that it can not outlive its parent's run.
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
from typing import Any, NoReturn

from hf_dist_ext.errors import RunError, UsageError

NAME = "_run.lease"  # what begins with "_" Trainer never pushes to the hub
TOKEN = "HF_DIST_LEASE"  # environment: the launcher's token
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks answers

_held: dict[Path, Lease] = {}


class Lease:
    """Of one folder, held by this process until `release` or its end. `lock` is the descriptor of the locked file.
    `made`: folders that did not exist before; those still empty at the end go with it."""

    def __init__(self, path: Path, token: str, lock: int, made: Sequence[Path]):
        self.path, self.token, self._lock, self._made = path, token, lock, made
        atexit.register(self.release)
        os.register_at_fork(after_in_child=self._forget)

    def check(self) -> None:
        """(3): RunError when the folder is another run's by now."""
        if _is_at(self.path, self._lock):
            return
        if self.path.exists():
            raise RunError(
                f"{self.path.parent} was taken over by {_owner(_read(self.path))}, as {NAME} of this run was deleted. "
                "This run writes nothing more there. Let the other one go on, or stop it and resume."
            )
        # somebody emptied the folder; nobody else has it
        before, self._lock = self._lock, _lock(self.path, self.token)
        os.close(before)

    def release(self) -> None:
        if _held.get(self.path.parent) is not self:
            return
        with contextlib.suppress(OSError):  # the folder is gone
            # else the launcher or rank 0 still holds it
            if _flock(self._lock, fcntl.LOCK_EX) and _read(self.path).get("token") == self.token:
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()
        self._forget()

    def _forget(self) -> None:
        """In a forked child: closing its copy of the descriptor leaves the parent's lock alone."""
        if _held.get(self.path.parent) is self:
            del _held[self.path.parent]
            atexit.unregister(self.release)
            os.close(self._lock)


def take(output_dir: str | os.PathLike) -> Lease:
    """The lease of a folder; the one this process has, if it has it. Raises UsageError when another run holds it."""
    folder = Path(output_dir).resolve()
    if folder in _held:
        return _held[folder]
    path = folder / NAME
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = os.environ.get(TOKEN)
        if token is None or _read(path).get("token") != token:  # (2)
            token = uuid.uuid4().hex
        lock = _lock(path, token)
    except OSError as error:
        words = error.strerror or error
        raise UsageError(f"output_dir={folder} can not be written: {words}. Give another --output_dir.") from error
    if not _is_seen_by_others(path, lock):
        _say(f"{folder} has no locks that other hosts see. Start no other run in it meanwhile.")
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
    """A descriptor whose lock says that the folder is this run's."""
    while True:
        with contextlib.ExitStack() as opened:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, file)
            is_first = _flock(file, fcntl.LOCK_EX)
            owner = _read(path)
            if not is_first and owner.get("token") != token:
                _refuse(path, owner)
            if not _is_at(path, file):  # its last owner has just removed it
                continue
            if is_first:
                if owner:
                    _say(f"took over {path.parent} from {_owner(owner)}, which holds no lock of it")
                _describe(file, token)
            # Linux drops the exclusive lock before it takes the shared one; who came in between has written its token.
            if not _flock(file, fcntl.LOCK_SH) or (owner := _read(path)).get("token") != token:
                _refuse(path, owner)
            if not is_first:
                _describe(file, token)
            opened.pop_all()
            return file


def _flock(file: int, kind: int) -> bool:
    """False while others hold it. Where there are no locks nobody does."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one of this name, and not one that was removed or replaced."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _is_seen_by_others(path: Path, lock: int) -> bool:
    """Whether hosts that mount the file's folder too see its lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    device = os.stat(path).st_dev
    with contextlib.suppress(OSError):  # there is no such table but on Linux
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, words = line.partition(" - ")
            kind, *_, options = words.split()
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}" and is_of_one_host(kind, options):
                return False
    return True


def is_of_one_host(kind: str, options: str) -> bool:
    """Whether flock on a mounted file system stays on this host, though others may mount it too."""
    if kind.startswith("nfs"):
        return not {"nolock", "local_lock=all", "local_lock=flock"}.isdisjoint(options.split(","))
    return kind.startswith("fuse.") or kind in ("9p", "virtiofs") or "localflock" in options.split(",")  # Lustre's


def _describe(file: int, token: str) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
    text = json.dumps(owner | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n"
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def _read(path: Path) -> dict[str, Any]:
    """Empty: there is no file, someone is just making it, or it is none of ours."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _owner(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another run"


def _refuse(path: Path, owner: dict[str, Any]) -> NoReturn:
    since = f" since {owner['since']}" if "since" in owner else ""
    raise UsageError(
        f"output_dir={path.parent} is in use by {_owner(owner)}{since}. Stop that run, or give another --output_dir."
    )


def _say(text: str) -> None:
    print(f"hf-dist: {text}", file=sys.stderr, flush=True)
