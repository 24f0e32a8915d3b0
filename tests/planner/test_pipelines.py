"""Pipelines in a plan: what the largest rank holds, sends and waits, and when one is recommended."""

import json
import re

import pytest

from hf_dist_ext import cli, policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import auto, pipelines
from hf_dist_ext.planner.catalog import GIB, PIPELINE_PRESETS, Hardware
from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.memory import Case, model_of
from hf_dist_ext.run.presets import presets
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies.pipeline import schedules, stages
from tests.planner.test_choose import DECODER, filled, make_run, on_machine, workload  # noqa: F401, a fixture

LARGE = {"per_device_train_batch_size": 256, "gradient_cache_chunk_size": 4, "bf16": True, "projection_dim": 64}


def pipeline_option(plan, is_split=False):
    return next(one for one in plan.options if one.pipeline and (one.strategy.pipeline.parts > 1) == is_split)


def strategy_of(work, hardware, **only):
    return next(
        one
        for one in pipelines.candidates(work, hardware)
        if all(getattr(one.pipeline, name) == value for name, value in ({"parts": 1} | only).items())
    )


# ---- stages ----


def test_models_that_can_be_cut_are_those_of_a_run():
    assert policy.IN_STAGES == stages.DECODERS | stages.ENCODERS.keys()


def test_layers_are_dealt_evenly_and_word_embeddings_are_counted_on_the_first_rank(make_run):  # noqa: F811
    staged = pipeline_option(make_plan(make_run(DECODER, **LARGE, pipeline_parallel_size=4), Hardware(4))).pipeline
    first, later = (staged.parameters(rank).elements for rank in (0, 3))
    whole = model_of(staged.work).whole.elements
    assert first - later == 151936 * 2048 + 64 * 2048 + 2048 and first + 3 * later == whole  # 7 layers each


def test_the_rank_that_needs_most_decides(make_run):  # noqa: F811
    plan = make_plan(make_run(DECODER, **LARGE, pipeline_parallel_size=4), Hardware(4, 80 * GIB))
    option = pipeline_option(plan)
    totals = [option.pipeline.needed(rank).total for rank in (0, 3)]
    assert option.bytes.total == totals[0] > 1.1 * totals[1]
    assert option.pipeline.layers == [7, 7, 7, 7]
    given = make_run(DECODER, **LARGE, pipeline_parallel_size=4, pipeline_split=[4, 12, 20])
    assert pipeline_option(make_plan(given, Hardware(4, 80 * GIB))).pipeline.layers == [4, 8, 8, 8]


# ---- what is held, sent, waited ----


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_messages_are_those_of_the_schedule(make_run, schedule):  # noqa: F811
    fields = {"max_length": 64, "per_device_train_batch_size": 24, "gradient_cache_chunk_size": 4}
    run = make_run(pipeline_parallel_size=4, pipeline_schedule=schedule, **fields)
    plan = make_plan(run, Hardware(4, 80 * GIB))
    option, work = pipeline_option(plan), workload(run)
    pipeline, chunks = option.strategy.pipeline, option.pipeline.num_chunks
    assert chunks == policy.dealt_chunks(schedule, 4, 12)
    sent = [
        sum(
            action.kind.startswith("SEND")
            for forward_only in (True, False)
            for action in schedules.actions(schedule, 4, pipeline.per_rank, chunks, rank, forward_only)
        )
        for rank in range(4)
    ]
    assert option.given.traffic.collectives["send"] == max(sent) > 0
    row = 64 * 768 * 4
    assert option.pipeline.messages[1] == 3 * 48 * row * pipeline.per_rank
    assert option.pipeline.bubble_share == policy.idle_share(schedule, 4, pipeline.per_rank, chunks)
    assert work.num_chunks() == 12


def test_no_gradient_is_sent_to_stages_before_which_nothing_trains(make_run):  # noqa: F811
    fields = {"max_length": 64, "per_device_train_batch_size": 24, "gradient_cache_chunk_size": 4, "projection_dim": 8}
    whole, head = (
        pipeline_option(make_plan(make_run(**fields, pipeline_parallel_size=4, later=later), Hardware(4, 80 * GIB)))
        for later in ({}, {"trainable_modules": ["projection"]})
    )
    assert 3 * head.pipeline.messages[1] == 2 * whole.pipeline.messages[1] > 0
    assert (head.given.traffic.collectives["send"], whole.given.traffic.collectives["send"]) == (2 * 12, 3 * 12)
    assert whole.bytes.gradients > head.bytes.gradients == 4 * 8 * 768


def test_copies_reduce_their_stage_once_per_update(make_run):  # noqa: F811
    fields = {"per_device_train_batch_size": 64, "gradient_cache_chunk_size": 4, "pipeline_parallel_size": 2}
    run = make_run(**fields, gradient_accumulation_steps=3)
    option = pipeline_option(make_plan(run, Hardware(8, 80 * GIB)))
    largest = option.pipeline.parameters(0).trained_stored
    assert option.strategy.name == "PP 2 x DP 4" and option.given.traffic.collectives["all_reduce"] == 1
    assert option.pipeline.reduced == pytest.approx(2 * 3 / 4 * largest)
    once = pipeline_option(make_plan(make_run(**fields), Hardware(8, 80 * GIB)))
    assert option.given.traffic.collectives["send"] == 3 * once.given.traffic.collectives["send"]


# ---- which ----


@pytest.mark.parametrize(
    "field, value", [("neftune_noise_alpha", 5.0), ("use_liger_kernel", True), ("save_async", True)]
)
def test_a_pipeline_that_a_run_refuses_is_not_chosen(make_run, field, value):  # noqa: F811
    plan = make_plan(make_run(DECODER, **LARGE, later={field: value}), Hardware(4, 80 * GIB))
    assert {one.why_not for one in plan.options if one.pipeline} == {f"a pipeline does not go with {field}"}


WAYS = {"multi_gpu_ddp", "multi_gpu_fsdp", "multi_gpu_fsdp_offload", *PIPELINE_PRESETS}


def test_a_pipeline_is_recommended_where_links_between_machines_are_slow(make_run):  # noqa: F811
    run = make_run(DECODER, **LARGE)
    plan = make_plan(run, Hardware(8, 14 * GIB, 2, "nvlink"), WAYS & presets().keys())
    rows = {one.strategy.name: one for one in plan.options}
    assert plan.best is not None and plan.best.pipeline is not None
    assert rows["FSDP memory"].fits and rows["FSDP memory"].sending > rows["FSDP memory"].seconds / 2
    assert plan.best.seconds < rows["FSDP memory"].seconds
    assert plan.changes["pipeline_parallel_size"] == plan.best.strategy.pipeline.ranks
    assert plan.changes["accelerate_config"] == plan.best.preset in PIPELINE_PRESETS
    assert any("is quicker than" in reason and "of sending" in reason for reason in plan.reasons)


def test_where_sharding_fits_and_links_are_quick_the_plan_says_why_there_is_no_pipeline(make_run):  # noqa: F811
    plan = make_plan(make_run(DECODER, **LARGE), Hardware(8, filled(20 * GIB), 1, "nvlink"), WAYS)
    assert plan.best.strategy.name == "FSDP speed" and pipeline_option(plan).fitted is not None
    (said,) = [reason for reason in plan.reasons if reason.startswith("No pipeline")]
    assert "as FSDP speed is quicker: for as many rows FSDP speed takes 13 s" in said
    assert "PP 4 x DP 2 takes 13 s" in said and "contrastive batch is 512 rows, that of DDP or FSDP 2048" in said


def test_a_pipeline_is_recommended_where_nothing_else_fits(make_run):  # noqa: F811
    """FSDP makes what belongs to no layer whole on every device; a pipeline has it on its first."""
    model = DECODER | {"vocab_size": 2_000_000, "num_hidden_layers": 48, "hidden_size": 1920}
    fields = LARGE | {"optim": "sgd", "frozen_parts_fsdp": "shard"}
    run = make_run(model, later={"trainable_modules": ["layers"]}, **fields)
    for gibs, others in ((20, set()), (32, {"FSDP offload"})):  # the CPU's memory comes last too, and is slower
        plan = make_plan(run, Hardware(8, filled(gibs * GIB), 1, "nvlink", given_host_bytes=2**50), WAYS)
        fitting = {o.strategy.name for o in plan.options if o.pipeline is None and o.fitted and not o.why_not}
        assert fitting == others
        assert plan.best.pipeline is not None and plan.best.fitted.needed.total < gibs * GIB


@pytest.mark.parametrize(("chunk", "best"), [(32, "PP 2 x DP 4"), (64, "TP")])
def test_of_ways_that_share_rows_the_quicker_one_is_recommended(make_run, chunk, best):  # noqa: F811
    run = make_run(DECODER, **(LARGE | {"gradient_cache_chunk_size": chunk}))
    plan = make_plan(run, Hardware(8, filled(40 * GIB), 1, "nvlink"), {"multi_gpu_tp", "multi_gpu_pp"})
    rows = [option for option in plan.options if not option.why_not]
    assert len(rows) == 2 and all(option.fits for option in rows)
    assert plan.best.strategy.name == best and plan.best.seconds == min(option.seconds for option in rows)


def test_a_run_that_asks_for_a_pipeline_gets_it_judged(make_run):  # noqa: F811
    plan = make_plan(make_run(DECODER, **LARGE, pipeline_parallel_size=4), Hardware(8, 80 * GIB))
    assert plan.best.strategy.name == "PP 4 x DP 2" and plan.best.preset == "multi_gpu_pp"
    assert all(
        "pipeline_parallel_size" in o.why_not for o in plan.options if o.pipeline is None and o.why_not[:3] != "it "
    )
    assert any("takes longer than" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ({"model_type": "distilbert"}, {}, "can not be made of distilbert"),
        (DECODER, {"fp16": True, "bf16": False}, "does not go with fp16"),
        (DECODER, {"sharding": "FULL_SHARD"}, "does not go with sharding"),
        (DECODER, {"pipeline_parallel_size": 3}, r"pipelines of 3 can not be made of 8 device\(s\); --num_devices"),
        (DECODER, {"pipeline_split": [28]}, r"28 layers cut at \[28\] \(pipeline_split\) do not make 2 stages"),
        (DECODER, {"pipeline_split": [7, 14]}, r"pipeline_split=\[7, 14\] has 2 numbers, 2 stages need 1"),
        (
            DECODER,
            {"pipeline_parallel_size": 8, "pipeline_schedule": "zero_bubble", "pipeline_stages_per_rank": 4},
            "28 layers do not make 32 stages",
        ),
    ],
)
def test_a_pipeline_that_can_not_be_is_refused(make_run, model, fields, words):  # noqa: F811
    with pytest.raises(UsageError, match=words):
        make_plan(make_run(model, **(LARGE | {"pipeline_parallel_size": 2} | fields)), Hardware(8, 80 * GIB))


@pytest.mark.parametrize("model", [{"model_type": "distilbert"}, {"model_type": "gemma2"}, DECODER], ids=str)
def test_auto_never_cuts_a_model_by_itself(make_run, monkeypatch, model):  # noqa: F811
    on_machine(monkeypatch, 6)
    run = make_run(model, per_device_train_batch_size=64, gradient_cache_chunk_size=4, accelerate_config="auto")
    choice = auto.choose(run, 8)
    assert not choice.preset.startswith(("multi_gpu_pp", "multi_gpu_3d"))
    rows = {one["strategy"]: one for one in choice.plan["strategies"] if one["pipeline"]}
    assert bool(rows) == (model is DECODER)
    assert not any(one["can_be_chosen"] for one in rows.values())


def test_the_command_says_what_a_pipeline_takes(make_run, capsys):  # noqa: F811
    make_run(DECODER, **LARGE, pipeline_parallel_size=4, pipeline_schedule="interleaved_1f1b")
    words = ["plan", "--config", "run.json", "--num_devices", "8", "--device_memory_gib", "80"]
    cli.main([*words, "--png", "plan.png"])
    said = capsys.readouterr().out
    assert "PP 4 x DP 2, interleaved_1f1b: layers 3, 3, 3, 3, 4, 4, 4, 4; at most 11 of 128 chunks held" in said
    cli.main([*words, "--json"])
    rows = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)["strategies"]}
    found = rows["PP 4 x DP 2"]["pipeline"]
    assert found["live_chunks"] == 11
    assert found["bubble_share"] == round(policy.idle_share("interleaved_1f1b", 4, 2, 128), 4)
    assert rows["DDP"]["pipeline"] is None and rows["PP 4 x DP 2"]["per_step"]["collectives"]["send"] > 0


def test_layers_split_inside_a_machine_and_stages_over_it(make_run):  # noqa: F811
    run = make_run(DECODER, **LARGE, pipeline_parallel_size=2)
    hardware = Hardware(64, 80 * GIB, 8)
    work = workload(run)
    four = strategy_of(work, hardware, parts=4)
    assert four.name == "TP 4 x PP 2 x DP 8" and four.preset == "multi_gpu_3d"
    whole, split = (
        pipelines.estimate(Case(work, strategy_of(work, hardware, parts=parts), hardware)) for parts in (1, 4)
    )
    words = 4 * 151936 * 2048
    assert split.gradients - words == pytest.approx((whole.gradients - words) / 4, rel=0.01)  # words are whole
    assert {one.pipeline.parts for one in pipelines.candidates(work, hardware)} == {1, 2, 4, 8}
    lora = workload(make_run(DECODER, **LARGE, pipeline_parallel_size=2, later={"use_lora": True}))
    assert {one.pipeline.parts for one in pipelines.candidates(lora, hardware)} == {1}
    sent = pipelines.traffic(Case(work, four, hardware))
    assert sent.collectives["all_reduce"] > 100


def test_pipelines_are_as_long_as_the_devices_can_be_dealt_to(make_run):  # noqa: F811
    found = pipelines.candidates(workload(make_run(DECODER, **LARGE)), Hardware(12, 80 * GIB))
    assert {one.pipeline.ranks for one in found} == {2, 3, 4, 6, 12}
    assert all(12 % one.pipeline.devices == 0 for one in found)


@pytest.mark.parametrize(
    ("machines", "words"), [(8, "--num_machines 8 --machine_rank N .*--num_processes 64 "), (1, "")]
)
def test_groups_of_another_size_than_the_preset_s_are_started_by_a_whole_command(machines, words):
    run = load_run(["--config", "configs/plan/embedder_24b.json", "--pipeline_parallel_size", "2"])
    said = make_plan(run, Hardware(64, 80 * GIB, machines, "nvlink")).command
    words = words or "--num_processes 64 "
    preset = "accelerate launch --config_file configs/accelerate/multi_gpu_3d.yaml "
    assert re.search(f"{preset}{words}--parallelism_config_tp_size 4 scripts/train_hf.py --config configs", said)


def test_hours_are_of_the_steps_that_the_run_makes(make_run):  # noqa: F811
    run = make_run(DECODER, **LARGE, pipeline_parallel_size=4, max_steps=100)
    plan = make_plan(run, Hardware(8, 80 * GIB))
    assert plan.best.fitted.turns >= 4
    assert plan.time.hours == pytest.approx(100 * plan.best.seconds / plan.best.fitted.turns / 3600)
