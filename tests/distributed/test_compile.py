"""Models that inductor compiled, on two processes: the gradients of uncompiled ones, and no compilation once warm."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.forked import Run
from tests.engine.test_compile import CompiledGraphs, trained
from tests.parity import exactness_worker

LIMIT = 900  # seconds


def measured(say, folder: Path) -> str:
    signal.alarm(LIMIT)
    exactness_worker.BERT["num_hidden_layers"] = 2
    options = {"per_device_train_batch_size": 7, "num_train_epochs": 2, "eval_strategy": "epoch", "use_cpu": True}
    options |= {"dtype": torch.float64, "dropout": 0.0, "num_rows": 30}  # a last batch of one row for each process
    wanted, graphs = trained(folder / "plain", **options), CompiledGraphs()
    found = trained(folder / "compiled", callbacks=[graphs], torch_compile=True, **options)
    scale = min(float(of_step.norm()) for of_step in wanted)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    return json.dumps({"error": error, "scale": scale, "counts": graphs.counts})


@pytest.mark.slow
@pytest.mark.parametrize("mode, of_training, of_evaluation", [
    ("single", 2, 0),  # without gradients, and with them
    ("ddp", 2, 0),
    ("fsdp-sharded", 10, 2),  # of the five parts between FSDP's hooks, whatever the layers; two know of evaluation
])  # fmt: skip
def test_inductor_gives_the_gradients_of_uncompiled_steps(mode, of_training, of_evaluation, tmp_path):
    found = json.loads(Run(mode, tmp_path / "run", partial(measured, folder=tmp_path)).result())
    assert found["scale"] > 0 and found["error"] < 1e-10
    steps = 5 if mode == "single" else 3  # of an epoch, with an evaluation at the end of each
    assert found["counts"] == [*[of_training] * steps, *[of_training + of_evaluation] * (steps + 2)]
