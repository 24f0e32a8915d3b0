"""Pipelines: of two and three processes, and of more whose layers are split over groups (tensor parallelism).

Orders and stages alone are in tests/strategies; here are runs: gradients against naive full-batch lines, what a run
holds and sends, resumed runs, folders, evaluations, and what is refused.
"""

import functools
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.mesh import Shape
from hf_dist_ext.strategies.pipeline import schedules
from hf_dist_ext.strategies.pipeline.strategy import Pipeline
from tests.distributed import pipeline_worker as worker
from tests.distributed.forked import by_launch, look, train_under_preset
from tests.parity.exactness_table import MESHES, PIPELINE_CASES, PIPELINES, SPLIT, measure_mesh, measure_pipeline
from tests.tiny_models import loaded, needs_tensor_parallelism, tiny_pairs

SENTINEL = "decoder, accumulation, temperature"
# One schedule with all cases; of those whose backward is in two halves, or whose processes hold several stages, the
# cases in which a stage has nothing to train or chunks are of other shapes. All of everything with -m slow.
SENTINELS = {
    "PP 2, 1f1b": PIPELINE_CASES,
    "PP 2, zero_bubble": [
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


@needs_tensor_parallelism
def test_so_they_are_where_layers_are_split():
    errors = measure_mesh("PP 2 x TP 2, 1f1b", SENTINEL)
    assert set(errors) == {SENTINEL} and errors[SENTINEL]["tolerance"] == 1e-10
    check(errors)


@needs_tensor_parallelism
@pytest.mark.slow
@pytest.mark.parametrize("run", MESHES)
def test_so_they_are_in_every_layout_under_every_schedule(run):
    errors = measure_mesh(run)
    assert len(errors) == len(SPLIT)
    check(errors)


# Layout -> pipelines, ranks that split a layer. All but the first are slow.
RUNS = {"PP 2": (1, 1), "PP 2 x TP 2": (1, 2), "PP 2 x TP 2 x DP 2": (2, 2)}
COPIES = "PP 2 x DP 2"  # of which counts alone are looked at
PRESETS = {
    "PP 2": ("multi_gpu_pp", 2), COPIES: ("multi_gpu_pp", 4),
    "PP 2 x TP 2": ("multi_gpu_3d", 4), "PP 2 x TP 2 x DP 2": ("multi_gpu_3d", 8),
}  # fmt: skip
OF_EIGHT = ["resumed", "held", "counted", "not_finite", "draws", "writes", "frozen"]
OF_FOUR = [*OF_EIGHT, "loaded", "elsewhere", "head", "evaluation", "said"]
OF_ADAPTERS = ["adapters", "adapters elsewhere"]
OF_TWO = [*schedules.SCHEDULES, "bf16", *OF_FOUR, *OF_ADAPTERS, "again", "weights_only", "whole weights only"]


@functools.cache
def runs(layout: str) -> tuple[TemporaryDirectory, dict]:
    """The folder of the runs of the worker, and what they found."""
    preset, processes = PRESETS[layout]
    fields, made = {"pipeline_parallel_size": 2}, TemporaryDirectory()
    only = ["counted"] if layout == COPIES else {2: OF_TWO, 4: OF_FOUR, 8: OF_EIGHT}[processes]
    return made, look(preset, processes, worker.found_in, Path(made.name), fields, only)


def found(layout: str = "PP 2") -> dict:
    return runs(layout)[1]


def in_layouts(names: str, *cases: tuple) -> pytest.MarkDecorator:
    marks = lambda layout: () if layout in ("PP 2", COPIES) else (pytest.mark.slow, needs_tensor_parallelism)  # noqa: E731
    return pytest.mark.parametrize(names, [pytest.param(*case, marks=marks(case[0])) for case in cases])


FEW = [layout for layout in RUNS if PRESETS[layout][1] < 8]
KINDS = [(layout, kind) for layout in RUNS for kind in ("resumed", "frozen")]
KINDS += [*((layout, "head") for layout in FEW), ("PP 2", "adapters")]
in_all, in_few = in_layouts("layout", *zip(RUNS)), in_layouts("layout", *zip(FEW))


@in_layouts(
    "layout, schedule",
    *(("PP 2", schedule) for schedule in schedules.SCHEDULES),
    *((layout, policy.PIPELINE_SCHEDULE) for layout in (COPIES, *RUNS)),
)
def test_it_holds_and_sends_what_its_schedule_says_and_copies_reduce_once(layout, schedule):
    pipelines, parts = {COPIES: (2, 1), **RUNS}[layout]
    ranks = found(layout)[schedule if layout == "PP 2" else "counted"]
    assert len(ranks) == 2 * pipelines * parts
    for rank, of_rank in enumerate(ranks):
        place, per_rank, chunks = Shape(pipelines, 2, parts).place(rank), of_rank["per_rank"], of_rank["chunks"]
        assert chunks == worker.BATCH  # two columns, two rows each
        live = policy.live_chunks(schedule, 2, per_rank, chunks, place.stages)
        assert of_rank["live"] == live
        assert of_rank["waiting"] <= max(live, 2 * per_rank)  # buffers follow what is under way
        kinds = [
            action.kind
            for forward_only in (True, False)
            for action in schedules.actions(schedule, 2, per_rank, chunks, place.stages, forward_only)
        ]
        assert of_rank["isend"] == sum(kind.startswith("SEND") for kind in kinds) > 0
        assert of_rank["irecv"] == sum(kind.startswith("RECV") for kind in kinds)
        assert of_rank.get("reductions", 0) == (pipelines > 1)


def test_chunks_that_are_alive_share_the_half_precision_copies_of_weights():
    for of_rank in found()["bf16"]:
        assert of_rank["live"] == worker.BATCH and of_rank["replayed"]
        assert 0 < of_rank["casts"] <= of_rank["halves"]


@in_layouts("layout, part", *(("PP 2", part) for part in schedules.SCHEDULES), *((of, "counted") for of in RUNS))
def test_dropout_is_replayed_on_every_stage(layout, part):
    assert all(of_rank["replayed"] for of_rank in found(layout)[part])


@in_all
def test_each_process_holds_its_share(layout):
    """Of weights and optimizer state: half of its stage where layers are split."""
    ranks, (pipelines, _) = found(layout)["held"], RUNS[layout]
    with TemporaryDirectory() as name:
        worker.save_base(Path(name))
        whole = sum(p.numel() for p in loaded(name, projection_dim=16).parameters())
    for kind, times in (("weights", 1), ("optimizer", 2)):
        held = [of_rank[kind] / times for of_rank in ranks]
        assert sum(held) == pytest.approx(pipelines * whole, rel=0.05)  # norms are whole on ranks that split a layer
        assert 0 < max(held) < 1.2 * pipelines * whole / len(ranks)


@in_few
def test_weights_are_read_in_parts(layout):
    """No process has more of a loaded model than its part of its stage."""
    ranks, (_, parts) = found(layout)["loaded"], RUNS[layout]
    whole = sum(found()["loaded"])
    assert all(0 < held < 0.6 * whole / parts for held in ranks)


@in_all
def test_ranks_that_split_a_layer_draw_alike_and_stages_do_not(layout):
    drawn, (_, parts) = found(layout)["draws"], RUNS[layout]
    assert all(before == after for before, after in drawn)  # a resumed run draws as the uninterrupted one
    groups = [drawn[start : start + parts] for start in range(0, len(drawn), parts)]
    assert all(of_rank == group[0] for group in groups for of_rank in group)
    assert groups[0] != groups[1]


@in_all
def test_what_a_loss_writes_in_its_forward_is_on_every_stage(layout):
    """A checkpoint has the state of the first process, and the last stage alone runs the loss."""
    states = found(layout)["writes"]
    assert all(state == states[-1] for state in states) and states[0]["seen"] == 8


@in_layouts("layout, kind", *KINDS)
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(layout, kind):
    run = found(layout)[kind]
    assert run["moved"] > 1e-2
    assert run["equal"] and run["losses_equal"]
    assert run["committed"] == ""
    last = f"rng_state_{PRESETS[layout][1] - 1}.pth"
    assert {"trainable_optimizer.pt", "scheduler.pt", "loss.safetensors", last} <= set(run["files"])


@in_layouts("layout, kind", *KINDS)
def test_the_folder_of_the_end_is_whole_and_loads_on_one_process(layout, kind):
    run = found(layout)[kind]
    assert run["embeddings_differ"] < 1e-6
    assert run.get("weights_equal", True)
    assert run["facts"]["embedder"]["built"]["projection_dim"] == 16


@in_few
def test_a_checkpoint_is_read_by_processes_that_have_other_stages(layout):
    all_is_read = {"weights": True, "moments": True, "moved": True}
    assert found(layout)["elsewhere"] == {**all_is_read, "parts": True}


def test_so_is_one_of_adapters():
    assert all(found()["adapters elsewhere"][name] for name in ("weights", "moments", "moved"))


@in_all
def test_one_process_goes_on_from_the_weights_of_a_checkpoint(layout, tmp_path):
    base, checkpoint = (Path(runs(layout)[0].name, *parts) for parts in (("base",), ("run", "checkpoint-4")))
    worker.check_one_process_goes_on(base, checkpoint, tmp_path, layout.lower())


def test_a_run_continues_none_whose_optimizer_has_other_groups():
    ours, theirs = SimpleNamespace(name="pp 2", ranks_per_layer=1), {"tensor_parallel_size": 1}
    with pytest.raises(UsageError, match="saved without a pipeline, this run is pp 2"):
        Pipeline.check_resumable(ours, Path("checkpoint-2"), theirs, 2)
    ours, theirs = SimpleNamespace(name="pp 2 x tp 2", ranks_per_layer=2), theirs | {"pipeline_parallel_size": 4}
    with pytest.raises(UsageError, match="was saved as pp 4, this run is pp 2 x tp 2.*resume_weights_only"):
        Pipeline.check_resumable(ours, Path("checkpoint-2"), theirs | {"sharding": "pp 4"}, 4)
    Pipeline.check_resumable(ours, Path("checkpoint-2"), theirs | {"tensor_parallel_size": 2}, 4)


def test_ranks_that_split_a_layer_are_neighbours_and_so_are_the_stages_of_a_pipeline():
    places = [Shape(2, 3, 2).place(rank) for rank in range(12)]
    assert places[:6] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]
    assert places[6:] == [(1, *place[1:]) for place in places[:6]]


@in_all
def test_an_update_that_is_not_finite_on_one_stage_is_skipped_on_all(layout):
    assert found(layout)["not_finite"] == {"skipped_once": True, "is_finite": True}


@in_all
def test_parts_on_any_stage_have_learning_rates_of_their_own(layout):
    rates = found(layout)["frozen"]["rates"]
    assert rates["learning_rate_projection"] == pytest.approx(0.5 * rates["learning_rate"])
    assert rates["learning_rate_layers.1"] == pytest.approx(0.2 * rates["learning_rate"])


@in_all
def test_a_logged_line_says_how_long_processes_wait(layout):
    measured, expected = found(layout)["resumed"]["bubble"]
    assert 0 < measured < 1 and 0 < expected < 1
    if layout == "PP 2":
        assert expected == pytest.approx(1 / (worker.BATCH + 1), abs=1e-4)


@in_all
def test_rows_are_counted_once_per_pipeline(layout):
    run, (pipelines, parts) = found(layout)["resumed"], RUNS[layout]
    assert run["rows_per_step"] == run["logged_batch"] == pipelines * worker.BATCH
    facts = run["facts"]
    sizes = ("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    assert [facts[name] for name in sizes] == [2 * pipelines * parts, pipelines, parts, 2]
    assert facts["sharding"] == layout.lower()
    if pipelines == 1:
        assert facts["samples_seen"] == 4 * 2 * worker.BATCH


def test_a_trainer_trains_once_more():
    assert len(found()["again"]) == 2 and min(found()["again"]) > 0


def test_weights_of_a_run_with_frozen_parts_are_taken():
    assert found()["weights_only"] > 0


def test_so_are_those_of_a_whole_checkpoint():
    assert found()["whole weights only"] > 0


@in_few
def test_an_evaluation_is_that_of_one_process(layout, tmp_path):
    worker.save_base(tmp_path / "base")
    alone = worker.evaluated(tmp_path / "base", tmp_path, is_alone=True)
    assert 0 < alone["eval_mrr@10"] < 1
    ranking = ("eval_mrr@10", "eval_ndcg@10", "eval_recall@1", "eval_recall@10")
    for name in ranking if RUNS[layout][0] > 1 else ("eval_loss", *ranking):
        assert found(layout)["evaluation"][name] == pytest.approx(alone[name], abs=1e-6)


@in_layouts(
    "layout, what, words",
    ("PP 2", "no cache", "works on chunks.*gradient_cache_chunk_size"),
    ("PP 2", "auto", "works on chunks"),
    ("PP 2", "kept graphs", "gradient_cache_keep_graph=1"),
    ("PP 2", "fp16", "fp16=true.*bf16"),
    ("PP 2", "async", "save_async=true"),
    ("PP 2", "compile", "torch_compile=true"),
    ("PP 2", "half in evaluation", "bf16_full_eval=true"),
    ("PP 2", "reentrant", "use_reentrant=true"),
    ("PP 2", "hook", "ddp_comm_hook"),
    ("PP 2", "sharding", "a pipeline does not go with sharding='FULL_SHARD'"),
    ("PP 2", "schedule", 'dualpipe.*it takes "gpipe"'),
    ("PP 2", "per rank", "1f1b has 1 per process"),
    ("PP 2", "no pipeline", "pipeline_schedule='gpipe' is of a pipeline"),
    ("PP 2", "processes", "2 processes do not make pipelines of 3"),
    ("PP 2", "split", "2 numbers; 2 stages need 1"),
    ("PP 2", "empty stage", "6 layers cut at"),
    ("PP 2", "layers", "6 layers do not make 8 stages"),
    ("PP 2", "other rows", "hold other rows than each other"),
    ("PP 2", "architecture", 'made of "distilbert"'),
    ("PP 2", "towers", "made of Linear"),
    ("PP 2 x TP 2", "optimizer", "optim=adafactor.*adamw_torch"),
    ("PP 2 x TP 2", "adapters", "tensor parallelism does not go with adapters"),
    ("PP 2 x TP 2", "processes", "4 processes do not make pipelines of 4 .* x 2 .*multiple of 8"),
    ("PP 2 x TP 2", "other numbers", "draw other random numbers"),
)
def test_what_it_can_not_do_is_refused(layout, what, words):
    assert re.search(words, found(layout)["said"][what], re.DOTALL), found(layout)["said"][what]


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@by_launch
def test_a_run_file_trains_under_the_preset_and_its_folder_loads(tmp_path, is_launched):
    pipeline = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}
    fields = tiny_pairs(tmp_path, rows=84) | {"model_config": CONFIG, "accelerate_config": "pp"}
    train_under_preset("multi_gpu_pp", tmp_path, fields | pipeline, is_launched)
    assert loaded(tmp_path / "run").transformers_model.config.num_hidden_layers == 4


@needs_tensor_parallelism
@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, 8])
def test_a_run_file_trains_under_the_preset_of_three_dimensions(tmp_path, processes):
    fields = tiny_pairs(tmp_path, rows=148) | {"model_config": CONFIG, "accelerate_config": "3d"}
    fields |= {"pipeline_parallel_size": 2}
    train_under_preset("multi_gpu_3d", tmp_path, fields, is_launched=True, processes=processes, groups=processes // 4)
    assert loaded(tmp_path / "run").transformers_model.config.num_hidden_layers == 4
