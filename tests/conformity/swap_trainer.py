"""A pytest plugin that puts `DistTrainer` and `DistTrainingArguments` in the place of the classes of transformers and
sentence-transformers.

    PYTHONPATH=tests/conformity:. pytest -p swap_trainer --trainer ours --outcomes ours.json $HF_TRAINER_TESTS

(1) before a test file is imported, the names in every module from which such files import them are ours
(2) a test that expects an error gets one in our words: `match` of pytest.raises is left out
(3) each test's outcome (passed, failed, skipped) is written as JSON when the session ends

Loaded by its own name, not as `tests.conformity...`: a checkout of transformers has a package `tests` too.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Prefix of the classes' names -> packages whose modules have them. Those that subclass Trainer come first.
PLACES = {
    "SentenceTransformer": ("sentence_transformers", "sentence_transformers.sentence_transformer"),
    "MultiVectorEncoder": ("sentence_transformers", "sentence_transformers.multi_vector_encoder"),
    "": ("transformers",),
}
outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trainer", choices=("stock", "ours"), default="ours", help="whose classes the tests import")
    parser.addoption("--outcomes", type=Path, help="where the outcomes are written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--trainer") == "ours":
        swap()
        pytest.raises = raises


def swap() -> None:
    """(1) transformers' modules that are imported from now on get ours too: `Seq2SeqTrainer` becomes a subclass."""
    from hf_dist_ext.training.arguments import DistTrainingArguments
    from hf_dist_ext.training.trainer import DistTrainer

    for prefix, packages in PLACES.items():
        for place in (package + module for package in packages for module in ("", ".trainer", ".training_args")):
            if importlib.util.find_spec(place) is None:
                continue
            module = importlib.import_module(place)
            for name, ours in (("Trainer", DistTrainer), ("TrainingArguments", DistTrainingArguments)):
                if hasattr(module, prefix + name):
                    setattr(module, prefix + name, ours)


@contextmanager
def raises(*expected: Any, match: Any = None, stock: Any = pytest.raises, **options: Any) -> Iterator[Any]:
    """(2)"""
    with stock(*expected, **options) as error:
        yield error


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """(3) A test fails when its setup or teardown does."""
    is_last_word = report.when == "call" or report.outcome != "passed"
    if is_last_word and outcomes.get(report.nodeid) != "failed":
        outcomes[report.nodeid] = report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":  # a file that can not be imported, or says that it is to be skipped
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--outcomes")
    if path is not None:
        path.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
