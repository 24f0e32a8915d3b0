"""One run per folder: refused while the owner lives, taken over when it is gone, removed at the end."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
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


def start(code: str, folder: Path, *before: str, **more: str) -> subprocess.Popen:
    command = [*before, sys.executable, "-c", code, str(folder)]
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


def refusal(folder: Path, *before: str, **more: str) -> str:
    """What a second run says that is refused."""
    second = start(HOLD, folder, *before, **more)
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


def test_it_is_removed_when_the_process_ends(tmp_path):
    with holding(tmp_path) as process:
        process.communicate("", timeout=300)
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


NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"]).returncode != 0,
    reason="no process namespace of one's own is allowed here",
)
def test_a_run_in_another_process_namespace_is_refused_too(tmp_path):
    first = start(HOLD, tmp_path, *NAMESPACE)
    try:
        assert first.stdout.readline() == "held\n" and content(tmp_path)["pid"] == 1
        for other in (NAMESPACE, ()):
            assert "in use by process 1 on" in refusal(tmp_path, *other)
        first.communicate("", timeout=300)
        with holding(tmp_path):
            pass
    finally:
        first.kill()
        first.communicate()


def test_rank_0_shares_the_lease_of_its_launcher_and_keeps_it_when_the_launcher_is_killed(tmp_path, holder):
    with holding(tmp_path, **{lease.TOKEN: content(tmp_path)["token"]}) as rank_0:
        assert content(tmp_path)["pid"] == rank_0.pid
        holder.kill()
        holder.wait()
        with pytest.raises(UsageError, match=f"in use by process {rank_0.pid}"):
            lease.take(tmp_path)
        rank_0.communicate("", timeout=300)
    assert not (tmp_path / lease.NAME).exists()


def test_a_token_that_no_launcher_wrote_there_shares_nothing(tmp_path):
    """Two runs that a process of a third run has started, for one folder."""
    with holding(tmp_path, **{lease.TOKEN: "of another folder"}) as first:
        assert content(tmp_path)["token"] != "of another folder"
        words = refusal(tmp_path, **{lease.TOKEN: "of another folder"})
        assert f"in use by process {first.pid}" in words
        first.communicate("", timeout=300)


def test_the_launcher_keeps_the_lease_when_rank_0_has_ended(tmp_path, holder):
    with holding(tmp_path, **{lease.TOKEN: content(tmp_path)["token"]}) as rank_0:
        rank_0.communicate("", timeout=300)
    with pytest.raises(UsageError, match="in use by process"):
        lease.take(tmp_path)
    holder.communicate("", timeout=300)
    assert not (tmp_path / lease.NAME).exists()


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


@pytest.mark.parametrize(
    ("kind", "options", "is_local"),
    [
        ("ext4", "rw", False), ("nfs4", "rw,vers=4.2,local_lock=none", False), ("nfs", "rw,local_lock=all", True),
        ("nfs", "rw,nolock", True), ("lustre", "rw,flock", False), ("lustre", "rw,localflock", True),
        ("fuse.gcsfuse", "rw", True), ("fuseblk", "rw", False), ("virtiofs", "rw", True),
    ],
)  # fmt: skip
def test_locks_that_other_hosts_do_not_see_are_known_by_their_mount(kind, options, is_local):
    assert lease.is_of_one_host(kind, options) == is_local


def test_where_locks_do_not_reach_other_hosts_the_run_says_so_and_takes_the_folder(tmp_path, monkeypatch, capsys):
    def flock(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")  # such a file system can not be mounted in a test

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        held = lease.take(tmp_path)
        assert "has no locks that other hosts see. Start no other run" in capsys.readouterr().err
        held.check()
        held.release()
    assert list(tmp_path.iterdir()) == []
    lease.take(tmp_path).release()
    assert not capsys.readouterr().err
    monkeypatch.setattr(lease, "is_of_one_host", lambda kind, options: True)
    lease.take(tmp_path).release()
    assert "has no locks that other hosts see" in capsys.readouterr().err
