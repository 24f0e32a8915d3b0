"""A pytest plugin that puts `DistTrainer` and `DistTrainingArguments` in the place of transformers' own classes.

    PYTHONPATH=tests/conformity:. pytest -p swap_trainer --trainer ours --outcomes ours.json $HF_TRAINER_TESTS

(1) before a test file is imported, the names in every module from which such files import them are ours
(2) each test's outcome (passed, failed, skipped) is written as JSON when the session ends

Loaded by its own name, not as `tests.conformity...`: a checkout of transformers has a package `tests` too.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

PLACES = ("transformers", "transformers.trainer", "transformers.training_args")
outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trainer", choices=("stock", "ours"), default="ours", help="whose classes the tests import")
    parser.addoption("--outcomes", type=Path, help="where the outcomes are written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--trainer") == "ours":
        swap()


def swap() -> None:
    """(1) transformers' modules that are imported from now on get ours too: `Seq2SeqTrainer` becomes a subclass."""
    from hf_dist_ext.training.arguments import DistTrainingArguments
    from hf_dist_ext.training.trainer import DistTrainer

    for place in PLACES:
        module = importlib.import_module(place)
        for name, ours in (("Trainer", DistTrainer), ("TrainingArguments", DistTrainingArguments)):
            if hasattr(module, name):
                setattr(module, name, ours)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """(2) A test fails when its setup or teardown does."""
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
