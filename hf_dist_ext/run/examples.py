"""Run files to begin with, each with ten rows of data: `hf-dist init` copies one, and it trains as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_dist_ext.errors import UsageError

FOLDER = Path(__file__).parents[1] / "examples"
KINDS = {
    "text": "an embedding model for texts",
    "image-text": "a pair of towers that finds pictures by words",
    "projector": "the projector of a vision-language model between frozen parts",
}


def copy(kind: str, folder: Path) -> list[Path]:
    """The files that were written into `folder`. Raises UsageError before it would write over one."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file. Give a folder.")
    sources = sorted(path for path in (FOLDER / kind).rglob("*") if path.is_file())
    targets = [folder / path.relative_to(FOLDER / kind) for path in sources]
    if there := [path for path in targets if path.exists()]:
        raise UsageError(f"{there[0]} is there already, and nothing was written. Give another folder.")
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return targets
