"""Runs that are right are not reported, neither by the check in every step nor by an audit."""

import pytest

from tests.parity import sound_runs

FEW = ["dropout", "lora:0.3", "two alike", "qwen3:16", "base"]


@pytest.mark.parametrize("dtype", sound_runs.DTYPES)
@pytest.mark.parametrize(
    "model", [model if model in FEW else pytest.param(model, marks=pytest.mark.slow) for model in sound_runs.MODELS]
)
def test_nothing_is_reported_of_a_sound_run(tmp_path, model, dtype):
    assert sound_runs.sound_run(model, dtype, 3 if model in FEW else 48, str(tmp_path)) == ""
