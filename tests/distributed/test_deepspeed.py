"""ZeRO-1, 2 and 3 on two gloo processes: the weights of naive full-batch steps, what is sent, what is skipped, what is
resumed.

DeepSpeed compiles its shared-memory communication at the first start, which takes a minute or two.
"""

import functools
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import deepspeed_install
from tests.distributed.forked import needs_deepspeed
from tests.launching import launch

WORKER = Path(__file__).with_name("deepspeed_worker.py")
STAGES = pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
UNCLIPPED = [
    "no cache", "chunks of 4", "every chunk reduced", "2 graphs kept", "accumulation", "temperature",
    "temperature, accumulation", "frozen layer", "frozen backbone", "tower per column", "frozen tower", "LoRA",
    "LoRA and projection",
]  # fmt: skip


@functools.cache
def found(stage: int) -> dict:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        launch(f"deepspeed_zero{stage}", 2, WORKER, "--output", output, timeout=900)
        return json.loads(output.read_text())


@needs_deepspeed
@STAGES
@pytest.mark.parametrize("case", UNCLIPPED)
def test_weights_are_those_of_full_batch_steps(stage, case):
    entry = found(stage)[case]
    if stage == 3 and case in ("no cache", "2 graphs kept"):
        assert "gradient_cache_keep_graph 0" in entry["refused"]
        return
    assert entry["engine"] == "DeepSpeedEngine" and entry["stage"] == stage
    assert entry["moved"] > 0.1 and entry["error"] < 1e-5  # float32
    assert all(entry["frozen"]) and bool(entry["frozen"]) == case.startswith(("frozen", "LoRA"))
    assert [moved > 0.01 for moved in entry["loss_moved"]] == [True] * case.startswith("temperature")
    assert all(error < 1e-5 for error in entry["loss_error"])


@needs_deepspeed
def test_a_deepspeed_json_of_ones_own_trains_the_same_weights(tmp_path):
    """Its "auto" values follow the run, its other keys are DeepSpeed's."""
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 1000}
    auto = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, **dict.fromkeys(auto, "auto")}))
    yaml = ["distributed_type: DEEPSPEED", "num_processes: 2", "main_process_port: 0", "deepspeed_config:"]
    yaml.append(f"  deepspeed_config_file: {tmp_path / 'ds.json'}")
    (tmp_path / "own.yaml").write_text("\n".join([*yaml, ""]))
    launch(str(tmp_path / "own"), 2, WORKER, "--output", tmp_path / "found.json", "--only", "chunks of 4", timeout=900)
    (entry,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert entry["stage"] == 2 and entry["moved"] > 0.1 and entry["error"] < 1e-5


@needs_deepspeed
@STAGES
@pytest.mark.parametrize("case", ["max_grad_norm", "temperature, max_grad_norm"])
def test_gradients_are_clipped_by_the_norm_of_all_ranks_and_of_the_temperature(stage, case):
    entry = found(stage)[case]
    assert 0.1 < entry["moved"] < 0.3 and entry["error"] < 1e-5  # two steps of 0.1 times 1.0
    assert all(error < 2e-5 for error in entry["loss_error"])


@needs_deepspeed
@STAGES
def test_gradients_are_reduced_once_per_update(stage):
    sent = found(stage)["sent"]
    assert sent["speed"][0] == 2  # updates
    if stage > 1:
        assert sent["memory"] == [3 * number for number in sent["speed"]]  # chunks


@needs_deepspeed
@STAGES
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_both(stage):
    entry = found(stage)["two bad steps"]
    assert entry["moved"] == entry["temperature_moved"] == [False, False, True, True]
    assert entry["total"] == 2 and entry["finite"]
    assert entry["saved"] == ["checkpoint-1", "checkpoint-4", "checkpoint-5"], "none while updates are skipped"


@needs_deepspeed
@STAGES
def test_too_many_updates_in_a_row_that_are_not_finite_end_the_run(stage):
    entry = found(stage)["too many bad steps"]
    assert "loss of rank 1 is inf; 2 steps in a row" in entry["message"]
    assert entry["finite"] and entry["saved"] == ["checkpoint-1"]


@needs_deepspeed
@STAGES
def test_so_do_those_of_a_models_own_loss(stage):
    entry = found(stage)["bad steps of a model's own loss"]
    assert "loss of rank 1 is inf; 2 steps in a row" in entry["message"] and entry["moved"] == [True, False]


@needs_deepspeed
@STAGES
def test_an_update_whose_passes_differ_is_not_made(stage):
    """Though the engine steps inside of the backward, before anybody has read the comparison."""
    entry = found(stage)["passes that differ"]
    assert "step 2: the gradient cache" in entry["message"] and "(rank 1: " in entry["message"]
    assert entry["moved"] == entry["temperature_moved"] == [False]


@needs_deepspeed
@STAGES
@pytest.mark.parametrize("name", ["resumed", "resumed, frozen backbone"])
def test_a_resumed_run_ends_with_the_same_weights(stage, name):
    entry = found(stage)[name]
    assert entry["equal"] and entry["moved"] > 0.1
    assert entry["trained_equal"] == [True] * ("frozen" in name)  # the projection
    assert set(entry["files"]) - {"manifest.json"} <= set(entry["in_manifest"])
    assert sum(file.endswith("optim_states.pt") for file in entry["in_manifest"]) == 2


@needs_deepspeed
@STAGES
def test_a_checkpoint_of_a_part_holds_no_frozen_weights(stage):
    whole, part = (found(stage)[name]["files"] for name in ("resumed", "resumed, frozen backbone"))
    assert "trainable.safetensors" in part and not any("model.safetensors" in name for name in part)
    pickles = [sum(size for name, size in files.items() if "states.pt" in name) for files in (whole, part)]
    assert pickles[1] < pickles[0] / 10


@needs_deepspeed
@STAGES
def test_a_shard_that_is_not_whole_is_named(stage):
    said = found(stage)["resumed"]["broken"]
    for what, words in {"altered": "was altered", "short": "bytes instead of", "gone": "is missing"}.items():
        assert said["shard"] in said[what] and words in said[what], what


@needs_deepspeed
def test_what_deepspeed_can_not_do_is_refused():
    assert "auto" in found(1)["refused"]


@needs_deepspeed
def test_a_shard_that_would_run_something_is_refused(tmp_path):
    from hf_dist_ext.strategies.zero_checkpoint import reading

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"optimizer_state_dict": Runs()}, tmp_path / "optim_states.pt")
    with pytest.raises(UsageError, match="mkdir.*trust_checkpoint"), reading(False, "checkpoint-2"):
        torch.load(tmp_path / "optim_states.pt", weights_only=False)  # as DeepSpeed does
    assert not (tmp_path / "ran").exists()
    with reading(True, "checkpoint-2"):
        torch.load(tmp_path / "optim_states.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


@needs_deepspeed
def test_getattr_reads_stages_of_zero_and_nothing_else(tmp_path):
    """Early releases of Python 3.11 pickle the members of enums as `getattr(class, name)`."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from hf_dist_ext.strategies.zero_checkpoint import reading

    class Reads:
        def __init__(self, *what):
            self.what = what

        def __reduce__(self):
            return getattr, self.what

    def read(*what):
        torch.save({"zero_stage": Reads(*what)}, tmp_path / "optim_states.pt")
        with reading(False, "checkpoint-2"):
            return torch.load(tmp_path / "optim_states.pt", weights_only=False)["zero_stage"]

    member = list(ZeroStageEnum)[-1]
    assert read(ZeroStageEnum, member.name) is member
    for what in ((ZeroStageEnum, "__init__"), (torch.device, "type"), (torch.float32, "itemsize")):
        with pytest.raises(UsageError, match="trust_checkpoint"):
            read(*what)


@pytest.mark.parametrize(
    "version, is_old", [("0.19.1", True), ("0.9.5", True), ("0.19.8", False), ("0.20.0+a", False)]
)
def test_versions_that_are_wrong_in_silence_are_refused(version, is_old):
    if not is_old:
        return deepspeed_install.check_version(version)
    with pytest.raises(UsageError, match=r"0\.19\.8.*pip install"):
        deepspeed_install.check_version(version)


@needs_deepspeed
def test_without_a_compiler_collectives_go_over_gloo(monkeypatch, caplog):
    from deepspeed import ops

    monkeypatch.setitem(ops.__compatible_ops__, deepspeed_install.SHARED_MEMORY_OP, True)
    deepspeed_install.prepare_cpu()
    assert ops.__compatible_ops__[deepspeed_install.SHARED_MEMORY_OP]
    monkeypatch.setattr(deepspeed_install.shutil, "which", lambda name: None)
    deepspeed_install.prepare_cpu()
    assert not ops.__compatible_ops__[deepspeed_install.SHARED_MEMORY_OP] and "gloo" in caplog.text
