"""Ranks that would not train the same run are refused before the first step, by field and rank."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from hf_dist_ext import train
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.distributed.memory_worker import statuses
from tests.tiny_models import embedding_model, model_config, tiny_pairs, tiny_tokenizer
from tests.training.test_nonfinite import Regression, rows


@pytest.fixture
def run_file(tmp_path) -> Path:
    fields = tiny_pairs(tmp_path) | {
        "model_config": model_config("bert"), "disable_tqdm": True, "per_device_train_batch_size": 4, "max_steps": 2,
        "report_to": "none", "output_dir": str(tmp_path / "out"), "use_cpu": True, "save_strategy": "no",
        "gradient_cache_chunk_size": 2, "max_length": 16,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(fields))
    return tmp_path / "run.json"


def work(say, run_file: Path, on_second: list[str]) -> str:
    sys.argv = ["train_hf.py", "--config", str(run_file), *(on_second if os.environ["RANK"] == "1" else [])]
    try:
        train.main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
    return "ended well"


def refused(run_file: Path, *on_second: str, mode: str = "ddp") -> str:
    """What is said, as one line, when rank 1 is started with further fields."""
    run = Run(mode, run_file.parent / "log", partial(work, run_file=run_file, on_second=list(on_second)))
    codes, said = statuses(run), "\n".join(log.read_text() for log in run.logs)
    lines = {line.partition("): ")[2] or line for line in said.splitlines() if line.startswith("error")}
    assert codes == [2, 2] and "Traceback" not in said, said
    assert "'loss'" not in said and not list((run_file.parent / "out").glob("*.json*")), "it has trained"
    return lines.pop().removeprefix("error: ")


def copied(run_file: Path, name: str, edit=lambda lines: lines) -> str:
    """Another copy of the training rows, edited."""
    source = Path(json.loads(run_file.read_text())["dataset_name"])
    other = run_file.parent / "elsewhere" / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("\n".join(edit(source.read_text().splitlines())))
    return str(other)


@pytest.mark.parametrize("words, said", [
    (["--learning_rate", "1e-3"], "learning_rate is "),
    (["--max_length", "8"], "max_length is 16 on rank 0 and 8 on rank 1"),
    (["--gradient_accumulation_steps", "2"], "gradient_accumulation_steps is not given on rank 0 and 2 on rank 1"),
    (["--seed", "7"], "seed is not given on rank 0 and 7 on rank 1"),
    (["--gradient_cache_chunk_size", "4"], "gradient_cache_chunk_size is 2 on rank 0 and 4 on rank 1"),
])  # fmt: skip
def test_another_field_on_a_rank_is_refused_by_name(run_file, words, said):
    assert said in refused(run_file, *words)


@pytest.mark.parametrize("is_stream", [False, True])
def test_three_edited_rows_on_a_rank_are_refused(run_file, is_stream):
    def edit(lines: list[str]) -> list[str]:
        for i in (3, 4, 7):
            row = json.loads(lines[i])
            lines[i] = json.dumps(row | {name: f"{text} x" for name, text in row.items() if isinstance(text, str)})
        return lines

    fields = json.loads(run_file.read_text())
    run_file.write_text(json.dumps(fields | {"streaming": is_stream}))
    words = refused(run_file, "--dataset_name", copied(run_file, "pairs.jsonl", edit))
    assert "the content of train_dataset is" in words and "on rank 1" in words


def test_another_tokenizer_on_a_rank_is_refused(run_file):
    other = tiny_tokenizer()
    other.backend_tokenizer.normalizer = None
    other.save_pretrained(run_file.parent / "other")
    vocabulary = json.loads((run_file.parent / "other" / "tokenizer.json").read_text())
    words = list(vocabulary["model"]["vocab"])
    first, second = words[-1], words[-2]
    ids = vocabulary["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (run_file.parent / "other" / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "the tokenizer is" in refused(run_file, "--tokenizer_name", str(run_file.parent / "other"))


def test_other_weights_are_refused_where_every_rank_keeps_its_own(run_file):
    import torch

    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model = embedding_model(model_config("bert"))
        model.save_pretrained(str(run_file.parent / name))
    fields = json.loads(run_file.read_text())
    fields = {name: value for name, value in fields.items() if name not in ("model_config", "tokenizer_name")}
    run_file.write_text(json.dumps(fields | {"model_name_or_path": str(run_file.parent / "one")}))
    words = refused(run_file, "--model_name_or_path", str(run_file.parent / "two"), mode="fsdp-full")
    assert "the weight " in words and "on rank 1" in words


def train_alone(say, folder: Path) -> str:
    """Without a run file: the trainer itself compares."""
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=1 + int(os.environ["RANK"]),
    )  # fmt: skip
    with pytest.raises(UsageError, match="gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1"):
        DistTrainer(Regression(), args, train_dataset=rows({})).train()
    return "refused"


def test_a_trainer_without_a_run_file_compares_its_arguments(tmp_path):
    assert Run("ddp", tmp_path / "log", partial(train_alone, folder=tmp_path / "out")).result() == "refused"


@pytest.mark.parametrize("mode", ["ddp", "fsdp-full"])
def test_ranks_may_have_the_same_things_in_other_places(run_file, mode):
    tokenizer = json.loads(run_file.read_text())["tokenizer_name"]
    shutil.copytree(tokenizer, run_file.parent / "elsewhere" / "tokenizer")
    words = ["--tokenizer_name", str(run_file.parent / "elsewhere" / "tokenizer")]
    words += ["--dataset_name", copied(run_file, "the same.jsonl")]
    run = Run(mode, run_file.parent / "log", partial(work, run_file=run_file, on_second=words))
    assert run.result() == "ended well"
