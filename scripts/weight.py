"""What the project weighs: lines and tokens of code by package, overridden methods of Trainer, functions of a step.

    python scripts/weight.py                   # seconds: it reads source alone
    python scripts/weight.py --step            # trains a tiny model, and counts what its third step calls
    python scripts/weight.py --step --names    # and prints these functions, file by file

Tokens leave out docstrings, comments, indentation and line ends, so dense formatting gains nothing. A step is one
`training_step` of texts through a gradient cache on one process: every function of the package that it calls is
counted once, as each is one that a reader of a step may have to understand.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_dist_ext"
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
COMPREHENSION = ("comp>", "genexpr>")
WORDS = "which package trains an encoder on pairs".split()
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_tokens(source: str) -> int:
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in SKIPPED and token.start[0] not in documented for token in tokens)


def num_lines(folder: str, pattern: str) -> int:
    return sum(len(path.read_text(errors="replace").splitlines()) for path in (ROOT / folder).rglob(pattern))


def of_source() -> Iterator[str]:
    lines, tokens, classes = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        source, parts = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts
        package = parts[0] if len(parts) > 1 else "top"
        lines[package] += len(source.splitlines())
        tokens[package] += count_tokens(source)
        classes.update(node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for package, number in sorted(lines.items()):
        yield f"{package:12} {number:7,} lines {tokens[package]:8,} tokens"
    yield f"{'all':12} {lines.total():7,} lines {tokens.total():8,} tokens"
    yield f"tests {num_lines('tests', '*.py'):,} lines, docs {num_lines('docs', '*.md'):,} lines"
    twice = sorted(name for name, times in classes.items() if times > 1)
    yield f"class names that stand twice: {', '.join(twice) or 'none'}"


def of_trainer() -> str:
    """Methods of transformers.Trainer that a subclass of ours has too. A private one may change with any release."""
    from transformers import Trainer

    from hf_dist_ext.tasks.generation import GeneratingTrainer
    from hf_dist_ext.training.trainer import DistTrainer

    own = {name for kind in (DistTrainer, GeneratingTrainer) for name, value in vars(kind).items() if callable(value)}
    overridden = [name for name in own if inspect.isfunction(vars(Trainer).get(name)) and not name.startswith("__")]
    return f"overridden methods of Trainer: {len(overridden)}, private ones {sum(n[0] == '_' for n in overridden)}"


def of_step() -> dict[str, set[str]]:
    """File -> functions that the third step calls; comprehensions, which are no functions to a reader, left out."""
    from datasets import Dataset
    from transformers import BertConfig

    from hf_dist_ext import DistTrainer, DistTrainingArguments
    from hf_dist_ext.data.code_search import train_tokenizer
    from hf_dist_ext.engine.losses import InfoNCELoss
    from hf_dist_ext.models import from_run

    class Counting(DistTrainer):
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            sys.setprofile(note if self.state.global_step == 2 else None)
            try:
                return super().training_step(*arguments, **options)
            finally:
                sys.setprofile(None)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not code.co_name.endswith(COMPREHENSION):
            called[str(Path(code.co_filename).relative_to(PACKAGE))].add(code.co_qualname)

    called: dict[str, set[str]] = defaultdict(set)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    texts = [" ".join(WORDS[: 1 + row % 7]) for row in range(48)]
    tokenizer = train_tokenizer(texts, model_max_length=32)
    model = from_run.build(model_config=BertConfig(vocab_size=len(tokenizer), **sizes), tokenizer=tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        args = DistTrainingArguments(
            folder, per_device_train_batch_size=12, gradient_cache_chunk_size=4, max_steps=3, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        rows = Dataset.from_dict({"query": texts, "positive": texts[::-1]})
        Counting(model, args, loss=InfoNCELoss(), train_dataset=rows).train()
    return called


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true", help="count overrides and functions of a step too")
    parser.add_argument("--names", action="store_true", help="print the functions of the step")
    asked = parser.parse_args()
    print("\n".join(of_source()))
    if not asked.step:
        return
    print(of_trainer())
    called = of_step()
    for file, names in sorted(called.items(), key=lambda pair: -len(pair[1])) if asked.names else ():
        print(f"{file:40} {len(names):3} {', '.join(sorted(names))}")
    print(f"a cached text step calls {sum(map(len, called.values()))} functions in {len(called)} files")


if __name__ == "__main__":
    main()
