"""A run and a machine -> which strategy, preset, chunk size and checkpointing, with the reasons in sentences.

    plan = make_plan(run, Hardware(num_devices=8, memory_bytes=80 * GIB))
    plan.best.strategy.preset, plan.changes, plan.reasons

(1) every strategy is estimated with the run's own settings: bytes by planner/memory.py, collectives by traffic.py
(2) what does not fit is tried with smaller chunks, with checkpointing, with both (or a smaller batch and more
    accumulation where there is no gradient cache to use)
(3) of what fits and has a preset, the one whose step is shortest wins: arithmetic plus communication; what fits as the
    run stands comes before what needs changes or the CPU's memory

Stages are planned one by one, and the one that needs most decides. Boundaries follow from the numbers: nothing here
knows how large a "large" model is. No weights are loaded: a laptop plans for a model that it could never hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import pipelines
from hf_dist_ext.planner.catalog import (
    GIB,
    PER_NODE,
    STRATEGIES,
    Hardware,
    StrategySpec,
    adapted,
    can_leave_frozen_whole,
    leaves_frozen_whole,
    refusal,
    tensor_parallel_size,
)
from hf_dist_ext.planner.devices import CARDS, CPU
from hf_dist_ext.planner.memory import Settings, model_of
from hf_dist_ext.planner.plan import MOST_ROWS, Estimate, Most, Option, Plan, changes_for
from hf_dist_ext.planner.reasons import explain, explain_halves, explain_precision, explain_stages
from hf_dist_ext.planner.traced import traced
from hf_dist_ext.planner.workload import Workload, with_batch
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.presets import presets

NEARLY = 1.1  # steps that differ by less are equally long: the figures are rough
CLEARLY = 1.25  # what needs DeepSpeed beside torch has to be so much quicker
TWICE = 2  # sharding what fits whole has to be so much quicker: the bytes it saves a hook of DDP saves too
MOST_DEVICES = 1024  # that are tried where nothing fits
WORTH = 0.95  # a change that makes a step as long as this is worth a sentence
EIGHT_BIT = "adamw_torch_8bit"  # torchao's, whose state FSDP shards


def make_plan(
    run: Run, hardware: Hardware, available: Collection[str] | None = None, may_halve_frozen: bool = True
) -> Plan:
    """The plan of a parsed run. `available`: presets to choose from, those of this package by default.
    `may_halve_frozen`: where nothing else fits the devices, plan with frozen weights in bfloat16, and say what half
    precision would take; without it, as at a start, the run is planned as it stands.

    Raises UsageError where the model's configuration is not to be had, or it does not run without values.
    """
    if run.stages:
        return _plan_stages(run, hardware, available, may_halve_frozen)
    plan = plan_workload(traced(run), hardware, available)
    if may_halve_frozen and not _fits_devices(plan) and _has_wide_frozen_weights(run, plan.work):
        half = {"dtype": "bfloat16"}
        halved = replace(run, options=replace(run.options, **half), given=run.given | half)
        of_half = plan_workload(traced(halved), hardware, available)
        if _fits_devices(of_half):
            explain_halves(of_half, plan)
            plan = of_half
            plan.presumed = half
            plan.changes = changes_for(plan, plan.best)
    if may_halve_frozen and hardware.card != CPU:
        card = CARDS.get(hardware.card or "")
        half = "bf16" if card is None or card.has_bf16 else "fp16"
        of_half = None
        if run.options.dtype in (None, "float32") and not (run.given.get("bf16") or run.given.get("fp16")):
            of_half = plan_workload(traced(replace(run, given=run.given | {half: True})), hardware, available)
        explain_precision(plan, run.given, half, of_half)
    plan.run = run
    return plan


def _fits_devices(plan: Plan) -> bool:
    return plan.best is not None and not plan.best.strategy.offloads


def _has_wide_frozen_weights(run: Run, work: Workload) -> bool:
    """Frozen weights in float32, which autocast computes with in bfloat16 anyhow; what trains becomes float32."""
    is_open = run.options.dtype is None and bool(run.given.get("bf16")) and not work.is_in_4_bits
    return is_open and any(one.item == 4 and not one.trains for one in work.parameters().values())


def _plan_stages(run: Run, hardware: Hardware, available: Collection[str] | None, may_halve_frozen: bool) -> Plan:
    """Each stage by itself; the plan of the one that needs most where nothing is sharded, since the processes are
    those of the whole run."""
    plans = [make_plan(stage, hardware, available, may_halve_frozen) for stage in run.stages]
    largest = max(plans, key=lambda plan: plan.simplest.bytes.total)
    for plan in plans:
        chosen = plan.option(largest.best.strategy.name) if largest.best is not None else None
        largest.stages.append(
            {
                "name": plan.run.name,
                "needs": round(plan.simplest.bytes.total),
                "needs_with": None if chosen is None else round(chosen.bytes.total),
                "fits": None if chosen is None else chosen.fits,
                "set": {} if chosen is None else changes_for(plan, chosen),
            }
        )
    explain_stages(largest)
    return largest


def plan_workload(work: Workload, hardware: Hardware, available: Collection[str] | None = None) -> Plan:
    available = set(presets()) if available is None else set(available)
    options = [
        _option(work, adapted(strategy, work, hardware), hardware, available)
        for strategy in STRATEGIES
        if _has_meaning(strategy, work, hardware)
    ]
    options += _pipelines(work, hardware, available)
    best = _best(options)
    plan = Plan(work, hardware, options, best, notes=list(work.notes))
    if best is None and not any(option.fitted for option in options):
        plan.enough = _enough(work, hardware, available)
    if best is not None and best.strategy.is_deepspeed and (reason := deepspeed_install.why_unusable()):
        plan.notes.append(reason)
    if best is not None:
        plan.larger, plan.most = _larger(work, best), _most(work, best)
    if hardware.memory_is_assumed:
        plan.notes.append(
            f"no device is visible here: {hardware.memory_bytes / GIB:.0f} GiB per device are assumed. "
            "--device_memory_gib says otherwise."
        )
    if hardware.nodes_are_assumed:
        plan.notes.append(f"{hardware.num_nodes} machines of {hardware.per_node}; --num_nodes says otherwise.")
    if not policy.is_known_optimizer(work.optimizer):
        plan.notes.append(f'optim "{work.optimizer}" is not known here: counted as AdamW, 8 bytes per parameter.')
    whole = model_of(work).whole
    if whole.trained and whole.trained_stored < 4 * whole.trained:
        plan.notes.append(
            "what trains is stored in half precision on one device and under DDP: small updates are lost."
        )
    explain(plan)
    if best is not None:
        plan.changes = changes_for(plan, best)
    return plan


def _enough(work: Workload, hardware: Hardware, available: Collection[str]) -> Plan | None:
    """For as many more devices as something fits, in machines of eight; None: not even of MOST_DEVICES."""
    size = max(hardware.per_node, PER_NODE)
    for power in range(1, MOST_DEVICES.bit_length()):
        devices = hardware.num_devices << power
        if devices > MOST_DEVICES or (devices > size and devices % size):
            continue
        larger = replace(hardware, num_devices=devices, num_nodes=max(1, devices // size))
        possible = [one for one in STRATEGIES if not one.offloads and _has_meaning(one, work, larger)]
        options = [_option(work, adapted(one, work, larger), larger, available) for one in possible]
        if (best := _best(options)) is not None:
            return Plan(work, larger, options, best)
    return None


def _pipelines(work: Workload, hardware: Hardware, available: Collection[str]) -> list[Option]:
    """The best pipeline of whole layers, and the best one whose layers are split too."""
    asked, found = work.pipeline_size, []
    possible = [_option(work, one, hardware, available) for one in pipelines.candidates(work, hardware)]
    for is_split in (False, True):
        of_kind = [option for option in possible if (option.strategy.pipeline.parts > 1) == is_split]
        if of_kind:
            order = [(not o.fits, o.fitted is None, o.seconds, o.bytes.total) for o in of_kind]
            found.append(of_kind[order.index(min(order))])
    if asked > 1 and (not found or pipelines.why_none(work)):
        why = pipelines.why_none(work) or pipelines.why_not_dealt(work, hardware)
        raise UsageError(f"pipeline_parallel_size={asked}: {why}. Remove it to see what the other ways take.")
    return found


def _has_meaning(strategy: StrategySpec, work: Workload, hardware: Hardware) -> bool:
    if strategy.name == "single":
        return True
    if hardware.num_devices == 1:
        return strategy.offloads
    if strategy.replicates_frozen:  # where the run's own field does so, the other rows do
        return can_leave_frozen_whole(work) and not leaves_frozen_whole(work, hardware)
    if strategy.is_hybrid:
        return hardware.num_nodes > 1 or work.given.get("sharding") == "HYBRID_SHARD"
    if strategy.is_tensor_parallel:
        return work.is_embedding and tensor_parallel_size(strategy, work, hardware) > 1
    if strategy.preset == "multi_gpu_fsdp" and work.fsdp_mode != "auto":
        return strategy.keeps_whole == (work.fsdp_mode == "speed")
    return not strategy.keeps_whole or work.is_embedding  # without our loss nothing keeps weights whole


def _preset(strategy: StrategySpec, hardware: Hardware, available: Collection[str]) -> str:
    for_nodes = {"multi_gpu_ddp": "multi_node_ddp", "multi_gpu_hsdp": "multi_node_hsdp"}.get(strategy.preset)
    if hardware.num_nodes > 1 and for_nodes in available:
        return for_nodes
    # The run file's frozen_parts_fsdp lets the plain preset leave frozen parts whole.
    if strategy.name == "FSDP frozen whole" and strategy.preset not in available:
        return "multi_gpu_fsdp"
    return strategy.preset


def _option(work: Workload, strategy: StrategySpec, hardware: Hardware, available: Collection[str]) -> Option:
    preset = _preset(strategy, hardware, available)
    given = Estimate(work, strategy, hardware, Settings(is_checkpointed=work.is_checkpointed))
    checkpointed = given.with_settings(is_checkpointed=True)
    why_not = refusal(strategy, work, hardware) or _why_not(work, strategy, preset, hardware, available)
    option = Option(preset, why_not, given, min(given.needed, checkpointed.needed, key=lambda one: one.total))
    # ZeRO-3 refuses a step that has a graph per column (strategies/zero.py)
    option.needs_chunk = strategy.is_deepspeed and "w" in strategy.shards and work.is_embedding and not work.is_cached
    needs_chunk = option.needs_chunk or (strategy.pipeline is not None and not work.is_cached)
    if work.finds_chunk or needs_chunk or not option.fits:
        _make_fit(option, needs_chunk)
    else:
        option.fitted = given
    fitted = option.fitted
    if work.finds_chunk and fitted is not None and fitted.settings.is_checkpointed == work.is_checkpointed:
        option.found = fitted.needed
    return option


def _why_not(
    work: Workload, strategy: StrategySpec, preset: str, hardware: Hardware, available: Collection[str]
) -> str:
    if strategy.pipeline is not None and (reason := pipelines.why_none(work)):
        return reason
    if strategy.pipeline is None and work.pipeline_size > 1:
        return f"the run file asks for pipelines of {work.pipeline_size} (pipeline_parallel_size)"
    if strategy.name == "single" and hardware.num_devices > 1:
        return f"it would use one of {hardware.num_devices} devices"
    if preset not in available:
        is_of_pipelines = strategy.pipeline is not None and preset in presets()
        return "pipeline_parallel_size is not given" if is_of_pipelines else f"there is no preset {preset}"
    return ""


def _make_fit(option: Option, needs_chunk: bool) -> None:
    """(2) The quickest of: smaller chunks, checkpointing, both; where none of it helps, with an 8-bit optimizer."""
    work = option.given.work
    others = [EIGHT_BIT] if _can_be_8_bit(work, option.strategy) else []
    for variant in (work, *(replace(work, optimizer=other) for other in others)):
        for is_checkpointed in dict.fromkeys([work.is_checkpointed, True]):
            for smaller, settings in _smaller(variant, is_checkpointed, needs_chunk):
                tried = replace(option.given, work=smaller, settings=settings)
                option.least = min(option.least, tried.needed, key=lambda one: one.total)
                if tried.fits and tried.seconds < option.seconds:
                    option.fitted = tried
        if option.fitted is not None:
            return


def _can_be_8_bit(work: Workload, strategy: StrategySpec) -> bool:
    """Not where layers are split, nor with the optimizers of the CPU and of DeepSpeed."""
    is_other = strategy.offloads or strategy.is_deepspeed or strategy.is_tensor_parallel or strategy.pipeline
    return not is_other and work.optimizer.startswith("adamw_torch") and "bit" not in work.optimizer


def _larger(work: Workload, best: Option) -> Estimate | None:
    """The largest gain by wider chunks, where the run names a size that is smaller than the memory allows."""
    if best.fitted is None or not work.is_cached or work.finds_chunk:
        return None
    found, most = None, work.most_rows
    own = best.fitted.rows_at_once
    for rows in (min(own << power, most) for power in range(1, most.bit_length())):
        wider = replace(best.fitted, work=work).with_settings(chunk_rows=rows)
        if not wider.fits:
            break
        if wider.seconds < WORTH * (found.seconds if found else best.seconds):
            found = wider
        if rows >= most:
            break
    return found


def _most(work: Workload, best: Option) -> Most | None:
    """The largest chunk, and the largest batch of a device, by halving the range in which they lie."""
    fitted = best.fitted
    if fitted is None or best.strategy.pipeline is not None:
        return None
    batch, chunk = fitted.work.batch, None
    as_fitted = replace(fitted, work=replace(with_batch(work, batch), optimizer=fitted.work.optimizer))

    def largest(known: int, limit: int, fits: Callable[[int], bool]) -> int:
        upper = known
        while upper < limit and fits(min(limit, 2 * upper)):
            upper = min(limit, 2 * upper)
        step = upper // 2
        while step > upper // 64:  # to about 2 %
            upper += step if upper + step <= limit and fits(upper + step) else 0
            step //= 2
        return upper

    if work.is_embedding and fitted.is_chunked:
        chunk = largest(
            fitted.rows_at_once, work.most_rows, lambda rows: as_fitted.with_settings(chunk_rows=rows).fits
        )
    most = largest(batch, MOST_ROWS, lambda rows: replace(as_fitted, work=with_batch(as_fitted.work, rows)).fits)
    return Most(chunk, most)


def _smaller(work: Workload, is_checkpointed: bool, needs_chunk: bool) -> list[tuple[Workload, Settings]]:
    """Settings from large to small: rows per chunk for a loss over embeddings, else the batch."""
    if not work.is_embedding:
        batches = [work.batch >> halvings for halvings in range(work.batch.bit_length())]
        steps = {rows: work.accumulation * -(-work.batch // rows) for rows in batches}
        variants = [replace(with_batch(work, rows), accumulation=steps[rows]) for rows in batches]
        return [(variant, Settings(is_checkpointed=is_checkpointed)) for variant in variants]
    most = max(work.rows_of_chunk(column) for column in work.columns)
    is_found = work.finds_chunk or needs_chunk
    whole = [(work, Settings(is_checkpointed=is_checkpointed))] if not is_found else []
    sizes = [2**power for power in range(20, -1, -1) if 2**power < most or is_found and 2**power <= most]
    return whole + [(work, Settings(rows, is_checkpointed)) for rows in sizes]


def _best(options: list[Option]) -> Option | None:
    """(3) Of what asks least of the run, the shortest step; of steps about as short the simplest strategy: the table
    goes from simple to involved."""
    possible = [option for option in options if not option.why_not and option.fitted is not None]
    if deepspeed_install.why_unusable():  # worth installing only where torch alone needs the CPU's memory, and it not
        of_torch = [option for option in possible if not option.strategy.is_deepspeed]
        on_devices = [option for option in possible if not option.strategy.offloads]
        possible = [option for option in of_torch if option in on_devices] or on_devices or of_torch or possible
    quickest = min((o for o in possible if not o.strategy.pipeline), key=lambda o: o.seconds, default=None)
    wants_pipelines = quickest is not None and quickest.sending > quickest.seconds / 2
    least = min((_effort(option, wants_pipelines) for option in possible), default=0)
    possible = [option for option in possible if _effort(option, wants_pipelines) == least]
    shortest = min((option.seconds for option in possible), default=0.0)
    whole = [option for option in possible if option.strategy.name in ("single", "DDP") and option.fits]
    if any(option.seconds <= TWICE * shortest for option in whole):
        possible = whole
    torch_alone = [o for o in possible if not o.strategy.is_deepspeed and o.seconds <= CLEARLY * shortest]
    possible = torch_alone or possible
    shortest = min((option.seconds for option in possible), default=0.0)
    return next((option for option in possible if option.seconds <= NEARLY * shortest), None)


def _effort(option: Option, wants_pipelines: bool) -> int:
    """What an option asks: nothing, other chunks or checkpointing, another optimizer, rows that devices share (fewer
    then meet in the loss), the CPU's memory."""
    if option.strategy.offloads:
        return 4
    if option.strategy.is_tensor_parallel or (option.strategy.pipeline and not wants_pipelines):
        return 3
    if option.fits:
        return 0
    return 2 if option.fitted and option.fitted.work.optimizer == EIGHT_BIT else 1
