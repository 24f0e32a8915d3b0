"""How many bytes per second the processes of a run send each other: what the plan's --network_gbps wants.

    accelerate launch --config_file configs/accelerate/multi_node_ddp.yaml ... --module hf_dist_ext.tasks.links

An all-reduce of 64 MiB is timed a few times over all processes. Between machines the slowest link is a machine's own,
which its processes share; in one machine it is that between devices.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from accelerate import PartialState

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error, joining
from hf_dist_ext.strategies import collectives

MIB, TIMES = 64, 5


def gbps(seconds: float, size: int, processes: int, processes_here: int) -> float:
    """Gbit/s that a machine sends in an all-reduce of `size` bytes, of a process where all are on one machine. Rings
    send 2 (n - 1) / n of the bytes for n members: machines, where there are several."""
    members = processes // processes_here
    members = processes if members == 1 else members
    return 2 * (members - 1) / members * size * 8 / seconds / 1e9


def main() -> None:
    with exit_on_usage_error():
        if launched.processes() == 1:
            raise UsageError(
                "links are between processes, and one was started. Start it with accelerate launch --config_file "
                "configs/accelerate/multi_gpu_ddp.yaml --num_processes 2 --module hf_dist_ext.tasks.links."
            )
        with joining():
            state = PartialState(cpu=collectives.must_use_cpu())
        data = torch.ones(MIB * 2**18, device=state.device)
        taken = []
        for _ in range(TIMES + 1):
            state.wait_for_everyone()
            began = time.perf_counter()
            dist.all_reduce(data)
            data[:1].tolist()  # an accelerator has then finished
            taken.append(time.perf_counter() - began)
        here = launched.processes_here(launched.processes())
        found = gbps(sorted(taken[1:])[TIMES // 2], data.nbytes, launched.processes(), here)
        if state.is_main_process:
            machines = launched.processes() // here
            option = f"--network_gbps {found:.3g}" if machines > 1 else f"{found:.3g} Gbit/s between two devices"
            print(f"{launched.processes()} processes on {machines} machine(s), {dist.get_backend()}: {option}")
        state.destroy_process_group()


if __name__ == "__main__":
    main()
