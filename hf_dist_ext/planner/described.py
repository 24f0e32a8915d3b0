"""What a run file comes to on this machine: processes, data, batch, order of rows, what trains.

Of the data some rows of local files say what their columns are. What `datasets` may read in another way is not judged:
folders with files of several kinds, JSON over several lines. A word of a fault that is none is worse than silence.
"""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.local_files import ENDINGS, UNREADABLE, files_of, rows_of
from hf_dist_ext.run.config import Run, RunConfig, fields_of_run_file
from hf_dist_ext.run.sources import (
    BUILT_IN,
    NUM_PAIR_COLUMNS,
    columns_of_evaluation,
    query_column,
    refuse_no_pair,
    require_column,
    sources_of,
)

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")
ROWS = 1000  # that are looked at: a JSON row may leave out a column that others have
WRONG = "WRONG: "  # begins what training would refuse
MOST_FILES = 8  # of a folder, that are looked at
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
        said["data"] = f"{'; '.join(seen)}. Rows were not looked at; {command} checks them all."
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
    """UsageError for data that training would refuse, before a process is started or waits for others."""
    for clause in [clause for one in run.stages or [run] for clause in _datasets(one)]:
        if clause.startswith(WRONG):
            raise UsageError(f"The data can not be trained on: {clause.removeprefix(WRONG)}.")


def _datasets(run: Run) -> list[str]:
    """A clause per dataset. None where a stage has data of its own."""
    configs = [source.config for source in sources_of(run.options)] or [run.options]
    names = [(config, name) for config in configs for name in (config.dataset_name, config.eval_dataset_name)]
    return list(dict.fromkeys(_dataset(config, name) for config, name in names if name))


def _dataset(config: RunConfig, name: str) -> str:
    if name in BUILT_IN:
        return f"{name}, built in"
    path, faults = Path(os.path.expanduser(name)), []  # "~nobody/a" is a path as it stands
    if not path.exists():
        if HUB_ID.fullmatch(name) and path.suffix not in ENDINGS:
            return f"{name} is no file or folder here and was not looked at"
        return f"{WRONG}{name} is no file or folder here; paths start at {Path.cwd()}"
    # of a folder one file may do: others may be of another split
    for file in _files_of_folder(path) if path.is_dir() else files_of(name, ""):
        try:
            if found := _columns(config, file, name):
                return f"{name} with the columns {', '.join(found)}"
        except (json.JSONDecodeError, csv.Error):
            break
        except UsageError as error:
            faults.append(WRONG + str(error).removesuffix("."))
        except UNREADABLE as error:
            return f"{WRONG}{name} cannot be read: {error}"
    else:
        if faults:
            return faults[0]
    return f"{name} is here, and its columns were not looked at"


def _files_of_folder(folder: Path) -> list[Path]:
    """A few data files of one kind. None where `datasets` alone knows which it reads: beside pictures, a README.md
    with a list of splits, the state of a saved dataset."""
    inside = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    shown = [file for file in inside if not any(part.startswith((".", "__")) for part in file.parts)]
    is_of_one_kind = len({file.suffix for file in shown}) == 1 and shown[0].suffix in ENDINGS
    return [folder / file for file in shown] if is_of_one_kind and len(shown) <= MOST_FILES else []


def _columns(config: RunConfig, file: Path, name: str) -> list[str]:
    """The columns of a file. Raises UsageError, as training does, where one that the run reads is not among them."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        found, leaves_out = pyarrow.parquet.read_schema(file).names, False
    else:
        rows, leaves_out = rows_of(file, ROWS)
        found = list(dict.fromkeys(column for row in rows for column in row))
    columns = config.columns
    if name == config.eval_dataset_name:
        columns = columns_of_evaluation(columns, found)
    if config.task != "embedding" or not found:
        return found
    if columns is None and not {query_column(found), "positive"} <= {*found}:
        refuse_no_pair(found, name)
    # a row that was not looked at may have a negative
    is_known = not (leaves_out and file.suffix in (".json", ".jsonl"))
    for column, source in list((columns or {}).items())[: None if is_known else NUM_PAIR_COLUMNS]:
        for one in [source] if isinstance(source, str) else source.values() if isinstance(source, dict) else source:
            require_column(one, found, name, f'columns["{column}"]')
    for option in ("id_column", "label_column"):
        if (one := getattr(config, option)) is not None:
            require_column(one, found, name, option)
    return found
