"""What a plan says of the precision that the run computes in, and of what offloading rules out."""

import re

import pytest

from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import CARDS, hardware_of
from hf_dist_ext.planner.reasons import _seconds, gib
from tests.planner.test_choose import make_run  # noqa: F401

BATCH = {"per_device_train_batch_size": 256, "gradient_cache_chunk_size": 32}


def planned(run, card="a100-80", devices=8, **more):
    return make_plan(run, hardware_of(devices, None, device=card, **more))


def said_of(plan, words):
    return [reason for reason in plan.reasons if words in reason]


def test_a_run_in_float32_is_told_what_half_precision_would_take(make_run):  # noqa: F811
    plan, half = planned(make_run(**BATCH)), planned(make_run(**BATCH, bf16=True))
    (said,) = said_of(plan, "computes in float32")
    assert half.best.seconds < plan.best.seconds / 2 and half.best.shown.total < plan.best.shown.total
    would, now = ((_seconds(one.best.seconds), gib(one.best.shown.total)) for one in (half, plan))
    numbers = r"would take (.+) per step and (.+) instead of (.+) and (.+) \(DDP\)\.$"
    assert re.search(f'"bf16": true {numbers}', said).groups() == (*would, *now)
    assert not said_of(half, "float32.")


def test_a_device_of_which_only_the_memory_is_known_is_taken_to_have_bfloat16(make_run):  # noqa: F811
    (said,) = said_of(make_plan(make_run(**BATCH), hardware_of(1, 80.0)), "computes in float32")
    assert '"bf16": true would take' in said


@pytest.mark.parametrize("card", [name for name, card in CARDS.items() if not card.has_bf16])
def test_cards_without_bfloat16_are_told_of_float16(make_run, card):  # noqa: F811
    assert card in ("v100-32", "t4")
    (said,) = said_of(planned(make_run(**BATCH), card), "computes in float32")
    assert '"fp16": true would take' in said
    plan = planned(make_run(**BATCH, bf16=True), card)
    assert said_of(plan, f'A {card} multiplies in float16, not in bfloat16: "fp16" in place of "bf16".')
    assert not said_of(planned(make_run(**BATCH, bf16=True)), "multiplies in float16")
    assert not said_of(planned(make_run(**BATCH, fp16=True), card), "float")


def test_what_cpu_offload_rules_out_is_not_called_slower(make_run):  # noqa: F811
    plan = planned(make_run(**BATCH, bf16=True, cpu_offload=True))
    assert plan.best.strategy.preset == "multi_gpu_fsdp" and plan.option("DDP").seconds < plan.best.seconds
    assert said_of(plan, "DDP fits too, but cpu_offload has no meaning without FSDP")
    assert not said_of(plan, "step is longer")
