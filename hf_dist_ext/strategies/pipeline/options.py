"""The fields of a run file that say how a model is cut into a pipeline, and what can not go together with one.

What is wrong is said before anything is cut. `options` is what accelerate hears of pipelines: groups of ranks that
hold the same rows, as under tensor parallelism.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dist_ext import launched, policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import mesh

# What transformers calls the options of activation checkpointing, today and before 5.23.
CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


def size(args: Any) -> int:
    """Ranks of a pipeline; 1: there is none."""
    return getattr(args, "pipeline_parallel_size", None) or 1


def check(args: Any) -> None:
    """Rules between the fields. Raises UsageError."""
    given = {
        name: value
        for name in ("pipeline_schedule", "pipeline_stages_per_rank", "pipeline_split")
        if (value := getattr(args, name)) is not None
    }
    if args.pipeline_parallel_size is not None and args.pipeline_parallel_size < 1:
        raise UsageError(f"pipeline_parallel_size={args.pipeline_parallel_size} must be at least 1.")
    if size(args) == 1:
        if given:
            name, value = next(iter(given.items()))
            raise UsageError(f"{name}={value!r} is of a pipeline. Set pipeline_parallel_size, or remove {name}.")
        return
    schedule, per_rank = schedule_of(args), args.pipeline_stages_per_rank
    number = "1" if schedule in policy.ONE_STAGE_PER_RANK else "at least 1"
    if per_rank is not None and (per_rank < 1 or (per_rank > 1 and number == "1")):
        raise UsageError(f"pipeline_stages_per_rank={per_rank}: {schedule} has {number} per process.")
    shape = mesh.shape_of(args)
    if launched.processes() % shape.of_a_model:
        parts = "" if shape.parts == 1 else f" x {shape.parts} (parallelism_config_tp_size)"
        raise UsageError(
            f"{launched.processes()} processes do not make pipelines of {size(args)} (pipeline_parallel_size){parts}. "
            f"Start a multiple of {shape.of_a_model}."
        )
    _check_rest(args)


def schedule_of(args: Any) -> str:
    return args.pipeline_schedule or policy.PIPELINE_SCHEDULE


def per_rank_of(args: Any) -> int:
    return policy.stages_per_rank(schedule_of(args), args.pipeline_stages_per_rank)


def stages_of(args: Any) -> tuple[list[int], int]:
    """This rank's stages, and how many there are."""
    rank = mesh.shape_of(args).place(launched.rank()).stages
    return policy.stages_of_rank(rank, size(args), per_rank_of(args)), size(args) * per_rank_of(args)


def _check_rest(args: Any) -> None:
    """UsageError for what was not made exact, or has no meaning, with a pipeline."""
    chunk_size = args.gradient_cache_chunk_size
    if not args.uses_gradient_cache or chunk_size == "auto":
        raise UsageError(
            "a pipeline works on chunks: give gradient_cache_chunk_size a number of rows, or "
            "gradient_cache_chunk_tokens one of tokens. None is found by measuring, as several chunks are under way."
        )
    refused = {
        f"gradient_cache_keep_graph={args.gradient_cache_keep_graph!r}": args.gradient_cache_keep_graph
        not in (0, "0", None),
        "fp16=true": args.fp16,
        "torch_compile=true": args.torch_compile,
        "dynamo in the accelerate configuration": launched.compiles(),
        "frozen_feature_cache": args.frozen_feature_cache is not None,
        "save_async=true": args.save_async,
        "save_on_each_node=true": args.save_on_each_node
        and launched.processes_here(launched.processes()) < launched.processes(),
        "bf16_full_eval=true": args.bf16_full_eval,
        f"neftune_noise_alpha={args.neftune_noise_alpha}": args.neftune_noise_alpha is not None,
        "use_liger_kernel=true": args.use_liger_kernel,
        "fp16_full_eval=true": args.fp16_full_eval,
        "use_reentrant=true": any((getattr(args, name, None) or {}).get("use_reentrant") for name in CHECKPOINTING),
        "DeepSpeed": bool(args.deepspeed) or launched.uses_deepspeed(),
        "FSDP": bool(args.fsdp) or launched.uses_fsdp(),
        "parallelism_config in the arguments": getattr(args, "parallelism_config", None) is not None,
    }
    of_fsdp = {name: getattr(args, name) for name in policy.FSDP_FIELDS}
    refused |= (
        {f"{name}={value!r}": value not in (None, "NO_SHARD") for name, value in of_fsdp.items()}
        | {f"{name}={value!r}": bool(value) for name in policy.DDP_FIELDS for value in [getattr(args, name, None)]}
        | {
            f"{name}_size above 1 in the parallelism_config": launched.mesh_size(name) > 1
            for name in ("dp_shard", "dp_replicate")
        }
    )
    if found := [what for what, is_given in refused.items() if is_given]:
        remedy = {"fp16=true": "Use bf16."}.get(found[0], "Leave it out, or use multi_gpu_fsdp.")
        raise UsageError(f"a pipeline does not go with {found[0]}. {remedy}")


def check_model(model: nn.Module | None, args: Any) -> None:
    """Before anything is cut. Raises UsageError."""
    if model is None:
        raise UsageError("a pipeline needs the model itself, not model_init: it is cut into stages before training.")
    if any(vars(module).get("_is_distributed_loading_by_transformers") for module in model.modules()):
        raise UsageError(f"{type(model).__name__} is split over processes already. Give a pipeline the whole model.")


def options(args: Any) -> dict[str, Any]:
    """What an `Accelerator` takes: loaders then deal the same rows to the ranks of a pipeline."""
    if size(args) == 1:
        return {}
    from accelerate import ParallelismConfig

    shape = mesh.shape_of(args)
    return {"parallelism_config": ParallelismConfig(tp_size=shape.of_a_model, dp_shard_size=shape.copies)}
