"""The gradient cache under DeepSpeed ZeRO-1, 2 and 3 on two gloo processes: the weights of naive full-batch steps.

DeepSpeed compiles its shared-memory communication at the first start, which takes a minute or two.
"""

import functools
import importlib.util
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hf_dist_ext import deepspeed_step
from hf_dist_ext.errors import UsageError
from tests.launching import launch

WORKER = Path(__file__).with_name("deepspeed_worker.py")
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed: an extra")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@functools.cache
def found(stage: int) -> dict:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        launch(f"deepspeed_zero{stage}", 2, WORKER, "--output", output, timeout=600)
        return json.loads(output.read_text())


@needs_deepspeed
@STAGES
@pytest.mark.parametrize("case", ["no cache", "chunks of 4", "2 graphs kept", "accumulation", "frozen layer"])
def test_weights_are_those_of_full_batch_steps(stage, case):
    entry = found(stage)[case]
    if stage == 3 and case in ("no cache", "2 graphs kept"):
        assert "gradient_cache_keep_graph 0" in entry["refused"]
        return
    assert entry["engine"] == "DeepSpeedEngine" and entry["stage"] == stage
    assert entry["moved"] > 0.1 and entry["error"] < 1e-5  # float32
    assert all(entry["frozen"]) and bool(entry["frozen"]) == (case == "frozen layer")


@needs_deepspeed
@STAGES
def test_gradients_are_clipped_by_the_norm_of_all_ranks(stage):
    entry = found(stage)["max_grad_norm"]
    assert 0 < entry["moved"] < 0.01 and entry["error"] < 2e-3  # a step of a thousandth, beside float32 weights


@needs_deepspeed
@STAGES
def test_a_resumed_run_ends_with_the_same_weights(stage):
    assert found(stage)["resumed"]["equal"]


@needs_deepspeed
def test_what_deepspeed_can_not_do_is_refused():
    temperature, auto = found(2)["refused"]
    assert "learnable_temperature" in temperature and "auto" in auto


@pytest.mark.parametrize(
    "version, is_old", [("0.19.0", True), ("0.9.5", True), ("0.19.1", False), ("0.20.0+a", False)]
)
def test_versions_that_lose_gradients_are_refused(version, is_old):
    if not is_old:
        return deepspeed_step.check_version(version)
    with pytest.raises(UsageError, match="0.19.1"):
        deepspeed_step.check_version(version)
