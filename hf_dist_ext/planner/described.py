"""What a run file comes to on this machine: processes, data, batch, order of rows, what trains."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import Run, fields_of_run_file
from hf_dist_ext.run.sources import BUILT_IN, sources_of

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
CHUNKS = {
    "gradient_cache_chunk_size": "rows",
    "gradient_cache_chunk_tokens": "tokens",
    "gradient_cache_chunk_patches": "patches",
}


def words(run: Run, processes: str, groups: int, given_over_file: list[str]) -> dict[str, str]:
    """Name -> words. `groups`: of processes that hold the same rows; `given_over_file`: fields of the command line."""
    said = {"processes": processes, "over the file": ", ".join(given_over_file)}
    if seen := _datasets(run):
        command = f"hf-dist train {run.path} --max_steps 1 --output_dir NEW"
        said["data"] = f"{', '.join(seen)}. It was not opened; {command} checks all of it."
    for one in run.stages or [run]:
        of_stage = f" of stage {one.name}" if run.stages else ""
        said |= {
            f"batch{of_stage}": _batch(one, groups),
            f"learning rate{of_stage}": _rate(one, groups),
            f"order of rows{of_stage}": _order(one),
            f"trains{of_stage}": _trains(one),
        }
    return {name: text for name, text in said.items() if text}


def _value(run: Run, name: str) -> Any:
    return run.given[name] if name in run.given else fields_of_run_file()[name].default


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


def _order(run: Run) -> str:
    seed = run.given.get("data_seed")
    seed = _value(run, "seed") if seed is None else seed
    strategy = _value(run, "train_sampling_strategy")
    if run.options.streaming:
        return "a stream, as its files have it" if strategy == "sequential" else f"a stream, shuffled with seed {seed}"
    is_apart = run.options.loss is not None and run.given.get("no_duplicates_in_batch") is not False
    is_apart = is_apart and strategy == "random"
    return f"{strategy}, seed {seed}" + (", equal texts in different batches" if is_apart else "")


def _trains(run: Run) -> str:
    for field, verb in (("trainable_modules", "only"), ("frozen_modules", "all but")):
        if (named := run.given.get(field)) is not None:
            return f"{verb} {named if isinstance(named, str) else ', '.join(named)}"
    return f"adapters of rank {run.options.lora_r}" if run.options.use_lora else "all of the model"


# ---- data ----


def check_data(run: Run) -> None:
    """UsageError for a dataset that is no file or folder here, before a process is started or waits for others."""
    for name in [name for one in run.stages or [run] for name in _datasets(one)]:
        path = Path(os.path.expanduser(name))  # "~nobody/a" is a path as it stands
        could_be_a_hub_id = HUB_ID.fullmatch(name) and path.suffix not in ENDINGS
        if not (name in BUILT_IN or path.exists() or could_be_a_hub_id):
            raise UsageError(
                f"The data can not be trained on: {name} is no file or folder here; paths start at {Path.cwd()}."
            )


def _datasets(run: Run) -> list[str]:
    """Empty where each stage has data of its own."""
    configs = [source.config for source in sources_of(run.options)] or [run.options]
    names = [name for config in configs for name in (config.dataset_name, config.eval_dataset_name)]
    return list(dict.fromkeys(name for name in names if name))
