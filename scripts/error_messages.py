"""Every message with which the package ends a run, read from its source; `…` stands for what is filled in.

    python scripts/error_messages.py            # all of them, by package
    python scripts/error_messages.py tokenizer  # those with a word

The documentation's site has them as a page (scripts/docs_site.py).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAISED = ("UsageError", "RunError", "ValueError")


def words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(words, node.values))
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return "…"


def messages(source: str) -> list[str]:
    """What a file's `raise UsageError(...)` and its like say, in the order of the file."""
    nodes = list(ast.walk(ast.parse(source)))
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    calls = [call for call in raised if isinstance(call, ast.Call) and call.args]
    given = [call.args[0] for call in calls if getattr(call.func, "id", "") in RAISED]
    # Some words are put together by a function of the same file; a RowCheck raises others after the row's number.
    makers = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in given if isinstance(node, ast.Call)}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in makers]
    given += [node.value for made in functions for node in ast.walk(made) if isinstance(node, ast.Return)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1]
    given += [call.args[1] for call in calls if getattr(call.func, "attr", "") == "add"]
    return [words(node) for node in given if node is not None]


def by_package() -> dict[str, list[str]]:
    """Package -> its messages, each once, without those that are all filled in."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "hf_dist_ext").rglob("*.py")):
        parts = path.relative_to(ROOT / "hf_dist_ext").parts
        package = parts[0] if len(parts) > 1 else "the commands"
        found.setdefault(package, []).extend(messages(path.read_text(encoding="utf-8")))
    clear = {package: [one for one in dict.fromkeys(said) if len(one) > 25] for package, said in found.items()}
    return {package: said for package, said in clear.items() if said}


def page() -> Iterator[str]:
    """The lines of a page in Markdown."""
    yield "# Every error message\n"
    yield "Each says what was given, why it can not be, and what to do; `…` stands for what is filled in. [More on"
    yield "some of them](troubleshooting.md)."
    for package, said in by_package().items():
        yield f"\n## {package}\n"
        yield from (f"* `{' '.join(one.split())}`" for one in sorted(said))


if __name__ == "__main__":
    asked = [word.casefold() for word in sys.argv[1:]]
    for package, said in by_package().items():
        for one in said:
            if all(word in one.casefold() for word in asked):
                print(f"{package}: {one}")
