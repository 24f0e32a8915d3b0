"""What the run file says about sharding, compression, frozen parts, adapters and stages is in the plan."""

import json

import huggingface_hub
import pytest

from hf_dist_ext import cli
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.catalog import GIB, TENSOR_PARALLEL_GROUP, Hardware, adapted
from hf_dist_ext.planner.choose import make_plan, plan_workload
from hf_dist_ext.planner.local_files import config_file
from hf_dist_ext.planner.memory import Case, estimate, model_of
from hf_dist_ext.planner.plan import _without
from hf_dist_ext.planner.traffic import arithmetic, traffic
from hf_dist_ext.run.presets import find_preset, load_preset
from tests.planner.test_choose import BASE, DECODER, bytes_of, filled, make_run, option, strategy, workload  # noqa: F401, a fixture
from tests.tiny_models import embedding_model

LARGE = {"per_device_train_batch_size": 64, "gradient_cache_chunk_size": 4, "bf16": True}
FOUR = Hardware(4, 80 * GIB)


def names(plan):
    return {one.strategy.name for one in plan.options if not one.why_not}


def units(run, name="FSDP memory", devices=FOUR):
    return traffic(Case(workload(run), strategy(name), devices)).collectives


# ---- FSDP's knobs ----


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({"sharding": "FULL_SHARD"}, {"FSDP memory", "FSDP offload"}),
        ({"sharding": "SHARD_GRAD_OP"}, {"FSDP speed", "FSDP offload"}),
        ({"sharding": "HYBRID_SHARD", "sharding_group_size": 2}, {"HSDP"}),
        ({"sharding": "NO_SHARD"}, {"DDP"}),
        ({"cpu_offload": True}, {"FSDP speed", "FSDP memory", "FSDP offload"}),
        ({"cpu_offload": False}, {"FSDP speed", "FSDP memory"}),
        ({"ddp_comm_hook": "fp16"}, {"DDP"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_only_what_a_knob_allows_can_be_chosen(make_run, fields, possible):  # noqa: F811
    found = names(make_plan(make_run(DECODER, **LARGE, **fields), FOUR))
    assert {name for name in found if not name.startswith(("ZeRO", "TP", "PP"))} == possible
    if "ddp_comm_hook" in fields or fields.get("sharding") != "NO_SHARD":
        assert not any(name.startswith("ZeRO") for name in found)


def test_groups_share_a_copy_each(make_run):  # noqa: F811
    run = make_run(DECODER, **LARGE, sharding="HYBRID_SHARD", sharding_group_size=2)
    plan = make_plan(run, FOUR)
    whole = bytes_of(make_run(DECODER, **LARGE), "FSDP memory", 4)
    assert plan.best.preset == "multi_gpu_fsdp" and plan.best.bytes.optimizer == 2 * whole.optimizer > 0
    run = make_run(DECODER, **LARGE, sharding="HYBRID_SHARD", sharding_group_size=3)
    assert "groups of 3" in option(make_plan(run, FOUR), "HSDP").why_not


def test_offloading_moves_state_to_the_host(make_run):  # noqa: F811
    on, off = (
        option(make_plan(make_run(DECODER, **LARGE, cpu_offload=offload), FOUR), "FSDP memory").bytes
        for offload in (True, False)
    )
    assert off.host == 0 < on.host and on.optimizer == 0 < off.optimizer and on.total < off.total


def test_layers_below_min_num_params_are_no_units(make_run):  # noqa: F811
    every, none = units(make_run()), units(make_run(min_num_params=10**9))
    assert every["all_gather"] > none["all_gather"] and none["reduce_scatter"] == 1 + len(workload(make_run()).columns)


def test_a_wider_reduction_sends_twice_as_much(make_run):  # noqa: F811
    half, full, default = (make_run(DECODER, **LARGE, reduce_dtype=one) for one in ("bfloat16", "float32", None))
    sent = [traffic(Case(workload(run), strategy("FSDP speed"), FOUR)).bytes for run in (half, full)]
    trained = model_of(workload(half)).whole.trained
    assert sent[1] - sent[0] == pytest.approx(trained * 2 * 3 / 4, rel=1e-6)
    narrow, wide = (bytes_of(run, "FSDP speed", 4) for run in (half, full))
    assert wide == bytes_of(default, "FSDP speed", 4) and wide.buffers > narrow.buffers
    assert wide.gradients - narrow.gradients == pytest.approx(trained * 2)  # whole ones wait for the one reduction


# ---- compression ----


def compression(run, interconnect):
    plan = make_plan(run, Hardware(4, 80 * GIB, 1, interconnect))
    return next(reason for reason in plan.reasons if reason.startswith("Reducing"))


def test_compression_is_pointless_where_the_reduction_hides_behind_arithmetic(make_run):  # noqa: F811
    large = {"per_device_train_batch_size": 4096, "gradient_cache_chunk_size": 64}
    said = compression(make_run(**large, ddp_comm_hook="fp16"), "nvlink")
    assert "pointless" in said and 'remove ddp_comm_hook="fp16"' in said
    assert "pointless" in compression(make_run(**large), "nvlink")
    small = {"per_device_train_batch_size": 8}
    assert '"ddp_comm_hook": "fp16" would' in compression(make_run(**small), "ethernet")
    said = compression(make_run(**small, ddp_comm_hook="power_sgd"), "ethernet")
    assert "makes it" in said and "warm-up" in said
    half = make_run(**small, later={"dtype": "bfloat16"})
    said = " ".join(make_plan(half, Hardware(4, 80 * GIB, 1, "ethernet"), {"multi_gpu_ddp"}).reasons)
    assert "half precision already" in said and "ddp_comm_hook" not in said


def test_a_hook_sends_less_and_power_sgd_keeps_what_it_left_out(make_run):  # noqa: F811
    def ddp(**fields):
        run = make_run(**fields)
        return traffic(Case(workload(run), strategy("DDP"), FOUR)), bytes_of(run, "DDP", 4)

    (whole, plain), (half, _), (low, kept) = ddp(), ddp(ddp_comm_hook="fp16"), ddp(ddp_comm_hook="power_sgd")
    gradients = model_of(workload(make_run())).whole.trained_stored
    assert whole.bytes - half.bytes == pytest.approx(0.75 * gradients)
    assert low.bytes < 0.1 * whole.bytes and kept.buffers - plain.buffers > gradients


@pytest.mark.parametrize("hook, shares", [("random_k", (0.05, 0.05)), ("top_k", (0.05 * 4, 0.05 * 32))])
def test_top_k_is_gathered_so_that_what_travels_grows_with_the_devices(make_run, hook, shares):  # noqa: F811
    work = workload(make_run(ddp_comm_hook=hook, ddp_compression_ratio=0.05))
    for devices, share in zip((4, 32), shares, strict=True):  # top_k: 8 bytes for 4, from W devices instead of twice
        sent = traffic(Case(work, strategy("DDP"), Hardware(devices, 80 * GIB, 1, "ethernet")))
        assert sent.compressed_seconds / sent.reduction_seconds == pytest.approx(share, rel=0.05)
    kept = bytes_of(make_run(ddp_comm_hook=hook), "DDP", 4).buffers - bytes_of(make_run(), "DDP", 4).buffers
    assert kept > 1.009 * model_of(work).whole.trained_stored  # what is left out, and what is sent


# ---- frozen parts ----

FROZEN = {"projection_dim": 64, "trainable_modules": ["projection"], "gradient_cache_chunk_size": 8}


def test_frozen_parts_are_whole_under_fsdp_where_training_leaves_them_so(make_run):  # noqa: F811
    def weights(memory_gib, **fields):
        work = workload(make_run(**FROZEN, **fields))
        devices = Hardware(4, memory_gib * GIB)
        chosen = adapted(strategy("FSDP memory"), work, devices)
        return chosen.replicates_frozen, estimate(Case(work, chosen, devices)).weights

    size = 4 * model_of(workload(make_run())).whole.elements
    assert weights(80) == weights(1, frozen_parts_fsdp="replicate")
    assert weights(80)[0] and weights(80)[1] > 0.99 * size
    for sharded in (weights(80, frozen_parts_fsdp="shard"), weights(1)):  # a quarter of 1 GiB is less than BERT
        assert not sharded[0] and sharded[1] < 0.8 * size
    plan = make_plan(make_run(**FROZEN, frozen_parts_fsdp="shard"), FOUR)
    assert option_names(plan).isdisjoint({"FSDP frozen whole"})
    assert "FSDP frozen whole" in option_names(make_plan(make_run(**FROZEN), Hardware(4, 1 * GIB)))


def option_names(plan):
    return {one.strategy.name for one in plan.options}


def test_a_frozen_backbone_is_encoded_once_and_a_stored_one_not_at_all(make_run):  # noqa: F811
    given = {"per_device_train_batch_size": 64, **FROZEN}
    once, stored = workload(make_run(**given)), workload(make_run(**given, frozen_feature_cache="features"))
    all_trains = workload(make_run(**{**given, "trainable_modules": None}))
    rows = sum(column.rows for column in once.columns)
    projection = 2 * rows * 64 * 768 * 2  # forward, and the backward of its weight
    assert arithmetic(Case(stored)) == pytest.approx(projection)
    assert arithmetic(Case(once)) == pytest.approx(0.25 * arithmetic(Case(all_trains)), rel=0.01)
    assert units(make_run(**given))["reduce_scatter"] == 2  # the projection's, and that of the loss
    few, none = (estimate(Case(work)).activations for work in (once, stored))
    assert 0 < none < few and none == pytest.approx(rows * 4 * (768 + 2 * 64 + 2), rel=0.01)
    assert estimate(Case(stored)).weights > 4e8  # they stay where they were


# ---- adapters ----


def test_a_run_file_with_adapters_is_planned(make_run):  # noqa: F811
    run = make_run(DECODER, use_lora=True, lora_r=16, lora_target_modules=["q_proj", "v_proj"])
    assert model_of(workload(run)).whole.trained == 28 * 16 * (2048 + 2048 + 2048 + 1024)
    assert names(make_plan(run, FOUR)) >= {"DDP"} and "FSDP frozen whole" not in option_names(make_plan(run, FOUR))


@pytest.mark.parametrize("kind", ["bert", "llama", "qwen3", "gemma2"])
def test_adapters_without_targets_are_where_peft_puts_them(kind, make_run):  # noqa: F811
    import torch
    from transformers import AutoConfig

    from hf_dist_ext.tasks.adapters import add_adapters

    run = make_run({"model_type": kind, "num_hidden_layers": 2}, use_lora=True)
    with torch.device("meta"):
        model = add_adapters(embedding_model(AutoConfig.for_model(kind, num_hidden_layers=2)), run.options)
    theirs = {name for name, one in model.named_parameters() if one.requires_grad}
    theirs = {name.removeprefix("base_model.model.").replace(".default", "") for name in theirs}
    ours = {name for name, one in workload(run).parameters().items() if one.trains}
    assert len(ours) >= 4 and ours == theirs


def test_adapters_that_find_no_layer_are_refused_as_in_training(make_run):  # noqa: F811
    with pytest.raises(UsageError, match="no layer called q_proj"):
        make_plan(make_run({"model_type": "mpnet"}, use_lora=True), FOUR)


# ---- stages ----


def test_stages_are_planned_one_by_one_and_the_largest_decides(make_run, capsys):  # noqa: F811
    stages = [
        {"name": "align", "trainable_modules": ["projection"], "max_length": 32},
        {"name": "all", "per_device_train_batch_size": 4096},
    ]
    run = make_run(projection_dim=64, per_device_train_batch_size=256, gradient_cache_chunk_size=64, stages=stages)
    plan = make_plan(run, Hardware(2, 24 * GIB))
    align, everything = plan.stages
    assert plan.run.name == "all" and everything["needs"] > align["needs"] and plan.work.batch == 4096
    assert align["fits"] and 'Stage "all" needs most' in plan.reasons[0] and 'Stage "align" then' in plan.reasons[-1]
    cli.main(["plan", "--config", "run.json", "--num_devices", "2", "--device_memory_gib", "24"])
    assert 'stage "all" of 2' in capsys.readouterr().out
    cli.main(["plan", "--config", "run.json", "--num_devices", "2", "--device_memory_gib", "24", "--json"])
    assert json.loads(capsys.readouterr().out)["stage"] == "all"


def test_the_memory_of_the_cpu_is_no_easier_way_than_smaller_chunks(make_run):  # noqa: F811
    run = make_run(DECODER, per_device_train_batch_size=256, gradient_cache_chunk_size=16, max_length=512)
    needs = {name: bytes_of(run, name, 4).total for name in ("FSDP memory", "FSDP offload")}
    between = Hardware(4, filled((needs["FSDP memory"] + needs["FSDP offload"]) / 2))
    plan = make_plan(run, between)
    assert option(plan, "FSDP offload").fits and not option(plan, "FSDP memory").fits
    assert plan.best.preset == "multi_gpu_fsdp" and plan.changes["gradient_cache_chunk_size"] < 16


def test_tensor_parallelism_is_planned_as_its_preset_runs_it_and_comes_last(make_run):  # noqa: F811
    sizes = load_preset(find_preset("tp"))["parallelism_config"]
    assert sizes == {"parallelism_config_tp_size": TENSOR_PARALLEL_GROUP}
    run = make_run(DECODER, per_device_train_batch_size=256, gradient_cache_chunk_size=16, max_length=512, bf16=True)
    roomy = make_plan(run, Hardware(4, 80 * GIB))
    assert option(roomy, "TP").fits and roomy.best.preset != "multi_gpu_tp"
    only = plan_workload(roomy.work, Hardware(4, 80 * GIB), available=["multi_gpu_tp"])
    assert only.best.preset == "multi_gpu_tp" and "contrastive batch is 512 rows" in " ".join(only.reasons)
    experts = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    for other in (make_run(), make_run(DECODER | experts), make_run(DECODER, use_lora=True)):
        assert "TP" not in {found.strategy.name for found in make_plan(other, Hardware(4, 80 * GIB)).options}


@pytest.mark.parametrize("overrides, words", [
    ("--pipeline_parallel_size 4 --seed 3", "--seed 3"),
    ("--seed 3 --pipeline_parallel_size=4", "--seed 3"),
    ("--pipeline_parallel_size --seed 3", "--seed 3"),
    ("", ""),
])  # fmt: skip
def test_a_plans_command_has_an_option_once(overrides, words):
    assert " ".join(_without(overrides.split(), {"pipeline_parallel_size": 2})) == words


def test_a_hub_that_is_not_reached_is_asked_once(monkeypatch):
    """A download asks six times, over half a minute."""
    asked = []

    def head(url):
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *words, **options: asked.append(words))
    with pytest.raises(UsageError, match='"somebody/nothing" is neither in the hub cache nor to be had.*not known'):
        config_file("somebody/nothing")
    assert len(asked) == 1


def test_a_plan_is_for_the_processes_of_the_run_file(make_run, monkeypatch, capsys):  # noqa: F811
    run = make_run(num_processes=3)
    for words, devices in ([], 3), (["--num_devices", "5"], 5):
        cli.main(["plan", str(run.path), "--device_memory_gib", "80", "--json", *words])
        assert json.loads(capsys.readouterr().out)["hardware"]["num_devices"] == devices
