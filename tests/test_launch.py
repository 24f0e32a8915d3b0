"""From a run to its processes: who is started, what is refused, and that exit codes and signals come back."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist_ext import cli, launch
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.planner import devices as planner_devices
from hf_dist_ext.run.presets import find_preset
from hf_dist_ext.run.read import load_run

MINIMAL = {"dataset_name": "code-search", "model_config": {"model_type": "bert"}}
LAUNCHER_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE ACCELERATE_DYNAMO_MODE ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED "
    "ACCELERATE_USE_CPU FSDP_VERSION SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE PMI_SIZE CUDA_VISIBLE_DEVICES "
    "HIP_VISIBLE_DEVICES HF_HUB_OFFLINE HF_DIST_DEBUG"
).split() + [launch.HANDED_OVER]


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """make_run(key=value): a loaded run, in a folder and an environment without a launcher."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the code under test sets is undone
        monkeypatch.delenv(name)

    def make_run(**keys):
        Path("my_run.json").write_text(json.dumps(MINIMAL | keys), encoding="utf-8")
        return load_run(["--config", "my_run.json"])

    return make_run


@pytest.fixture
def devices(monkeypatch):
    """devices(n): a machine with n visible GPUs."""
    return lambda count: monkeypatch.setattr(launch, "count_devices", lambda: count)


@pytest.mark.parametrize(
    ("keys", "visible", "kind", "processes"),
    [
        ({}, 0, "NO", 1),
        ({}, 1, "NO", 1),
        ({}, 4, "MULTI_GPU", 4),
        ({"accelerate_config": "auto"}, 4, "MULTI_GPU", 4),
        ({"accelerate_config": "auto", "num_processes": 2}, 4, "MULTI_GPU", 2),
        ({"num_processes": 3}, 0, "MULTI_GPU", 3),
        ({"num_processes": 1}, 4, "NO", 1),
        ({"accelerate_config": "single"}, 4, "NO", 1),
        ({"accelerate_config": "ddp"}, 0, "MULTI_GPU", 2),
        ({"accelerate_config": "ddp"}, 1, "MULTI_GPU", 1),
        ({"accelerate_config": "fsdp"}, 8, "FSDP", 8),
        ({"accelerate_config": "fsdp2", "num_processes": 3}, 0, "FSDP", 3),
        ({"accelerate_config": "hsdp"}, 0, "FSDP", 4),  # the mesh, 2 x 2
        ({"accelerate_config": "hsdp"}, 8, "FSDP", 4),
        ({"accelerate_config": "fsdp", "fsdp": True}, 2, "FSDP", 2),
        ({"accelerate_config": "fsdp", "sharding": "SHARD_GRAD_OP"}, 1, "FSDP", 1),
        ({"accelerate_config": "fsdp", "sharding": "NO_SHARD", "ddp_comm_hook": "fp16"}, 2, "FSDP", 2),
    ],
)
def test_the_plan_follows_the_run_file_and_the_devices(make_run, keys, visible, kind, processes):
    plan = launch.plan_launch(make_run(**keys), visible)
    assert (plan.kind, plan.num_processes) == (kind, processes)


@pytest.mark.parametrize(
    ("content", "keys", "visible", "processes"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 3}, {}, 4, 3),
        ({"distributed_type": "MULTI_GPU", "num_processes": 3}, {"num_processes": 2}, 4, 2),
        ({"distributed_type": "MULTI_GPU"}, {}, 4, 4),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0,2"}, {}, 4, 2),
        ({"distributed_type": False}, {}, 4, 1),
    ],
)
def test_a_file_of_the_user_s_own_says_its_number_of_processes(make_run, content, keys, visible, processes):
    Path("mine.yaml").write_text(json.dumps(content), encoding="utf-8")
    run = make_run(accelerate_config="mine.yaml", **keys)
    assert launch.plan_launch(run, visible).num_processes == processes


@pytest.mark.parametrize(
    ("content", "keys", "visible", "words"),
    [
        (None, {"num_processes": 4}, 2, "4 processes .* 2 GPU"),
        (None, {"accelerate_config": "ddp", "num_processes": 2}, 1, "1 GPU"),
        (None, {"accelerate_config": "single", "num_processes": 2}, 4, "num_processes=2.*one process"),
        (None, {"accelerate_config": "nonsense"}, 0, "no preset.*multi_gpu_ddp"),
        (None, {"fsdp": True}, 0, "multi_gpu_fsdp"),
        (None, {"fsdp": True, "accelerate_config": "ddp"}, 0, "multi_gpu_fsdp"),
        (None, {"sharding": "FULL_SHARD", "accelerate_config": "ddp"}, 2, "no meaning without FSDP.*multi_gpu_fsdp"),
        (None, {"cpu_offload": True, "accelerate_config": "single"}, 2, "cpu_offload=True has no meaning without"),
        (None, {"ddp_comm_hook": "fp16", "accelerate_config": "fsdp"}, 2, "FSDP, which scatters.*multi_gpu_ddp"),
        (None, {"ddp_comm_hook": "fp16", "accelerate_config": "tp"}, 4, "tensor parallelism, which reduces"),
        (None, {"ddp_comm_hook": "fp16", "accelerate_config": "ddp"}, 1, "one process, which sends no gradients"),
        ({"distributed_type": "MULTI_CPU"}, {}, 0, "MULTI_CPU.*multi_gpu_ddp"),
        ({"distributed_type": "FSDP"}, {}, 0, "FSDP version 1.*fsdp_version: 2"),
        ({"distributed_type": "DEEPSPEED"}, {}, 2, "pip install"),
        ({"distributed_type": "MULTI_GPU", "num_machines": 2}, {}, 2, "2 machines.*accelerate launch"),
    ],
)
def test_what_cannot_run_is_refused_before_any_process_exists(make_run, monkeypatch, content, keys, visible, words):
    monkeypatch.setattr(launch.deepspeed_install, "find_spec", lambda name: None)
    if content:
        Path("mine.yaml").write_text(json.dumps(content), encoding="utf-8")
        keys = {"accelerate_config": "mine.yaml", **keys}
    with pytest.raises(UsageError, match=words) as caught:
        launch.plan_launch(make_run(**keys), visible)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "mask", "visible"),
    [(4, None, 4), (4, "", 0), (4, "-1", 0), (4, "2", 1), (4, "0, 3", 2), (4, "0,9,1", 1), (4, "GPU-a,GPU-b", 2)]
    + [(1, "MIG-a,MIG-b", 2), (0, "0,1", 0), (2, "0,-1,1", 1)],
)
def test_masks_are_read_as_the_driver_reads_them(installed, mask, visible):
    assert planner_devices._count_visible(installed, mask) == visible


def test_devices_are_counted_from_the_driver(monkeypatch, tmp_path):
    listing = "GPU 0: One (UUID: GPU-a)\nGPU 1: Two (UUID: GPU-b)\n  MIG 1g: (UUID: MIG-c)\n"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nprintf '%s' '{listing}'\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(planner_devices.importlib.metadata, "version", lambda name: "2.13.0")
    assert planner_devices.count_devices() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert planner_devices.count_devices() == 1
    monkeypatch.setattr(planner_devices.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert planner_devices.count_devices() == 0


@pytest.mark.parametrize(("mask", "kept"), [(None, "0"), ("3,1", "3"), ("GPU-a,GPU-b", "GPU-a")])
def test_one_process_keeps_one_of_several_gpus_so_that_data_parallel_cannot_happen(
    make_run, devices, monkeypatch, capsys, mask, kept
):
    devices(2)
    if mask:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    launch.hand_over_if_needed(make_run(accelerate_config="single"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == kept and "first of 2" in capsys.readouterr().err


def test_accelerate_s_single_process_keeps_one_gpu_too(make_run, devices, monkeypatch):
    devices(2)
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    launch.hand_over_if_needed(make_run())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_cpu_asked_for_hides_no_gpu_and_starts_one_process(make_run, devices):
    devices(4)
    launch.hand_over_if_needed(make_run(use_cpu=True))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_would_each_train_alone_are_refused(make_run, monkeypatch, name):
    monkeypatch.setenv(name, "4")
    with pytest.raises(UsageError, match="4 tasks .* alone"):
        launch.hand_over_if_needed(make_run())


DDP = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
FSDP2 = DDP | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FSDP1 = FSDP2 | {"FSDP_VERSION": "1"}
TP = DDP | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
TP |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "keys", "visible", "warnings"),
    [
        (DDP, {}, 2, []),
        (DDP, {"accelerate_config": "auto"}, 2, []),
        (DDP, {"accelerate_config": "ddp", "num_processes": 2}, 2, []),
        (FSDP2, {"accelerate_config": "fsdp"}, 2, []),
        (FSDP2, {"accelerate_config": "fsdp"}, 0, ["on the CPU over gloo"]),
        (DDP | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, {"accelerate_config": "ddp"}, 1, []),
        (DDP, {}, 8, ["2 of 8 visible GPUs"]),
        (DDP, {"accelerate_config": "fsdp"}, 2, ["started DDP on 2", 'asks for accelerate_config="multi_gpu_fsdp"']),
        (
            FSDP2,
            {"accelerate_config": "ddp"},
            2,
            ["started FSDP version 2", 'asks for accelerate_config="multi_gpu_ddp"'],
        ),
        (FSDP1, {"accelerate_config": "fsdp"}, 2, ["FSDP version 1", "(FSDP version 2)"]),
        (DDP, {"pipeline_parallel_size": 2}, 2, []),
        (
            DDP,
            {"accelerate_config": "fsdp", "pipeline_parallel_size": 2},
            2,
            ["started pipelines of 2 processes on 2", 'accelerate_config="multi_gpu_fsdp" (FSDP version 2)'],
        ),
        (
            TP,
            {"accelerate_config": "pp", "pipeline_parallel_size": 2},
            4,
            ["started pipelines of 2 groups of 2 processes on 4", '"multi_gpu_pp" (pipelines of 2 processes)'],
        ),
        (DDP, {"num_processes": 4}, 2, ["on 2 process", "asks for num_processes=4"]),
        (
            {"ACCELERATE_DYNAMO_MODE": "default"},
            {"accelerate_config": "ddp", "num_processes": 2},
            0,
            ["num_processes=2"],
        ),
        ({"ACCELERATE_DYNAMO_MODE": "default"}, {"accelerate_config": "fsdp"}, 1, ["started one process"]),
    ],
)
def test_under_a_launcher_a_difference_is_one_warning(
    make_run, devices, monkeypatch, capsys, env, keys, visible, warnings
):
    devices(visible)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    launch.hand_over_if_needed(make_run(**keys))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1 + ("warning" in "".join(lines) and visible == 0)
    assert bool(lines) == bool(warnings)
    for words in warnings:
        assert words in "\n".join(lines)


@pytest.mark.parametrize(
    ("env", "keys", "visible", "words"),
    [
        (FSDP1, {}, 0, "FSDP version 1"),
        (DDP, {}, 1, "2 processes .* 1 GPU.*--num_processes 1"),
        (DDP, {"fsdp": True}, 0, "multi_gpu_fsdp"),
        (DDP, {"accelerate_config": "nonsense"}, 2, "no preset"),
    ],
)
def test_under_a_launcher_what_cannot_work_is_an_error(make_run, devices, monkeypatch, env, keys, visible, words):
    devices(visible)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        launch.hand_over_if_needed(make_run(**keys))


def test_only_the_first_process_looks_at_the_output_dir(make_run, devices, monkeypatch):
    devices(0)
    run = make_run()
    Path("outputs/my_run").mkdir(parents=True)
    Path("outputs/my_run/metrics.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="metrics.json"):
        launch.hand_over_if_needed(run)  # plain python
    for name, value in DDP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="metrics.json"):
        launch.hand_over_if_needed(run)  # rank 0 of accelerate launch
    monkeypatch.setenv("RANK", "1")
    launch.hand_over_if_needed(run)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(launch.HANDED_OVER, "1")
    launch.hand_over_if_needed(run)  # rank 0 of our own hand-over, whose starter has looked


@pytest.mark.parametrize(
    "keys, words",
    [({"dataset_name": "gone.jsonl"}, "gone.jsonl"), ({"report_to": "trackio"}, "trackio"), ({"fsdp": True}, "shard")],
)
def test_an_occupied_output_dir_hides_no_other_mistake(make_run, devices, keys, words):
    devices(0)
    run = make_run(**keys)
    Path("outputs/my_run").mkdir(parents=True)
    Path("outputs/my_run/metrics.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        launch.hand_over_if_needed(run)


def test_train_starts_the_installed_module_in_every_process(make_run, monkeypatch):
    """No script lies beside an installed wheel."""
    make_run(accelerate_config="multi_gpu_ddp", num_processes=2)
    started = []
    monkeypatch.setattr(launch, "_run_launcher", lambda plan, devices, command: started.append(command) or 0)
    for words in (["my_run.json"], ["--config", "my_run.json"]):
        with pytest.raises(SystemExit) as done:
            cli.main(["train", *words, "--seed", "3"])
        assert done.value.code == 0
    assert started == [["--module", "hf_dist_ext.train", "--config", "my_run.json", "--seed", "3"]] * 2


# Real processes ------------------------------------------------------------------------------------------------------

LIMIT_SECONDS = 300  # for processes that hang; none should
SCRIPT = """
import os, sys, time
from pathlib import Path
from hf_dist_ext import failures
from hf_dist_ext.failures import exit_on_usage_error, first_error_only
from hf_dist_ext.run.read import load_run
from hf_dist_ext.errors import UsageError
from hf_dist_ext.launch import hand_over_if_needed

failures.SAME_ERROR_SECONDS = failures.SAME_LINE_SECONDS = 200  # for a rank 0 that starts late on a busy machine
with exit_on_usage_error():
    hand_over_if_needed(load_run(sys.argv[1:]))
    rank, mode = os.environ.get("RANK", "0"), os.environ.get("TEST_MODE")
    if mode == "usage":
        if rank == "0":
            time.sleep(1.5)  # the other has the error in an earlier second
        raise UsageError("nothing to train. Give more.")
    if mode == "crash" and rank == "1":
        sys.exit(7)
    if mode == "error":
        with first_error_only():
            if rank == "0":
                time.sleep(1.5)
            raise KeyError("broken")
    if mode:
        Path(f"pid{rank}").write_text(str(os.getpid()))
        time.sleep(600)
    names = ("WORLD_SIZE", "OMP_NUM_THREADS", "ACCELERATE_USE_FSDP", "FSDP_VERSION")
    # one write, between whose words the other rank's cannot come
    os.write(1, " ".join([f"rank {rank}:", *(str(os.environ.get(name)) for name in names)]).encode() + b"\\n")
"""


@pytest.fixture
def start(make_run):
    """start(arguments, mode, launcher words): the script as a process in its own group, without GPUs."""
    started = []
    Path("script.py").write_text(SCRIPT, encoding="utf-8")

    def start(*arguments, mode="", under=(), **keys):
        make_run(**keys)
        env = os.environ | {
            "TEST_MODE": mode,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(Path(launch.__file__).parents[1]),
        }
        env.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, *under, "script.py", "--config", "my_run.json", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, start_new_session=True, **streams))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_plain_python_hands_over_to_accelerate(start):
    process = start("--num_processes", "2", accelerate_config="fsdp")
    output, errors = process.communicate(timeout=LIMIT_SECONDS)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(output.splitlines()) == [f"rank {rank}: 2 {threads} true 2" for rank in (0, 1)]
    assert process.returncode == 0 and "multi_gpu_fsdp: starting 2 process" in errors
    assert errors.count("over gloo") == 1  # the starter has said it; its ranks do not check once more


@pytest.mark.parametrize(
    ("preset", "env"), [("ddp", "None None"), pytest.param("fsdp", "true 2", marks=pytest.mark.slow)]
)
def test_accelerate_launch_as_typed_by_a_user_starts_two_processes_without_a_gpu(start, preset, env):
    under = ("-m", "accelerate.commands.launch", "--config_file", str(find_preset(preset)))
    process = start(under=under)
    output, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert sorted(output.splitlines()) == [f"rank {rank}: 2 1 {env}" for rank in (0, 1)], errors
    assert process.returncode == 0 and "over gloo" in errors


def test_a_usage_error_in_the_ranks_is_one_line_and_exit_code_2(start):
    process = start(mode="usage", accelerate_config="ddp")
    errors = process.communicate(timeout=LIMIT_SECONDS)[1].splitlines()
    assert process.returncode == 2
    assert errors[1:] == ["error: nothing to train. Give more."] and "starting 2" in errors[0]


def test_the_summary_of_a_launcher_holds_the_message_of_a_usage_error(tmp_path, monkeypatch):
    """accelerate launch and torchrun print it as their root cause."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit), exit_on_usage_error():
        raise UsageError("nothing to train. Give more.")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert "nothing to train. Give more." in str(ChildFailedError("a script", {0: failure}))


def test_an_error_of_all_ranks_is_that_of_the_first_one(start):
    process = start(mode="error", accelerate_config="ddp")
    errors = process.communicate(timeout=LIMIT_SECONDS)[1]
    assert process.returncode == 1 and "rank 0 ended with exit code 1" in errors
    assert errors.count("Traceback") == errors.count("KeyError: 'broken'") == 1


def test_a_failing_rank_ends_the_others_and_its_exit_code_comes_back(start):
    process = start(mode="crash", accelerate_config="ddp")
    errors = process.communicate(timeout=LIMIT_SECONDS)[1]
    assert process.returncode == 7 and "rank 1 ended with exit code 7" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_processes(start, sent, code):
    process = start(mode="sleep", accelerate_config="ddp")
    pids = [Path("pid0"), Path("pid1")]
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(path.is_file() and path.read_text() for path in pids):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(sent)
    errors = process.communicate(timeout=LIMIT_SECONDS)[1]
    assert process.returncode == code and re.search(r"exit code 130\. The same|SIGTERM; the others", errors)
    assert "Traceback" not in errors and len(errors.splitlines()) == 2, errors  # it started them, and it ended them
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
