"""One run per output_dir: a lock that the system drops with its holder.

(1) a run takes a folder by locking its file `_run.lease`, exclusively for a moment, which fails while any process of
    another run holds it; then it keeps a shared lock. What the file says (host, pid, since when) only informs
(2) a launcher takes the lock before any rank exists, and names its token in the environment; rank 0 shares the lock by
    this token, so that the lock lives on when only the launcher is killed. Whoever owns it last removes the file
(3) some file systems have no locks that other hosts see. There the file itself is the lock, and the owner touches it
    every 10 s. Who finds a file watches it for 120 s of its own clock, and takes over only if nobody touches it
(4) the owner asks again before every commit: it may have been paused for so long that (3) gave its folder away

A forked child (a worker that loads data) drops its copy of the lock, so that it can not outlive its parent's run.
No torch here.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_dist_ext.errors import RunError, UsageError

NAME = "_run.lease"  # what begins with "_" Trainer never pushes to the hub
TOKEN = "HF_DIST_LEASE"  # environment: the launcher's token
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 120

_held: dict[Path, Lease] = {}


class Lease:
    """Of one folder, held by this process until `release` or its end. `lock` is the descriptor of the locked file;
    None: the heartbeat of (3). `made`: folders that did not exist before; those still empty at the end go with it."""

    def __init__(self, path: Path, token: str, lock: int | None, made: Sequence[Path] = ()):
        self.path, self.token, self._lock, self._made = path, token, lock, made
        self._ended = threading.Event()
        if lock is None:
            threading.Thread(target=self._beat, daemon=True).start()
        atexit.register(self.release)
        os.register_at_fork(after_in_child=self._forget)

    def check(self) -> None:
        """(4): RunError when the folder is another run's by now."""
        if self._lock is not None and _is_at(self.path, self._lock):
            return
        if self._lock is not None and not self.path.exists():  # somebody emptied the folder; nobody else has it
            os.close(self._lock)
            self._lock = _lock(self.path, self.token)
            return
        if self._lock is None and self._is_ours():
            return
        raise RunError(
            f"{self.path.parent} was taken over by {_owner(_read(self.path))}, as this process was paused for more "
            f"than {STALE_SECONDS} s or {NAME} was deleted. This run writes nothing more there. Let the other one go "
            "on, or stop it and resume."
        )

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that is away for a moment: the next touch counts
                if self._is_ours():
                    os.utime(self.path)

    def _is_ours(self) -> bool:
        return _read(self.path).get("token") == self.token

    def _let_go(self) -> int | None:
        """Of everything but the lock, which it gives back."""
        atexit.unregister(self.release)
        self._ended.set()
        _held.pop(self.path.parent, None)
        lock, self._lock = self._lock, None
        return lock

    def release(self) -> None:
        lock = self._let_go()
        with contextlib.suppress(OSError):  # the launcher or rank 0 still holds it, or the folder is gone
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_ours():
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()
        if lock is not None:
            os.close(lock)

    def _forget(self) -> None:
        """In a forked child: closing its copy of the descriptor leaves the parent's lock alone."""
        if (lock := self._let_go()) is not None:
            os.close(lock)


def take(output_dir: str | os.PathLike) -> Lease:
    """The lease of a folder; the one this process has, if it has it. Raises UsageError when another run holds it."""
    folder = Path(output_dir).resolve()
    if folder in _held:
        return _held[folder]
    path, lock = folder / NAME, None
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = os.environ.get(TOKEN)
        if token is None or _read(path).get("token") != token:  # (2)
            token = uuid.uuid4().hex
        if _has_locks(folder):
            lock = _lock(path, token)
        else:
            _take_file(path, token)
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
    """(4), of every folder that this process holds: call it right before a commit."""
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
                    _say(f"took over {path.parent} from {_owner(owner)}, which is gone")
                _describe(file, token)
            # Linux drops the exclusive lock before it takes the shared one; who came in between has written its token.
            if not _flock(file, fcntl.LOCK_SH) or (owner := _read(path)).get("token") != token:
                _refuse(path, owner)
            if not is_first:
                _describe(file, token)
            opened.pop_all()
            return file


def _flock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one of this name, and not one that was removed or replaced."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _has_locks(folder: Path) -> bool:
    """Whether a lock in this folder can be taken, and other hosts that mount it would see it."""
    device = os.stat(folder).st_dev
    with contextlib.suppress(OSError):  # there is no such table but on Linux
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, words = line.partition(" - ")
            kind, *_, options = words.split()
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}" and is_of_one_host(kind, options):
                return False
    probe = folder / f"{NAME}.{uuid.uuid4().hex}"
    file = os.open(probe, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # "no locks available", "not implemented", ...
        return False
    finally:
        os.close(file)
        probe.unlink(missing_ok=True)


def is_of_one_host(kind: str, options: str) -> bool:
    """Whether flock on a mounted file system stays on this host, though others may mount it too."""
    if kind.startswith("nfs"):
        return not {"nolock", "local_lock=all", "local_lock=flock"}.isdisjoint(options.split(","))
    return kind.startswith("fuse.") or kind in ("9p", "virtiofs") or "localflock" in options.split(",")  # Lustre's


def _take_file(path: Path, token: str) -> None:
    _say(f"{path.parent} has no locks that other hosts see: a heartbeat in {NAME} stands for one")
    if _read(path).get("token") == token:  # the launcher's
        os.replace(_written(path, token), path)
        return
    while not _create(path, token):
        if not (owner := _read(path)) and not path.exists():
            continue
        _watch(path, owner)
        moved = path.with_name(f"{NAME}.{uuid.uuid4().hex}")
        try:
            os.rename(path, moved)  # of several that found it silent, one moves it away
        except FileNotFoundError:
            continue
        if _read(moved).get("token") != owner.get("token"):  # a newer one, of who was faster: put it back
            os.rename(moved, path)
            continue
        moved.unlink()
        _say(f"took over {path.parent} from {_owner(owner)}, which is gone")


def _watch(path: Path, owner: dict[str, Any]) -> None:
    """Returns when nobody has touched the file for long enough; clocks of other hosts, and steps of one, do not count.
    UsageError as soon as someone does."""

    def touched() -> tuple | None:
        with contextlib.suppress(FileNotFoundError):
            return (status := os.stat(path)).st_mtime_ns, status.st_ino
        return None

    _say(f"{path.parent} was taken by {_owner(owner)}: waiting {STALE_SECONDS} s for a sign of life")
    before, began = touched(), time.monotonic()
    while time.monotonic() - began < STALE_SECONDS:
        time.sleep(min(1.0, HEARTBEAT_SECONDS))
        if (now := touched()) is None:
            return
        if now != before:
            _refuse(path, owner)


def _create(path: Path, token: str) -> bool:
    """Whether the file was not there and now is ours, complete from its first moment."""
    own = _written(path, token)
    try:
        os.link(own, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        os.replace(own, path)
        return True
    finally:
        own.unlink(missing_ok=True)


def _written(path: Path, token: str) -> Path:
    own = path.with_name(f"{NAME}.{uuid.uuid4().hex}")
    file = os.open(own, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _describe(file, token)
    finally:
        os.close(file)
    return own


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
