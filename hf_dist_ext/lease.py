"""One run per output_dir: a small file that says who writes there, and that it lives.

(1) to take it: create `run.lease` (host, pid, since when), which only one of several processes can; a thread touches
    the file every few seconds: its modification time is the heartbeat
(2) it is there: refuse, naming its owner, unless the owner is gone: its process on this host has ended, or on another
    host the file was not touched for a while. Then take it over, and say so
(3) the launcher takes it before any rank exists and names it in the environment; rank 0 makes it its own, so that it
    holds on when only the launcher is killed
(4) whoever owns it last removes it at exit

Times are those of the file system that holds the folder, so clocks of hosts may differ. No torch here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError

NAME = "run.lease"
TOKEN = "HF_DIST_LEASE"  # environment: the launcher's token
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 120  # of a host that cannot be asked

_held: dict[Path, Lease] = {}


class Lease:
    """Of one folder, held by this process until `release` or its end."""

    def __init__(self, folder: Path, token: str):
        self.path, self.token = folder / NAME, token
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        atexit.register(self.release)

    def is_ours(self) -> bool:
        return (_read(self.path) or {}).get("token") == self.token

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            if self.is_ours():
                os.utime(self.path)

    def release(self) -> None:
        atexit.unregister(self.release)
        self._ended.set()
        _held.pop(self.path.parent, None)
        found = _read(self.path) or {}
        is_last = found.get("pid") == os.getpid() or _start_of(found.get("pid")) != found.get("started")
        if found.get("token") == self.token and is_last:  # else rank 0 still has what its launcher took
            self.path.unlink(missing_ok=True)


def take(output_dir: str | os.PathLike) -> Lease:
    """The lease of a folder; the one this process has, if it has it. Raises UsageError when another run holds it."""
    folder = Path(output_dir).resolve()
    if folder in _held:
        return _held[folder]
    folder.mkdir(parents=True, exist_ok=True)
    path, given = folder / NAME, os.environ.get(TOKEN, "")
    token = uuid.uuid4().hex
    found = _read(path)
    if found is not None and given and found.get("token") == given:  # (3)
        token = given
        _write(path, token)
    else:
        while not _create(path, token):
            _remove_if_stale(path)
    _held[folder] = Lease(folder, token)
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


def _create(path: Path, token: str) -> bool:
    """Whether the file was not there and now is ours, complete from its first moment."""
    own = path.with_name(f"{NAME}.{token}")
    _write(own, token)
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


def _write(path: Path, token: str) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_of(os.getpid()), "token": token}
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(owner | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n", encoding="utf-8")
    os.replace(new, path)


def _read(path: Path) -> dict[str, Any] | None:
    """None: no file. Empty: someone is just making it, or it is none of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def _remove_if_stale(path: Path) -> None:
    """(2)"""
    found = _read(path)
    if found is None:
        return
    age = _age(path)
    if age is None:
        return
    host, pid = found.get("host"), found.get("pid")
    if host == socket.gethostname():
        is_gone, how = _start_of(pid) != found.get("started"), f"process {pid} has ended"
    else:
        is_gone, how = age > STALE_SECONDS, f"no sign of life for {age:.0f} s"
    if not is_gone:
        raise UsageError(
            f"output_dir={path.parent} is in use by process {pid} on {host} since {found.get('since')} "
            f"(last heartbeat {age:.0f} s ago). Stop that run, or give another --output_dir."
        )
    taken = path.with_name(f"{NAME}.{uuid.uuid4().hex}")
    try:
        os.rename(path, taken)  # of several that find it stale, one moves it away
    except FileNotFoundError:
        return
    if (_read(taken) or {}).get("token") != found.get("token"):  # a newer one, of who was faster: put it back
        os.rename(taken, path)
        return
    taken.unlink()
    print(f"hf-dist: took over {path.parent} from a run on {host} that is gone ({how})", file=sys.stderr, flush=True)


def _age(path: Path) -> float | None:
    """Seconds since the last heartbeat by the clock of the file system; None when the file is gone."""
    probe = path.with_name(f"{NAME}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return max(0.0, probe.stat().st_mtime - path.stat().st_mtime)
    except FileNotFoundError:
        return None
    finally:
        probe.unlink()


def _start_of(pid: Any) -> float | None:
    """When a process of this host began, which tells it from a later one with the same number; None: it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.Error, TypeError, ValueError):
        return None
