"""Names that a package hands on are imported when they are first asked for: `import hf_dist_ext` costs nothing."""

import importlib
from collections.abc import Callable
from typing import Any


def handed_on(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. `homes`: name -> the module that has it, relative to the package."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get
