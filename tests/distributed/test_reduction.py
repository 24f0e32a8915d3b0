"""Which backward of an update reduces, and how often: one of a full-size chunk, once, with torch.compile too."""

from __future__ import annotations

import collections
import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from tests.distributed.forked import Run
from tests.parity import exactness_worker
from tests.parity.exactness_worker import Case

LIMIT = 300  # seconds


class Watch(TrainerCallback):
    """Of every update: gloo's all-reduces, and the tokens of every forward with a graph, in their order."""

    def __init__(self) -> None:
        self.updates: list[dict] = []

    def on_train_begin(self, args, state, control, model=None, **others):
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, arguments, features) -> None:
        if torch.is_grad_enabled():
            self.tokens.append(features["input_ids"].numel())

    def on_step_begin(self, args, state, control, **others):
        self.tokens: list[int] = []
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiler.start()

    def on_pre_optimizer_step(self, args, state, control, **others):
        self.profiler.stop()
        counts = collections.Counter(event.name for event in self.profiler.events())
        self.updates.append({"all_reduce": counts["gloo:all_reduce"], "tokens": self.tokens})


def measured(say, case: Case) -> str:
    signal.alarm(LIMIT)
    original, watch = exactness_worker.DistTrainer, Watch()

    def watched(*arguments, callbacks, **options):
        return original(*arguments, callbacks=[*callbacks, watch], **options)

    exactness_worker.DistTrainer = watched
    exactness_worker.BERT["num_hidden_layers"] = 1
    error = exactness_worker.measure(case)
    return json.dumps({"error": error, "updates": watch.updates})


def found(mode: str, folder: Path, case: Case) -> dict:
    return json.loads(Run(mode, folder, partial(measured, case=case)).result())


@pytest.mark.parametrize("model", ["bert", "towers"])
def test_a_compiled_model_reduces_once_per_update(model, tmp_path):
    arguments = {"torch_compile": True, "torch_compile_backend": "eager"}
    compiled = found("ddp", tmp_path / "run", Case("compiled", model=model, arguments=arguments))
    assert compiled["error"] < 1e-10
    # the gradients, and what the ranks say of their loss
    assert [update["all_reduce"] for update in compiled["updates"]] == [2]


@pytest.mark.parametrize("keep", [0, 2, 99])
@pytest.mark.parametrize("mode", ["ddp", "fsdp-sharded", pytest.param("hsdp-sharded", marks=pytest.mark.slow)])
def test_the_backward_that_reduces_is_of_a_full_size_chunk(mode, keep, tmp_path):
    arguments = {"gradient_cache_chunk_size": 5, "gradient_cache_keep_graph": keep}
    plain = found(mode, tmp_path / "run", Case("full size", columns=exactness_worker.THREE, arguments=arguments))
    assert plain["error"] < 1e-10
    (update,) = plain["updates"]
    *others, last = update["tokens"]
    assert len(others) == 5 and max(others) > 2 * min(others)
    assert last > 0.6 * max(others) and last > min(others)
