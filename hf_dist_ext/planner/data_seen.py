"""What a run file's data are, as far as that is seen without reading them: the columns of files that lie here.

Training reads every row, with `datasets`, whose import alone takes seconds. Here the first rows of a local file say
what its columns are, and nothing is said of the others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hf_dist_ext.planner.lengths import ENDINGS, UNREADABLE, files_of, rows_of
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.sources import BUILT_IN, query_column, sources_of

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")
ROWS = 1000  # that are looked at: a JSON row may leave out a column that others have


def words(run: Run) -> str:
    """A clause per dataset, and how to have all rows looked at. Empty where a stage has data of its own."""
    configs = [source.config for source in sources_of(run.options)] or [run.options]
    names = [(config, name) for config in configs for name in (config.dataset_name, config.eval_dataset_name)]
    seen = dict.fromkeys(_of_one(config, name) for config, name in names if name)
    if not seen:
        return ""
    command = f"hf-dist train {run.path} --max_steps 1 --output_dir NEW"
    return f"{'; '.join(seen)}. Rows were not looked at; {command} checks them all."


def _of_one(config: RunConfig, name: str) -> str:
    if name in BUILT_IN:
        return f"{name}, built in"
    path = Path(name).expanduser()
    if not path.exists():
        if HUB_ID.fullmatch(name) and path.suffix not in ENDINGS:
            return f"{name} is no file or folder here and was not looked at"
        return f"WRONG: {name} is no file or folder here; paths start at {Path.cwd()}"
    try:
        rows = [row for file in files_of(name, config.train_split)[:1] for row in rows_of(file, ROWS)[0]]
    except UNREADABLE as error:
        return f"WRONG: {name} cannot be read: {error}"
    found = list(dict.fromkeys(column for row in rows for column in row))
    if not found:
        return f"{name} is here, and its columns were not looked at"
    if config.task == "embedding" and (
        missing := [column for column in _wanted(config, found) if column not in found]
    ):
        return f'WRONG: {name} has the columns {", ".join(found)}, and this run reads "{missing[0]}"'
    return f"{name} with the columns {', '.join(found)}"


def _wanted(config: RunConfig, found: list[str]) -> list[str]:
    """Columns of the data that must be there."""
    sources: list[Any] = list((config.columns or {}).values())
    if config.columns is None:
        sources = [query_column(found), "positive"]
    flat = [one for source in sources for one in _flat(source)]
    return [*flat, *(one for one in (config.id_column, config.label_column) if one is not None)]


def _flat(source: str | list[str] | dict[str, str]) -> list[str]:
    if isinstance(source, str):
        return [source]
    return list(source.values()) if isinstance(source, dict) else source
