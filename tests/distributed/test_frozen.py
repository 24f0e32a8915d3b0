"""Frozen-part training: one process, DDP, FSDP2 with frozen parts replicated and sharded."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed import forked, frozen_worker
from tests.launching import launch

PRESET = "multi_gpu_fsdp_frozen_replicated"
RUNS = {"single": ("python", 1), "DDP": ("multi_gpu_ddp", 2), "FSDP2": ("multi_gpu_fsdp", 2), PRESET: (PRESET, 2)}


@functools.cache
def found(run: str) -> dict:
    preset, num_processes = RUNS[run]
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        words = ("--folder", Path(folder) / "runs", "--output", output)
        if preset == PRESET:  # the one real launch of it
            launch(preset, num_processes, frozen_worker.__file__, *words)
        else:
            forked.launch(preset, num_processes, frozen_worker.main, *words)
        return json.loads(output.read_text())


ALL_RUNS = [pytest.param(run, marks=[pytest.mark.slow] * (run == PRESET)) for run in RUNS]


@pytest.mark.parametrize("run", ALL_RUNS)
def test_only_the_projector_moves_though_one_rank_never_sees_an_image(run):
    assert found(run)["world_size"] == RUNS[run][1]
    for name, case in found(run).items():
        if name != "world_size":
            assert case["moved"] > 0.01 and case["frozen_equal"], name


@pytest.mark.parametrize("run", ["DDP", "FSDP2"])
def test_weights_equal_those_of_one_process(run):
    alone = found("single")["plain"]
    for name in set(found(run)) - {"world_size", "bf16"}:
        assert found(run)[name]["projector"] == pytest.approx(alone["projector"], abs=1e-6), name
        assert found(run)[name]["losses"] == pytest.approx(alone["losses"], abs=1e-5), name


@pytest.mark.parametrize("run", ALL_RUNS)
def test_frozen_weights_stay_bf16_and_trainable_ones_are_float32_masters(run):
    case = found(run)["bf16"]
    assert case["trained_dtypes"] == ["torch.float32"] and case["frozen_dtypes"] == ["torch.bfloat16"]


def test_ddp_sends_the_gradients_of_what_trains_and_no_more():
    for name in ("plain", "bf16", "checkpointing"):
        case = found("DDP")[name]
        assert case["reduced_bytes_per_step"] == case["trainable_bytes"] > 0, name


def test_fsdp_replicates_small_frozen_parts_and_shards_them_when_asked():
    assert found("FSDP2")["plain"]["sharded_frozen"] == []
    assert any("vision_tower" in name for name in found("FSDP2")["sharded"]["sharded_frozen"])


@pytest.mark.slow
def test_the_preset_for_replicated_frozen_parts_shards_none_of_them():
    assert found(PRESET)["plain"]["sharded_frozen"] == []
