"""The presets for several machines, started as such: two launchers on loopback that meet at an address and a port."""

import json
import socket
import subprocess
import sys

import pytest

from tests.launching import PRESETS, ROOT, environment

WORKER = ROOT / "tests" / "parity" / "exactness_worker.py"
CASES = ["chunk 4, does not divide", "accumulation, temperature"]


def run_on_two(preset: str, processes: int, *options: str) -> list[str]:
    """Processes in all -> what the launchers printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(PRESETS / f"{preset}.yaml")]
    command += ["--num_machines", "2", "--num_processes", str(processes), "--main_process_ip", "127.0.0.1"]
    command += ["--main_process_port", port]
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
    assert [machine.returncode for machine in machines] == [0, 0], "".join(text[-4000:] for text in printed)
    return printed


@pytest.mark.parametrize(
    "preset, processes, options",
    [
        ("multi_node_ddp", 2, []),
        pytest.param("multi_node_hsdp", 4, ["--parallelism_config_dp_shard_size", "2"], marks=pytest.mark.slow),
    ],
)
def test_two_machines_have_the_full_batch_gradients(preset, processes, options, tmp_path):
    output = tmp_path / "found.json"
    run_on_two(preset, processes, *options, str(WORKER), "--output", str(output), "--names", *CASES)
    found = json.loads(output.read_text())
    assert set(found) == set(CASES)
    for name, entry in found.items():
        assert entry["error"] <= entry["tolerance"], (name, entry)
