"""Signals on one process: the step is finished, one checkpoint written, and a resumed run is the uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import TrainerCallback

from hf_dist_ext import train
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.preemption import MARK, REQUEUE, SIGNALS, StopSignals, exit_code, forward_to_children
from hf_dist_ext.run.read import load_run
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.launching import ROOT, environment
from tests.training.test_nonfinite import Regression, rows


class SignalAt(TrainerCallback):
    """Sends this process a signal during a step, or during the evaluation after it."""

    def __init__(self, step: int, in_evaluation: bool = False, number: int = signal.SIGTERM):
        self.step, self.in_evaluation, self.number, self.predicted = step, in_evaluation, number, 0

    def on_step_begin(self, args, state, control, **others):
        if state.global_step + 1 == self.step and not self.in_evaluation:
            os.kill(os.getpid(), self.number)

    def on_prediction_step(self, args, state, control, **others):
        self.predicted += 1
        if state.global_step == self.step and self.in_evaluation:
            os.kill(os.getpid(), self.number)


def trainer(folder: Path, *callbacks, model=Regression, **more) -> DistTrainer:
    torch.manual_seed(0)
    options = dict(max_steps=8, save_strategy="no", per_device_train_batch_size=2, per_device_eval_batch_size=1)
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=0.1, preemptible=True,
        **(options | more),
    )  # fmt: skip
    return DistTrainer(model(), args, train_dataset=rows({}), eval_dataset=rows({}, 200), callbacks=list(callbacks))


def weights(of: DistTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in of.model.parameters()])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_train_behind_the_step_and_the_resumed_run_is_the_whole_one(tmp_path, number):
    whole = trainer(tmp_path / "whole")
    whole.train()
    assert not whole.was_preempted and not list((tmp_path / "whole").glob("checkpoint-*"))
    stopped = trainer(tmp_path / "run", SignalAt(3, number=number))
    stopped.train()
    assert stopped.was_preempted and stopped.control.should_training_stop and stopped.state.global_step == 3
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    is_interrupted = number == signal.SIGINT
    assert (tmp_path / "run" / MARK).is_file() != is_interrupted, "nobody starts an interrupted run again"
    assert signal.getsignal(number) == (signal.default_int_handler if is_interrupted else signal.SIG_DFL)
    assert exit_code(stopped.stop_signal) == (130 if is_interrupted else REQUEUE)
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert not torch.equal(weights(stopped), weights(whole))
    assert torch.equal(weights(resumed), weights(whole)) and not (tmp_path / "run" / MARK).exists()


def test_a_long_evaluation_is_left(tmp_path):
    stopping = SignalAt(4, in_evaluation=True)
    stopped = trainer(tmp_path, stopping, eval_strategy="steps", eval_steps=4)
    stopped.train()
    assert stopped.was_preempted and (tmp_path / "checkpoint-4" / "optimizer.pt").is_file()
    assert 0 < stopping.predicted <= 8
    stopping = SignalAt(0, in_evaluation=True)
    stopped = trainer(tmp_path / "start", stopping, eval_on_start=True)
    stopped.train()
    assert stopped.was_preempted and stopped.state.global_step == 0 and 0 < stopping.predicted <= 8


class Drawing(Regression):
    """With dropout; a row of an evaluation is moved by random numbers of all kinds."""

    def forward(self, x, labels=None):
        if not self.training:
            x = x + 0.01 * (torch.rand(1) + np.random.rand() + random.random())
        return super().forward(torch.nn.functional.dropout(x, 0.5, self.training), labels)


def drawing(folder: Path, *callbacks, **more) -> DistTrainer:
    options = dict(max_steps=9, save_strategy="steps", save_steps=2, logging_steps=1, model=Drawing)
    return trainer(folder, *callbacks, **options | more)


def test_an_evaluation_between_steps_changes_no_number_of_the_training(tmp_path):
    plain = drawing(tmp_path / "plain")
    plain.train()
    evaluated = drawing(tmp_path / "evaluated", eval_strategy="steps", eval_steps=2)
    evaluated.train()
    assert torch.equal(weights(plain), weights(evaluated))
    first, again = (evaluated.evaluate()["eval_loss"] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_signal_takes_an_evaluation_with_it_and_the_resumed_run_ends_with_the_same_weights(
    tmp_path, strategy, in_evaluation
):
    options = dict(eval_strategy=strategy, eval_steps=2, save_strategy=strategy, per_device_train_batch_size=12)
    whole = drawing(tmp_path / "whole", **options)
    whole.train()
    drawing(tmp_path / "run", SignalAt(4, in_evaluation), **options).train()
    resumed = drawing(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole), weights(resumed))
    assert {line["step"] for line in resumed.state.log_history if "eval_loss" in line} == {2, 6, 8, 9} - (
        {9} if strategy == "steps" else set()
    )


def test_the_last_step_needs_no_early_leave(tmp_path):
    finished = trainer(tmp_path, SignalAt(8))
    finished.train()
    assert finished.state.global_step == 8 and not finished.was_preempted


def test_the_checkpoint_outlives_the_end_of_training_with_a_limit_of_one(tmp_path):
    stopped = trainer(
        tmp_path, SignalAt(5), save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    stopped._load_best = lambda: pytest.fail("a run that goes on has no use for it")
    stopped.train()
    assert stopped.state.best_model_checkpoint is not None
    assert (tmp_path / "checkpoint-5" / "optimizer.pt").is_file()


def test_a_handler_of_the_users_own_stays(tmp_path):
    def mine(*arguments):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("name", "code"), [("SIGUSR1", REQUEUE), ("SIGTERM", REQUEUE), ("SIGINT", 130)])
def test_a_process_with_nothing_to_finish_leaves_at_once_with_the_code(name, code):
    script = "import os, signal\nfrom hf_dist_ext.run.preemption import StopSignals\n"
    script += f"with StopSignals():\n    os.kill(os.getpid(), signal.{name})"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), cwd=ROOT, capture_output=True)
    assert done.returncode == code and not done.stderr


def test_a_second_ctrl_c_ends_a_process_that_is_finishing_its_step():
    script = "import os, signal\nfrom hf_dist_ext.run.preemption import StopSignals\n"
    script += "with StopSignals() as stop:\n    stop.finishes_steps = True\n    os.kill(os.getpid(), signal.SIGINT)\n"
    script += "    print(stop.received, flush=True)\n    os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"SIGINT\n", b"")


def test_an_interrupt_that_a_shell_has_its_jobs_ignore_stays_ignored():
    script = "import signal\nfrom hf_dist_ext.run.preemption import StopSignals\n"
    script += "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script += "with StopSignals():\n    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN"
    subprocess.run([sys.executable, "-c", script], env=environment(), cwd=ROOT, check=True)


def test_a_child_that_has_just_ended_does_not_end_its_launcher(monkeypatch):
    """The launcher's list of children is older than the signal that it sends to them."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    listed = [psutil.Process(child.pid) for child in children]
    gone = children[0]
    gone.kill()
    gone.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self: listed)
    forward_to_children(signal.SIGTERM, None)
    assert children[1].wait(300) == -signal.SIGTERM


def test_a_signal_while_the_process_ends_does_not_change_its_code():
    code = "import atexit, os, signal\nfrom hf_dist_ext.run.preemption import REQUEUE, StopSignals\n"
    code += "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    code += "with StopSignals():\n    raise SystemExit(REQUEUE)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT)
    assert done.returncode == REQUEUE


def test_auto_resumes_what_is_there_and_else_starts(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"model_config": {"model_type": "bert"}, "dataset_name": "code-search"}')
    words = ["--config", str(path), "--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", "auto"]
    assert "resume_from_checkpoint" not in load_run(words).training
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)  # torn
    run = load_run(words)
    assert "resume_from_checkpoint" not in run.training and run.training["overwrite_output_dir"]
    folder = tmp_path / "out" / "checkpoint-2"
    for name in ("model.safetensors", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).write_text("x")
    with pytest.raises(UsageError, match="no complete checkpoint"):  # it may be the stock Trainer's: not overwritten
        load_run(words)
    manifest.commit(folder, manifest.record(folder, manifest.files_in(folder)), {"step": 2})
    assert load_run(words).training["resume_from_checkpoint"] is True


@pytest.mark.parametrize(("number", "is_marked"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_run_that_is_asked_to_leave_while_it_loads_is_marked(number, is_marked, tmp_path, monkeypatch):
    """SIGTERM may come from a launcher because of an error, after which nobody shall start the run again."""
    fields = {
        "model_config": {"model_type": "bert"},
        "dataset_name": "code-search",
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "run.json").write_text(json.dumps(fields | {"accelerate_config": "single_gpu", "use_cpu": True}))
    words = ["--config", str(tmp_path / "run.json")]
    monkeypatch.setattr(train, "train", lambda run: os.kill(os.getpid(), number))
    before = {one: signal.getsignal(one) for one in SIGNALS}  # a process that leaves ignores them
    try:
        with pytest.raises(SystemExit) as left:
            train.main(words)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert left.value.code == REQUEUE and (tmp_path / "out" / MARK).is_file() == is_marked
