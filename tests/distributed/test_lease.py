"""A run of two processes that was paused while its lock file was deleted and another run took the folder."""

import json
import os
import signal
from pathlib import Path

import pytest
from transformers import TrainerCallback

from hf_dist_ext.run import lease
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.training.test_nonfinite import Regression, rows


class PauseAt(TrainerCallback):
    """Rank 0 says where it is and waits, as a suspended machine does, in a step or while its save is written."""

    def __init__(self, step: int, say, in_save: bool):
        self.step, self.say, self.in_save = step, say, in_save

    def pause(self) -> None:
        if int(os.environ["RANK"]) == 0:
            self.say(f"paused {os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_step_begin(self, args, state, control, **others):
        if state.global_step + 1 == self.step and not self.in_save:
            self.pause()


def train(say, folder: Path, in_save: bool) -> str:
    signal.alarm(600)
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=8, save_steps=2,
        per_device_train_batch_size=2, save_total_limit=1,
    )  # fmt: skip
    pause = PauseAt(4, say, in_save)

    class Pausing(DistTrainer):
        def _write_states(self, folder: Path) -> None:
            super()._write_states(folder)
            if in_save and self.state.global_step == 4:
                pause.pause()

    Pausing(Regression(), args, train_dataset=rows({}), callbacks=[pause]).train()
    return "ended"


@pytest.mark.parametrize("in_save", [False, True])
def test_an_owner_that_was_taken_over_commits_nothing_more_and_all_its_ranks_end(tmp_path, in_save):
    run = Run("ddp", tmp_path / "log", lambda say: train(say, tmp_path / "out", in_save))
    word, pid = run.lines.readline().split()
    assert word == "paused" and int(pid) == run.pids[0]
    os.waitpid(int(pid), os.WUNTRACED)
    (tmp_path / "out" / lease.NAME).unlink()
    successor = lease.take(tmp_path / "out")
    os.kill(int(pid), signal.SIGCONT)
    assert not run.wait()
    words = "\n".join(log.read_text() for log in run.logs)
    assert f"was taken over by process {os.getpid()} on" in words and "RunError" in words, words
    complete = [path.parent.name for path in (tmp_path / "out").glob("checkpoint-*/manifest.json")]
    assert complete == ["checkpoint-2"]
    assert json.loads((tmp_path / "out" / lease.NAME).read_text())["pid"] == os.getpid()
    successor.release()
