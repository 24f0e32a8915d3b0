"""Every knob of sharding and of DDP's communication: what it changes, or why it is refused."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests import launching
from tests.distributed import strategy_worker
from tests.distributed.forked import by_launch, launch

PRESETS = {"fsdp": ("multi_gpu_fsdp", 2), "ddp": ("multi_gpu_ddp", 2), "hybrid": ("multi_gpu_fsdp", 4)}
GRADIENTS = "allreduce_ torch.float64"


@functools.cache
def found(cases: str, is_launched: bool = False) -> dict:
    preset, num_processes = PRESETS[cases]
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        words = ("--cases", cases, "--output", output)
        if is_launched:
            launching.launch(preset, num_processes, strategy_worker.__file__, *words)
        else:
            launch(preset, num_processes, strategy_worker.main, *words)
        return json.loads(output.read_text())


def sent(cases: str, name: str, key: str, what: str = "collectives") -> int:
    return found(cases)[name][what].get(key, 0)


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP, no cache", "NO_SHARD", "cpu_offload"])
@by_launch
def test_sharding_changes_no_gradient(name, is_launched):
    entry = found("fsdp", is_launched)[name]
    assert entry["gradient_norm"] > 1
    assert entry["gradient_difference"] < 1e-12 and entry["weight_difference"] < 1e-12


def test_full_shard_gathers_weights_for_every_chunk_and_shard_grad_op_once():
    often, once = (sent("fsdp", n, "_allgather_base_ torch.float64") for n in ("FULL_SHARD", "SHARD_GRAD_OP"))
    assert often > 3 * once > 0
    assert sum(found("fsdp")["FULL_SHARD"]["reshards"]) == 3 and not any(found("fsdp")["SHARD_GRAD_OP"]["reshards"])


def test_no_shard_is_ddp():
    entry = found("fsdp")["NO_SHARD"]
    assert entry["wrapper"] == "DistributedDataParallel" and entry["units"] == 0
    assert entry["collectives"] == found("ddp")["preset"]["collectives"] == found("ddp")["NO_SHARD"]["collectives"]


def test_offload_moves_every_unit():
    assert set(found("fsdp")["cpu_offload"]["offloads"]) == {"CPUOffloadPolicy"}
    assert set(found("fsdp")["preset"]["offloads"]) == {"OffloadPolicy"}


def test_layers_below_min_num_params_are_no_units():
    assert (found("fsdp")["preset"]["units"], found("fsdp")["min_num_params"]["units"]) == (4, 2)
    gathers = [sent("fsdp", name, "_allgather_base_ torch.float64") for name in ("preset", "min_num_params")]
    assert gathers[1] < gathers[0]


def test_reduce_dtype_is_what_gradients_are_added_up_in():
    key = "_reduce_scatter_base_ torch.bfloat16"
    assert sent("fsdp", "reduce_dtype", key) == 4 * 4 and sent("fsdp", "preset", key) == 0  # steps x units
    assert 1e-6 < found("fsdp")["reduce_dtype"]["gradient_difference"] < 0.02


def test_activation_checkpointing_changes_no_gradient():
    entry = found("fsdp")["activation_checkpointing"]
    assert entry["is_checkpointing"] and entry["gradient_difference"] < 1e-12


@pytest.mark.slow
def test_hybrid_shard_shards_inside_a_group_and_averages_between_groups():
    entry = found("hybrid")["HYBRID_SHARD"]
    assert entry["mesh"] == [2, 2] and entry["collectives"][GRADIENTS] == 4 * 4  # steps x units


def test_fp16_halves_what_is_sent_and_rounds_it():
    whole, half = sent("ddp", "preset", GRADIENTS, "elements"), "allreduce_ torch.float16"
    assert sent("ddp", "fp16", half, "elements") == whole > 10_000 and sent("ddp", "fp16", GRADIENTS) == 0
    assert 1e-6 < found("ddp")["fp16"]["gradient_difference"] < 1e-2


def test_power_sgd_sends_less_after_its_warm_up():
    whole, less = (sent("ddp", name, GRADIENTS, "elements") for name in ("preset", "power_sgd"))
    assert whole / 2 < less < 0.6 * whole  # two of four steps are whole
    assert found("ddp")["power_sgd"]["gradient_difference"] == 0.0 < found("ddp")["power_sgd"]["weight_difference"]


def test_power_sgds_state_is_in_the_checkpoint_of_every_process():
    resumed, whole = found("ddp")["resumed"], sent("ddp", "preset", GRADIENTS, "elements")
    assert resumed["files"] == ["ddp_comm_hook_0.pt", "ddp_comm_hook_1.pt"]
    assert resumed["saved_error"] > 0 and resumed["loaded_equal"] and resumed["moved_on"]
    assert resumed["iterations"] == [4, 0, 4]  # two steps after a resume are warm-up again
    assert whole / 2 < resumed["elements"] < 0.6 * whole  # the two steps after a resume are whole


def test_sparse_hooks_send_their_share_of_the_elements():
    whole = sent("ddp", "preset", GRADIENTS, "elements")
    values = sent("ddp", "random_k", GRADIENTS, "elements")
    assert 0.05 * whole < values < 0.06 * whole  # of each parameter one element at least
    of_two_processes = sent("ddp", "top_k", "_allgather_base_ torch.uint8", "elements")
    assert sent("ddp", "top_k", GRADIENTS) == 0 and 24 * values <= of_two_processes < 24.2 * values  # 8 + 4 bytes each
    assert found("ddp")["random_k, all"]["gradient_difference"] < 1e-12
    assert 0.1 < found("ddp")["top_k"]["gradient_difference"] < found("ddp")["random_k"]["gradient_difference"] <= 1.1


@pytest.mark.parametrize("hook", ["top_k", "random_k"])
def test_a_run_that_sends_a_part_resumes_bit_for_bit(hook):
    resumed = found("ddp")["resumed sparse"][hook]
    assert resumed["is_equal"] and resumed["left_out"] > 0 and resumed["updates"] == 4


@pytest.mark.parametrize("name, field", [
    ("ddp_gradient_as_bucket_view", "is_bucket_view"), ("ddp_static_graph", "is_static")
])  # fmt: skip
def test_bucket_options_reach_ddp_and_change_no_gradient(name, field):
    entry = found("ddp")[name]
    assert entry[field] and not found("ddp")["preset"][field] and entry["gradient_difference"] < 1e-12


def test_the_rate_follows_the_effective_batch():
    assert found("ddp")["lr linear"]["learning_rate"] == pytest.approx(0.01 * 3)  # 3 accumulated, base of 2 devices


@pytest.mark.parametrize("cases, name, words", [
    ("fsdp", "HYBRID_SHARD", "2 processes in groups of 2"), ("fsdp", "comm hook", "reduce_dtype"),
    ("ddp", "bf16", "NCCL"), ("ddp", "batched_power_sgd", "torch 2.13"), ("ddp", "FULL_SHARD", "multi_gpu_fsdp"),
    ("ddp", "top_k, unused", "ddp_find_unused_parameters"),
    ("ddp", "ddp_static_graph, cache", "number of chunks"), ("ddp", "reduce_dtype", "ddp_comm_hook"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused_with_the_reason(cases, name, words):
    assert words in found(cases)[name]["refused"]
