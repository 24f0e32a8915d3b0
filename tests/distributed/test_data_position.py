"""Resuming on another number of processes: the epoch's order goes on, and an update learns from as many rows."""

import json
from collections import Counter
from functools import partial
from pathlib import Path

from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.data.test_position import Model, table
from tests.distributed.forked import Run


def train(say, folder: Path, resume: Path | None) -> str:
    args = DistTrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4,
        save_strategy="steps", save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    trainer = DistTrainer(Model(), args, train_dataset=table(32))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    facts = trainer.model.seen, args.gradient_accumulation_steps, trainer.state.global_step
    (folder / f"seen_{rank()}.json").write_text(json.dumps(facts))
    return "done"


def rows_seen(mode: str, folder: Path, resume: Path | None = None) -> tuple[list[list[int]], int, int]:
    """(rows of every rank, accumulated batches, steps)."""
    assert Run(mode, folder.with_suffix(".run"), partial(train, folder=folder, resume=resume)).result() == "done"
    seen, *facts = zip(*(json.loads(path.read_text()) for path in sorted(folder.glob("seen_*.json"))), strict=True)
    return list(seen), *(of_ranks[0] for of_ranks in facts)


def test_two_processes_go_on_as_one_and_one_as_two(tmp_path):
    """32 rows, 2 epochs, 8 rows per update: two processes of 4 rows, or one of 4 rows twice."""
    two, accumulation, step = rows_seen("ddp", tmp_path / "two")
    assert accumulation == 1 and step == 8 and len(two) == 2
    order = [row for i in range(0, 32, 4) for rank in two for row in rank[i : i + 4]]
    assert Counter(order) == Counter(list(range(32)) * 2)
    (one,), accumulation, step = rows_seen("single", tmp_path / "one", tmp_path / "two" / "checkpoint-2")
    assert accumulation == 2 and step == 8 and one == order[16:]
    # in the second epoch of a run that was changed once already
    again, accumulation, step = rows_seen("ddp", tmp_path / "again", tmp_path / "one" / "checkpoint-6")
    assert step == 8 and sorted(again[0] + again[1]) == sorted(order[48:])
