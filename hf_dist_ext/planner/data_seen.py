"""What a run file's data are, as far as that is seen without reading them: the columns of files that lie here.

Training reads every row, with `datasets`, whose import alone takes seconds. Here some rows of a local file say what
its columns are. What `datasets` may read in another way is not judged: folders with files of several kinds, JSON over
several lines. A word of a fault that is none is worse than silence.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.lengths import ENDINGS, UNREADABLE, files_of, rows_of
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.sources import BUILT_IN, NUM_PAIR_COLUMNS, columns_of_evaluation, query_column, sources_of

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")
ROWS = 1000  # that are looked at: a JSON row may leave out a column that others have
WRONG = "WRONG: "  # begins what training would refuse
MOST_FILES = 8  # of a folder, that are looked at


def check(run: Run) -> None:
    """UsageError for data that training would refuse, before a process is started or waits for others."""
    for clause in _clauses(run):
        if clause.startswith(WRONG):
            raise UsageError(f"The data can not be trained on: {clause.removeprefix(WRONG)}.")


def _clauses(run: Run) -> list[str]:
    configs = [source.config for source in sources_of(run.options)] or [run.options]
    names = [(config, name) for config in configs for name in (config.dataset_name, config.eval_dataset_name)]
    return list(dict.fromkeys(_of_one(config, name) for config, name in names if name))


def words(run: Run) -> str:
    """A clause per dataset, and how to have all rows looked at. Empty where a stage has data of its own."""
    if not (seen := _clauses(run)):
        return ""
    command = f"hf-dist train {run.path} --max_steps 1 --output_dir NEW"
    return f"{'; '.join(seen)}. Rows were not looked at; {command} checks them all."


def _of_one(config: RunConfig, name: str) -> str:
    if name in BUILT_IN:
        return f"{name}, built in"
    path = Path(os.path.expanduser(name))  # "~nobody/a" is a path as it stands
    if not path.exists():
        if HUB_ID.fullmatch(name) and path.suffix not in ENDINGS:
            return f"{name} is no file or folder here and was not looked at"
        return f"{WRONG}{name} is no file or folder here; paths start at {Path.cwd()}"
    try:
        # of a folder one file may do: others may be of another split
        files = _files_of_folder(path) if path.is_dir() else files_of(name, "")
        seen = [_columns(config, file, name == config.eval_dataset_name) for file in files]
    except (json.JSONDecodeError, csv.Error):
        seen = []
    except UNREADABLE as error:
        return f"{WRONG}{name} cannot be read: {error}"
    found, missing = next((one for one in seen if one[0] and not one[1]), seen[0] if seen else ([], []))
    if not found:
        return f"{name} is here, and its columns were not looked at"
    if missing:
        near = difflib.get_close_matches(missing[0], found, n=1)
        hint = f'. Closest: "{near[0]}"' if near else ""
        remedy = hint if config.columns else '. Map them: columns={"query": "...", "positive": "..."}'
        return f'{WRONG}{name} has the columns {", ".join(found)}, and this run reads "{missing[0]}"{remedy}'
    return f"{name} with the columns {', '.join(found)}"


def _files_of_folder(folder: Path) -> list[Path]:
    """A few data files of one kind. None where `datasets` alone knows which it reads: beside pictures, a README.md
    with a list of splits, the state of a saved dataset."""
    inside = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    shown = [file for file in inside if not any(part.startswith((".", "__")) for part in file.parts)]
    is_of_one_kind = len({file.suffix for file in shown}) == 1 and shown[0].suffix in ENDINGS
    return [folder / file for file in shown] if is_of_one_kind and len(shown) <= MOST_FILES else []


def _columns(config: RunConfig, file: Path, is_evaluation: bool) -> tuple[list[str], list[str]]:
    """The columns of a file, and those that the run reads and that are not there."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        found, leaves_out = pyarrow.parquet.read_schema(file).names, False
    else:
        rows, leaves_out = rows_of(file, ROWS)
        found = list(dict.fromkeys(column for row in rows for column in row))
    if is_evaluation:
        config = dataclasses.replace(config, columns=columns_of_evaluation(config.columns, found))
    if config.task != "embedding":
        return found, []
    is_known = not (leaves_out and file.suffix in (".json", ".jsonl"))  # else a row not looked at may have a negative
    return found, [column for column in _wanted(config, found, is_known) if column not in found]


def _wanted(config: RunConfig, found: list[str], with_negatives: bool) -> list[str]:
    """Columns of the data that must be there."""
    sources: list[Any] = list((config.columns or {}).values())[: None if with_negatives else NUM_PAIR_COLUMNS]
    if config.columns is None:
        sources = [query_column(found), "positive"]
    flat = [one for source in sources for one in _flat(source)]
    return [*flat, *(one for one in (config.id_column, config.label_column) if one is not None)]


def _flat(source: str | list[str] | dict[str, str]) -> list[str]:
    if isinstance(source, str):
        return [source]
    return list(source.values()) if isinstance(source, dict) else source
