"""The presets for several machines, started as such: two launchers on loopback that meet at an address and a port."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hf_dist_ext import failures
from hf_dist_ext.errors import RunError, UsageError
from tests.distributed import forked
from tests.launching import PRESETS, ROOT, environment, hold_port
from tests.tiny_models import model_config, tiny_pairs

WORKER = ROOT / "tests" / "parity" / "exactness_worker.py"
CASES = ["chunk 4, does not divide", "accumulation, temperature"]


def run_on_two(
    preset: str, processes: int, *options: str, on_second: Sequence[str] = (), codes: Sequence[int] = (0, 0)
) -> list[str]:
    """Processes in all -> what the launchers printed."""
    holder, port = hold_port()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(PRESETS / f"{preset}.yaml")]
    command += ["--num_machines", "2", "--num_processes", str(processes), "--main_process_ip", "127.0.0.1"]
    command += ["--main_process_port", str(port)]
    machines = [
        subprocess.Popen(
            [*command, "--machine_rank", str(machine), *options, *(on_second if machine else ())],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        for machine in range(2)
    ]
    try:
        printed = [machine.communicate(timeout=300)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
        holder.close()
    assert [machine.returncode for machine in machines] == list(codes), "".join(text[-4000:] for text in printed)
    return printed


MEETS = """
import json, os, sys
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")])
if dist.get_rank() == 0:
    of_preset = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    Path(sys.argv[1]).write_text(json.dumps([ranks, of_preset]))
dist.barrier()
dist.destroy_process_group()
"""


def test_processes_of_two_machines_meet(tmp_path):
    script, output = tmp_path / "meets.py", tmp_path / "found.json"
    script.write_text(MEETS)
    run_on_two("multi_node_ddp", 2, str(script), str(output))
    ranks, of_preset = json.loads(output.read_text())
    assert ranks == [["0", "0", "0"], ["1", "0", "1"]]
    assert of_preset and of_preset == {name: forked.of_preset("multi_gpu_ddp", 2).get(name) for name in of_preset}


@pytest.mark.parametrize("words, said", [
    (["--lerning_rate", "1"], 'Unknown field "lerning_rate"'),
    pytest.param(["--dataset_name", "gone.jsonl"], "gone.jsonl is no file or folder here", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_machine_that_fails_early_ends_the_others_with_its_words(tmp_path, words, said):
    fields = tiny_pairs(tmp_path) | {"model_config": model_config("bert"), "output_dir": str(tmp_path / "out")}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    script = str(ROOT / "scripts" / "train_hf.py")
    options = [script, "--config", str(tmp_path / "run.json"), "--max_steps", "1"]
    first, second = run_on_two("multi_node_ddp", 2, *options, on_second=words, codes=(1, 1))
    (line,) = [line for line in first.splitlines() if line.startswith("error")]
    assert line.startswith("error: rank 1 on ") and "ended before the run began: " in line and said in line, first
    assert said in second and "[E" not in first and "gloo" not in first.replace("over gloo", ""), first
    assert not (tmp_path / "out").exists()


def test_a_mistake_is_said_also_where_the_store_of_machine_0_is_gone(monkeypatch, capsys):
    def is_gone():
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(failures, "_shared_store", is_gone)
    monkeypatch.setattr(failures, "_may_fail_early", True)
    with pytest.raises(SystemExit), failures.exit_on_usage_error():
        raise UsageError("there is no such field")
    assert capsys.readouterr().err == "error: there is no such field\n"
    with pytest.raises(RunError, match="the launcher of machine 0 ended"):
        failures.meet()


def test_who_waits_says_for_how_many_machines_and_not_for_ever(monkeypatch, capsys):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    said |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(failures, "FIRST_SECONDS", 0)
    monkeypatch.setattr(failures, "MEET_SECONDS", 2)
    seconds = itertools.count()  # each look at the clock takes one
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    store.set(f"{failures.MEETING}/1", "here")
    with pytest.raises(RunError, match=f"1 of 2 machines did not come to 127.0.0.1:{store.port}.*SOCKET_IFNAME"):
        failures.meet()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"hf-dist: waiting for 2 machines at 127.0.0.1:{store.port}, 1 came, ")
    assert len(said) == 1  # and not again before SAY_SECONDS


JOINS = """
from hf_dist_ext import failures
failures.FIRST_SECONDS, failures.SAY_SECONDS, failures.MEET_SECONDS = 1, 1, {limit}
from hf_dist_ext.train import main
main()
"""


@pytest.mark.parametrize("comes", [False, True])
def test_a_process_that_waits_for_its_group_says_so_and_what_to_check(tmp_path, comes):
    """Without torchrun's store nobody counts machines, as where a scheduler starts the processes."""
    fields = tiny_pairs(tmp_path) | {"model_config": model_config("bert"), "output_dir": str(tmp_path / "out")}
    fields |= {"max_steps": 1, "use_cpu": True, "report_to": "none"}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    (tmp_path / "joins.py").write_text(JOINS.format(limit=250 if comes else 10))
    holder, port = hold_port()

    def start(rank: int) -> subprocess.Popen:
        said = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        command = [sys.executable, str(tmp_path / "joins.py"), "--config", str(tmp_path / "run.json")]
        return subprocess.Popen(
            command, env=environment() | said, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )

    first, others, waiting = start(0), [], f"hf-dist: waiting for all 2 processes at 127.0.0.1:{port}, "
    try:
        heard = []
        while not (heard and heard[-1].startswith(waiting)):
            assert (line := first.stdout.readline()), "".join(heard)
            heard.append(line)
        others = [start(1)] if comes else []
        rest = first.communicate(timeout=300)[0]
    finally:
        for one in [first, *others]:
            one.kill()
        holder.close()
    if comes:
        assert first.returncode == 0 and "devices 2 x cpu, ddp, gloo, float32" in rest
    else:
        assert first.returncode == 1 and "did not meet within 10 s" in rest and "SOCKET_IFNAME" in rest


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, processes, options",
    [("multi_node_ddp", 2, []), ("multi_node_hsdp", 4, ["--parallelism_config_dp_shard_size", "2"])],
)
def test_two_machines_have_the_full_batch_gradients(preset, processes, options, tmp_path):
    output = tmp_path / "found.json"
    run_on_two(preset, processes, *options, str(WORKER), "--output", str(output), "--names", *CASES)
    found = json.loads(output.read_text())
    assert set(found) == set(CASES)
    for name, entry in found.items():
        assert entry["error"] <= entry["tolerance"], (name, entry)
