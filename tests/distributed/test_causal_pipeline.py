"""Causal language models with their own loss in pipelines, also of layers that are split (tensor parallelism) and of
copies that shard their stages (FSDP2): gradients against naive lines, runs against those of one process, what a run
holds, resumed runs, folders, and what is refused. Stages alone are in tests/strategies."""

import functools
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from hf_dist_ext import policy
from hf_dist_ext.strategies.pipeline import schedules
from tests.distributed import causal_pipeline_worker as worker
from tests.distributed.forked import look
from tests.parity import causal_worker
from tests.parity.exactness_table import LAYOUTS, MESHES, PIPELINES, measure_causal
from tests.tiny_models import needs_tensor_parallelism

slow = pytest.mark.slow
SENTINELS = {
    "PP 2, 1f1b": ["causal LM, tied word embeddings", "causal LM, accumulation 2, short last window, clipped"],
    "PP 2, interleaved_1f1b": ["causal LM, 7 chunks, a schedule in rounds takes 8", "causal LM, later layers frozen"],
}


def not_exact(errors: dict) -> dict:
    return {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}


@pytest.mark.parametrize(
    ("run", "names"),
    [
        *SENTINELS.items(),
        pytest.param(
            "PP 2 x TP 2, 1f1b", ["causal LM, tied word embeddings", "causal LM, LoRA"], marks=needs_tensor_parallelism
        ),
    ],
)
def test_gradients_of_a_causal_language_model_are_those_of_one_process(run, names):
    errors = measure_causal(run, *names)
    assert len(errors) == len(names) and not not_exact(errors)


@slow
@pytest.mark.parametrize("run", [*PIPELINES, *(pytest.param(run, marks=needs_tensor_parallelism) for run in MESHES)])
def test_gradients_are_those_of_one_process_whatever_the_schedule(run):
    errors = measure_causal(run)
    assert len(errors) == len(causal_worker.CASES) and not not_exact(errors)


# Layout -> preset, processes, fields. All of these are slow.
RUNS = {"PP 2": ("multi_gpu_pp", 2, {})} | {of: run[:3] for of, run in LAYOUTS.items() if run[1] == 4}
ALONE = ("PP 2", "PP 2 x TP 2")  # which are compared with a run of one process
SHORT = ("resumed", "drawn")  # runs of the default tier
OF_FOUR = ("elsewhere", "adapters", "frozen", "head", "compared", "not_finite", *SHORT)
OF_TWO = (*schedules.SCHEDULES, "adapters, head", "streamed", "said", *OF_FOUR)


@functools.cache
def runs(layout: str, parts: tuple[str, ...]) -> tuple[TemporaryDirectory, dict]:
    """The folder of these runs of the worker, and what they found."""
    (preset, processes, fields), made = RUNS[layout], TemporaryDirectory()
    return made, look(preset, processes, worker.found_in, Path(made.name), fields, parts)


def found(layout: str = "PP 2", *parts: str) -> dict:
    """`parts`: none means all of the slow tier."""
    return runs(layout, parts or (OF_TWO if layout == "PP 2" else OF_FOUR))[1]


def in_layouts(names: str, *cases: tuple) -> pytest.MarkDecorator:
    marks = lambda layout: () if layout == "PP 2" else needs_tensor_parallelism  # noqa: E731
    return pytest.mark.parametrize(names, [pytest.param(*case, marks=marks(case[0])) for case in cases])


in_all = in_layouts("layout", *zip(RUNS))


@slow
@in_layouts("layout", *zip(ALONE))
def test_a_run_is_that_of_one_process(layout):
    parts = OF_TWO if layout == "PP 2" else OF_FOUR
    folder = Path(runs(layout, parts)[0].name)
    ours, alone = found(layout)["compared"], look("python", 1, worker.found_alone, folder)
    for name in ("eval_loss", "eval_target"):
        assert abs(alone["evaluation"][name]) > 0.01
        assert ours["evaluation"][name] == pytest.approx(alone["evaluation"][name], rel=1e-9)
    assert ours["evaluation"]["eval_rows"] == alone["evaluation"]["eval_rows"] == 10
    assert ours["tokens"] == alone["tokens"] > 0
    assert len(ours["losses"]) == 4
    for mine, theirs in zip(ours["losses"], alone["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)  # Trainer adds losses up in float32
    mine, theirs = (torch.load(folder / of / "weights.pt") for of in ("compared", "alone"))
    start = causal_worker.build(causal_worker.Case("tied", config=causal_worker.TIED)).state_dict()
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (weight - start[name]).norm() > 1e-3
        assert (mine[name] - weight).abs().max() <= 1e-10, name


@slow
@in_all
def test_both_copies_of_a_tied_weight_train_alike(layout):
    assert found(layout)["compared"]["copies_equal"]


@slow
@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_a_step_is_one_pass_that_holds_what_its_schedule_says(schedule):
    for rank, of_rank in enumerate(found()[schedule]):
        per_rank, chunks = of_rank["per_rank"], of_rank["chunks"]
        assert chunks == worker.CHUNKS
        assert of_rank["forwards"] == of_rank["backwards"] == per_rank * chunks
        assert of_rank["live"] == policy.live_chunks(schedule, 2, per_rank, chunks, rank)
        kinds = [action.kind for action in schedules.actions(schedule, 2, per_rank, chunks, rank)]
        assert of_rank["isend"] == sum(kind.startswith("SEND") for kind in kinds) > 0
        assert of_rank["irecv"] == sum(kind.startswith("RECV") for kind in kinds)


@slow
def test_1f1b_holds_fewer_chunks_than_stages_follow():
    assert [of_rank["live"] for of_rank in found()["1f1b"]] == [2, 1]
    assert [of_rank["live"] for of_rank in found()["gpipe"]] == [worker.CHUNKS] * 2


@slow
def test_no_process_holds_the_whole_model():
    whole = causal_worker.build(causal_worker.Case("tied", config=causal_worker.TIED))
    number = sum(p.numel() for p in whole.parameters())
    for schedule in schedules.SCHEDULES:
        assert all(0 < of_rank["parameters"] < 0.7 * number for of_rank in found()[schedule])


def kinds(layout: str, *names: str) -> list:
    marks = [slow] if layout == "PP 2" else [slow, needs_tensor_parallelism]
    return [pytest.param(layout, (), name, marks=marks) for name in names]


of_kinds = pytest.mark.parametrize(
    "layout, parts, kind",
    [
        ("PP 2", SHORT, "resumed"),
        *kinds("PP 2", "adapters", "adapters, head"),
        *(case for layout in RUNS if layout != "PP 2" for case in kinds(layout, "resumed", "adapters")),
    ],
)


@of_kinds
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(layout, parts, kind):
    run = found(layout, *parts)[kind]
    assert run["moved"] > 1e-2
    assert run["equal"] and run["losses_equal"] and run["committed"] == ""
    assert {"trainable_optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(run["files"])
    if layout == "PP 2":
        assert run["sizes"] == [1, 1, 2]


@of_kinds
def test_the_folder_of_the_end_is_whole(layout, parts, kind):
    run = found(layout, *parts)[kind]
    assert run["weights_equal"] and "lm_head.weight" not in run["keys"]
    assert run["tied"] is (kind != "adapters, head")
    assert run["logits_differ"] < 1e-6 and run["unlabelled"]


def test_a_tied_weight_that_processes_drew_for_themselves_is_one():
    assert found("PP 2", *SHORT)["drawn"] == {"before": True, "after": True}


@slow
@in_layouts("layout", *((layout,) for layout in RUNS if layout != "PP 2"))
def test_so_it_is_where_layers_are_split_or_sharded(layout):
    assert found(layout)["drawn"] == {"before": True, "after": True}


@slow
@in_all
def test_checkpoints_of_frozen_parts_are_resumed_and_taken(layout):
    for kind in ("frozen", "head"):
        run = found(layout)[kind]
        assert run["equal"] and run["taken"] and run["moved"]
    assert found(layout)["head"]["saved"] == ["model.embed_tokens.weight"]
    assert not any("layers.0." in name or "layers.3." in name for name in found(layout)["frozen"]["saved"])


@slow
def test_a_stream_trains_on_the_rows_in_its_order():
    of_rows, of_stream = found()["streamed"]
    assert len(of_rows) == 4 and of_rows[0] != of_rows[1] and of_stream == of_rows


@slow
@in_all
def test_a_checkpoint_is_read_by_processes_that_have_other_stages(layout):
    assert found(layout)["elsewhere"] == {"weights": True, "moments": True, "moved": True}


@slow
@in_all
def test_an_update_whose_loss_is_not_finite_is_skipped_on_all(layout):
    assert found(layout)["not_finite"] == {"skipped_once": True, "is_finite": True}


@slow
def test_a_logged_line_says_how_long_processes_wait():
    measured, expected = found()["resumed"]["bubble"]
    assert expected == pytest.approx(1 / (worker.CHUNKS + 1), abs=1e-4)
    assert 0 < measured < 1


@slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no chunks", "works on chunks.*gradient_cache_chunk_size"),
        ("tokens", "cuts a batch into chunks of equal rows.*gradient_cache_chunk_size"),
        ("both", "gradient_cache_chunk_tokens=64 needs a loss over embeddings"),
        ("mean", "this one does not use that number"),
        ("mean, evaluated", "this one does not use that number"),
        ("mean in evaluations", "this one does not use that number"),
        ("other labels", "the batch has no labels, only input_ids, attention_mask"),
        ("no items", "this model's is a mean"),
        ("no labels", "the batch has no labels, only input_ids, attention_mask"),
        ("other rows", "'lengths' has 3 entries, input_ids 6 rows"),
        ("no rows", r"needs batches with input_ids \(rows, tokens\), got labels"),
        ("batch size", "auto_find_batch_size=true"),
        ("dispatch", "dispatch_batches=true has the first process read"),
        ("optimizer", "updates weights inside of backward"),
        ("noise", "neftune_noise_alpha=5.0"),
        ("merging", "with adapters does not work under FSDP, ZeRO-3 and in a pipeline"),
        ("classifier", "LlamaForSequenceClassification with its own loss"),
        ("architecture", 'made of "granite"'),
        ("layers", "6 layers cut at"),
    ],
)
def test_what_it_can_not_do_is_refused(what, words):
    assert re.search(words, found()["said"][what], re.DOTALL), found()["said"][what]
