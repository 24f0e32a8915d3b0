"""Pipelines whose layers are split over groups (tensor parallelism), and whose copies shard their stages (FSDP2).

Everything that pipelines do alone is in test_pipeline.py; here is that it holds in these layouts.
"""

import functools
import json
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
from tests.distributed import mesh_worker, pipeline_worker
from tests.distributed.forked import launch, train_under_preset
from tests.parity.exactness_table import LAYOUTS, MESHES, measure_mesh
from tests.tiny_models import loaded, needs_tensor_parallelism, tiny_pairs

pytestmark = needs_tensor_parallelism
slow = pytest.mark.slow
# Layout -> pipelines, ranks that split a layer
RUNS = {"PP 2 x TP 2": (1, 2), "PP 2 x FSDP2 2": (2, 1), "PP 2 x FSDP2 2 per update": (2, 1),
        "PP 2 x TP 2 x DP 2": (2, 2), "PP 2 x TP 2 x FSDP2 2": (2, 2)}  # fmt: skip


def test_ranks_that_split_a_layer_are_neighbours_and_so_are_the_stages_of_a_pipeline():
    places = [Shape(2, 3, 2).place(rank) for rank in range(12)]
    assert places[:6] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]
    assert places[6:] == [(1, *place[1:]) for place in places[:6]]


SENTINEL = "decoder, accumulation, temperature"


@pytest.mark.parametrize(
    ("run", "names"),
    [("PP 2 x TP 2, 1f1b", [SENTINEL]), ("PP 2 x FSDP2 2, 1f1b", [SENTINEL, "bf16 autocast"])],
)
def test_gradients_are_the_full_batch_gradients(run, names):
    errors = measure_mesh(run, *names)
    assert set(errors) == set(names) and errors[SENTINEL]["tolerance"] == 1e-10
    assert not {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}


@slow
@pytest.mark.parametrize("run", MESHES)
def test_gradients_of_every_layout_and_schedule_are_the_full_batch_gradients(run):
    errors = measure_mesh(run)
    assert len(errors) >= len(LAYOUTS[MESHES[run][0]][3])
    assert not {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}


@functools.cache
def folder(layout: str) -> TemporaryDirectory:
    """Of the runs of the worker."""
    preset, processes, fields, _ = LAYOUTS[layout]
    fields, made = {"pipeline_parallel_size": 2} | fields, TemporaryDirectory()
    if "SHARD_GRAD_OP" in fields.values():
        fields["pipeline_schedule"] = "zero_bubble_v"
    only = ["resumed", "held", "counted", "not_finite", "draws", "frozen"] if processes == 8 else []
    if processes == 4:
        only = ["loaded", "held", "counted", "draws", "replayed", "resumed", "elsewhere", "frozen", "head"]
        only += ["not_finite", "evaluation", "said", "adapters", "adapters_elsewhere"]
    launch(preset, processes, mesh_worker.main, made.name, "--fields", json.dumps(fields), "--only", *only)
    return made


def name_of(layout: str) -> str:
    """What a checkpoint says of it."""
    return layout.lower().replace("fsdp2", "fsdp").removesuffix(" per update")


def found(layout: str) -> dict:
    return json.loads(Path(folder(layout).name, "found.json").read_text())


FOUR = [layout for layout in RUNS if LAYOUTS[layout][1] == 4]
KINDS = [(layout, kind) for layout in RUNS for kind in ("resumed", "frozen")]
KINDS += [(layout, kind) for layout in FOUR for kind in ("head", "adapters")]


@slow
@pytest.mark.parametrize("layout, kind", KINDS)
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(layout, kind):
    run = found(layout)[kind]
    assert run["moved"] > 1e-2
    assert run["equal"] and run["losses_equal"]
    assert run["committed"] == ""
    assert {"trainable_optimizer.pt", "scheduler.pt", "loss.safetensors", "rng_state_3.pth"} <= set(run["files"])


@slow
@pytest.mark.parametrize("layout, kind", KINDS)
def test_the_folder_of_the_end_is_whole_and_loads_on_one_process(layout, kind):
    run = found(layout)[kind]
    assert run["embeddings_differ"] < 1e-6
    assert run.get("weights_equal", True)
    assert run["facts"]["embedder"]["built"]["projection_dim"] == 16


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_one_process_goes_on_from_the_weights_of_a_checkpoint(layout, tmp_path):
    base, checkpoint = (Path(folder(layout).name, *parts) for parts in (("base",), ("run", "checkpoint-4")))
    pipeline_worker.check_one_process_goes_on(base, checkpoint, tmp_path, name_of(layout))


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_it_holds_and_sends_what_its_schedule_says_and_copies_reduce_once(layout):
    ranks, (pipelines, parts) = found(layout)["counted"], RUNS[layout]
    schedule = "zero_bubble_v" if "per update" in layout else policy.PIPELINE_SCHEDULE
    assert len(ranks) == 2 * pipelines * parts
    for rank, of_rank in enumerate(ranks):
        stages, per_rank, chunks = (
            Shape(pipelines, 2, parts).place(rank).stages,
            of_rank["per_rank"],
            of_rank["chunks"],
        )
        assert chunks == pipeline_worker.BATCH
        assert of_rank["live"] == sum(policy.live_chunks(schedule, 2, per_rank, chunks, stages)[0])
        kinds = [
            action.kind
            for forward_only in (True, False)
            for action in schedules.actions(schedule, 2, per_rank, chunks, stages, forward_only)
        ]
        assert of_rank["isend"] == sum(kind.startswith("SEND") for kind in kinds) > 0
        # Of all gradients; where FSDP2 has reduced those of the stages, of the temperature.
        assert of_rank.get("reductions", 0) == (pipelines > 1)


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_rows_are_counted_once_per_pipeline(layout):
    run, (pipelines, parts) = found(layout)["resumed"], RUNS[layout]
    assert run["rows_per_step"] == run["logged_batch"] == pipelines * pipeline_worker.BATCH
    facts = run["facts"]
    sizes = ("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    assert [facts[name] for name in sizes] == [2 * pipelines * parts, pipelines, parts, 2]
    assert facts["sharding"] == name_of(layout)


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_each_process_holds_its_share(layout):
    """Of weights and optimizer state: half of its stage where layers are split or sharded, a quarter where both."""
    ranks, (pipelines, _) = found(layout)["held"], RUNS[layout]
    with TemporaryDirectory() as name:
        pipeline_worker.save_base(Path(name), num_attention_heads=4, num_key_value_heads=2)
        whole = sum(p.numel() for p in loaded(name, projection_dim=16).parameters())
    copies = pipelines if "DP 2" in layout and "FSDP" not in layout else 1
    for kind, times in (("weights", 1), ("optimizer", 2)):
        held = [of_rank[kind] / times for of_rank in ranks]
        assert sum(held) == pytest.approx(copies * whole, rel=0.05)  # norms are whole on ranks that split a layer
        assert max(held) < 1.2 * copies * whole / len(ranks)


@slow
@pytest.mark.parametrize("layout", [layout for layout in RUNS if "FSDP" in layout])
def test_fsdp_communicates_once_per_update_or_for_every_chunk(layout):
    chunks = 2 * pipeline_worker.BATCH  # of two batches, two columns, two rows each
    for of_rank in found(layout)["held"]:
        if "per update" in layout:
            assert of_rank["gathered"] == of_rank["reduced"] == of_rank["units"] >= 3
        else:
            assert of_rank["reduced"] == chunks * of_rank["units"]
            assert of_rank["gathered"] >= 3 * chunks * of_rank["units"]  # two forwards and a backward


@slow
def test_weights_are_read_in_parts():
    """No process has more of a loaded model than its part of its stage."""
    ranks = found("PP 2 x TP 2")["loaded"]
    whole = sum(found("PP 2 x FSDP2 2")["loaded"][:2])  # of a pipeline of two: every stage once
    assert all(0 < held < 0.3 * whole for held in ranks)


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_ranks_that_split_a_layer_draw_alike_and_stages_do_not(layout):
    drawn, (_, parts) = found(layout)["draws"], RUNS[layout]
    assert all(before == after for before, after in drawn)  # a resumed run draws as the uninterrupted one
    groups = [drawn[start : start + parts] for start in range(0, len(drawn), parts)]
    assert all(of_rank == group[0] for group in groups for of_rank in group)
    assert groups[0] != groups[1]


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_dropout_is_replayed_on_every_stage(layout):
    assert found(layout)["replayed"] == [True] * 4


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_an_update_that_is_not_finite_on_one_stage_is_skipped_on_all(layout):
    assert found(layout)["not_finite"] == {"skipped_once": True, "is_finite": True}


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_a_checkpoint_is_read_by_processes_that_have_other_stages(layout):
    assert found(layout)["elsewhere"] == {"weights": True, "moments": True, "moved": True, "parts": True}
    assert found(layout)["adapters_elsewhere"] == {"weights": True, "moments": True}


@slow
@pytest.mark.parametrize("layout", RUNS)
def test_parts_have_learning_rates_of_their_own_and_the_bubble_is_logged(layout):
    run = found(layout)["frozen"]
    assert run["rates"]["learning_rate_projection"] == pytest.approx(0.5 * run["rates"]["learning_rate"])
    assert run["rates"]["learning_rate_layers.1"] == pytest.approx(0.2 * run["rates"]["learning_rate"])
    assert all(0 < share < 1 for share in run["bubble"])


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_retrieval_metrics_are_those_of_one_process(layout, tmp_path):
    mesh_worker.save_base(tmp_path / "base")
    alone = pipeline_worker.evaluated(tmp_path / "base", tmp_path, is_alone=True)
    assert 0 < alone["eval_mrr@10"] < 1
    for name in ("eval_mrr@10", "eval_ndcg@10", "eval_recall@1", "eval_recall@10"):
        assert found(layout)["evaluation"][name] == pytest.approx(alone[name], abs=1e-6)


@slow
@pytest.mark.parametrize(
    ("layout", "what", "words"),
    [
        ("PP 2 x TP 2", "optimizer", "optim=adafactor.*adamw_torch"),
        ("PP 2 x TP 2", "one pipeline", "4 processes are one pipeline. Start 8 or more"),
        ("PP 2 x TP 2", "processes", "4 processes do not make pipelines of 4 .* x 2 .*multiple of 8"),
        ("PP 2 x TP 2", "other numbers", "draw other random numbers"),
        (
            "PP 2 x FSDP2 2",
            "zero bubble",
            "pipeline_schedule='zero_bubble' computes.*SHARD_GRAD_OP",
        ),
        ("PP 2 x FSDP2 2", "hybrid", "HYBRID_SHARD.*Choose one of FULL_SHARD, SHARD_GRAD_OP"),
        ("PP 2 x FSDP2 2", "sharded optimizer", "sharding=.* does not go with optim=adafactor"),
        ("PP 2 x FSDP2 2", "offload", "a pipeline does not go with cpu_offload=True"),
    ],
)
def test_what_it_can_not_do_is_refused(layout, what, words):
    assert re.search(words, found(layout)["said"][what], re.DOTALL), found(layout)["said"][what]


def test_a_run_that_splits_layers_does_not_continue_one_that_does_not():
    ours = SimpleNamespace(name="pp 2 x tp 2", ranks_per_layer=2)
    theirs = {"tensor_parallel_size": 1, "pipeline_parallel_size": 4, "sharding": "pp 4"}
    with pytest.raises(UsageError, match="was saved as pp 4, this run is pp 2 x tp 2.*resume_weights_only"):
        Pipeline.check_resumable(ours, Path("checkpoint-2"), theirs, 4)
    Pipeline.check_resumable(ours, Path("checkpoint-2"), theirs | {"tensor_parallel_size": 2}, 4)


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@slow
@pytest.mark.parametrize("processes, more", [(4, {}), (8, {"sharding": "FULL_SHARD"})])
def test_a_run_file_trains_under_the_preset_and_its_folder_loads(tmp_path, processes, more):
    fields = tiny_pairs(tmp_path, rows=148) | {"model_config": CONFIG, "accelerate_config": "3d"}
    fields |= {"pipeline_parallel_size": 2} | more
    train_under_preset("multi_gpu_3d", tmp_path, fields, is_launched=True, processes=processes, groups=processes // 4)
    assert loaded(tmp_path / "run").transformers_model.config.num_hidden_layers == 4
