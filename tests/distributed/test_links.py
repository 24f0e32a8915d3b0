"""The bandwidth check prints what the plan takes, over real processes."""

import re
import subprocess
import sys

import pytest

from hf_dist_ext.tasks.links import gbps
from tests.launching import PRESETS, ROOT, environment


def test_a_machine_sends_a_ring_s_share_of_an_all_reduce():
    assert gbps(1.0, 10**9, processes=2, processes_here=2) == pytest.approx(8.0)  # (n - 1) / n twice
    assert gbps(1.0, 10**9, processes=16, processes_here=8) == pytest.approx(8.0)  # two machines, whatever is inside
    assert gbps(0.5, 10**9, processes=4, processes_here=4) == pytest.approx(24.0)


@pytest.mark.parametrize("processes", [1, 2])
def test_links_are_measured_between_processes(processes):
    words = [sys.executable, "-m", "hf_dist_ext.tasks.links"]
    if processes == 2:
        words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        words += [str(PRESETS / "multi_gpu_ddp.yaml"), "--num_processes", "2", "--module", "hf_dist_ext.tasks.links"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, cwd=ROOT)
    if processes == 1:
        assert ended.returncode == 2 and "one was started" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
        assert re.search(r"^2 processes on 1 machine\(s\), gloo: [\d.e+-]+ Gbit/s", ended.stdout, re.MULTILINE)
