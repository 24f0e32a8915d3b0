"""One run per folder: refused while the owner lives, taken over when it is gone, removed at the end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist_ext import lease
from hf_dist_ext.errors import UsageError
from tests.launching import ROOT, environment

HOLD = "import sys, time; from hf_dist_ext import lease; lease.take(sys.argv[1]); print('held', flush=True); "
HOLD += "time.sleep(60)"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


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
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_when_the_process_ends(tmp_path):
    done = [sys.executable, "-c", HOLD.replace("time.sleep(60)", "1"), str(tmp_path)]
    subprocess.run(done, check=True, env=environment(), cwd=ROOT)
    assert list(tmp_path.iterdir()) == []


def test_another_host_counts_as_gone_only_without_heartbeats(tmp_path, monkeypatch):
    owner = {"host": "elsewhere", "pid": 1, "token": "t", "since": "then"}
    path = tmp_path / lease.NAME
    path.write_text(json.dumps(owner))
    with pytest.raises(UsageError, match="process 1 on elsewhere since then"):
        lease.take(tmp_path)
    long_ago = time.time() - lease.STALE_SECONDS - 5
    os.utime(path, (long_ago, long_ago))
    lease.take(tmp_path).release()
    assert not path.exists()


def test_a_heartbeat_renews_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.05)
    held = lease.take(tmp_path)
    os.utime(tmp_path / lease.NAME, (1, 1))
    for _ in range(100):
        time.sleep(0.05)
        if lease._age(tmp_path / lease.NAME) < 60:
            break
    assert lease._age(tmp_path / lease.NAME) < 60
    held.release()


def test_a_number_that_another_process_got_meanwhile_is_not_the_owner(tmp_path):
    (tmp_path / lease.NAME).write_text(
        json.dumps({"host": lease.socket.gethostname(), "pid": os.getppid(), "started": 1.0, "token": "t"})
    )
    lease.take(tmp_path).release()


def test_rank_0_makes_the_launchers_lease_its_own(tmp_path, holder, monkeypatch):
    monkeypatch.setenv(lease.TOKEN, content(tmp_path)["token"])
    held = lease.take(tmp_path)
    assert content(tmp_path)["pid"] == os.getpid()
    held.release()
    assert not (tmp_path / lease.NAME).exists()


def test_of_many_that_start_at_once_one_gets_it(tmp_path):
    code = "import sys; from hf_dist_ext import lease, errors\n"
    code += "try:\n    lease.take(sys.argv[1]); print('got', flush=True); sys.stdin.read()\n"
    code += "except errors.UsageError: print('refused', flush=True)"
    dead = {"host": lease.socket.gethostname(), "pid": 2**22 + 1, "started": 1.0, "token": "t"}
    (tmp_path / lease.NAME).write_text(json.dumps(dead))
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    started = [subprocess.Popen(command, **pipes) for _ in range(5)]
    answers = sorted(process.stdout.readline().strip() for process in started)
    for process in started:
        process.communicate("")
    assert answers == ["got"] + ["refused"] * 4
