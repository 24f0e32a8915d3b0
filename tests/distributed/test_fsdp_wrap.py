import json

import pytest

from tests.distributed import fsdp_wrap_worker
from tests.distributed.forked import launch
from tests.tiny_models import TEXT_CONFIGS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two gloo processes go through all models: model name -> what they found."""
    output = tmp_path_factory.mktemp("wrap") / "found.json"
    launch("multi_gpu_fsdp", 2, fsdp_wrap_worker.main, output)
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", [*TEXT_CONFIGS, "clip", "siglip"])
def test_every_layer_is_sharded_and_one_step_equals_the_single_process_step(results, name):
    result = results[name]
    assert result["num_layers"] == (4 if name in ("clip", "siglip") else 2)
    assert result["num_sharded_layers"] == result["num_layers"]
    assert result["num_sharded_parameters"] == result["num_parameters"] > 10
    assert result["largest_change"] > 1e-3
    assert result["largest_difference"] < 1e-12 * max(1, result["largest_change"])
