"""The built-in dataset: find a function of Python's standard library from its docstring. It needs no download.

    from hf_dist_ext.data.code_search import load_code_search, train_tokenizer

    dataset = load_code_search()                                   # on Python 3.11 train: 5,705 rows, test: 500
    tokenizer = train_tokenizer([*dataset["train"]["query"], *dataset["train"]["positive"]])

(1) Every module of the running Python's standard library is read, in path order, without the tests
(2) A function with a docstring becomes a row: the docstring's first paragraph is the query, the function without its
    docstring the positive
(3) Rows are left out until every query and every document occurs once, so that a query has one right answer
(4) A seeded draw of `held_out` rows is the test split; by (3) no query or document of it is in train

The rows depend on the Python version and on nothing else: not on the file system, the locale or the hash seed.
"""

from __future__ import annotations

import ast
import logging
import random
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dist_ext.errors import UsageError

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Tests repeat the library's own wording, and the package folders below the library are not part of Python.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def load_code_search(held_out: int = 500, seed: int = 42, root: str | Path | None = None) -> DatasetDict:
    """Train and test split with the columns query, positive, name (`module.qualname`), path (below `root`) and line.

    `root` is the folder to read, None = the running Python's standard library. Raises UsageError when there is no
    source to read or not more rows than `held_out`.
    """
    from datasets import Dataset, DatasetDict

    rows = one_row_per_query(read_functions(root))
    if len(rows) <= held_out:
        raise UsageError(
            f"held_out={held_out} of {len(rows)} code-search rows leaves none to train on. Hold out fewer."
        )
    test_rows = set(random.Random(seed).sample(range(len(rows)), held_out))
    splits = {
        "train": [row for index, row in enumerate(rows) if index not in test_rows],
        "test": [row for index, row in enumerate(rows) if index in test_rows],
    }
    return DatasetDict({name: Dataset.from_list(split) for name, split in splits.items() if split})


def read_functions(root: str | Path | None = None) -> list[dict]:
    """Every documented function below `root` as a row, in path and line order, each different source once."""
    root = Path(root or sysconfig.get_path("stdlib"))
    rows: list[dict] = []
    seen_code: set[str] = set()
    unreadable: list[str] = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            module_rows = list(functions_of_module(path, relative))
        except (SyntaxError, ValueError, OSError):  # templates of lib2to3, files in an encoding we do not know
            unreadable.append(relative.as_posix())
            continue
        for row in module_rows:
            # Copies of a function differ in their indentation at most.
            code = " ".join(row["positive"].split())
            if code not in seen_code:
                seen_code.add(code)
                rows.append(row)
    if unreadable:
        logger.info("code-search: %d files could not be parsed: %s", len(unreadable), ", ".join(unreadable))
    if not rows:
        raise UsageError(
            f"No documented Python function below {root}: this Python comes without its library's source. "
            "Run with a Python that has it, or give a dataset_name."
        )
    return rows


def one_row_per_query(rows: list[dict]) -> list[dict]:
    """The first row of each query: "Internal function." can not be answered with one document."""
    first_rows: dict[str, dict] = {}
    for row in rows:
        first_rows.setdefault(row["query"].casefold(), row)
    return list(first_rows.values())


def functions_of_module(path: Path, relative: Path) -> Iterator[dict]:
    with tokenize.open(path) as file:  # honours the coding line, whatever the locale
        source = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in old modules are not this user's concern
        tree = ast.parse(source)
    lines = source.split("\n")  # ast counts these; str.splitlines would also split at form feeds
    parts = relative.with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    for qualified_name, function in functions_below(tree, module):
        paragraph = (ast.get_docstring(function) or "").split("\n\n")[0]
        query = " ".join(paragraph.split())
        if query and len(function.body) > 1:  # a body of nothing but the docstring is no document
            yield {
                "query": query,
                "positive": source_without_docstring(function, lines),
                "name": qualified_name,
                "path": relative.as_posix(),
                "line": function.lineno,
            }


def functions_below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with qualified names, none inside another: the outer document would hold the inner."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield f"{prefix}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from functions_below(child, f"{prefix}.{child.name}")
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from functions_below(child, prefix)


def source_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    docstring = function.body[0]
    assert docstring.end_lineno is not None and docstring.end_col_offset is not None, "ast.parse gives both"
    first_line = min([function.lineno] + [decorator.lineno for decorator in function.decorator_list])
    head = lines[first_line - 1 : docstring.lineno]
    tail = lines[docstring.end_lineno - 1 : function.end_lineno]
    head[-1] = cut_bytes(head[-1], 0, docstring.col_offset)
    tail[0] = cut_bytes(tail[0], docstring.end_col_offset, None)
    # `def f(): "what it does"; return 1` keeps its statement, without the semicolon.
    return textwrap.dedent("\n".join(head).rstrip() + "\n".join(tail).lstrip(" ;")).strip()


def cut_bytes(line: str, start: int, end: int | None) -> str:
    return line.encode()[start:end].decode()  # ast's columns count UTF-8 bytes


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 3000, model_max_length: int = 256
) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer for finding code, lower-case; the same texts give the same tokenizer.

    (1) identifiers are cut where a reader sees words (`readHTTPHeader_v2` -> read http header v 2): a docstring and
        the names in its function share tokens
    (2) punctuation is dropped: it is a large part of a function's tokens and tells little of what the function is for
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special_tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    # BPE over bytes, not WordPiece: the vocabulary of the latter's trainer changes from run to run (tokenizers 0.23).
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            # (1) before the capital of a new word: fooBar -> foo Bar, HTTPHeader -> HTTP Header
            normalizers.Replace(Regex(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"), " "),
            normalizers.Replace("_", " "),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\W+"), "removed"),  # (2)
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    cls_id, sep_id = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls_id), ("[SEP]", sep_id)],
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=model_max_length, **special_tokens)
