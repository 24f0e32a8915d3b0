"""Short names for people who come from similar projects, and what each one sets. `SHORT_NAMES` is the whole table.

`in_long_names` maps one layer (the file, or the command line over the file). A short name and its long one may both be
given with one meaning; with two, that is an error, because either choice would surprise someone.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import show

Convert = Callable[[Any, dict], dict]  # (value, what else is given in long names) -> long names


def _choice(**values: dict[str, Any]) -> Convert:
    return lambda value, given: values[value]


def _gradient_cache(is_on: bool, given: dict) -> dict:
    sizes = ("gradient_cache_chunk_size", "gradient_cache_chunk_tokens")
    if not is_on:
        return {name: None for name in sizes if name == sizes[0] or name in given}
    if given.get("gradient_cache_chunk_tokens"):  # a token budget alone is a complete choice
        return {}
    return {"gradient_cache_chunk_size": given.get("gradient_cache_chunk_size") or "auto"}


def _fsdp(is_on: bool, given: dict) -> dict:
    if is_on:
        return {"accelerate_config": "multi_gpu_fsdp"}
    return {"accelerate_config": None} if given.get("accelerate_config") == "multi_gpu_fsdp" else {}


def _tracker(name: str) -> Convert:
    def convert(is_on: bool, given: dict) -> dict:
        trackers = given.get("report_to") or []
        trackers = [trackers] if isinstance(trackers, str) else trackers
        trackers = [one for one in trackers if one not in ("none", name)]
        if is_on:
            return {"report_to": trackers if "all" in trackers else [*trackers, name]}
        return {"report_to": trackers or "none"} if "report_to" in given else {}

    return convert


def _save_top_k(count: int, given: dict) -> dict:
    if count <= 0:
        return {"save_total_limit": None} if count == -1 else {"save_strategy": "no"}
    # The Trainer keeps the newest `save_total_limit` checkpoints, the best one among them when it knows the best:
    # that needs an evaluation whenever it saves.
    evaluation = given.get("eval_strategy", "no")
    if evaluation == "no" or given.get("save_strategy", "steps") not in (evaluation, "best"):
        return {"save_total_limit": count}
    return {"save_total_limit": count, "load_best_model_at_end": given.get("load_best_model_at_end", True)}


_NO, _FP16, _BF16 = {"bf16": False, "fp16": False}, {"bf16": False, "fp16": True}, {"bf16": True, "fp16": False}


def _freeze(group: str) -> Convert:
    def convert(is_on: bool, given: dict) -> dict:
        frozen = given.get("frozen_modules") or []
        if isinstance(frozen, str):
            raise UsageError(
                f"freeze_{group} adds to a list of names, but frozen_modules={show(frozen)} is a regex. Keep one."
            )
        others = [name for name in frozen if name != group]
        if is_on:
            return {"frozen_modules": [*others, group]}
        return {"frozen_modules": others or None} if group in frozen else {}

    return convert


# Short name: (what it takes, the long name of the same thing) or (what it takes, what it sets in words, how).
SHORT_NAMES: dict[str, tuple[str, str] | tuple[str, str, Convert]] = {
    "batch_size": ("int", "per_device_train_batch_size"),
    "eval_batch_size": ("int", "per_device_eval_batch_size"),
    "epochs": ("float", "num_train_epochs"),
    "num_epochs": ("float", "num_train_epochs"),
    "num_workers": ("int", "dataloader_num_workers"),
    "gradient_accumulation": ("int", "gradient_accumulation_steps"),
    "gradient_clip": ("float", "max_grad_norm"),
    "model_name": ("str", "model_name_or_path"),
    "mrl_dims": ("list[int] | None", "matryoshka_dims"),
    "warmup_ratio": ("float", "warmup_steps"),  # the Trainer reads warmup_steps below 1 as a share of all steps
    "use_gradient_checkpointing": ("bool", "activation_checkpointing"),  # "gradient_checkpointing" before 5.23
    "mixed_precision": ('Literal["no", "fp16", "bf16"]', "bf16 and fp16", _choice(no=_NO, fp16=_FP16, bf16=_BF16)),
    "precision": (
        'Literal["32-true", "16-mixed", "bf16-mixed"]',
        "bf16 and fp16",
        _choice(**{"32-true": _NO, "16-mixed": _FP16, "bf16-mixed": _BF16}),
    ),
    "use_gradient_cache": ("bool", 'gradient_cache_chunk_size ("auto" unless given; false: null)', _gradient_cache),
    "use_fsdp": ("bool", 'accelerate_config "multi_gpu_fsdp"', _fsdp),
    "loss_type": (
        'Literal["infonce", "info_nce", "contrastive"]',
        'loss "infonce"',
        lambda value, given: {"loss": "infonce"},
    ),
    "freeze_vision": ("bool", '"vision" in frozen_modules', _freeze("vision")),
    "freeze_language": ("bool", '"language" in frozen_modules', _freeze("language")),
    "freeze_projector": ("bool", '"projector" in frozen_modules', _freeze("projector")),
    "log_to_wandb": ("bool", '"wandb" in report_to', _tracker("wandb")),
    "log_to_tensorboard": ("bool", '"tensorboard" in report_to', _tracker("tensorboard")),
    "save_top_k": (
        "int",
        "save_total_limit; load_best_model_at_end where evaluation and saving go together (-1: keep all, 0: none)",
        _save_top_k,
    ),
}
SHORT_BOUNDS = {"warmup_ratio": {"minimum": 0, "exclusiveMaximum": 1}, "save_top_k": {"minimum": -1}}
PRESET_SHORT_NAMES = {
    "single": "single_gpu",
    "ddp": "multi_gpu_ddp",
    "fsdp": "multi_gpu_fsdp",
    "fsdp2": "multi_gpu_fsdp",
    "hsdp": "multi_gpu_hsdp",
    "fsdp_offload": "multi_gpu_fsdp_offload",
    "tp": "multi_gpu_tp",
    "pp": "multi_gpu_pp",
    "3d": "multi_gpu_3d",
    "zero1": "deepspeed_zero1",
    "zero2": "deepspeed_zero2",
    "zero3": "deepspeed_zero3",
}

# What people type that is no field, answered by its meaning: of earlier TrainingArguments, of sentence-transformers,
# FlagEmbedding, GradCache, TRL, LLaMA-Factory, axolotl and LLaVA's scripts call it.
_LENGTH = "Use max_length: one number, or one for each column."
_ROWS = "Use dataset_name: a file, a folder or a hub id."
_CHUNK = "Use gradient_cache_chunk_size: the rows of a batch that are in memory at a time."
_GLOBAL = (
    "Every row's negatives are those of the whole batch, of all devices; remove it (cross_device_negatives: false)."
)
_PROCESSES = (
    'Use num_processes, one for each GPU, with accelerate_config ("ddp", "fsdp"). hf-dist plan takes --num_devices 8 '
    "--device h100 for machines that are not here."
)
_ATTENTION = 'Use "attn_implementation": "flash_attention_2".'
_NEGATIVES = 'Map columns of negatives: "columns": {"query": "...", "positive": "...", "negative": ["...", "..."]}.'
MEANINGS = {
    **dict.fromkeys(("devices", "gpus", "num_gpus", "n_gpus", "n_gpu", "ngpus", "nproc_per_node"), _PROCESSES),
    "evaluation_strategy": "Use eval_strategy.",
    "group_by_length": "Remove it: rows of a batch are sorted by length before they are cut (gradient_cache_sort).",
    "logging_dir": "Logs go to output_dir/runs; the environment variable TENSORBOARD_LOGGING_DIR moves them.",
    "no_cuda": 'Use "use_cpu": true.',
    "token_dim": 'Use "loss": "late_interaction" with projection_dim: the dimensions of token vectors.',
    "save_safetensors": "Weights are always saved as safetensors; remove it.",
    "lr": "Use learning_rate.",
    "mini_batch_size": _CHUNK,
    "scale": "Use temperature, which is 1 / scale: 0.05 for a scale of 20.",
    "gather_across_devices": _GLOBAL,
    "batch_sampler": "Use no_duplicates_in_batch; equal documents are never negatives (mask_false_negatives).",
    "multi_dataset_batch_sampler": "Use datasets, each batch of one; datasets_temperature says how they are drawn.",
    "router_mapping": 'remove it: of a Router the first column takes the route "query", the others "document".',
    "learning_rate_mapping": 'Use learning_rates: {"part of the model": 1e-5}.',
    "query_max_len": _LENGTH,
    "passage_max_len": _LENGTH,
    "train_group_size": _NEGATIVES,
    "negatives_cross_device": _GLOBAL,
    "negatives_x_device": _GLOBAL,
    "query_instruction_for_retrieval": 'Use prompts: {"query": "..."}.',
    "sentence_pooling_method": "Use pooling.",
    "normlized": "Use normalize.",
    "normalized": "Use normalize.",
    "grad_cache": _CHUNK,
    "gc_q_chunk_size": _CHUNK,
    "gc_p_chunk_size": _CHUNK,
    "chunk_size": _CHUNK,
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "model_max_length": _LENGTH,
    "cutoff_len": _LENGTH,
    "sequence_len": _LENGTH,
    "dataset_text_field": "Use columns, which maps columns of the data to query, positive and negative.",
    "dataset": _ROWS,
    "train_file": _ROWS,
    "train_data": _ROWS,
    "data_path": _ROWS,
    "media_dir": "Use image_folder.",
    "val_size": "Use eval_holdout, a number of rows.",
    "val_set_size": "Use eval_holdout, a number of rows.",
    "finetuning_type": "Use use_lora, or trainable_modules for some parts; without them everything trains.",
    "adapter": "Use use_lora.",
    "use_peft": "Use use_lora.",
    "lora_rank": "Use lora_r.",
    "lora_target": "Use lora_target_modules.",
    "lora_target_linear": 'Use "lora_target_modules": "all-linear".',
    "base_model": "Use model_name_or_path.",
    "micro_batch_size": "Use per_device_train_batch_size.",
    "flash_attn": _ATTENTION,
    "flash_attention": _ATTENTION,
    "use_flash_attn": _ATTENTION,
    "wandb_project": 'Use "report_to": "wandb"; the environment variable WANDB_PROJECT names the project.',
    "freeze_vision_tower": "Use freeze_vision.",
    "freeze_multi_modal_projector": "Use freeze_projector.",
    "freeze_language_model": "Use freeze_language.",
    "freeze_llm": "Use freeze_language.",
    "freeze_backbone": 'Use "trainable_modules": ["projector"]; what is not named is frozen.',
    "tune_mm_mlp_adapter": 'Use "trainable_modules": ["projector"]; what is not named is frozen.',
    "mm_projector_lr": 'Use learning_rates: {"projector": 1e-5}.',
    "mm_tunable_parts": "Use trainable_modules; what is not named is frozen.",
}


def in_long_names(layer: dict[str, Any], below: dict[str, Any], known: Container[str], echo: list[str]) -> dict:
    """A layer with its short names replaced; `below` is the layer it lies over, `known` the long names that exist.

    What was mapped is added to `echo`, a line each.
    """
    result = {name: value for name, value in layer.items() if name not in SHORT_NAMES}
    preset = result.get("accelerate_config")
    if preset in PRESET_SHORT_NAMES:
        result["accelerate_config"] = PRESET_SHORT_NAMES[preset]
        echo.append(f"accelerate_config={show(preset)} -> {show(PRESET_SHORT_NAMES[preset])}")
    origin = {name: f"{name}={show(layer[name], name)}" for name in result}
    for short in (name for name in layer if name in SHORT_NAMES):
        given_as = f"{short}={show(layer[short])}"
        mapped = _mapped(short, layer[short], below | result, known)
        for name, value in mapped.items():
            if name in result and result[name] != value and not _is_addition(name, result[name], value):
                raise UsageError(f"{given_as} means {name}={show(value)}, but {origin[name]} is given too. Keep one.")
            result[name], origin[name] = value, given_as
        echo.append(f"{given_as} -> {', '.join(f'{n}={show(v)}' for n, v in mapped.items()) or 'nothing to change'}")
    return result


def _mapped(short: str, value: Any, given: dict, known: Container[str]) -> dict[str, Any]:
    target, *convert = SHORT_NAMES[short][1:]
    if convert:
        return convert[0](value, given)
    if target == "activation_checkpointing" and target not in known:
        target = "gradient_checkpointing"
    return {target: value}


def _is_addition(name: str, old: Any, new: Any) -> bool:
    """One tracker more in report_to contradicts nothing, unless the file says that there shall be none; nor does one
    more frozen group."""
    if name == "frozen_modules":
        return isinstance(old, list) and set(old) <= set(new or ())
    old = [old] if isinstance(old, str) else old
    return name == "report_to" and bool(old) and old != ["none"] and set(old) <= set(new if new != "none" else ())
