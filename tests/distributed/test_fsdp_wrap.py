import json
from pathlib import Path

import pytest

from tests.launching import launch
from tests.tiny_models import TEXT_CONFIGS

WORKER = Path(__file__).with_name("fsdp_wrap_worker.py")


@pytest.fixture(scope="module")
def results():
    """One real launch of two gloo processes that goes through all models: model name -> what its worker found."""
    done = launch("multi_gpu_fsdp", 2, WORKER)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["model"]: line for line in lines}


@pytest.mark.parametrize("name", [*TEXT_CONFIGS, "clip", "siglip"])
def test_every_layer_is_sharded_and_one_step_equals_the_single_process_step(results, name):
    result = results[name]
    assert result["num_layers"] == (4 if name in ("clip", "siglip") else 2)
    assert result["num_sharded_layers"] == result["num_layers"]
    assert result["num_sharded_parameters"] == result["num_parameters"] > 10
    assert result["largest_change"] > 1e-3
    assert result["largest_difference"] < 1e-12 * max(1, result["largest_change"])
