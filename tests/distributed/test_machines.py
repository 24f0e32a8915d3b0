"""The presets for several machines, started as such: two launchers on loopback that meet at an address and a port."""

import json
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_dist_ext import failures
from hf_dist_ext.errors import RunError
from tests.distributed import forked
from tests.launching import PRESETS, ROOT, environment, hold_port

WORKER = ROOT / "tests" / "parity" / "exactness_worker.py"
CASES = ["chunk 4, does not divide", "accumulation, temperature"]


def run_on_two(preset: str, processes: int, *options: str) -> None:
    """Processes in all, which must end well."""
    holder, port = hold_port()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(PRESETS / f"{preset}.yaml")]
    command += ["--num_machines", "2", "--num_processes", str(processes), "--main_process_ip", "127.0.0.1"]
    command += ["--main_process_port", str(port)]
    machines = [
        subprocess.Popen(
            [*command, "--machine_rank", str(machine), *options],
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
    assert [machine.returncode for machine in machines] == [0, 0], "".join(text[-4000:] for text in printed)


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


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_in_vain_for_its_group_says_where_and_what_to_check(monkeypatch, capsys, rank):
    holder, port = hold_port()
    said = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    holder.close()
    with pytest.raises(RunError, match=f"the 2 processes did not meet at 127.0.0.1:{port}: .*SOCKET_IFNAME"):
        with failures.joining():
            dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    where = f"hf-dist: 2 processes of several machines meet at 127.0.0.1:{port}"
    assert (where in capsys.readouterr().err) == (rank == 0)


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
