"""From a run and a machine to a strategy: boundaries follow from the bytes, and everything is said."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_dist_ext import cli, launch
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import auto, devices
from hf_dist_ext.planner.catalog import GIB, MARGIN, STRATEGIES, Hardware
from hf_dist_ext.planner.choose import make_plan, plan_workload
from hf_dist_ext.planner.devices import CARDS, card_of, hardware_of
from hf_dist_ext.planner.memory import Case, Settings, activation_cost, estimate, model_of
from hf_dist_ext.planner.plan import _without, changes_for
from hf_dist_ext.planner.reasons import gib
from hf_dist_ext.planner.report import write_png
from hf_dist_ext.planner.traced import traced as workload
from hf_dist_ext.planner.traffic import speed, traffic
from hf_dist_ext.planner.workload import with_batch
from hf_dist_ext.run import record
from hf_dist_ext.run.presets import presets
from hf_dist_ext.run.read import load_run
from tests.tasks.test_folders import write_run
from tests.tasks.test_stages import main as train
from tests.tiny_models import embedding_model, model_config

ROOT = Path(__file__).parents[2]
BASE = {"model_type": "bert"}  # 109M parameters
DECODER = {
    "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.delenv(name, raising=False)

    def make_run(model=BASE, later=None, **fields):
        content = {"dataset_name": "code-search", "model_config": model, "max_length": 128, **fields}
        Path("run.json").write_text(json.dumps(content), encoding="utf-8")
        run = load_run(["--config", "run.json"])
        run.given |= later or {}
        for name in (later or {}).keys() & vars(run.options).keys():
            setattr(run.options, name, later[name])
        return run

    return make_run


def strategy(name):
    return next(one for one in STRATEGIES if one.name == name)


def filled(needed):
    """Memory of a device of which a plan fills so many bytes."""
    return needed / (1 - MARGIN)


def deepspeed_is(monkeypatch, unusable):
    """`unusable`: why; empty when it is installed."""
    monkeypatch.setattr("hf_dist_ext.run.deepspeed_install.why_unusable", lambda *_: unusable)


def option(plan, name):
    return next(one for one in plan.options if one.strategy.name == name)


def bytes_of(run, name, devices=1, **settings):
    return estimate(Case(workload(run), strategy(name), Hardware(devices), Settings(**settings)))


def test_every_strategy_names_a_preset_of_ours_or_says_that_there_is_none(make_run):
    plan = make_plan(make_run(), Hardware(4, 80 * GIB))
    for one in plan.options:
        assert (one.preset in presets()) or one.why_not == f"there is no preset {one.preset}"
    assert plan.best.preset in presets()


def test_memory_that_is_assumed_is_said_to_be(make_run, monkeypatch, capsys):
    monkeypatch.setattr("hf_dist_ext.planner.devices.device_memory_bytes", lambda: None)
    make_run()
    cli.main(["plan", "--config", "run.json", "--num_devices", "2"])
    assert "note: no device is visible here: 80 GiB per device are assumed." in capsys.readouterr().out
    cli.main(["plan", "--config", "run.json", "--num_devices", "2", "--device_memory_gib", "80"])
    assert "per device are assumed" not in capsys.readouterr().out


def test_deepspeed_that_is_not_installed_is_recommended_only_where_torch_alone_needs_the_cpu(make_run, monkeypatch):
    model, fields = DECODER | {"num_hidden_layers": 2}, {"gradient_cache_chunk_size": 4, "bf16": True}
    run = make_run(model, optim="paged_adamw_32bit", **fields)  # which the plan knows no 8-bit one for
    tight = make_plan(run, Hardware(8, GIB))
    zero, fsdp = (option(tight, name).least.total for name in ("ZeRO-3", "FSDP memory"))
    both, zero_alone = Hardware(8, filled(1.01 * fsdp)), Hardware(8, filled((zero + fsdp) / 2))
    deepspeed_is(monkeypatch, "")
    assert zero < 0.99 * fsdp and make_plan(run, both).best.strategy.is_deepspeed
    deepspeed_is(monkeypatch, "DeepSpeed is not here.")
    plan = make_plan(run, both)
    assert plan.best.strategy.name.startswith("FSDP") and not plan.best.strategy.offloads
    assert "DeepSpeed is not here." not in plan.notes and not option(plan, "ZeRO-3").why_not
    plan = make_plan(run, zero_alone)
    assert plan.best.strategy.is_deepspeed and "DeepSpeed is not here." in plan.notes


def test_deepspeed_that_is_not_installed_is_not_recommended_where_it_needs_the_cpu_too(monkeypatch):
    run, machine = load_run(["--config", str(ROOT / "configs/plan/embedder_2b.json")]), Hardware(1, 8 * GIB)
    deepspeed_is(monkeypatch, "")
    assert make_plan(run, machine).best.strategy.name == "ZeRO-3 offload"
    deepspeed_is(monkeypatch, "DeepSpeed is not here.")
    plan = make_plan(run, machine)
    assert plan.best.strategy.name == "FSDP offload" and option(plan, "ZeRO-3 offload").fitted is not None
    larger = load_run(["--config", str(ROOT / "configs/plan/embedder_8b.json")])
    plan = make_plan(larger, Hardware(16, 17 * GIB, 2))  # here it does not, and torch alone does
    assert plan.best.strategy.name == "ZeRO-3" and option(plan, "FSDP offload").fitted is not None


def test_weights_that_do_not_fit_one_device_are_sharded(make_run):
    run = make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=4, bf16=True)
    needed = bytes_of(run, "DDP", 4).total
    assert make_plan(run, Hardware(4, filled(1.01 * needed))).best.strategy.name == "DDP"
    plan = make_plan(run, Hardware(4, filled(0.99 * needed)))
    assert plan.best.preset == "multi_gpu_fsdp" and plan.best.fits
    assert plan.changes["accelerate_config"] == "multi_gpu_fsdp"
    assert any("FSDP" in reason and "DDP does not fit" in reason or "only with" in reason for reason in plan.reasons)


def assert_its_own_fields_give(again, one):
    same = next(other for other in again.options if other.strategy == one.strategy)
    assert same.fits and same.given.seconds == pytest.approx(one.seconds)
    assert same.bytes.total == pytest.approx(one.fitted.needed.total)


def test_a_recommended_chunk_is_what_its_own_fields_give(make_run):
    model, given = DECODER | {"num_hidden_layers": 2, "vocab_size": 2048}, {"per_device_train_batch_size": 512}
    run, of_cpu = make_run(model, **given), "FSDP offload"
    hardware = Hardware(4, filled(1.3 * option(make_plan(run, Hardware(4, 8 * GIB)), of_cpu).least.total))
    plan = make_plan(run, hardware)
    fields = changes_for(plan, option(plan, of_cpu))
    assert fields["gradient_cache_chunk_size"] < 512
    assert_its_own_fields_give(make_plan(make_run(model, **given, **fields), hardware), option(plan, of_cpu))


@pytest.mark.parametrize("more, name", [
    ([], "gradient_cache_chunk_tokens"), (["--gradient_cache_chunk_size", "64"], "gradient_cache_chunk_size")
])  # fmt: skip
def test_a_recommendation_for_a_run_that_bounds_tokens_is_what_its_own_fields_give(more, name):
    words = ["--config", str(ROOT / "configs/plan/embedder_8b_lora.json"), "--gradient_cache_chunk_tokens", "1024"]
    hardware = Hardware(1, 24 * GIB)
    plan = make_plan(load_run([*words, *more]), hardware)
    assert plan.changes[name] > 2
    kept = _without([*words, *more], plan.changes)
    kept += [word for key, value in plan.changes.items() for word in (f"--{key}", json.dumps(value))]
    assert_its_own_fields_give(make_plan(load_run(kept), hardware), plan.best)


def test_a_row_that_fits_with_changes_names_the_fields(make_run, capsys):
    make_run(per_device_train_batch_size=4096)
    words = ["plan", "run.json", "--num_devices", "2", "--device_memory_gib", "8"]
    cli.main(words)
    rows = {line[2:20].strip(): line for line in capsys.readouterr().out.splitlines() if "GiB" not in line}
    cli.main([*words, "--json"])
    found = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)["strategies"]}
    chunk = found["DDP"]["set"]["gradient_cache_chunk_size"]
    assert chunk == found["DDP"]["made_to_fit"]["chunk_rows"] and not found["DDP"]["fits"]
    assert " changed " in rows["DDP"] and rows["DDP"].rstrip().endswith(f'"gradient_cache_chunk_size": {chunk}')
    assert "preset" not in rows["FSDP memory"] and found["FSDP memory"]["set"]["gradient_cache_fsdp"] == "memory"


def test_nothing_that_fits_is_said_with_what_to_do(make_run):
    plan = make_plan(make_run(DECODER), Hardware(2, 2 * GIB))
    assert plan.best is None and any("adamw_bnb_8bit" in reason for reason in plan.reasons)


def test_frozen_parts_have_no_gradients_and_no_state(make_run):
    full = bytes_of(make_run(), "DDP", 2)
    run = make_run(projection_dim=64, later={"trainable_modules": ["projection"]})
    frozen = bytes_of(run, "DDP", 2)
    trained = 64 * 768
    assert model_of(workload(run)).whole.trained == trained
    assert frozen.gradients == 4 * trained and frozen.optimizer == 8 * trained and frozen.buffers == 4 * trained
    assert frozen.weights == pytest.approx(full.weights, rel=0.01) and frozen.activations < full.activations / 10


def test_frozen_weights_take_what_training_loads_them_in(make_run):
    """As tasks/parts.py decides by the same rule: under autocast as the files hold them, where a part is frozen."""
    Path("model").mkdir()
    Path("model", "config.json").write_text(json.dumps({**BASE, "dtype": "bfloat16"}), encoding="utf-8")
    for frozen, half, item in (({"trainable_modules": ["encoder.layer.11"]}, True, 2), ({}, True, 4), (
        {"trainable_modules": ["encoder.layer.11"]}, False, 4,
    )):  # fmt: skip
        run = make_run(None, model_name_or_path="model", bf16=half, later=frozen)
        found = workload(run).parameters().items()
        assert {one.item for name, one in found if "layer.0." in name} == {item}
        assert {one.item for name, one in found if "layer.11." in name} == {4}  # what trains
    for half, item in ((True, 2), (False, 4)):
        work = workload(make_run(None, model_name_or_path="model", bf16=half, use_lora=True))
        of_base = {one.item for name, one in work.parameters().items() if ".lora_" not in name}
        assert of_base == {item} and model_of(work).whole.trained_stored == 4 * model_of(work).whole.trained
    Path("model", "config.json").write_text(json.dumps({**DECODER, "dtype": "bfloat16"}), encoding="utf-8")
    run = make_run(None, model_name_or_path="model", bf16=True, later={"trainable_modules": ["layers.1"]})
    assert {one.item for one in workload(run).parameters(2).values()} == {4}  # split while it is loaded: float32


def test_a_base_in_4_bits_is_counted_as_it_is_stored_and_never_sharded(make_run):
    small = DECODER | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    fields = {"use_lora": True, "bf16": True, "per_device_train_batch_size": 256}
    plain, packed = (workload(make_run(small, **fields, load_in_4bit=is_packed)) for is_packed in (False, True))
    before, after = plain.parameters(), packed.parameters()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "proj" in name and "lora" not in name} and len(changed) == 14
    for name in changed:
        numbers = before[name].elements
        assert after[name].elements == numbers
        assert after[name].item * numbers == pytest.approx(numbers * (1 / 2 + 1 / 64 + 4 / 64 / 256), abs=4 + 64)
    largest = max(before[name].elements for name in changed)
    single = estimate(Case(packed, strategy("single"), Hardware(1)))
    stored = sum(one.elements * one.item for one in after.values() if not one.trains)
    assert single.weights == pytest.approx(stored + 2 * largest + activation_cost(Case(packed)).casts)
    assert activation_cost(Case(packed)).casts < activation_cost(Case(plain)).casts / 20  # those of adapters alone
    plan = plan_workload(packed, Hardware(4, 80 * GIB))
    assert {one.strategy.name for one in plan.options if not one.why_not} == {"DDP"}
    assert option(plan, "FSDP speed").why_not == "load_in_4bit keeps the base whole in every process"


@pytest.mark.parametrize(
    ("optim", "per_parameter"), [("adamw_torch", 8), ("adamw_bnb_8bit", 2), ("sgd", 0), ("adafactor", 0.02)]
)
def test_optimizers_differ(make_run, optim, per_parameter):
    run = make_run(optim=optim)
    elements = model_of(workload(run)).whole.elements
    assert bytes_of(run, "single").optimizer == pytest.approx(per_parameter * elements, rel=0.1, abs=0.02 * elements)


def test_an_optimizer_that_is_not_known_is_said(make_run):
    assert "counted as AdamW" in make_plan(make_run(optim="galore_adamw"), Hardware()).notes[0]


def test_half_precision_keeps_masters_under_autocast(make_run):
    found = bytes_of(make_run(bf16=True), "single")
    elements = model_of(workload(make_run())).whole.elements
    assert found.master_weights == 4 * elements
    assert 1.5 * elements < found.weights < 2 * 2 * elements  # copies of what is multiplied, per column


def test_sharding_divides_by_the_number_of_devices(make_run):
    run = make_run(per_device_train_batch_size=64, gradient_cache_chunk_size=8)
    two, four = (bytes_of(run, "FSDP memory", devices) for devices in (2, 4))
    assert two.optimizer == 2 * four.optimizer and two.gradients == 2 * four.gradients
    whole = bytes_of(run, "DDP", 4)
    assert bytes_of(run, "ZeRO-1", 4).gradients == whole.gradients


def test_zero_keeps_whole_gradients_between_the_backwards_of_an_update_or_reduces_each(make_run):
    """As tests/distributed/test_deepspeed.py counts: one reduction per update, or one per chunk."""
    batch = {"per_device_train_batch_size": 64, "gradient_cache_chunk_size": 8}
    speed, memory = (make_run(**batch, gradient_cache_fsdp=mode) for mode in ("speed", "memory"))
    chunks = workload(speed).num_chunks(8)
    for name in ("ZeRO-2", "ZeRO-3"):
        kept, shared = bytes_of(speed, name, 4), bytes_of(memory, name, 4)
        assert kept.gradients == 4 * shared.gradients
        once, often = (
            traffic(Case(workload(run), strategy(name), Hardware(4))).collectives["reduce_scatter"] - 1  # the loss's
            for run in (speed, memory)
        )
        assert often == chunks * once
    assert (
        bytes_of(make_run(per_device_train_batch_size=64), "ZeRO-2", 4).gradients == shared.gradients
    )  # one backward


def test_collectives_are_those_counted_on_real_processes(make_run):
    """tests/distributed/test_trainer.py counts them: 6 chunks and 4 units under FSDP."""
    model = {"model_type": "bert", "num_hidden_layers": 3}
    run = make_run(model, per_device_train_batch_size=48, gradient_cache_chunk_size=16)
    of = {
        name: traffic(Case(workload(run), strategy(name), Hardware(2))).collectives
        for name in ("DDP", "FSDP speed", "FSDP memory")
    }
    loss = {"all_gather": 3, "reduce_scatter": 1}
    assert workload(run).num_chunks() == 6
    assert of["DDP"] == {"all_reduce": 1, **loss}
    assert of["FSDP speed"] == {"all_gather": 4 + 3, "reduce_scatter": 4 + 1}
    assert of["FSDP memory"] == {"all_gather": 60 + 3, "reduce_scatter": 24 + 1}


# ---- the command ----


def test_the_command_prints_a_table_json_and_a_picture(make_run, capsys):
    make_run(per_device_train_batch_size=256, gradient_cache_chunk_size=16)
    words = ["plan", "--config", "run.json", "--num_devices", "2", "--device_memory_gib", "24"]
    cli.main(words)
    output = capsys.readouterr().out
    assert "recommended: DDP (preset multi_gpu_ddp)" in output and "parameters train" in output
    cli.main([*words, "--json", "--optim", "sgd", "--png", "plan.png"])
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"]["preset"] == "multi_gpu_ddp"
    assert {one["strategy"] for one in found["strategies"]} >= {"DDP", "FSDP memory", "ZeRO-3", "FSDP offload"}
    assert all(one["bytes"]["optimizer"] == 0 for one in found["strategies"])
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_devices", "3", "--num_nodes", "2"], "share equally"),
        (["--device_memory_gib", "-1"], "positive number of GiB"),
        (["--png", "nowhere/plan.png"], "cannot be written"),
        (["--optimm", "sgd"], "Unknown field"),
        (["--num_device", "2"], "Closest: --num_devices"),
        (["--devices", "8"], "Closest: --device"),
        (["--device", "h1000"], "--device h1000 is not known. Choose one of b200"),
        (["--host_memory_gib", "0"], "positive number of GiB"),
        (["--network_gbps", "-5"], "positive number of Gbit/s"),
        (["--network_gbps", "inf"], "positive number of Gbit/s"),
        (["--num_rows", "-3"], "--num_rows -3 is not a positive number"),
        (["--price_per_hour", "-1"], "--price_per_hour -1.0 is not a positive number"),
        (["--trainable_modules", '["encoder.layer.12"]'], "matches no module. Closest"),
        (["--num_devices", "1,2"], "argument --num_devices: invalid int value: '1,2'"),
    ],
)
def test_mistakes_are_one_line(make_run, capsys, words, message):
    make_run()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--config", "run.json", *words])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_command_runs_the_very_plan_and_time_has_a_price(make_run, capsys):
    """What it sets, given to the run, makes a run that fits as it stands."""
    make_run(DECODER, per_device_train_batch_size=256, gradient_cache_chunk_size=16, max_length=512, bf16=True)
    machine = ["--num_devices", "4", "--device", "a100-40", "--num_rows", "102400", "--price_per_hour", "2.5"]
    cli.main(["plan", "--config", "run.json", *machine, "--json", "--num_train_epochs", "2"])
    found = json.loads(capsys.readouterr().out)["recommended"]
    words = found["command"].split()
    assert words[:3] == ["hf-dist", "train", "run.json"] and "--num_train_epochs" in words
    cli.main(["plan", "--config", "run.json", *machine, "--json", *words[3:]])
    again = json.loads(capsys.readouterr().out)
    chosen = next(one for one in again["strategies"] if one["strategy"] == found["strategy"])
    assert chosen["fits"] and again["recommended"]["strategy"] == found["strategy"]
    time = found["time"]
    assert time["rows_per_second"] == pytest.approx(4 * 256 / time["seconds_per_step"], rel=1e-3)
    assert time["tokens_per_second"] == pytest.approx(2 * 512 * time["rows_per_second"], rel=1e-3)
    assert time["hours"] == pytest.approx(2 * 100 * time["seconds_per_step"] / 3600, rel=1e-2)
    assert time["price"] == pytest.approx(4 * 2.5 * time["hours"], rel=1e-2)


def test_named_devices_have_memory_speed_and_links():
    slow, quick = (hardware_of(8, None, device=name) for name in ("l4", "h100"))
    assert (slow.interconnect, quick.interconnect) == ("pcie", "nvlink") and slow.memory_bytes == 23034 * 2**20
    assert speed(quick, 2) > 5 * speed(slow, 2) > 5 * speed(slow, 4)
    assert hardware_of(8, 24).interconnect == "pcie" and hardware_of(8, 80).interconnect == "nvlink"
    assert hardware_of(8, 100, device="h100").memory_bytes == 100 * GIB
    assert card_of("NVIDIA A100-SXM4-80GB") == "a100-80" and card_of("NVIDIA L40S") == "l40s"
    assert card_of("NVIDIA L4") == "l4" and card_of("NVIDIA L40") is None and card_of("NVIDIA A10G") is None
    assert card_of("NVIDIA H100 80GB HBM3") == "h100" and card_of("NVIDIA H100 PCIe") == "h100-pcie"
    assert all(card.source.startswith("NVIDIA") for card in CARDS.values())


def test_the_memory_of_the_host_is_counted_and_comes_last(make_run):
    run = make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=1, bf16=True)
    needs = {one.strategy.name: one.least for one in make_plan(run, Hardware(1, GIB)).options}
    device, host = filled(1.1 * needs["FSDP offload"].total), needs["FSDP offload"].host
    assert host > 10 * GIB and device < needs["single"].total
    roomy, narrow = (make_plan(run, Hardware(1, device, given_host_bytes=share * host)) for share in (1.1, 0.5))
    assert roomy.best.strategy.offloads and any("of a machine's own memory" in one for one in roomy.reasons)
    assert narrow.best is None and any("which has" in one and "assumed" not in one for one in narrow.reasons)
    both = make_plan(run, Hardware(1, filled(1.1 * needs["single"].total), given_host_bytes=2**50))
    assert both.best.strategy.name == "single"


@pytest.mark.parametrize("host, words", [(2**50, "machine's own memory."), (20 * GIB, "more than it has")])
def test_a_plan_that_shards_says_what_loading_takes_of_the_machine(make_run, host, words):
    run = make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=4, bf16=True)
    whole, alone = model_of(workload(run)).whole.trained_stored, filled(0.9 * bytes_of(run, "DDP", 8).total)
    plan = make_plan(run, Hardware(8, alone, num_nodes=2, given_host_bytes=host))
    assert plan.best.strategy.name.startswith(("FSDP", "HSDP"))
    (said,) = [one for one in plan.reasons if "loads the whole model" in one]
    assert f"4 x {gib(whole)}, {gib(4 * whole)} of the {gib(host)}" in said and words in said
    ddp = make_plan(run, Hardware(8, 2**50, num_nodes=2))
    assert ddp.best.strategy.name == "DDP" and not any("loads the whole" in one for one in ddp.reasons)


def test_machines_share_their_network_whatever_the_strategy(make_run):
    """Between machines hybrid sharding reduces as many bytes per machine as DDP does."""
    work = workload(make_run(bf16=True, per_device_train_batch_size=64))
    quick, slow = (Hardware(16, 80 * GIB, 2, network=rate) for rate in (1e15, 3e9))
    waits = {}
    for name in ("DDP", "HSDP"):
        seconds = [traffic(Case(work, strategy(name), machines)).seconds for machines in (quick, slow)]
        waits[name] = seconds[1] - seconds[0]
    assert waits["DDP"] > 0.1 and waits["HSDP"] == pytest.approx(waits["DDP"], rel=0.01)


def test_a_plan_leaves_a_margin_and_says_what_wider_chunks_save(make_run):
    fields, card = {"per_device_train_batch_size": 1024, "bf16": True}, Hardware(2, 24 * GIB)
    plan = make_plan(make_run(gradient_cache_chunk_size=4, **fields), card)
    assert (
        plan.best.fits and plan.larger.needed.total <= (1 - MARGIN) * 24 * GIB and plan.larger.settings.chunk_rows > 16
    )
    wider = make_plan(make_run(gradient_cache_chunk_size=plan.larger.settings.chunk_rows, **fields), card)
    assert wider.best.seconds == plan.larger.seconds < plan.best.seconds and wider.larger is None


def test_a_picture_without_matplotlib_says_how_to_get_it(make_run, monkeypatch):
    plan = make_plan(make_run(), Hardware())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        write_png(plan, Path("plan.png"))


# ---- "auto" ----


def on_machine(monkeypatch, memory_gib):
    monkeypatch.setattr(auto, "device_memory_bytes", lambda: memory_gib and memory_gib * GIB)
    monkeypatch.setattr(auto, "links", lambda: "nvlink")
    monkeypatch.setattr(auto, "card_here", lambda: None)


def test_auto_shards_what_does_not_fit_and_stores_why(make_run, monkeypatch, capsys):
    run = make_run(
        DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=4, bf16=True, accelerate_config="auto"
    )
    on_machine(monkeypatch, 80)
    assert launch.plan_launch(run, 4).kind == "MULTI_GPU"
    on_machine(monkeypatch, filled(24))
    monkeypatch.setattr(launch, "count_devices", lambda: 4)
    monkeypatch.setattr(launch, "_run_launcher", lambda *arguments: 0)
    with pytest.raises(SystemExit):
        launch.hand_over_if_needed(run)
    assert not Path(run.training["output_dir"], "plan.json").exists(), "the run is not accepted yet"
    record.write(run)
    stored = json.loads(Path(run.training["output_dir"], "plan.json").read_text(encoding="utf-8"))
    assert stored["preset"] == "multi_gpu_fsdp" and stored["plan"]["hardware"]["num_devices"] == 4
    said = capsys.readouterr().err
    assert "auto: multi_gpu_fsdp" in said and all(reason in said for reason in stored["reasons"])


def test_auto_counts_devices_where_nothing_can_be_computed_and_says_so(make_run, monkeypatch):
    run = make_run()
    assert "no GPU" in auto.choose(run, 0).reasons[0]
    on_machine(monkeypatch, None)
    assert "does not tell" in auto.choose(run, 2).reasons[0]
    on_machine(monkeypatch, 24)
    run.options.model_config, run.options.model_name_or_path = None, "nobody/has-this-model"
    choice = auto.choose(run, 2)
    assert choice.preset == "multi_gpu_ddp" and "the model was not read" in choice.reasons[0]


def test_auto_starts_one_process_where_no_preset_goes_with_the_fields(make_run, monkeypatch):
    """Training then says what does not go together."""
    on_machine(monkeypatch, 24)
    assert auto.choose(make_run(cpu_offload=False), 1).preset == "single_gpu"


def test_frozen_weights_that_nobody_gave_a_dtype_are_halved_in_a_plan_and_not_at_a_start(make_run, monkeypatch):
    model, fields = DECODER | {"num_hidden_layers": 2}, {"use_lora": True, "bf16": True}
    deepspeed_is(monkeypatch, "")

    def planned(memory, **more):
        return make_plan(make_run(model, **fields, **more), Hardware(1, memory))

    wide, half = (option(planned(GIB, dtype=one), "single").least.total for one in ("float32", "bfloat16"))
    memory = filled((wide + half) / 2)
    plan = planned(memory)
    assert plan.best.strategy.name == "single" and "--dtype bfloat16" in plan.command
    again = planned(memory, **plan.changes)
    assert again.best.fits and again.best.bytes.total == plan.best.fitted.needed.total
    assert planned(memory, dtype="float32").best.strategy.offloads  # as the run file has it
    monkeypatch.setattr(auto, "device_memory_bytes", lambda: memory)
    monkeypatch.setattr(auto, "card_here", lambda: None)
    assert auto.choose(make_run(model, **fields), 1).preset.endswith("_offload")


def test_auto_warns_when_the_run_may_not_fit(make_run, monkeypatch):
    on_machine(monkeypatch, 8)
    choice = auto.choose(make_run(per_device_train_batch_size=4096), 1)
    assert choice.preset == "single_gpu" and "gradient_cache_chunk_size" in choice.warnings[0]


SEEING = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 64, "num_hidden_layers": 2, "image_size": 32,
        "num_attention_heads": 4, "patch_size": 8,
    },
}  # fmt: skip


def test_columns_with_pictures_are_counted_with_them_or_words_say_that_they_are_not(make_run):
    both = {"query": {"text": "question", "image": "photo"}, "positive": "answer"}
    seen = workload(make_run(SEEING, columns=both))
    assert [column.images for column in seen.columns] == [1, 0]
    assert any("every row of query is counted with one picture" in note for note in seen.notes)
    with_picture, without = (seen.work(column).forward for column in seen.columns)
    assert with_picture > without > 0
    blind = workload(make_run(SEEING))
    assert [column.images for column in blind.columns] == [0, 0]
    assert any("no column is said to hold pictures" in note for note in blind.notes)
    other = {**SEEING, "model_type": "aya_vision", "text_config": {**SEEING["text_config"], "model_type": "cohere2"}}
    other["vision_config"] = {**SEEING["vision_config"], "model_type": "siglip_vision_model"}
    unknown = workload(make_run(other, columns=both))
    assert any('pictures of a "aya_vision" can not be counted' in note for note in unknown.notes)


# ---- what a plan says ----


def test_a_plan_says_what_to_run_and_why_before_the_table(make_run, capsys):
    make_run(per_device_train_batch_size=256, gradient_cache_chunk_size=16, max_steps=400)
    cli.main(["plan", "run.json", "--num_devices", "2", "--device", "4090"])
    title, _, best, run, time, *rest = capsys.readouterr().out.splitlines()
    assert "2 devices of 23.99 GiB (4090)" in title and best.startswith("recommended: DDP")
    assert "hf-dist train run.json" in run and "rows/s" in time and " minutes" in time
    assert [line[:4] for line in rest[:3]] == ["  - "] * 3 and rest[3] == "" and rest[4].startswith("GiB per device")


def test_many_devices_are_on_machines_of_eight_and_said_to_be(make_run, capsys):
    assert (hardware_of(64, 80).num_nodes, hardware_of(8, 80).num_nodes, hardware_of(64, 80, 1).num_nodes) == (8, 1, 1)
    assert hardware_of(12, 80).num_nodes == 1
    make_run()
    cli.main(["plan", "run.json", "--num_devices", "64"])
    assert "8 machines of 8; --num_nodes says otherwise" in capsys.readouterr().out


def test_the_least_that_is_named_is_the_least(make_run):
    """Of all chunks, with and without checkpointing, whatever the optimizer: nothing else fits less."""
    work = workload(make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=16, bf16=True))
    plan = plan_workload(work, Hardware(1, 4 * GIB, given_host_bytes=1))
    tried = [
        estimate(Case(variant, strategy("single"), plan.hardware, Settings(rows, is_checkpointed))).total
        for variant in (work, replace(work, optimizer="adamw_torch_8bit"))
        for rows in (1, 2, 3, 16, 64)
        for is_checkpointed in (False, True)
    ]
    assert plan.best is None and f"the least is single with {gib(min(tried))}" in plan.reasons[0]


def test_so_many_devices_as_are_said_to_do_are_enough_and_half_are_not(make_run):
    run = make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=1, bf16=True)
    small = filled(option(make_plan(run, Hardware(4, GIB)), "FSDP memory").least.total)
    plan = make_plan(run, Hardware(1, small, given_host_bytes=1))
    enough = plan.enough.hardware.num_devices
    assert plan.best is None and enough > 1 and any(f"{enough} such devices would do" in one for one in plan.reasons)
    found = [make_plan(run, Hardware(devices, small, given_host_bytes=1)).best for devices in (enough // 2, enough)]
    assert found[0] is None and found[1].strategy.name == plan.enough.best.strategy.name


@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (8, 2)])
@pytest.mark.parametrize("memory", [2, 8, 24, 80])
def test_sentences_have_the_numbers_of_the_table(make_run, devices, memory):
    """Every amount of memory in a sentence is one that the plan's rows have, or the sum that the sentence names."""
    run = make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=16, bf16=True)
    plan = make_plan(run, Hardware(devices[0], memory * GIB, devices[1]))
    known = [memory * GIB, plan.hardware.host_bytes]
    for one in [*plan.options, *([plan.enough.best] if plan.enough else [])]:
        of_one = [one.bytes, one.shown, one.least]
        of_one += [one.given.with_settings(is_checkpointed=value).needed for value in (True, False)]
        known += [size for needed in of_one for size in (*vars(needed).values(), needed.total)]
        known += [needed.total - needed.activations - needed.embeddings for needed in of_one]
        known += [needed.host * plan.hardware.per_node for needed in of_one]
        known += [one.sent.bytes, *([plan.larger.needed.total, plan.larger.traffic.bytes] if plan.larger else [])]
        known += [one.pipeline.messages[1], one.pipeline.reduced] if one.pipeline else []
    said = re.findall(r"[\d.]+ GiB", " ".join(plan.reasons))
    assert said and set(said) <= {gib(size or 0) for size in known}
    if plan.best is not None:  # a way that is called quicker, or no gain, is so by the table's seconds
        for name, words in re.findall(r"Sharded at best \((.*?), .*\) a step takes .*?: (.*?)\.", plan.reasons[0]):
            ratio = plan.best.seconds / option(plan, name).seconds
            assert ratio < 2 and ("twice" in words) == (ratio > 1.1) and option(plan, name).fitted is not None


def test_a_plan_for_the_cpu_takes_what_was_measured_of_it(make_run, capsys, monkeypatch):
    make_run(per_device_train_batch_size=16, gradient_cache_chunk_size=4)
    monkeypatch.setattr(devices, "measured_cpu", lambda run: 2e10)
    cli.main(["plan", "run.json", "--device", "cpu", "--num_devices", "2"])
    said = capsys.readouterr().out
    assert "(cpu), ethernet" in said and "0.01 TFLOP/s (measured or given)" in said


@pytest.mark.slow
def test_the_arithmetic_of_this_cpu_is_measured(make_run):
    assert (
        1e8
        < devices.measured_cpu(make_run({"model_type": "bert", "hidden_size": 64, "num_attention_heads": 2}))
        < 1e14
    )


def test_the_largest_chunk_and_batch_fit_and_hardly_larger_ones_do_not(make_run):
    work = workload(make_run(per_device_train_batch_size=8192, gradient_cache_chunk_size=16, bf16=True))
    plan = plan_workload(work, Hardware(2, 24 * GIB))
    needed = lambda work, **more: estimate(Case(work, strategy("DDP"), plan.hardware, Settings(**more))).total  # noqa: E731
    for larger, fits in ((1, True), (1.04, False)):
        rows = round(larger * plan.most.chunk_rows)
        assert (needed(work, chunk_rows=rows) <= plan.hardware.usable) == fits and 16 < rows < 8192
        rows = round(larger * plan.most.batch)
        assert (needed(with_batch(work, rows)) <= plan.hardware.usable) == fits and rows > 8192


PROJECTION = {"trainable_modules": ["projection"], "projection_dim": 16}


@pytest.mark.parametrize("fields", [{}, PROJECTION, {"use_lora": True, "lora_r": 64}])
def test_a_checkpoint_is_as_large_as_planned(tmp_path, fields):
    path = write_run(tmp_path, model_name_or_path=folder_of(tmp_path), optim="adamw_torch", **fields)
    train(path, "--max_steps", "2", "--save_steps", "2", "--eval_strategy", "no", "--eval_on_start", "false")
    files = [one for one in (tmp_path / "out" / "checkpoint-2").rglob("*") if one.suffix in (".safetensors", ".pt")]
    written = sum(one.stat().st_size for one in files)
    plan = make_plan(load_run(["--config", str(path)]), Hardware())
    assert plan.checkpoint_bytes > 1000 and written == pytest.approx(plan.checkpoint_bytes, rel=0.05, abs=8000)


def folder_of(path):
    """A model whose weights outweigh the headers of files."""
    config = model_config("bert", hidden_size=128, intermediate_size=512)
    embedding_model(config).save_pretrained(str(path / "model"))
    return str(path / "model")


def test_a_command_for_machines_names_files_that_are_there(make_run, monkeypatch):
    """A folder without a clone of this repository, and a clone."""
    plan = make_plan(make_run(), Hardware(16, 80 * GIB, 2))
    words = plan.command.split()
    assert Path(words[words.index("--config_file") + 1]).is_file()
    assert "--module hf_dist_ext.train --config" in plan.command
    monkeypatch.chdir(ROOT)
    assert "--config_file configs/accelerate/multi_node_ddp.yaml" in plan.command
    assert "--module" not in plan.command and " scripts/train_hf.py --config" in plan.command


def test_a_reader_that_stops_early_ends_a_command_quietly_and_the_picture_is_there(make_run, monkeypatch, tmp_path):
    run, (reading, writing) = make_run(), os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", str(run.path), "--num_devices", "1", "--png", "p.png"])
    assert ended.value.code == 1 and (tmp_path / "p.png").stat().st_size > 1000


OF_DEEPSPEED = {"ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 offload"}


@pytest.mark.parametrize("fields, names, word", [
    ({"gradient_cache_chunk_size": "auto"}, OF_DEEPSPEED, "automatic"),
    ({"save_async": True, "gradient_cache_chunk_size": 4}, OF_DEEPSPEED, "save_async"),
    ({"gradient_cache_chunk_size": 4, "gradient_cache_keep_graph": 2}, {"ZeRO-3", "ZeRO-3 offload"}, "keep_graph"),
    ({"gradient_cache_chunk_size": 4, "learnable_temperature": True}, {"ZeRO-3 offload"}, "learnable_temperature"),
])  # fmt: skip
def test_what_a_run_refuses_under_deepspeed_is_not_chosen(make_run, monkeypatch, fields, names, word):
    deepspeed_is(monkeypatch, "")
    plan = make_plan(make_run(per_device_train_batch_size=64, **fields), Hardware(4, 80 * GIB))
    assert {one.strategy.name for one in plan.options if one.strategy.is_deepspeed and word in one.why_not} == names


def test_zero_3_gets_the_chunk_without_which_it_is_refused(make_run, monkeypatch):
    deepspeed_is(monkeypatch, "")
    plan = make_plan(make_run(per_device_train_batch_size=64), Hardware(4, 80 * GIB))
    zero = option(plan, "ZeRO-3")
    assert not zero.fits and changes_for(plan, zero)["gradient_cache_chunk_size"] >= 1 and option(plan, "ZeRO-2").fits


def test_what_stays_whole_between_chunks_is_counted_wherever_fsdp_shards(make_run):
    fields = {"per_device_train_batch_size": 64, "gradient_cache_chunk_size": 4, "bf16": True}
    memory, quick = (
        make_plan(make_run(DECODER, **fields, gradient_cache_fsdp=mode), Hardware(8, 80 * GIB, 2))
        for mode in ("memory", "speed")
    )
    for name in ("HSDP", "FSDP offload", "TP"):
        before, after = (option(plan, name).given for plan in (memory, quick))
        whole = after.model.whole.trained
        assert after.needed.gradients - before.needed.gradients == pytest.approx(4 * whole)
        assert after.needed.weights > before.needed.weights and after.needed.host == before.needed.host
        gathers = [one.traffic.collectives["all_gather"] for one in (before, after)]
        assert gathers[1] < gathers[0]


def test_what_is_sharded_has_float32_state_though_it_was_loaded_in_half_precision(make_run):
    run = make_run(bf16=True, later={"dtype": "bfloat16"})
    elements = model_of(workload(run)).whole.elements
    assert bytes_of(run, "DDP", 4).optimizer == pytest.approx(4 * elements, rel=0.01)
    for name in ("FSDP speed", "FSDP memory", "ZeRO-1", "ZeRO-3"):
        assert bytes_of(run, name, 4).optimizer == pytest.approx(8 * elements / 4, rel=0.02), name
    assert bytes_of(run, "FSDP offload", 4).host > (8 + 4 + 4) * elements / 4 * 0.98


def test_auto_plans_with_the_card_that_a_plan_names(make_run, monkeypatch):
    on_machine(monkeypatch, 15)
    monkeypatch.setattr(auto, "card_here", devices.card_here)
    monkeypatch.setattr(devices, "_ask", lambda *words: "Tesla T4\n" * 4 if "--query-gpu=name" in words else "")
    run = make_run(per_device_train_batch_size=64, gradient_cache_chunk_size=16)
    found, plan = auto.choose(run, 4).plan, make_plan(run, Hardware(4, 15 * GIB, 1, "nvlink", card="t4"))
    assert found["hardware"]["device"] == "t4"
    assert found["recommended"]["time"] == plan.as_dict()["recommended"]["time"]
