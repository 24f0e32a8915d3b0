"""Runs of two processes of which rank 1 runs out of memory at one place of step 3, beside runs in which nothing does.

The processes are forked, talk over gloo, and have no launcher that would end one because of the other. A model of six
layers with a config: chunks without a graph are wider than those with one, and FSDP has several units.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from hf_dist_ext.engine.budget import ChunkBudget
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies.collectives import leave_together, rank, world_size
from hf_dist_ext.training.out_of_memory import FILE, LAST, REPLAY
from tests.distributed.forked import Run
from tests.formula_device import Formula
from tests.training.test_out_of_memory import six_layers, weights
from tests.training.test_trainer import Tiny, trainer

PLACES = ("pass 1", "before the gather", "after the gather", "backward of the loss", "replay", "reducing backward")
RESUMED = ("pass 1", "replay")  # before the gather and after it
LIMIT_SECONDS = 300  # for processes that hang; none should
OPTIONS = dict(num_rows=128, max_steps=4, learning_rate=0.01, gradient_cache_chunk_size=2, save_steps=1)


class Lack:
    """Raises on rank 1 in step 3 at a place."""

    def __init__(self, of, place: str, folder: Path):
        self.of, self.place, self.folder = of, place, folder
        layer, loss = of.model.middle[3], of.loss
        layer.register_forward_hook(self.after_layer)
        loss.register_forward_pre_hook(lambda *_: self.fail_if("before the gather"))
        loss.register_forward_hook(self.after_loss)

    @property
    def is_now(self) -> bool:
        return rank() == 1 and self.of.state.global_step == 2

    def fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("not enough memory")

    def fail_if(self, place: str) -> None:
        if self.is_now and self.place == place:
            self.fail()

    def after_layer(self, layer, inputs, output) -> None:
        if not torch.is_grad_enabled():
            self.fail_if("pass 1")
        elif self.of.step.sizes.fitting.place == REPLAY:
            self.fail_if("replay")
        elif self.of.step.sizes.fitting.place == LAST and self.is_now and self.place == "reducing backward":
            output.register_hook(self.fail)

    def after_loss(self, loss, inputs, output) -> None:
        self.fail_if("after the gather")
        if self.is_now and self.place == "backward of the loss":
            output.loss.register_hook(self.fail)


def train(say, folder: Path, place: str = "", resumes: bool = False, mode: str = "auto") -> str:
    made = trainer(folder, six_layers(), gradient_cache_fsdp=mode, save_strategy="steps", **OPTIONS)
    if place:
        Lack(made, place, folder)
    try:
        made.train(resume_from_checkpoint=resumes)
    except RunError as error:
        (folder / f"error{rank()}").write_text(str(error))
        print(error, flush=True)
        os._exit(1)  # as a script would; nothing waits for the other
    found = weights(made)
    if rank() == 0:
        torch.save(found, folder / "weights.pt")
    say(str(made.step.sizes.fitting.now))
    leave_together()
    return str(made.step.sizes.fitting.now)


class Told(Tiny):
    """Tells a `Formula` what runs."""

    def forward(self, input_ids, attention_mask):
        if torch.is_grad_enabled():
            self.of_formula[0].chunk(input_ids.numel())
        return super().forward(input_ids, attention_mask)


def fill_memory(say, folder: Path, keeps_graphs: bool) -> str:
    """A run with chunks of an automatic size, and kept graphs if asked for, on a device whose memory is a formula:
    what it takes, what was free."""
    options = dict(gradient_cache_chunk_size="auto", max_steps=12, per_device_train_batch_size=256, num_rows=1024)
    options |= dict(gradient_cache_keep_graph="auto" if keeps_graphs else 0)
    made = trainer(folder, Told(six_layers().middle), learning_rate=1e-3, **options)
    of_other_rows = 1_500_000 if keeps_graphs and world_size() == 2 else 0  # in the loss
    device = Formula(made.model, total=2_000_000 + of_other_rows, fixed=100_000, per_token=700, of_loss=50_000)
    made.model.of_formula = [device]
    plain = torch.get_device_module
    torch.get_device_module = lambda of=None: device if of == torch.device("cuda") else plain(of)
    made.step.sizes.budget = ChunkBudget(torch.device("cuda"), None, keeps_graphs=keeps_graphs)
    free = []

    def limits(*arguments, limits=made.chunk_budget.limits):
        device.state = device.bytes_of(t for s in made.optimizer.state.values() for t in s.values())
        if not made.chunk_budget.is_measuring:
            free.append((device.total - device.memory_allocated()) * 0.95)
        return limits(*arguments)

    made.chunk_budget.limits = limits
    made.train()
    tokens, of_model = made.chunk_budget.measured.tokens, device.bytes_of(made.model.parameters())
    layout, loss_bytes = made.step.layout, made.chunk_budget.measured.loss_bytes
    used = device.fixed + device.per_token * tokens + of_model
    if keeps_graphs:
        tokens = layout.chunked.costliest()
        used = device.fixed + device.per_token * tokens * (layout.num_kept + 1) + of_model + loss_bytes
    found = {
        "used": used, "free": free[0], "weights": of_model, "state": device.state, "steps": len(free),
        "kept": layout.num_kept, "graph": device.per_token * tokens, "loss": loss_bytes,
        "logged": made.state.log_history[-2].get("kept_graphs"),
    }  # fmt: skip
    torch.get_device_module = plain
    leave_together()
    return json.dumps(found)


def statuses(run: Run) -> list[int]:
    """Exit codes of all processes; -9 of one that is there after the limit, and ended."""
    left, found, deadline = set(run.pids), {}, time.monotonic() + LIMIT_SECONDS
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                found[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return [found[pid] for pid in run.pids]


def lacks(mode: str, kind: str, folder: Path, expected: torch.Tensor, place: str, resumes: bool) -> dict:
    folder.mkdir()
    run = Run(mode, folder / "short", partial(train, folder=folder, place=place, mode=kind))
    found = {"codes": statuses(run)}
    logs = [log.read_text() for log in run.logs]
    found["errors"] = [path.read_text() for path in sorted(folder.glob("error*"))]
    found["stored"] = json.loads((folder / FILE).read_text())["sizes"]
    found["logs"] = [] if len(found["errors"]) == 2 else [log[-3000:] for log in logs]
    if resumes:
        found["sizes"] = Run(mode, folder / "resumed", partial(train, folder=folder, resumes=True, mode=kind)).result()
        found["difference"] = (torch.load(folder / "weights.pt") - expected).abs().max().item()
    return found


def with_lacks(mode: str, folder: Path, places: Sequence[str], kind: str = "speed") -> dict[str, dict]:
    """Place -> what happens where memory runs out there; `kind` is of FSDP."""
    whole = folder / "whole"
    whole.mkdir()
    Run(mode, whole / "log", partial(train, folder=whole, mode=kind)).result()
    expected = torch.load(whole / "weights.pt")
    return {
        place: lacks(mode, kind, folder / f"short{number}", expected, place, place in RESUMED)
        for number, place in enumerate(places)
    }


def filled(mode: str, folder: Path, keeps_graphs: bool) -> dict:
    fill = partial(fill_memory, folder=folder / "out", keeps_graphs=keeps_graphs)
    return json.loads(Run(mode, folder / "log", fill).result())
