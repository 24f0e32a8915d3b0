"""Runs of one process, or of several that talk over gloo, forked from a process that has imported everything.

A launch costs six CPU seconds of imports for each process, a fork none: what a run would import on its way is imported
here. The children are real processes with a launcher's environment; they are killed by their ids.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import evaluate  # noqa: F401
import pytest
import torch.distributed.algorithms.ddp_comm_hooks  # noqa: F401
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_multi_gpu_env
from tqdm import tqdm
from transformers.models.bert import modeling_bert  # noqa: F401

from hf_dist_ext import train
from hf_dist_ext.strategies.collectives import leave_together
from tests import launching
from tests.launching import PRESETS, ROOT

if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed  # noqa: F401, which accelerate imports wherever it is installed

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
MODES = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp-full": (2, FSDP | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    "fsdp-sharded": (2, FSDP | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}),
}
ZERO = {
    f"zero{stage}": (
        2, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
    )
    for stage in (1, 2, 3)
}  # fmt: skip
THREE = {f"{mode}-3": (3, environment) for mode, (size, environment) in (MODES | ZERO).items() if size == 2}
HSDP = {"hsdp-sharded": (4, MODES["fsdp-sharded"][1])}  # two copies of the model, each on two processes


class Run:
    """A started run: process ids, and the lines that rank 0 says; the last is what `target` returns.

    `mode` is a key of the tables above, or a shipped preset; "ddp@3" has three processes.
    `target(say)` is what each process does. Their output is in `log` with the rank before its suffix.
    """

    def __init__(self, mode: str, log: Path, target: Callable[[Callable[[str], object]], str]):
        name, _, number = mode.partition("+")[0].partition("@")
        tables = MODES | THREE | HSDP | ZERO
        if name.startswith(("zero", "deepspeed")):
            pytest.importorskip("deepspeed", reason="DeepSpeed: an extra")
        world_size, environment = tables[name] if name in tables else (2, of_preset(name, int(number)))
        world_size = int(number or world_size)
        self.reader, writer = os.pipe()
        self.holder, port = launching.hold_port()
        self.pids, self.logs = [], [log.with_suffix(f".{rank}.log") for rank in range(world_size)]
        for rank in range(world_size):
            if pid := os.fork():
                self.pids.append(pid)
                continue
            draw_bars_alone(tqdm)
            gc.freeze()  # or the first collection copies every page that is shared with the parent
            with open(self.logs[rank], "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            faulthandler.enable(file=2)  # pytest's writes where no log is
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not those of a test that is captured
            if rank:
                os.close(writer)  # rank 0 alone speaks: what it says ends with it
            try:
                if world_size > 1:
                    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                    values = (str(rank), str(rank), str(world_size), str(world_size), "127.0.0.1", str(port))
                    os.environ.update(dict(zip(names, values, strict=True)) | environment)
                AcceleratorState._reset_state(reset_partial_state=True)  # of a test that ran in this process before
                say = lambda line, rank=rank: rank == 0 and os.write(writer, f"{line}\n".encode())  # noqa: E731
                say(target(say))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        os.close(writer)
        self.lines = os.fdopen(self.reader)

    def wait(self) -> bool:
        """Whether all processes end well; when one does not, the others are ended.

        A test's other children, which it may have killed and not waited for, are none of this run's.
        """
        left, is_well = set(self.pids), True
        while left:
            for pid in tuple(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                left.discard(pid)
                if status and is_well:
                    is_well, code = False, os.waitstatus_to_exitcode(status)
                    self.ended = f"rank {self.pids.index(pid)} ended with {code}"
                    self.kill(left)
            time.sleep(0.002)
        return is_well

    def result(self) -> str:
        """The last line; AssertionError with the log when a process failed."""
        said = [""]
        reader = threading.Thread(target=lambda: said.extend(self.lines))
        reader.start()  # a process that dies is seen while another one waits for it and says nothing
        is_well = self.wait()
        reader.join()
        logs = (log.read_text().partition("\nExtension modules:")[0] for log in self.logs)
        ends = (log[-3000:] if "Fatal Python error" not in log else log[-9000:] for log in logs)
        assert is_well, "\n".join([self.ended, *ends])
        return said[-1].strip()

    def kill(self, pids) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def draw_bars_alone(bars: type[tqdm]) -> None:
    """Give progress bars a lock of this process: a parent's is shared, and a process that is killed keeps it.

    A subclass has a lock of its own when it drew before its parent class did.
    """
    bars.set_lock(threading.RLock())
    for subclass in bars.__subclasses__():
        draw_bars_alone(subclass)


def of_preset(name: str, num_processes: int) -> dict[str, str]:
    """What accelerate's launcher adds to the environment for a shipped preset."""
    words = ["--config_file", str(PRESETS / f"{name}.yaml"), "--num_processes", str(num_processes), "no script"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    return {key: value for key, value in prepare_multi_gpu_env(arguments).items() if os.environ.get(key) != value}


def launch(preset: str, num_processes: int, main: Callable[[], None], *arguments: object) -> None:
    """A worker's `main` as `tests.launching.launch` would run its script: with these words and a preset's environment,
    or as one process for "python"."""

    def target(say) -> str:
        signal.alarm(600)  # ends a process that waits for others
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sys.argv = ["worker", *map(str, arguments)]
        main()
        leave_together()
        return "done"

    with TemporaryDirectory() as folder:
        Run("single" if preset == "python" else f"{preset}@{num_processes}", Path(folder, "log"), target).result()


def look(preset: str, num_processes: int, function: Callable[..., dict], *arguments: object) -> dict:
    """What a function of an empty folder that all processes share returns on the first of them, under a preset."""

    def target(say) -> str:
        signal.alarm(600)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        found = json.dumps(function(Path(folder), *arguments))
        leave_together()
        return found

    with TemporaryDirectory() as folder:
        mode = "single" if preset == "python" else f"{preset}@{num_processes}"
        return json.loads(Run(mode, Path(folder, "log"), target).result())


def run_python(source: Path | str | Callable[[], None], *words: object, cwd: Path = ROOT, code: int = 0) -> str:
    """What Python says that runs a script, a function or, as with `-c`, a string, and ends with this exit code."""

    def target(say) -> str:
        signal.alarm(600)
        os.environ.update(launching.environment())
        os.chdir(cwd)
        sys.argv = [str(source) if isinstance(source, Path) else "-c", *map(str, words)]
        found = 0
        try:
            if isinstance(source, Path):
                sys.path.insert(0, str(source.parent))
                runpy.run_path(str(source), run_name="__main__")
            elif callable(source):
                source()
            else:
                exec(compile(source, "-c", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            found = end.code or 0
        sys.stdout.flush()
        return f"ended with {found}"

    with TemporaryDirectory() as folder:
        run = Run("single", Path(folder, "log"), target)
        end, said = run.result(), run.logs[0].read_text()
    assert end == f"ended with {code}", f"{end}\n{said[-6000:]}"
    return said


def train_hf() -> None:
    """scripts/train_hf.py, for `launch`."""
    train.main()


def train_under_preset(
    preset: str, folder: Path, fields: dict, is_launched: bool = False, processes: int = 2, groups: int = 1
) -> dict:
    """metrics.json of a run of scripts/train_hf.py, of groups of processes that hold the same rows.

    `is_launched`: the script itself starts the launcher, as the run file says; several groups accelerate's.
    """
    run = fields | {
        "eval_holdout": 20, "max_length": 16, "pooling": "last", "max_steps": 2, "per_device_train_batch_size": 32,
        "learning_rate": 0.05, "gradient_cache_chunk_size": 8, "save_strategy": "no",
        "output_dir": str(folder / "run"), "report_to": [],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    if is_launched:
        starter = "python" if groups == 1 else preset
        done = launching.launch(starter, processes, ROOT / "scripts" / "train_hf.py", "--config", folder / "run.json")
        for noise in ("examples/s", "broadcast_buffers"):  # bars without a terminal, a warning of other libraries
            assert noise not in done.stderr + done.stdout
    else:
        launch(preset, processes, train_hf, "--config", folder / "run.json")
    report = json.loads((folder / "run" / "metrics.json").read_text())
    assert (report["world_size"], report["contrastive_batch_size"]) == (processes, 32 * groups)
    assert report["before"]["mrr@10"] != report["after"]["mrr@10"]
    return report


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed: an extra")


def slow(*values):
    """A row of parameters that runs with -m slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


by_launch = pytest.mark.parametrize(
    "is_launched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "launched"]
)


def gather_everything(trainer) -> None:
    """Before training: ZeRO-3 keeps small weights whole on every rank, that is all of a tiny model's."""
    if trainer.is_deepspeed_enabled:
        config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
