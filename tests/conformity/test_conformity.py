"""Trainer's own tests end with our classes as they do with the stock ones, but for what expected.py lists.

They are not copied here. `HF_TRAINER_TESTS` names a checkout of transformers of the installed version, or its folder
tests/trainer, or some of its test files (separated as in PATH); each is run twice, with the stock classes and ours.
So are files of sentence-transformers, whose model and dataset from the hub have a small stand-in here.

    HF_TRAINER_TESTS=../transformers pytest tests/conformity
    HF_TRAINER_TESTS=../sentence-transformers/tests/sentence_transformer/test_trainer.py pytest tests/conformity
"""

import json
import math
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.conformity.expected import EXPECTED
from tests.launching import environment
from tests.sentence_models import transformer
from tests.tiny_models import SMALL, WORDS, tiny_tokenizer

HERE = Path(__file__).parent


def test_files() -> list[Path]:
    given = [Path(part).resolve() for part in os.environ.get("HF_TRAINER_TESTS", "").split(os.pathsep) if part]
    return [path / "tests" / "trainer" if (path / "tests" / "trainer").is_dir() else path for path in given]


test_files.__test__ = False


def outcomes(trainer: str, paths: list[Path], folder: Path) -> dict[str, str]:
    """Of every test under the paths, with `stock` classes or `ours`."""
    found = folder / f"{trainer}.json"
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(HERE), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "swap_trainer", "-p", "no:cacheprovider"]
    command += ["--trainer", trainer, "--outcomes", str(found), "--continue-on-collection-errors", *map(str, paths)]
    # A folder of its own: tests write there, and the package `tests` is the checkout's, not ours.
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found.read_text())


def differences(stock: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    assert "passed" in stock.values()
    both = {name: (stock.get(name, "not there"), ours.get(name, "not there")) for name in {**stock, **ours}}
    return {name: f"{before} -> {now}" for name, (before, now) in both.items() if before != now}


@pytest.mark.skipif("HF_TRAINER_TESTS" not in os.environ, reason="HF_TRAINER_TESTS names no checkout of transformers")
def test_trainers_own_tests_end_as_with_the_stock_classes(tmp_path):
    write_stand_ins(tmp_path)
    stock, ours = (outcomes(trainer, test_files(), tmp_path) for trainer in ("stock", "ours"))
    print(f"{len(stock)} tests; stock: {Counter(stock.values())}, ours: {Counter(ours.values())}")
    found = differences(stock, ours)
    for name, words in found.items():
        print(name, words, next((EXPECTED[key] for key in EXPECTED if is_of(name, key)), "NOT EXPECTED"))
    unexpected = {name: words for name, words in found.items() if not any(is_of(name, key) for key in EXPECTED)}
    is_there = {key: [name for name in stock if is_of(name, key)] for key in EXPECTED}
    outlived = [key for key, names in is_there.items() if names and not found.keys() & set(names)]
    assert not unexpected and not outlived


def is_of(name: str, key: str) -> bool:
    return name.partition("[")[0].endswith(key)


def write_stand_ins(folder: Path) -> None:
    """What tests of sentence-transformers ask the hub for: a folder of that name in the working folder comes first."""
    config = BertConfig(**{**SMALL, "vocab_size": 501, "max_position_embeddings": 128})
    first = transformer(folder / "bert", BertModel(config), tiny_tokenizer(max_length=128))
    model = folder / "sentence-transformers-testing" / "stsb-bert-tiny-safetensors"
    SentenceTransformer(modules=[first, Pooling(32, "mean")], device="cpu").save_pretrained(str(model))
    for split, count in (("train", 200), ("validation", 60)):
        texts = [[f"{WORDS[(i * k) % len(WORDS)]} {i}" for i in range(count)] for k in (1, 3)]
        rows = {"sentence1": texts[0], "sentence2": texts[1], "score": [i % 6 / 5 for i in range(count)]}
        Dataset.from_dict(rows).to_json(folder / "sentence-transformers" / "stsb" / f"{split}.jsonl")


# What a file of Trainer's own tests does, in small: relative helpers, names from three modules, a subclass.
FAKE = {
    "tests/__init__.py": "",
    "tests/trainer/__init__.py": "",
    "tests/trainer/helpers.py": """
        from transformers import TrainingArguments
        from transformers.trainer import Trainer

        class OwnTrainer(Trainer):
            pass
        """,
    "tests/trainer/test_names.py": """
        import pytest
        from transformers import Seq2SeqTrainer, Trainer, trainer, training_args

        from .helpers import OwnTrainer, TrainingArguments

        def test_ends_alike(tmp_path):
            assert Trainer.__name__.endswith("Trainer")

        def test_all_names_are_one_class():
            assert trainer.Trainer is Trainer
            assert issubclass(OwnTrainer, Trainer) and issubclass(Seq2SeqTrainer, Trainer)
            assert training_args.TrainingArguments is trainer.TrainingArguments is TrainingArguments

        def test_tells_the_classes_apart():
            assert (Trainer.__name__, TrainingArguments.__name__) == ("Trainer", "TrainingArguments")

        @pytest.fixture
        def broken():
            raise RuntimeError

        def test_broken_setup(broken):
            pass
        """,
    "tests/trainer/test_not_importable.py": "import a_module_that_is_not_there",
}


def test_the_hook_swaps_the_classes_before_test_files_are_imported(tmp_path):
    for name, text in FAKE.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    stock, ours = (outcomes(trainer, [path.parent], tmp_path) for trainer in ("stock", "ours"))
    assert {name.rpartition("::")[2]: outcome for name, outcome in stock.items()} == {
        "test_ends_alike": "passed",
        "test_all_names_are_one_class": "passed",
        "test_tells_the_classes_apart": "passed",
        "test_broken_setup": "failed",
        "checkout/tests/trainer/test_not_importable.py": "failed",
    }
    ((name, words),) = differences(stock, ours).items()
    assert name.endswith("test_tells_the_classes_apart") and words == "passed -> failed"


def test_without_our_fields_callbacks_and_files_are_those_of_trainer(tmp_path):
    found = {}
    for trainer_class, arguments in ((Trainer, TrainingArguments), (DistTrainer, DistTrainingArguments)):
        folder = tmp_path / trainer_class.__name__
        args = arguments(
            output_dir=str(folder), max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = trainer_class(Diverging(), args, train_dataset=[{"x": torch.ones(4)}] * 16)
        callbacks = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        trainer.train()
        found[trainer_class.__name__] = callbacks, sorted(path.name for path in folder.iterdir())
    assert found["Trainer"] == found["DistTrainer"]


class Diverging(torch.nn.Module):
    """At a large rate its first update makes the loss infinite, its second NaN."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def forward(self, x):
        return {"loss": self.layers(x).pow(4).mean()}


@pytest.mark.parametrize("is_filtered", [False, True])
def test_without_our_fields_losses_that_are_not_finite_train_and_are_logged_as_by_trainer(tmp_path, is_filtered):
    found = {}
    for trainer_class, arguments in ((Trainer, TrainingArguments), (DistTrainer, DistTrainingArguments)):
        torch.manual_seed(0)
        args = arguments(
            output_dir=str(tmp_path / trainer_class.__name__), learning_rate=1e9, logging_steps=5, max_steps=25,
            logging_nan_inf_filter=is_filtered, save_steps=25, use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{"x": torch.full((4,), float(i + 1))} for i in range(16)]
        trainer = trainer_class(Diverging(), args, train_dataset=rows)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert len(losses) == 5 and any(not math.isfinite(float(loss)) for loss in losses) != is_filtered
        found[trainer_class.__name__] = str(losses), [p.tolist() for p in trainer.model.parameters()]
    assert str(found["Trainer"]) == str(found["DistTrainer"])
