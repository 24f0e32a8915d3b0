"""The newest releases that the tests pass with. Floors are in setup.py; a newer release may work, and is named."""

from __future__ import annotations

import importlib.metadata
import re

NEWEST_TESTED = {"accelerate": "1.15", "transformers": "5.23"}


def untested() -> list[str]:
    """A sentence for each package that is newer than tested."""
    installed = {package: importlib.metadata.version(package) for package in NEWEST_TESTED}
    return [
        f"{package} {installed[package]} is newer than {tested}, the newest that hf_dist_ext was tested with. If a "
        f"run fails inside of DistTrainer, install that: pip install '{package}=={tested}.*'"
        for package, tested in NEWEST_TESTED.items()
        if _numbers(installed[package]) > _numbers(tested)
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
