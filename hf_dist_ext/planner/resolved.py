"""What a run file comes to on this machine, in words: processes, data, batch, order of rows, what trains."""

from __future__ import annotations

from typing import Any

from hf_dist_ext.planner import data_seen
from hf_dist_ext.run.config import Run, all_fields


def words(run: Run, processes: str, groups: int, given_over_file: list[str]) -> dict[str, str]:
    """Name -> words. `groups`: of processes that hold the same rows; `given_over_file`: fields of the command line."""
    said = {"processes": processes, "over the file": ", ".join(given_over_file)}
    said["data"] = data_seen.words(run)
    lives = {f" of stage {stage.name}": stage for stage in run.stages} or {"": run}
    for of_stage, life in lives.items():
        said |= {
            f"batch{of_stage}": _batch(life, groups),
            f"learning rate{of_stage}": _rate(life, groups),
            f"order of rows{of_stage}": _order(life),
            f"trains{of_stage}": _trains(life),
        }
    return {name: text for name, text in said.items() if text}


def _value(run: Run, name: str) -> Any:
    return run.given[name] if name in run.given else all_fields()[name].default


def _batch(run: Run, groups: int) -> str:
    each, accumulated = _value(run, "per_device_train_batch_size"), _value(run, "gradient_accumulation_steps")
    text = f"{each * groups * accumulated:,} rows per update = {each:,} x {groups} devices x {accumulated} accumulated"
    chunks = [f"{run.given[name]} {unit}" for name, unit in CHUNKS.items() if run.given.get(name) is not None]
    return text + (f"; chunks of {', '.join(chunks)}" if chunks else "")


def _rate(run: Run, groups: int) -> str:
    """As training/learning_rate.py scales it; nothing where it is as given."""
    rule, base, given = (_value(run, name) for name in ("lr_scale_rule", "lr_base_batch_size", "learning_rate"))
    if rule == "none" or not base:
        return ""
    factor = _value(run, "per_device_train_batch_size") * groups * _value(run, "gradient_accumulation_steps") / base
    return f"{given * (factor**0.5 if rule == 'sqrt' else factor):.4g}, from {given:.4g} for {base:,} rows ({rule})"


CHUNKS = {
    "gradient_cache_chunk_size": "rows",
    "gradient_cache_chunk_tokens": "tokens",
    "gradient_cache_chunk_patches": "patches",
}


def _order(run: Run) -> str:
    seed = run.given.get("data_seed")
    seed = _value(run, "seed") if seed is None else seed
    if run.options.streaming:
        is_shuffled = _value(run, "train_sampling_strategy") != "sequential"
        return f"a stream, shuffled with seed {seed}" if is_shuffled else "a stream, as its files have it"
    if (strategy := _value(run, "train_sampling_strategy")) != "random":
        return f"{strategy}, seed {seed}"
    apart = run.options.loss is not None and run.given.get("no_duplicates_in_batch") is not False
    return f"random, seed {seed}" + (", equal texts in different batches" if apart else "")


def _trains(run: Run) -> str:
    for field, verb in (("trainable_modules", "only"), ("frozen_modules", "all but")):
        if (named := run.given.get(field)) is not None:
            return f"{verb} {named if isinstance(named, str) else ', '.join(named)}"
    return f"adapters of rank {run.options.lora_r}" if run.options.use_lora else "all of the model"
