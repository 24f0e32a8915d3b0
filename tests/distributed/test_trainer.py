"""DistTrainer on one and two processes: equal to Trainer without a loss, resumed bit for bit, collectives counted."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed import trainer_worker
from tests.distributed.forked import launch

RUNS = {"single": ("python", 1), "DDP": ("multi_gpu_ddp", 2), "FSDP2": ("multi_gpu_fsdp", 2)}
COUNTED = {"HSDP": ("multi_gpu_hsdp", 4)}


@functools.cache
def found(run: str) -> dict:
    preset, num_processes = (RUNS | COUNTED)[run]
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        words = ["--folder", Path(folder) / "runs", "--output", output, *["--counts_alone"] * (run in COUNTED)]
        launch(preset, num_processes, trainer_worker.main, *words)
        return json.loads(output.read_text())


@pytest.mark.parametrize("run", ["single", "DDP"])
@pytest.mark.parametrize("kind", ["classification", "causal"])
def test_without_a_loss_it_is_trainer(run, kind):
    stock = found(run)["stock"][kind]
    assert stock["moved"] > 0.01
    assert stock["losses_equal"] and stock["weights_equal"] and stock["files_equal"]
    assert stock["resumed_equal"]


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(run):
    resume = found(run)["resume"]
    assert found(run)["world_size"] == RUNS[run][1]
    assert resume["moved"] > 1e-3 and resume["temperature_moved"] > 1e-5
    assert resume["weights_equal"], resume["largest_difference"]
    assert resume["temperatures_equal"] and resume["losses_equal"]
    assert {"loss.safetensors", "loss_optimizer.pt", "scheduler.pt"} <= set(resume["files"])


@pytest.mark.parametrize("run", ["DDP", "FSDP2"])
def test_retrieval_metrics_do_not_depend_on_how_many_ranks_hold_the_rows(run):
    alone = found("single")["evaluation"]
    assert 0 < alone["eval_mrr@10"] < 1
    assert found(run)["evaluation"] == pytest.approx(alone)


# gloo runs a reduce-scatter as an all-reduce, so both carry that name. Per micro-batch the loss side costs two
# all-gathers (row counts; text hashes), one per column whose rows all ranks read, and one reduce-scatter back. Once
# per update the ranks tell each other whether a loss was not finite.
LOSS_REDUCES = 1
GATHERS_OF_LOSS = 3
GATHERS_OF_GUARD = 1


def test_ddp_reduces_gradients_once_per_bucket_and_step():
    counts = found("DDP")["counts"]
    assert counts["speed"]["num_chunks"] > 3, "one chunk would prove nothing"
    assert counts["speed"]["gloo:all_reduce"] == 1 + LOSS_REDUCES
    assert counts["speed"]["gloo:all_gather"] == GATHERS_OF_LOSS + GATHERS_OF_GUARD
    assert counts["accumulation"]["gloo:all_reduce"] == 1 + 2 * LOSS_REDUCES


def test_fsdp_gathers_weights_and_reduces_gradients_once_per_unit_and_step():
    counts = found("FSDP2")["counts"]
    speed, units, norm = counts["speed"], counts["speed"]["units"], 1  # the logged gradient norm is one all-reduce
    assert units == 4 and speed["num_chunks"] > 3  # two layers, the embeddings, the rest
    assert speed["gloo:all_reduce"] == units + LOSS_REDUCES + norm
    assert speed["gloo:all_gather"] == units + GATHERS_OF_LOSS + GATHERS_OF_GUARD
    accumulation = counts["accumulation"]  # two micro-batches: still one reduction and one gather of every unit
    assert accumulation["gloo:all_reduce"] == units + 2 * LOSS_REDUCES + norm
    assert accumulation["gloo:all_gather"] == units + 2 * GATHERS_OF_LOSS + GATHERS_OF_GUARD


def test_fsdp_memory_mode_reduces_every_chunk():
    memory = found("FSDP2")["counts"]["memory"]
    assert memory["gloo:all_reduce"] == memory["num_chunks"] * memory["units"] + LOSS_REDUCES + 1
    assert memory["gloo:all_gather"] > 2 * found("FSDP2")["counts"]["speed"]["gloo:all_gather"]


def test_copies_of_groups_reduce_once_per_unit_and_step_too():
    """In a group, and then over the groups: two all-reduces for gloo."""
    counts = found("HSDP")["counts"]
    speed, memory, units, norm = counts["speed"], counts["memory"], counts["speed"]["units"], 1
    assert units == 4 and speed["num_chunks"] > 3
    assert speed["gloo:all_reduce"] == 2 * units + LOSS_REDUCES + norm
    assert speed["gloo:all_gather"] == units + GATHERS_OF_LOSS + GATHERS_OF_GUARD
    assert counts["accumulation"]["gloo:all_reduce"] == 2 * units + 2 * LOSS_REDUCES + norm
    assert memory["gloo:all_reduce"] == (memory["num_chunks"] + 1) * units + LOSS_REDUCES + norm
