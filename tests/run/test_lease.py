"""One run per folder: refused while the owner lives, taken over when it is gone, removed at the end."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.run import lease
from tests.launching import ROOT, environment

HOLD = "import sys; from hf_dist_ext.run import lease; held = lease.take(sys.argv[1]); print('held', flush=True); "
HOLD += "sys.stdin.read()"


def start(code: str, folder: Path, **more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, str(folder)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **pipes, env=environment(**more), cwd=ROOT)


@contextlib.contextmanager
def holding(folder: Path, before: str = "", **more: str):
    process = start(before + HOLD, folder, **more)
    try:
        assert process.stdout.readline() == "held\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def holder(tmp_path):
    with holding(tmp_path) as process:
        yield process


def refusal(folder: Path, **more: str) -> str:
    """What a second run says that is refused."""
    second = start(HOLD, folder, **more)
    _, words = second.communicate("", timeout=300)
    assert second.returncode == 1
    return words


def content(folder: Path) -> dict:
    return json.loads((folder / lease.NAME).read_text())


def test_a_second_run_is_refused_naming_the_first_and_takes_over_when_it_was_killed(tmp_path, holder, capsys):
    with pytest.raises(UsageError, match=f"in use by process {holder.pid} on .* since 20.*another --output_dir"):
        lease.take(tmp_path)
    assert content(tmp_path)["pid"] == holder.pid
    holder.kill()
    holder.wait()
    held = lease.take(tmp_path)
    assert content(tmp_path)["pid"] == os.getpid() and "took over" in capsys.readouterr().err
    assert lease.take(tmp_path) is held, "a process does not refuse itself"
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_is_stopped_still_owns_the_folder(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(UsageError, match="in use by process"):
        lease.take(tmp_path)


def test_a_file_that_says_anything_at_all_keeps_nobody_out(tmp_path):
    """Numbers of processes, names of hosts and times of the clock only inform."""
    for owner in ({"host": "elsewhere", "pid": 1, "token": "t", "since": "9999"}, {"pid": os.getppid()}, ["x"], ""):
        (tmp_path / lease.NAME).write_text(json.dumps(owner))
        os.utime(tmp_path / lease.NAME, (time.time() + 3600,) * 2)
        lease.take(tmp_path).release()


def test_rank_0_knows_by_its_launchers_token_that_the_folder_is_its_own(tmp_path, holder, monkeypatch):
    monkeypatch.setenv(lease.TOKEN, content(tmp_path)["token"])
    held = lease.take(tmp_path)
    held.check()
    held.release()
    assert content(tmp_path)["pid"] == holder.pid, "the launcher has the folder until it ends"
    holder.communicate("", timeout=300)
    assert list(tmp_path.iterdir()) == [], "its file goes with it"


def test_rank_0_whose_launcher_was_killed_writes_nothing_beside_the_next_run(tmp_path, holder, monkeypatch):
    monkeypatch.setenv(lease.TOKEN, content(tmp_path)["token"])
    held = lease.take(tmp_path)
    holder.kill()
    holder.wait()
    with holding(tmp_path, **{lease.TOKEN: "its own launcher's"}) as second:
        with pytest.raises(RunError, match=f"taken over by process {second.pid}"):
            held.check()
        held.release()


def test_a_token_that_no_launcher_wrote_there_shares_nothing(tmp_path):
    """Two runs that a process of a third run has started, for one folder."""
    with holding(tmp_path, **{lease.TOKEN: "of another folder"}) as first:
        assert content(tmp_path)["token"] != "of another folder"
        words = refusal(tmp_path, **{lease.TOKEN: "of another folder"})
        assert f"in use by process {first.pid}" in words
        first.communicate("", timeout=300)


def test_a_forked_worker_does_not_keep_the_folder_of_a_killed_parent(tmp_path):
    fork = "import os; from hf_dist_ext.run import lease; import sys; lease.take(sys.argv[1])\n"
    fork += "told, tell = os.pipe()\nif not os.fork(): os.write(tell, b'.'); os.read(0, 1); os._exit(0)\n"
    fork += "os.read(told, 1)\n"  # a child that has not run yet may still hold what its parent held
    with holding(tmp_path, fork) as process:
        process.kill()
        process.wait()
        lease.take(tmp_path).release()


def test_of_many_that_start_at_once_one_gets_it(tmp_path):
    code = "import sys; from hf_dist_ext import errors; from hf_dist_ext.run import lease\n"
    code += "try:\n    lease.take(sys.argv[1]); print('got', flush=True); sys.stdin.read()\n"
    code += "except errors.UsageError: print('refused', flush=True)"
    (tmp_path / lease.NAME).write_text(json.dumps({"host": "here", "pid": 2**22 + 1, "token": "t"}))
    started = [start(code, tmp_path) for _ in range(5)]
    answers = sorted(process.stdout.readline().strip() for process in started)
    for process in started:
        process.communicate("")
    assert answers == ["got"] + ["refused"] * 4


def test_a_folder_that_is_emptied_under_its_owner_is_locked_again(tmp_path):
    held = lease.take(tmp_path)
    (tmp_path / lease.NAME).unlink()
    lease.check()
    assert f"in use by process {os.getpid()}" in refusal(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_whose_file_was_deleted_does_not_write_beside_the_next_one(tmp_path):
    held = lease.take(tmp_path)
    (tmp_path / lease.NAME).unlink()
    with holding(tmp_path) as second:
        with pytest.raises(RunError, match=f"taken over by process {second.pid} on .*writes nothing more"):
            lease.check()
        held.release()
        assert content(tmp_path)["pid"] == second.pid


def test_where_there_are_no_locks_the_run_says_so_and_takes_the_folder(tmp_path, monkeypatch, capsys):
    def flock(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")  # such a file system can not be mounted in a test

    monkeypatch.setattr(fcntl, "flock", flock)
    held = lease.take(tmp_path)
    assert "has no locks. Start no other run in it meanwhile" in capsys.readouterr().err
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []
