"""Real launches for tests: accelerate's own launcher, the shipped presets, gloo processes on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ROOT / "configs" / "accelerate"


def environment(**more: str) -> dict[str, str]:
    """One thread per process (they share the machine), nothing fetched, the checkout importable."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("ACCELERATE_", "FSDP_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    } | more  # fmt: skip


def hold_port() -> tuple[socket.socket, int]:
    """A port of 127.0.0.1 for processes that will meet there, and a socket that holds it until it is closed.

    The socket does not listen, so that a process that is told the port may; the system gives it to none that asks for
    any port, as the other workers of the tests do all the time.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a store of torch sets it too
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]


def launch(
    preset: str, num_processes: int, script: str | Path, *arguments: str, timeout: int = 600, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with a preset by name; "python" runs the script without a launcher."""
    holder, port = hold_port()
    command = [sys.executable]
    if preset != "python":
        command += ["-m", "accelerate.commands.launch", "--config_file", str(PRESETS / f"{preset}.yaml")]
        command += ["--num_processes", str(num_processes), "--main_process_port", str(port)]
    with holder:
        done = subprocess.run(
            [*command, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(),
            cwd=ROOT,
        )
    if check and done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done
