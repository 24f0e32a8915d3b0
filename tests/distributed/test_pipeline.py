"""Pipelines of two and three processes, and two pipelines of two.

Orders and stages alone are in tests/strategies; here are runs: gradients against naive full-batch lines, what a run
holds and sends, resumed runs, folders, evaluations, and what is refused.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import Hardware
from hf_dist_ext.planner.choose import plan_workload
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.memory import Settings
from hf_dist_ext.planner.pipelines import Staged
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies.pipeline import schedules
from hf_dist_ext.strategies.pipeline.strategy import Pipeline
from hf_dist_ext.tasks import trace
from tests.distributed import pipeline_worker as worker
from tests.distributed.forked import by_launch, launch, train_under_preset
from tests.parity.exactness_table import PIPELINE_CASES, PIPELINES, measure_pipeline
from tests.tiny_models import loaded, tiny_pairs

# One schedule with all cases; of those whose backward is in two halves, or whose processes hold several stages, the
# cases in which a stage has nothing to train or chunks are of other shapes. All of everything with -m slow.
SENTINELS = {
    "PP 2, 1f1b": PIPELINE_CASES,
    "PP 2, zero_bubble_v": [
        "decoder, last token, left padding", "decoder, accumulation, temperature", "decoder, later layers frozen",
        "decoder, frozen, trained projection", "gradient checkpointing", "LoRA",
    ],
    "PP 3, interleaved_1f1b": [
        "decoder, accumulation, temperature", "decoder, first half frozen", "three columns, 3 hard negatives",
        "64 tokens per chunk", "max_grad_norm",
    ],
}  # fmt: skip


@pytest.mark.parametrize("run", SENTINELS)
def test_gradients_of_stages_are_the_full_batch_gradients(run):
    errors = measure_pipeline(run, *SENTINELS[run])
    assert set(errors) == set(SENTINELS[run])
    check(errors)


@pytest.mark.slow
@pytest.mark.parametrize("run", PIPELINES)
def test_so_they_are_under_every_schedule(run):
    errors = measure_pipeline(run)
    assert len(errors) >= len(PIPELINE_CASES)
    check(errors)


def check(errors: dict) -> None:
    assert not {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}


@functools.cache
def folder(processes: int = 2, *words: str) -> TemporaryDirectory:
    """Of the runs of the worker."""
    made = TemporaryDirectory()
    launch("multi_gpu_pp", processes, worker.main, made.name, *words)
    return made


def found(*words: object) -> dict:
    return json.loads(Path(folder(*words).name, "found.json").read_text())


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_it_holds_and_sends_what_its_schedule_says(schedule):
    ranks = found()[schedule]
    per_rank, chunks = ranks[0]["per_rank"], ranks[0]["chunks"]
    assert chunks == worker.BATCH  # two columns, two rows each
    for rank, of_rank in enumerate(ranks):
        live = sum(policy.live_chunks(schedule, 2, per_rank, chunks, rank)[0])
        assert of_rank["live"] == live
        assert of_rank["waiting"] <= max(live, 2 * per_rank)  # buffers follow what is under way
        kinds = [
            action.kind
            for forward_only in (True, False)
            for action in schedules.actions(schedule, 2, per_rank, chunks, rank, forward_only)
        ]
        assert of_rank["isend"] == sum(kind.startswith("SEND") for kind in kinds) > 0
        assert of_rank["irecv"] == sum(kind.startswith("RECV") for kind in kinds)


def planned(tmp_path: Path, schedule: str, **more) -> tuple:
    """The workload and the pipeline's option of a plan for what was counted."""
    run = {
        "dataset_name": "code-search", "model_config": worker.CONFIG, "projection_dim": 16,
        "max_length": worker.WIDTHS, "pipeline_schedule": schedule, "per_device_train_batch_size": worker.BATCH,
        "gradient_cache_chunk_size": 2, "pipeline_parallel_size": 2,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run | more))
    run = load_run(["--config", str(tmp_path / "run.json")])
    work = dataclasses.replace(workload_of(run, trace.complete_config(run.options)), mask_bytes=0)  # as on a CPU
    found = trace.shape(run, work)
    work = dataclasses.replace(work, found=found, embedding_dim=found["embedding_dim"])
    return work, next(option for option in plan_workload(work, Hardware(2)).options if option.pipeline)


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_a_plan_foretells_what_every_stage_holds(schedule, tmp_path):
    """The chunks at once, stage by stage, exactly; their bytes as well as a plan knows dropout's kernel on a CPU."""
    work, option = planned(tmp_path, schedule)
    pipeline = option.strategy.pipeline
    for rank, of_rank in enumerate(found()[schedule]):
        own = pipeline.stages_of_ranks[rank]
        live = policy.live_chunks(schedule, 2, pipeline.per_rank, option.pipeline.num_chunks, rank)
        assert live == [tuple(case) for case in of_rank["cases"]]
        assert option.pipeline.ranks[rank].live_chunks == of_rank["live"]
        saved, casts = Staged(work, pipeline, Settings()).held(own, live)
        assert casts == 0 and saved == pytest.approx(of_rank["bytes"], rel=0.1)


def test_chunks_that_are_alive_share_the_half_precision_copies_of_weights(tmp_path):
    work, option = planned(tmp_path, "gpipe", bf16=True)
    pipeline = option.strategy.pipeline
    for rank, of_rank in enumerate(found()["bf16"]):
        live = policy.live_chunks("gpipe", 2, 1, option.pipeline.num_chunks, rank)
        saved, casts = Staged(work, pipeline, Settings()).held(pipeline.stages_of_ranks[rank], live)
        assert of_rank["live"] == worker.BATCH and of_rank["replayed"]
        assert 0 < casts == of_rank["casts"] < 0.1 * saved


def test_1f1b_holds_fewer_chunks_than_stages_follow():
    assert [of_rank["live"] for of_rank in found()["1f1b"]] == [2, 1]
    assert [of_rank["live"] for of_rank in found()["gpipe"]] == [worker.BATCH] * 2


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_dropout_is_replayed_on_every_stage(schedule):
    assert all(of_rank["replayed"] for of_rank in found()[schedule])


def test_no_process_holds_the_whole_model():
    whole = sum(of_rank["parameters"] for of_rank in found()["1f1b"])
    assert all(0 < of_rank["parameters"] < 0.6 * whole for of_rank in found()["1f1b"])


def test_copies_of_a_pipeline_reduce_once_per_update():
    ranks = found(4, "--only", "counted")["1f1b"]
    assert [of_rank["reductions"] for of_rank in ranks] == [1] * 4
    assert [of_rank["live"] for of_rank in ranks] == [2, 1, 2, 1]


@pytest.mark.parametrize("kind", ["resumed", "adapters", "frozen", "head"])
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(kind):
    run = found()[kind]
    assert run["moved"] > 1e-2
    assert run["equal"] and run["losses_equal"]
    assert run["committed"] == ""
    assert {"trainable_optimizer.pt", "scheduler.pt", "loss.safetensors", "rng_state_1.pth"} <= set(run["files"])


def test_a_checkpoint_is_read_by_processes_that_have_other_stages():
    assert found()["elsewhere"] == {"weights": True, "moments": True, "moved": True, "parts": True}


def test_one_process_goes_on_from_the_weights_of_a_pipeline(tmp_path):
    base, checkpoint = (Path(folder().name, *parts) for parts in (("base",), ("run", "checkpoint-4")))
    worker.check_one_process_goes_on(base, checkpoint, tmp_path, "pp 2")


def test_a_pipeline_does_not_continue_a_run_without_one():
    with pytest.raises(UsageError, match="saved without a pipeline, this run is pp 2"):
        Pipeline.check_resumable(SimpleNamespace(name="pp 2"), Path("checkpoint-2"), {"tensor_parallel_size": 1}, 2)


@pytest.mark.parametrize("kind", ["resumed", "adapters", "frozen", "head"])
def test_the_folder_of_the_end_is_whole(kind):
    run = found()[kind]
    assert run["embeddings_differ"] < 1e-6
    assert run.get("weights_equal", True)
    assert run["facts"]["embedder"]["built"]["projection_dim"] == 16


def test_an_update_that_is_not_finite_on_one_stage_is_skipped_on_all():
    assert found()["not_finite"] == {"skipped_once": True, "is_finite": True}


def test_parts_on_any_stage_have_learning_rates_of_their_own():
    rates = found()["frozen"]["rates"]
    assert rates["learning_rate_projection"] == pytest.approx(0.5 * rates["learning_rate"])
    assert rates["learning_rate_layers.1"] == pytest.approx(0.2 * rates["learning_rate"])


def test_a_logged_line_says_how_long_processes_wait():
    measured, expected = found()["resumed"]["bubble"]
    assert expected == pytest.approx(1 / (worker.BATCH + 1), abs=1e-4)
    assert 0 < measured < 1


def test_rows_are_counted_once_per_pipeline():
    run = found()["resumed"]
    assert run["rows_per_step"] == run["logged_batch"] == worker.BATCH
    facts = run["facts"]
    sizes = ("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    assert [facts[name] for name in sizes] == [2, 1, 1, 2]
    assert facts["sharding"] == "pp 2" and facts["samples_seen"] == 4 * 2 * worker.BATCH


def test_a_trainer_trains_once_more():
    assert len(found()["again"]) == 2 and min(found()["again"]) > 0


def test_weights_of_a_run_with_frozen_parts_are_taken():
    assert found()["weights_only"] > 0


def test_so_are_those_of_a_whole_checkpoint():
    assert found()["whole weights only"] > 0


def test_an_evaluation_is_that_of_one_process(tmp_path):
    worker.save_base(tmp_path / "base")
    alone = worker.evaluated(tmp_path / "base", tmp_path, is_alone=True)
    assert 0 < alone["eval_mrr@10"] < 1
    for name in ("eval_loss", "eval_mrr@10", "eval_ndcg@10", "eval_recall@1", "eval_recall@10"):
        assert found()["evaluation"][name] == pytest.approx(alone[name], abs=1e-6)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no cache", "works on chunks.*gradient_cache_chunk_size"),
        ("auto", "works on chunks"),
        ("kept graphs", "gradient_cache_keep_graph=1"),
        ("fp16", "fp16=true.*bf16"),
        ("async", "save_async=true"),
        ("compile", "torch_compile=true"),
        ("half in evaluation", "bf16_full_eval=true"),
        ("reentrant", "use_reentrant=true"),
        ("hook", "ddp_comm_hook"),
        ("schedule", "dualpipe.*Choose one of gpipe"),
        ("per rank", "1f1b has 1 per process"),
        ("no pipeline", "pipeline_schedule='gpipe' is of a pipeline"),
        ("processes", "2 processes do not make pipelines of 3"),
        ("split", "2 numbers; 2 stages need 1"),
        ("empty stage", "6 layers cut at"),
        ("layers", "6 layers do not make 8 stages"),
        ("other rows", "hold other rows than each other"),
        ("architecture", 'made of "distilbert"'),
        ("towers", "made of Linear"),
    ],
)
def test_what_it_can_not_do_is_refused(what, words):
    assert re.search(words, found()["said"][what], re.DOTALL), found()["said"][what]


@by_launch
def test_a_run_file_trains_under_the_preset_and_its_folder_loads(tmp_path, is_launched):
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    pipeline = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}
    fields = tiny_pairs(tmp_path, rows=84) | {"model_config": config, "accelerate_config": "pp"}
    train_under_preset("multi_gpu_pp", tmp_path, fields | pipeline, is_launched)
    assert loaded(tmp_path / "run").transformers_model.config.num_hidden_layers == 4
