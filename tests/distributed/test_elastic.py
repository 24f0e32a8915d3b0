"""A group that is restarted after a death resumes by itself, on fewer processes too, and every row is seen."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hf_dist_ext import failures
from hf_dist_ext.strategies import collectives, consensus
from tests.distributed import elastic_worker
from tests.distributed.forked import Run
from tests.launching import PRESETS, ROOT, environment, hold_port

WORKER = Path(__file__).with_name("elastic_worker.py")


def lives(folder: Path) -> tuple[list[dict], list[dict]]:
    """What the ranks of the first life and of the second one did."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("life_*.json"))]
    began = sorted({life["began_at"] for life in found})
    assert len(began) == 2 and began[0] == 0 and began[1] > 0
    return [life for life in found if life["began_at"] == 0], [life for life in found if life["began_at"]]


def check_rows(folder: Path) -> None:
    """Steps of the first life that the second began behind, and all of the second: every row once per epoch."""
    first, second = lives(folder)
    kept = [rows for life in first for step, rows in life["steps"].items() if int(step) <= second[0]["began_at"]]
    kept += [rows for life in second for rows in life["steps"].values()]
    assert Counter(row for rows in kept for row in rows) == Counter(list(range(32)) * 2)
    assert max(int(step) for step in second[0]["steps"]) == 8
    assert json.loads((folder / "end_0.json").read_text()) == 8


def live(say, folder: Path, dies: str) -> str:
    sys.argv = ["elastic_worker.py", "--folder", str(folder), "--dies", dies]
    elastic_worker.main()
    return "ended well"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_life_goes_on_from_the_newest_checkpoint(tmp_path, processes):
    """Without a launcher: two processes die as their machine does, and are started again."""
    died = Run("ddp", tmp_path / "first", partial(live, folder=tmp_path, dies="rank1"))
    assert not died.wait()
    mode = {1: "single", 2: "ddp"}[processes]
    assert Run(mode, tmp_path / "second", partial(live, folder=tmp_path, dies="rank1")).result() == "ended well"
    first, second = lives(tmp_path)
    assert [life["world_size"] for life in first] == [2, 2]
    assert [life["world_size"] for life in second] == [processes] * processes
    check_rows(tmp_path)


def save_over(port: int, name: str, say) -> str:
    """What ranks do around a save, in a group whose processes share a store with those before them."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    options = {"store": dist.PrefixStore(name, store), "rank": int(os.environ["RANK"]), "world_size": 2}
    dist.init_process_group("gloo", **options)
    dist.distributed_c10d._get_default_store = lambda: store  # a launcher gives it to every group that it starts
    with consensus.ends_together("a save", seconds=300):
        pass
    notes = failures.exchange_notes(collectives.store_of_group(), f"of {name}") if name == "first" else {}
    late = collectives.store_of_group()
    collectives.exchange([0])
    return json.dumps([len(notes), late.check(["stuck/1"]) if name == "second" else None])


def test_a_group_that_a_launcher_starts_over_does_not_read_what_the_one_before_wrote(tmp_path, monkeypatch):
    """A machine that joins restarts all processes, and the count of restarts stays what it was."""
    monkeypatch.setattr(failures, "time", SimpleNamespace(sleep=lambda _: dist.barrier(), monotonic=time.monotonic))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = [
        json.loads(Run("ddp", tmp_path / name, partial(save_over, store.port, name)).result())
        for name in ("first", "second")
    ]
    assert found == [[2, None], [0, False]]


@pytest.mark.slow  # the next one restarts too, and more
def test_accelerate_launch_with_max_restarts_goes_on_from_the_newest_checkpoint(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--max_restarts", "1", "--monitor_interval", "0.5"]
    command += ["--config_file", str(PRESETS / "multi_gpu_ddp.yaml"), "--num_processes", "2", str(WORKER)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=200, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = lives(tmp_path)
    assert [life["world_size"] for life in [*first, *second]] == [2, 2, 2, 2]
    check_rows(tmp_path)


@pytest.mark.slow
def test_torchrun_goes_on_with_one_machine_when_the_other_is_gone(tmp_path):
    """Two launchers on loopback are two machines; the second dies with its process."""
    holder, port = hold_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1"]
    command += ["--max_restarts", "2", "--monitor_interval", "0.5", "--rdzv_id", "test", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]
    quick = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    work = [str(WORKER), "--folder", str(tmp_path), "--dies"]
    machines, options = [], {"stderr": subprocess.STDOUT, "env": environment(), "cwd": ROOT}
    try:
        # is_host: the meeting point is on the machine that stays.
        for name, is_host, dies in (("first", 1, "nobody"), ("second", 0, "machine")):
            started = [*command, "--rdzv_conf", f"is_host={is_host},{quick}", *work, dies]
            with (tmp_path / f"{name}.log").open("w") as log:
                machines.append(subprocess.Popen(started, stdout=log, **options))
        codes = sorted(machine.wait(timeout=240) for machine in machines)
    finally:
        for machine in machines:
            machine.kill()
        holder.close()
    logs = "\n".join((tmp_path / f"{name}.log").read_text()[-4000:] for name in ("first", "second"))
    assert codes == [-9, 0], logs
    first, second = lives(tmp_path)
    assert [life["world_size"] for life in first] == [2, 2] and [life["world_size"] for life in second] == [1]
    check_rows(tmp_path)
