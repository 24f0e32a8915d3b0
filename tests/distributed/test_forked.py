"""Forked processes stand for launched ones (forked.py): here every preset is launched, and hands on the same."""

import json
import os
import signal
import socket
import subprocess
import time

import pytest
import torch.distributed as dist
from tqdm import auto, tqdm
from tqdm.std import TqdmDefaultWriteLock

from tests.distributed.forked import Run, of_preset
from tests.launching import environment, hold_port, launch

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")


@pytest.mark.parametrize(("preset", "num_processes"), [
    ("multi_gpu_ddp", 2), ("multi_gpu_fsdp", 2), ("multi_gpu_fsdp_frozen_replicated", 2),
    ("multi_gpu_fsdp_offload", 2), ("multi_gpu_hsdp", 4), ("multi_gpu_tp", 2), ("multi_gpu_pp", 2),
])  # fmt: skip
def test_forked_processes_have_the_environment_of_a_real_launch(preset, num_processes, tmp_path):
    script = tmp_path / "says_its_environment.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(dict(os.environ)))\n"
    )
    launch(preset, num_processes, script, str(tmp_path))
    before, forked = environment(), of_preset(preset, num_processes)
    assert any(name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")) for name in forked)
    for rank in range(num_processes):
        launched = json.loads((tmp_path / str(rank)).read_text())
        assert (launched["RANK"], launched["WORLD_SIZE"]) == (str(rank), str(num_processes))
        given = {name: value for name, value in launched.items() if before.get(name) != value}
        assert {name: value for name, value in given.items() if not name.startswith(OF_TORCHRUN)} == forked


@pytest.mark.parametrize("bars", [tqdm, auto.tqdm], ids=["tqdm", "a subclass with a lock of its own"])
def test_a_killed_process_keeps_no_lock_from_the_next(tmp_path, monkeypatch, bars):
    """tqdm's locks are made once for a process and those that it forks."""
    monkeypatch.setattr(bars, "_lock", TqdmDefaultWriteLock(), raising=False)

    def hold(say) -> str:
        bars.get_lock().acquire()
        say("held")
        time.sleep(60)
        return ""

    killed = Run("single", tmp_path / "killed", hold)
    killed.lines.readline()
    os.kill(killed.pids[0], signal.SIGKILL)
    killed.wait()
    following = Run("single", tmp_path / "next", lambda say: str(bars.get_lock().acquire(timeout=10)))
    assert following.lines.readline().strip() == "True"
    following.wait()


def test_another_child_of_the_process_that_was_killed_is_not_taken_for_one_of_the_run(tmp_path):
    other = subprocess.Popen(["sleep", "60"])
    other.kill()
    time.sleep(0.5)  # ended, and nobody has waited for it
    assert Run("ddp", tmp_path / "log", lambda say: str(time.sleep(0.1))).result() == "None"
    assert other.wait() == -signal.SIGKILL


def test_a_process_that_crashes_says_how_and_where(tmp_path):
    with pytest.raises(AssertionError, match=rf"(?s)rank 0 ended with -{signal.SIGSEGV.value}\n.*test_forked.py"):
        Run("single", tmp_path / "log", lambda say: os.kill(os.getpid(), signal.SIGSEGV)).result()


def test_a_port_that_is_held_is_for_those_who_were_told_it():
    holder, port = hold_port()
    with holder:
        for _ in range(2):  # one after the other
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            dist.TCPStore("127.0.0.1", port, is_master=False).set("here", "yes")
            assert store.get("here") == b"yes"
            del store
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port))  # as the system tries it for a process that asks for any port
