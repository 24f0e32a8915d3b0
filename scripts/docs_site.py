"""Hooks of `mkdocs build` (mkdocs.yml): what lies outside of docs/ becomes part of the site.

The README is the first page, CHANGELOG.md and CONTRIBUTING.md are pages, run files and the licence are files to
download. One page is made that shows the docstring of every public name, and one with every error message
(error_messages.py). Links that lead out of docs/ are turned to them.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import error_messages  # mkdocs looks for it beside its hook
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md"} | {
    name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
}
COPIED = ("configs/**/*.json", "LICENSE", "CITATION.cff")
PACKAGES = ("hf_dist_ext", "hf_dist_ext.engine", "hf_dist_ext.data")
# The theme breaks names of fields in their middle.
TABLES = ".md-typeset td code { word-break: normal; overflow-wrap: break-word }"
METHODS = {  # that are shown beside their class
    "DistTrainer": ["whole_weights"],
    "InfoNCELoss": ["forward"],
}


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=turned((ROOT / name).read_text(encoding="utf-8"), "docs/")))
    files.append(File.generated(config, "reference.md", content=reference()))
    files.append(File.generated(config, "messages.md", content="\n".join(error_messages.page())))
    files.append(File.generated(config, "tables.css", content=TABLES))
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern)):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return turned(markdown, "../")


def turned(markdown: str, begin: str) -> str:
    """Links from the README into docs/, and from docs/ to its outside, to where the site has what they lead to."""
    markdown = re.sub(rf"\]\({re.escape(begin)}", "](", markdown)
    markdown = re.sub(r"\]\(README\.md", "](index.md", markdown)
    return markdown.replace("](configs)", "](configuration.md)")


def reference() -> str:
    lines = ["# Reference", "", "The docstring of every [public name](api.md)."]
    shown: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(set(module.__all__) - {"__version__"}):
            thing = getattr(module, name)
            if id(thing) in shown:  # under its shorter name already
                continue
            shown.add(id(thing))
            where = f"{package}.{module._HOMES[name]}" if hasattr(module, "_HOMES") else thing.__module__
            members = ", ".join(METHODS.get(name, []))
            options = [f"heading: {package}.{name}", f"members: [{members}]"]
            lines += ["", f"::: {where}.{name}", "    options:", *(f"      {option}" for option in options)]
    return "\n".join(lines) + "\n"
