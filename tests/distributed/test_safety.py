"""Runs of two processes that are signalled, killed, or run out of what they need, mostly in real launches."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from hf_dist_ext import failures
from hf_dist_ext.checkpoints.folder import checkpoint_to_resume, missing_from_checkpoint
from hf_dist_ext.run.lease import NAME as LEASE
from hf_dist_ext.run.preemption import MARK, REQUEUE
from tests.distributed import failing_worker, nonfinite_worker
from tests.distributed.forked import Run, look, run_python
from tests.distributed.memory_worker import statuses
from tests.launching import PRESETS, ROOT, environment, hold_port
from tests.tiny_models import model_config, tiny_pairs

SCRIPT = ROOT / "scripts" / "train_hf.py"
FAILING = ROOT / "tests" / "distributed" / "failing_worker.py"
SHUTDOWN_SECONDS = 200  # under 10 on a quiet machine; a hanging collective takes 1800


@pytest.fixture
def run_file(tmp_path) -> Path:
    fields = tiny_pairs(tmp_path) | {
        "model_config": model_config("bert"), "disable_tqdm": True,
        "per_device_train_batch_size": 4, "max_steps": 100_000, "report_to": "none",
        "output_dir": str(tmp_path / "out"), "use_cpu": True, "save_strategy": "no", "logging_steps": 1,
        "lr_scheduler_type": "constant", "gradient_cache_chunk_size": 2,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(fields))
    return tmp_path / "run.json"


class Running:
    """A command in the background: `ranks` are the processes that train, in order."""

    def __init__(self, run_file: Path, *words: str, launcher: str = "", script: Path = SCRIPT, **more: str):
        command, (self.holder, port) = [sys.executable], hold_port()
        if launcher == "torchrun":
            command += ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1"]
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]
        elif launcher:
            config = str(PRESETS / f"{launcher}.yaml")
            command += ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2"]
            command += ["--main_process_port", str(port)]
        else:
            words = ("--num_processes", "2", *words)
        self.folder = run_file.parent
        self.output = (self.folder / f"output-{time.monotonic()}.txt").open("w+")
        self.process = subprocess.Popen(
            [*command, str(script), "--config", str(run_file), *words],
            stdout=self.output, stderr=subprocess.STDOUT, env=environment(**more), cwd=ROOT,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in [*self.ranks(), self.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.wait()

    def ranks(self) -> list[psutil.Process]:
        try:
            children = psutil.Process(self.process.pid).children()
            found = [child for child in children if "RANK" in child.environ()]
            return sorted(found, key=lambda child: int(child.environ()["RANK"]))
        except psutil.Error:
            return []

    def wait_for_steps(self) -> None:
        wait_for_steps(self.folder / "out", lambda: self.process.poll() is None, self.text)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(SHUTDOWN_SECONDS)
        return code, self.text()

    def end_after_failure(self) -> tuple[int, str]:
        self.wait_for_steps()
        return self.end()

    def text(self) -> str:
        return Path(self.output.name).read_text()


def wait_for_steps(output_dir: Path, is_running: Callable[[], bool], text: Callable[[], str]) -> None:
    """Two; `text` is what the run has said."""
    log = output_dir / "metrics.jsonl"
    for _ in range(3000):
        if log.is_file() and len(log.read_text().splitlines()) >= 2:
            return
        assert is_running(), text()
        time.sleep(0.1)
    raise AssertionError(text())


def train(say, words: list[str]) -> str:
    """A process of a run, for `Run`; HF_TEST_FAIL says how rank 1 fails."""
    sys.argv = ["train_hf.py", *words]
    try:
        failing_worker.main()
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code)  # as Python would, whose own way Run takes for a failure
    return "ended well"


def said(run: Run) -> str:
    return "\n".join(log.read_text() for log in run.logs)


def checkpoints(run_file: Path) -> list[Path]:
    found = (run_file.parent / "out").glob("checkpoint-*")
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def test_signals_apart_end_in_one_checkpoint_and_code_75_and_auto_goes_on(run_file, monkeypatch):
    with Running(run_file) as running:
        running.wait_for_steps()
        second = run_python(SCRIPT, "--config", run_file, "--overwrite_output_dir", code=2)
        first, last = running.ranks()
        assert f"in use by process {running.process.pid} on" in second
        first.send_signal(signal.SIGUSR1)
        time.sleep(0.7)
        if last.is_running():
            last.send_signal(signal.SIGTERM)
        code, text = running.end()
    assert code == REQUEUE and "was asked to stop" in text and "Traceback" not in text, text
    (checkpoint,) = checkpoints(run_file)
    assert not missing_from_checkpoint(checkpoint)
    assert json.loads((run_file.parent / "out" / MARK).read_text())["step"] == int(checkpoint.name[11:])
    assert not (run_file.parent / "out" / LEASE).exists()
    last_step = int(checkpoint.name[11:]) + 2
    words = ["--config", str(run_file), "--resume_from_checkpoint", "auto", "--max_steps", str(last_step)]
    monkeypatch.setenv("HF_TEST_FAIL", "nothing")
    assert Run("ddp", run_file.parent / "log", partial(train, words=words)).result() == "ended well"
    lines = map(json.loads, (run_file.parent / "out" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, last_step + 1))


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, REQUEUE)])
def test_a_signal_to_all_processes_is_a_checkpoint_and_no_traceback(run_file, monkeypatch, sent, code):
    """As a launcher passes it on (tests/test_launch.py)."""
    monkeypatch.setenv("HF_TEST_FAIL", "nothing")
    run = Run("ddp", run_file.parent / "log", partial(train, words=["--config", str(run_file)]))
    wait_for_steps(run_file.parent / "out", lambda: True, partial(said, run))
    for pid in run.pids:
        os.kill(pid, sent)
    assert statuses(run) == [code, code]
    assert "Traceback" not in said(run) and "KeyboardInterrupt" not in said(run), said(run)
    (checkpoint,) = checkpoints(run_file)
    assert not missing_from_checkpoint(checkpoint)
    assert (run_file.parent / "out" / MARK).exists() == (code == REQUEUE)


@pytest.mark.slow
@pytest.mark.parametrize("mode, struck", [("multi_gpu_pp@2", 1), ("multi_gpu_3d@4", 2)])
def test_a_signal_to_one_process_of_a_pipeline_is_a_checkpoint_from_which_it_goes_on(
    run_file, monkeypatch, mode, struck
):
    monkeypatch.setenv("HF_TEST_FAIL", "nothing")
    words, out = ["--config", str(run_file), "--pipeline_parallel_size", "2"], run_file.parent / "out"
    run = Run(mode, run_file.parent / "log", partial(train, words=words))
    wait_for_steps(out, lambda: True, partial(said, run))
    os.kill(run.pids[struck], signal.SIGTERM)
    assert statuses(run) == [REQUEUE] * len(run.pids) and "Traceback" not in said(run), said(run)
    (checkpoint,) = checkpoints(run_file)
    assert not missing_from_checkpoint(checkpoint)
    last_step = int(checkpoint.name[11:]) + 2
    words += ["--resume_from_checkpoint", "auto", "--max_steps", str(last_step)]
    assert Run(mode, run_file.parent / "log", partial(train, words=words)).result() == "ended well"
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, last_step + 1))


@pytest.mark.slow
def test_ctrl_c_on_the_launcher_is_a_checkpoint_and_a_few_lines(run_file):
    with Running(run_file) as running:
        running.wait_for_steps()
        running.process.send_signal(signal.SIGINT)
        code, text = running.end()
    assert code == 130 and "Traceback" not in text and "KeyboardInterrupt" not in text, text
    said = text[text.index("was asked to stop") :].splitlines()
    assert len(said) < 8 and "exit code 130. The same command with --resume_from_checkpoint auto goes on" in text, text
    (checkpoint,) = checkpoints(run_file)
    assert not missing_from_checkpoint(checkpoint)
    assert not (run_file.parent / "out" / LEASE).exists() and not (run_file.parent / "out" / MARK).exists()


SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then printf '127.0.0.1\\nother\\n'; else echo "$@" >> {folder}/requeued; fi
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train", "train_nodes"])
def test_the_slurm_script_requeues_itself_and_goes_on(run_file, tmp_path, script):
    """bash, and stand-ins for scontrol, which writes down what it is asked, and srun; no cluster was tried."""
    (tmp_path / "bin").mkdir()
    for name, content in (("scontrol", SCONTROL.format(folder=tmp_path)), ("srun", SRUN)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    nodes = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_GPUS_ON_NODE": "1", "OUT": str(run_file.parent / "out")}
    submitted = environment(PATH=path, SLURM_JOB_ID=str(os.getpid()), SLURM_SUBMIT_DIR=str(ROOT), **nodes)
    command = ["bash", str(ROOT / "scripts" / "slurm" / f"{script}.sbatch"), "--config", str(run_file)]
    command += ["--accelerate_config", "single_gpu" if script == "train" else "multi_gpu_ddp"]
    job = subprocess.Popen(command, env=submitted)
    log = run_file.parent / "out" / "metrics.jsonl"
    for _ in range(1200):
        if log.is_file():
            break
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    code = job.wait(SHUTDOWN_SECONDS)
    assert code == REQUEUE or script == "train_nodes"
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    (checkpoint,) = checkpoints(run_file)
    steps = str(int(checkpoint.name[11:]) + 1)
    assert subprocess.run([*command, "--max_steps", steps], env=submitted).returncode == 0
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    lines = map(json.loads, log.read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, int(steps) + 1))
    report = json.loads((run_file.parent / "out" / "metrics.json").read_text())
    assert report["world_size"] == (1 if script == "train" else 2)


@pytest.mark.slow
def test_a_mark_that_an_earlier_start_left_requeues_no_run_that_fails(run_file, tmp_path):
    out = run_file.parent / "out"
    out.mkdir()
    (out / MARK).write_text("{}")
    (tmp_path / "bin").mkdir()
    for name, content in (("scontrol", SCONTROL.format(folder=tmp_path)), ("srun", "#!/bin/bash\nexit 1\n")):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    submitted = environment(
        PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin", SLURM_JOB_ID="1", SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NODELIST="n[0-1]", OUT=str(out),
    )  # fmt: skip
    command = ["bash", str(ROOT / "scripts" / "slurm" / "train_nodes.sbatch"), "--config", str(run_file)]
    assert subprocess.run(command, env=submitted).returncode == 1
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_under_accelerates_own_launcher_the_mark_tells_what_the_exit_code_hides(run_file):
    with Running(run_file, launcher="multi_gpu_fsdp") as running:
        running.wait_for_steps()
        running.process.send_signal(signal.SIGTERM)
        code, text = running.end()
    (checkpoint,) = checkpoints(run_file)
    assert json.loads((run_file.parent / "out" / MARK).read_text()) == {
        "exit_code": REQUEUE, "step": int(checkpoint.name[11:]), "signal": "SIGTERM"
    }  # fmt: skip
    assert not missing_from_checkpoint(checkpoint) and not (run_file.parent / "out" / LEASE).exists()
    assert code == 1, text


def test_a_rank_that_raises_is_the_one_error_that_is_shown(run_file, monkeypatch):
    """The other one lets a launcher end it (tests/test_launch.py) and says nothing meanwhile."""
    waits, sleep = run_file.parent / "waits for its launcher", time.sleep

    def waits_until_it_is_ended(seconds: float) -> None:
        if seconds == failures.PEER_SECONDS:
            waits.touch()
            seconds = 600
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", waits_until_it_is_ended)
    monkeypatch.setenv("HF_TEST_FAIL", "raise")
    run = Run("ddp", run_file.parent / "log", partial(train, words=["--config", str(run_file)]))
    first, last = run.pids
    assert os.waitstatus_to_exitcode(os.waitpid(last, 0)[1]) == 1
    while not waits.exists():
        assert os.waitpid(first, os.WNOHANG) == (0, 0), said(run)
        sleep(0.05)
    os.kill(first, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) != 0
    text = said(run)
    assert text.count("Traceback (most recent call last)") == 1 and "OSError: the data server went away" in text, text
    assert "[rank 1: step 3, forward and backward" in text


def test_a_step_that_takes_too_long_ends_with_who_was_where(run_file, monkeypatch):
    monkeypatch.setenv("HF_TEST_FAIL", "hang")
    monkeypatch.setattr(failures, "NOTE_SECONDS", 5)  # on a busy machine one is late
    words = ["--config", str(run_file), "--step_timeout", "6"]
    run = Run("ddp", run_file.parent / "log", partial(train, words=words))
    assert statuses(run) == [1, 1]
    text = said(run)
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "nothing was finished for 6 s. rank 0: step 3, forward and backward, for" in line, text
    assert "rank 1: step 3, forward and backward" in line and "failing_worker.py" in line.partition("rank 1")[2]
    assert "Traceback" not in text


@pytest.mark.parametrize("preset", ["multi_gpu_fsdp", pytest.param("multi_gpu_ddp", marks=pytest.mark.slow)])
def test_a_loss_that_is_infinite_on_one_rank_skips_the_update_on_all(tmp_path, preset):
    first, second = look(preset, 2, nonfinite_worker.found_by_ranks, tmp_path)
    assert first == second
    counted = [True, True, False, True, True]
    assert first["contrastive"] == {"moved": [True, False, True, True], "total": 1, "counted": counted, "message": ""}
    assert first["drifting"]["moved"] == [] and "(rank 1: " in first["drifting"]["message"]
    assert first["drifting"]["message"].startswith("step 1: the gradient cache encodes every chunk twice")
    assert first["own loss"]["total"] == 2 and first["own loss"]["moved"] == [True, False]
    assert "step 4: the loss of rank 1 is inf; 2 steps in a row were not finite" in first["own loss"]["message"]
    assert "checkpoint-1 is good: resume from it. No step after checkpoint-2" in first["own loss"]["message"]
    assert checkpoint_to_resume(True, tmp_path / "b") == tmp_path / "b" / "checkpoint-1"


@pytest.mark.slow
def test_a_launcher_that_restarts_goes_on_with_smaller_chunks_when_memory_ran_out(run_file):
    words = ("--save_strategy", "steps", "--save_steps", "1", "--max_steps", "5", "--resume_from_checkpoint", "auto")
    # torch 2.13 lets workers share the launcher's store, where a restart over gloo finds the addresses of before.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Running(run_file, *words, launcher="torchrun", script=FAILING, HF_TEST_FAIL="memory", **own_store) as running:
        code, text = running.end()
    assert code == 0 and "step 3: rank 1 ran out of memory in the pass without a graph" in text, text
    assert "memory ran out with the sizes that are given, says" in text and "chunks of 0.5 of" in text, text
    lines = map(json.loads, (run_file.parent / "out" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit", 3, "rank 1 ended with exit code 3"),
        ("kill", 137, "rank 1 ended with SIGKILL, which is mostly the machine's memory"),
    ],
)
def test_a_rank_that_leaves_or_is_killed_ends_all(run_file, how, code, words):
    with Running(run_file, script=FAILING, HF_TEST_FAIL=how) as running:
        found, text = running.end_after_failure()
    assert found == code and words in text, text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_stopped_rank_is_named_as_the_one_that_does_not_answer(run_file):
    with Running(run_file, "--step_timeout", "6", script=FAILING, HF_TEST_FAIL="stop") as running:
        code, text = running.end_after_failure()
    assert code == 1 and "Rank 1 does not answer" in text, text


@pytest.mark.slow
def test_the_time_limit_of_collectives_holds_on_gloo(run_file):
    with Running(run_file, "--ddp_timeout", "4", script=FAILING, HF_TEST_FAIL="hang") as running:
        code, text = running.end_after_failure()
    assert code == 1 and "Timed out waiting" in text, text


def test_processes_without_their_launcher_end(tmp_path):
    """They would wait for ever in the next save. A process that starts another one and ends stands for a launcher."""
    seen = tmp_path / "seen"
    worker = (
        "import time; from hf_dist_ext.failures import end_with_launcher; end_with_launcher(0.2, 0.05); "
        "print('watches', flush=True); time.sleep(60); print('left alone')"
    )
    launcher = (
        f"import subprocess, sys, time; out = open({str(seen)!r}, 'w'); "
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=out, stderr=out)\n"
        f"while not open({str(seen)!r}).read(): time.sleep(0.05)"
    )
    launched = environment() | {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    subprocess.run([sys.executable, "-c", launcher], env=launched, check=True, timeout=SHUTDOWN_SECONDS)
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while "is gone" not in seen.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "error: the launcher (process" in seen.read_text() and "left alone" not in seen.read_text()
