"""The lines that a run of task "embedding" ends with: how its folder is loaded, and asked.

    use it:   ...      in sentence-transformers
    try it:   ...      from the terminal

"{folder}" stands where the folder's name goes, "{quoted}" where a shell reads it. Each line runs as it is printed.
Where the run file names no file and no folder that holds what is searched, a word in capitals stands for yours.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hf_dist_ext.data import glyphs
from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS
from hf_dist_ext.data.load import FILE_FORMATS
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.losses import LATE
from hf_dist_ext.run.sources import CODE_SEARCH, all_parts, sources_of

ASK = "hf-dist search --model {quoted}"


def lines(run: Run) -> list[str]:
    config = run.options
    if any(part.config.loss == LATE for part in all_parts(config)):
        return [_to_use("MultiVectorEncoder")]
    return [*_lengths(config), _to_use("SentenceTransformer"), _to_try(run)]


def _to_use(kind: str) -> str:
    return f'use it:   from sentence_transformers import {kind}; model = {kind}("{{folder}}")'


def _lengths(config: RunConfig) -> list[str]:
    lengths = config.max_length
    if not isinstance(lengths, Mapping) or len(lengths) >= NUM_PAIR_COLUMNS and len(set(lengths.values())) == 1:
        return []
    listed = ", ".join(f"{column} {length} tokens" for column, length in lengths.items())
    return [
        f"lengths:  {listed}, as encode_query and encode_document of sentence-transformers 6.2 cut texts; its encode, "
        "and other programs, cut all at the longest."
    ]


def _to_try(run: Run) -> str:
    if run.options.dataset_name == CODE_SEARCH:
        return f'try it:   {ASK} "parse a date string"'
    found = [_searched(source.config) for source in sources_of(run.options)] or [_searched(run.options)]
    path, column = next((one for one in found if one[0] is not None), found[0])
    if path is None:
        data = column
    else:
        # what is started from another folder (hf-dist resume) gives an output_dir that is right from everywhere
        place = path.expanduser().absolute() if Path(run.training["output_dir"]).is_absolute() else path.expanduser()
        data = (
            shlex.join([str(place), *(["--column", column] if column else [])]).replace("{", "{{").replace("}", "}}")
        )
    return f'try it:   {ASK} --data {data} "words"'


def _searched(config: RunConfig) -> tuple[Path | None, str]:
    """Where the positives of a run lie and the column with them ("" for pictures), or None and the word for it."""
    columns = config.columns or {"query": "query", "positive": "positive"}
    name, column = list(columns.items())[1]
    if name in (config.image_columns or ()) or config.dataset_name == glyphs.NAME:
        has_folder = config.image_folder is not None and Path(config.image_folder).expanduser().is_dir()
        return (Path(config.image_folder), "") if has_folder else (None, "PICTURES")
    file = Path(config.dataset_name or "")
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    is_read = bool(suffixes) and suffixes[-1] in FILE_FORMATS and file.expanduser().is_file()
    return (file, column) if is_read and isinstance(column, str) else (None, "FILE")
