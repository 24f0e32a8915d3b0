"""Why a plan is what it is, in plain sentences with the numbers.

They say what trains, what fits, what dominates, whether compressing gradients is worth it, and of several stages which
one decides and what the others need.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.catalog import GIB, TENSOR_PARALLEL_GROUP
from hf_dist_ext.planner.memory import SPARSE, model_of
from hf_dist_ext.planner.plan import Option, Plan

MUCH_WAITING = 0.1  # of the time
ENOUGH_CHUNKS = 10  # per rank of a pipeline
MANY = 8  # stages
NEARLY_AS_QUICK = 1.1  # as planner/choose.py takes steps to be equally long
LOADS_WHOLE = ("multi_gpu_fsdp", "multi_gpu_hsdp")  # presets whose processes read all weights, and then shard them
SAVES_NOTHING = 0.9  # of the seconds of a reduction
POINTLESS = 0.1  # a reduction shorter than this share of the arithmetic hides behind it


def gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count < 100 * GIB else f"{count / GIB:.0f} GiB"


def count_of(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def count_with(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def in_json(fields: Mapping[str, Any]) -> str:
    """Fields of a run file as they stand there."""
    return ", ".join(f'"{name}": {json.dumps(value)}' for name, value in fields.items())


def few(found: Iterable[Any]) -> str:
    """Of the stages of a pipeline; those in the middle of many are left out."""
    words = list(map(str, found))
    return ", ".join(words if len(words) <= MANY else [*words[:2], "...", *words[-2:]])


def explain(plan: Plan) -> None:
    """The first three sentences say why: how it is spread, what trains, what activations take. Others follow."""
    best, say = plan.best, plan.reasons.append
    if best is None:
        _explain_nothing_fits(plan)
        say(_trained(plan))
        return
    if best.strategy.pipeline is not None:
        _explain_pipeline(plan, best)
        say(_trained(plan))
        say(_activations(plan, best))
        return
    alone = best.strategy.name in ("single", "DDP")
    say(_why_whole(plan, best) if alone else _why_shared(plan, best))
    say(_trained(plan))
    say(_activations(plan, best))
    if best.strategy.is_tensor_parallel:
        devices = plan.hardware.num_devices
        say(
            f"Groups of {TENSOR_PARALLEL_GROUP} share rows: the contrastive batch is "
            f"{plan.work.batch * devices // TENSOR_PARALLEL_GROUP} rows, that of DDP or FSDP "
            f"{plan.work.batch * devices}."
        )
    if (wide := plan.larger) is not None:
        fields, less = plan.work.chunk_fields(wide.settings.chunk_rows or 0), wide.traffic.bytes
        sending = f", sending {gib(less)} instead of {gib(best.sent.bytes)}" if less < 0.95 * best.sent.bytes else ""
        say(
            f"Wider chunks fit: {in_json(fields)} needs {gib(wide.needed.total)} and takes {_seconds(wide.seconds)} "
            f"per step instead of {_seconds(best.seconds)}{sending}."
        )
    if best.strategy.offloads:
        machine = f"{gib(best.shown.host * plan.hardware.per_node)} of {gib(plan.hardware.host_bytes)}"
        say(f"Its weights and state take {machine} of a machine's own memory{_assumed(plan)}.")
    if best.preset.startswith(LOADS_WHOLE) and plan.hardware.per_node > 1:
        say(_loaded(plan))
    if not alone:
        _explain_no_pipeline(plan, best)
    if best.strategy.name == "DDP":
        say(_compression(plan, best))


def _loaded(plan: Plan) -> str:
    """What a machine holds before the first layer is sharded."""
    whole, processes, has = model_of(plan.work).whole, plan.hardware.per_node, plan.hardware.host_bytes
    size = whole.trained_stored + whole.frozen_stored
    return (
        f"Each process loads the whole model before it is sharded: {processes} x {gib(size)}, "
        f"{gib(processes * size)} of the {gib(has)} of a machine's own memory{_assumed(plan)}."
        + (" That is more than it has: start on more machines." if processes * size > has else "")
    )


def _trained(plan: Plan) -> str:
    whole, simplest = model_of(plan.work).whole, plan.simplest
    trained = f"All {count_of(whole.elements)} parameters train"
    if whole.trained < whole.elements:
        share = f"{100 * whole.trained / whole.elements:.2g}"
        trained = f"{count_of(whole.trained)} of {count_of(whole.elements)} parameters train ({share}%)"
    given = simplest.bytes
    return f"{trained}: gradients {gib(given.gradients)}, optimizer state {gib(given.optimizer)}, before any sharding."


def _as_it_stands(best: Option) -> str:
    return "" if best.fits else f" with these fields set ({gib(best.bytes.total)} as the run stands)"


def _why_whole(plan: Plan, best: Option) -> str:
    """Everything lies on each device, and nothing that shards is so much quicker."""
    holds = f"{gib(best.shown.total)} of {gib(plan.hardware.memory_bytes)}{_as_it_stands(best)}"
    if best.strategy.name == "single":
        return f"One device is enough: {holds}."
    sharded = [one for one in plan.options if one.strategy.shards and one.fitted is not None and not one.why_not]
    sharded = [one for one in sharded if not one.is_last_resort and one.strategy.pipeline is None]
    quickest = min(sharded, key=_seconds_of, default=None)
    if quickest is None:
        return f"Every device holds everything: {holds}."
    than = f"{_seconds(quickest.seconds)} instead of {_seconds(best.seconds)}"
    if quickest.seconds < best.seconds / NEARLY_AS_QUICK:
        than += ": less than twice as quick, so what fits whole stays whole"
    elif quickest.seconds < best.seconds * NEARLY_AS_QUICK:
        than += ": no gain"
    name, needs = quickest.strategy.name, gib(quickest.shown.total)
    return f"Every device holds everything: {holds}. Sharded at best ({name}, {needs}) a step takes {than}."


def _why_shared(plan: Plan, best: Option) -> str:
    simplest, stands = plan.simplest, plan.simplest.bytes
    fixed = stands.total - stands.activations - stands.embeddings
    what = "fits only with changes" if simplest.fitted is not None else "does not fit"
    if simplest.fits:
        what = f"fits too, but {simplest.why_not or 'its step is longer'}"
    return (
        f"{simplest.strategy.name} {what}: {gib(fixed)} before any activation, {gib(stands.total)} in "
        f"all, of {gib(plan.hardware.memory_bytes)}. {best.strategy.name} ({best.strategy.in_words}) needs "
        f"{gib(best.shown.total)}{_as_it_stands(best)} and sends {gib(best.sent.bytes)} per device and step."
    )


def _explain_pipeline(plan: Plan, best: Option) -> None:
    """What it is made of, and why not one of the other ways."""
    found, say, name = best.pipeline, plan.reasons.append, best.strategy.name
    assert found is not None and best.fitted is not None
    say(
        f"{name} ({best.strategy.in_words}): {few(found.layers)} layers; {found.pipeline.schedule} holds "
        f"{found.live_chunks(0)} of {found.num_chunks} chunks and waits "
        f"{found.bubble_share:.1%} of the time. The largest rank needs {gib(best.shown.total)} of "
        f"{gib(plan.hardware.memory_bytes)}."
    )
    if found.bubble_share > MUCH_WAITING:
        enough = ENOUGH_CHUNKS * found.pipeline.ranks
        share = policy.idle_share(
            found.pipeline.schedule, found.pipeline.ranks, best.strategy.pipeline.per_rank, enough
        )
        say(f"Smaller chunks, or more rows, would wait less: {share:.1%} with {enough} chunks.")
    between = f" and {gib(found.reduced)} of gradients between copies" if found.copies > 1 else ""
    say(f"A step sends {gib(found.messages[1])} between stages{between}. {_rows_in_the_loss(plan, best)}")
    others = [option for option in plan.options if option.strategy.pipeline is None and option.fitted is not None]
    others = [option for option in others if not option.why_not] or others  # all, where the run asks for a pipeline
    other = min((option for option in others if option.strategy.name != "single"), key=_seconds_of, default=None)
    if other is None:
        say(f"Nothing else fits {gib(plan.hardware.memory_bytes)}.")
    else:
        better = "is quicker" if best.seconds < other.seconds else "takes longer"
        say(f"{name} {better} than {other.strategy.name}: for as many rows {_beside(best)}, {_beside(other)}.")


def _explain_no_pipeline(plan: Plan, best: Option) -> None:
    """Where the model does not lie whole on a device: what the quickest pipeline would take."""
    possible = [option for option in plan.options if option.pipeline is not None and option.fitted is not None]
    possible = [option for option in possible if not option.why_not] or possible
    other = min(possible, key=_seconds_of, default=None)
    if other is None:
        return
    assert other.pipeline is not None
    if best.seconds <= other.seconds:
        why = f"{best.strategy.name} is quicker"
    elif other.why_not:
        why = f"{other.strategy.name} can not be chosen"
    elif best.sending <= best.seconds / 2:
        why = f"{best.strategy.name} fits, and computes longer than it sends"
    else:
        why = f"{best.strategy.name} needs fewer changes"
    plan.reasons.append(
        f"No pipeline, as {why}: for as many rows {_beside(best)}, {_beside(other)}, and its devices wait "
        f"{other.pipeline.bubble_share:.1%} of the time. {_rows_in_the_loss(plan, other)}"
    )


def _seconds_of(option: Option) -> float:
    return option.seconds


def _beside(option: Option) -> str:
    return f"{option.strategy.name} takes {_seconds(option.seconds)} ({_seconds(option.sending)} of sending)"


def _rows_in_the_loss(plan: Plan, option: Option) -> str:
    pipeline, devices = option.strategy.pipeline, plan.hardware.num_devices
    assert pipeline is not None
    return (
        f"{pipeline.devices} devices of a pipeline share rows: the contrastive batch is "
        f"{plan.work.batch * devices // pipeline.devices} rows, that of DDP or FSDP {plan.work.batch * devices}."
    )


def _compression(plan: Plan, best: Option) -> str:
    """Whether a hook of DDP is worth its rounding: the reduction at this interconnect beside the arithmetic."""
    hook, sent = plan.work.given.get("ddp_comm_hook"), best.given.traffic
    whole, less, computed = sent.reduction_seconds, sent.compressed_seconds, sent.arithmetic_seconds
    beside = f"Reducing whole gradients takes {_seconds(whole)} beside {_seconds(computed)} of arithmetic"
    if whole < POINTLESS * computed:
        does = "sends a part of them" if hook in SPARSE else "rounds them"
        advice = f'; remove ddp_comm_hook="{hook}", which {does}' if hook else ""
        return f"{beside}: compressing them is pointless{advice}."
    if hook:
        warmup = ", after its warm-up steps" if hook == "power_sgd" else ""
        return f'{beside}; ddp_comm_hook="{hook}" makes it {_seconds(less)}{warmup}.'
    if less > SAVES_NOTHING * whole:
        return f"{beside}: they are in half precision already, so that compressing them saves nothing."
    return f'{beside}: "ddp_comm_hook": "fp16" would make it {_seconds(less)}, and round them.'


def _seconds(number: float) -> str:
    size, unit = (number, "s") if number >= 1 else (1000 * number, "ms")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.2g} {unit}"


def explain_halves(plan: Plan, as_it_stands: Plan) -> None:
    """Goes before the reasons of a plan with frozen weights in bfloat16."""
    other = as_it_stands.best
    stands = "nothing fits" if other is None else f"{other.strategy.name} alone fits"
    frozen = model_of(as_it_stands.work).whole.frozen_stored
    plan.reasons.insert(
        0,
        f'With frozen weights in float32, {gib(frozen)}, {stands}. "dtype": "bfloat16" halves them: autocast computes '
        "with them in bfloat16 anyhow, and what trains stays float32. What follows is with it.",
    )


def explain_precision(plan: Plan, given: Mapping[str, Any], half: str, of_half: Plan | None) -> None:
    """`half`: the field of the devices' half precision; `of_half`: the plan with it, where the run is in float32."""
    if given.get("bf16") and half == "fp16":
        plan.reasons.append(
            f'A {plan.hardware.card} multiplies in float16, not in bfloat16: "fp16" in place of "bf16".'
        )
    if of_half is None or of_half.best is None:
        return
    other, best = of_half.best, plan.best
    says = f'"{half}": true would take {_seconds(other.seconds)} per step and {gib(other.shown.total)}'
    than = "" if best is None else f" instead of {_seconds(best.seconds)} and {gib(best.shown.total)}"
    plan.reasons.append(f"The run computes in float32. {says}{than} ({other.strategy.name}).")


def explain_stages(plan: Plan) -> None:
    """Goes before the reasons of the stage that needs most."""
    needs = ", ".join(f'"{stage["name"]}" {gib(stage["needs"])}' for stage in plan.stages)
    how = "DDP" if plan.hardware.num_devices > 1 else "one device"
    plan.reasons.insert(
        0, f'Stage "{plan.run.name}" needs most and decides ({how}, as they stand: {needs}). What follows is for it.'
    )
    for stage in plan.stages:
        fields = {name: value for name, value in stage["set"].items() if name != "accelerate_config"}
        if stage["name"] == plan.run.name or plan.best is None:
            continue
        if stage["fits"]:
            plan.reasons.append(f'Stage "{stage["name"]}" then needs {gib(stage["needs_with"])}.')
        elif fields:
            plan.reasons.append(f'Stage "{stage["name"]}" does not fit as it stands. Set in it {in_json(fields)}.')
        else:
            plan.reasons.append(f'Stage "{stage["name"]}" does not fit with {plan.best.strategy.name}.')


def _activations(plan: Plan, best: Option) -> str:
    work, fitted, shown = plan.work, best.fitted, best.shown
    assert fitted is not None
    settings, batch = fitted.settings, fitted.work.batch
    what = "a chunk of " * fitted.is_chunked + f"{count_with(fitted.rows_at_once, 'row')} of {work.longest} tokens"
    with_it, without = best.activations(True), best.activations(False)
    other = ""
    if settings.chunk_rows is None and batch == work.batch:
        other = f" ({gib(without)} without checkpointing)" if settings.is_checkpointed else f" ({gib(with_it)} with)"
        other = other.replace("with)", "with checkpointing)")
    bound = max(shown.weights + shown.master_weights, shown.total / 2)
    dominate = ": they dominate" if shown.activations > bound else ""
    return f"Activations of {what} take {gib(shown.activations)}{other}{dominate}."


def _explain_nothing_fits(plan: Plan) -> None:
    least = min(plan.options, key=lambda option: (option.strategy.offloads, option.least.total))
    least_offloaded = min(plan.options, key=lambda option: option.least.total)
    choosable = [option for option in plan.options if option.fitted is not None]
    memory = gib(plan.hardware.memory_bytes)
    if choosable:
        names = [
            ", ".join(option.strategy.name for option in choosable if option.why_not == why) + f" ({why})"
            for why in dict.fromkeys(option.why_not for option in choosable)
        ]
        plan.reasons.append(f"Nothing that can be chosen here fits {memory}. What would: {'; '.join(names)}.")
        return
    plan.reasons.append(
        f"Nothing fits {memory}, of which {plan.hardware.usable / plan.hardware.memory_bytes:.0%} may be filled: the "
        f"least is {least.strategy.name} with {gib(least.least.total)}, smaller chunks and checkpointing tried."
    )
    if least_offloaded.strategy.offloads:
        needed, host = least_offloaded.least.total, least_offloaded.least.host * plan.hardware.per_node
        plan.reasons.append(
            f"{least_offloaded.strategy.name} would need {gib(needed)} of a device and {gib(host)} of "
            f"its machine's own memory, which has {gib(plan.hardware.host_bytes)}{_assumed(plan)}."
        )

    others = 'shorter rows, LoRA or frozen parts, "optim": "adamw_bnb_8bit", or half-precision weights'
    if (enough := plan.enough) is None:
        plan.reasons.append(f"More such devices would not do either. What helps: {others}.")
        return
    where = f" on {enough.hardware.num_nodes} machines" if enough.hardware.num_nodes > 1 else ""
    plan.reasons.append(
        f"{enough.hardware.num_devices} such devices{where} would do: {enough.best.strategy.name}, "
        f"{gib(enough.best.shown.total)} of each. What helps too: {others}."
    )


def _assumed(plan: Plan) -> str:
    return "" if plan.hardware.given_host_bytes else " (assumed; --host_memory_gib says otherwise)"
