"""A stream over several processes: one order, every row read by one of them and decoded by one of them."""

import io
import itertools
import json
import os
from pathlib import Path

import datasets
import PIL.Image
import pytest
import torch

from hf_dist_ext.data import stream_readers
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.data.test_position import Model
from tests.data.test_stream_order import dealt
from tests.distributed.forked import Run, slow

SHARDS, ROWS, BATCH, STEPS = 8, 11, 12, 10  # 88 rows an epoch, 120 in all: an epoch begins in the middle of a batch


def picture(number: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("L", (2, 2), number).save(file, "png")
    return file.getvalue()


def note(folder: Path, kind: str, number: int) -> None:
    with open(folder / f"{kind}-{os.getpid()}", "a") as file:
        file.write(f"{number}\n")


def noted(folder: Path, kind: str) -> list[int]:
    return [int(line) for path in folder.glob(f"{kind}-*") for line in path.read_text().splitlines()]


def pictures(folder: Path, shards: int = SHARDS, shuffled: bool = False) -> datasets.IterableDataset:
    """Rows that are noted when they are read; the number is in the picture, so only who decodes it knows the row."""

    def generate(shards):
        for shard in shards:
            for i in range(ROWS):
                note(folder, "read", ROWS * shard + i)
                yield {"image": {"bytes": picture(ROWS * shard + i), "path": None}}

    stream = datasets.IterableDataset.from_generator(
        generate, features=datasets.Features({"image": datasets.Image()}), gen_kwargs={"shards": list(range(shards))}
    )
    return stream.shuffle(seed=5, buffer_size=16) if shuffled else stream


class Collator:
    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, rows):
        numbers = [row["image"].getpixel((0, 0)) for row in rows]
        for number in numbers:
            note(self.folder, "decoded", number)
        return {"x": torch.tensor(numbers, dtype=torch.float).unsqueeze(1)}


def train(folder: Path, output: str, stream, processes: int, resume: str | None = None, **options) -> None:
    model = Model()
    args = DistTrainingArguments(
        **{"output_dir": str(folder / output), "per_device_train_batch_size": BATCH // processes, "max_steps": STEPS,
           "save_steps": 100, "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no",
           "remove_unused_columns": False} | options
    )  # fmt: skip
    trainer = DistTrainer(model, args, train_dataset=stream, data_collator=Collator(folder))
    trainer.train(resume_from_checkpoint=resume)
    (folder / f"{output}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(model.seen))


def run(mode: str, folder: Path, output: str, stream, **options) -> list[list[int]]:
    """The global batches, each sorted."""
    processes = {"single": 1, "ddp": 2}.get(mode) or int(mode[-1])
    Run(
        mode, folder / f"{output}.log", lambda say: train(folder, output, stream(), processes, **options) or ""
    ).result()
    rows = options.get("per_device_train_batch_size", BATCH // processes)
    ranks = [json.loads((folder / f"{output}-{rank}.json").read_text()) for rank in range(processes)]
    assert len({len(seen) for seen in ranks}) == 1, "every rank gets as many rows"
    return [sorted(sum((seen[i : i + rows] for seen in ranks), [])) for i in range(0, len(ranks[0]), rows)]


def expected(folder: Path, shards: int = SHARDS, shuffled: bool = False, batches: int = STEPS) -> list[list[int]]:
    decode = lambda row: PIL.Image.open(io.BytesIO(row.row["image"]["bytes"])).getpixel((0, 0))  # noqa: E731
    rows = dealt(pictures(folder, shards, shuffled), BATCH, number=decode)
    batches = [batch for _, batch in itertools.islice(rows, batches)]
    assert sorted(sum(batches, [])[: shards * ROWS]) == list(range(shards * ROWS)), "an epoch is every row once"
    return [sorted(batch) for batch in batches]


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(stream_readers, "ROUND_ROWS", 16)  # two rows of each of eight readers


@pytest.mark.parametrize(
    "mode, workers, shards",
    [
        ("single", 2, 8), ("ddp", 0, 8), ("ddp", 2, 8), ("ddp", 0, 1), ("ddp-3", 2, 8),
        slow("single", 0, 8), slow("ddp@4", 0, 8), slow("ddp@4", 2, 8), slow("ddp@4", 0, 3), slow("ddp-3", 2, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shuffled", [False, slow(True)])
def test_every_row_is_read_and_decoded_once_in_one_order(tmp_path, mode, workers, shards, shuffled):
    (tmp_path / "alone").mkdir()
    order = expected(tmp_path / "alone", shards, shuffled)
    found = run(mode, tmp_path, "out", lambda: pictures(tmp_path, shards, shuffled), dataloader_num_workers=workers)
    assert found == order
    read, decoded = noted(tmp_path, "read"), noted(tmp_path, "decoded")
    # Read ahead: the round that is dealt, with loader workers the one that their readers hold ready, and the batches
    # that workers and accelerate have asked for beyond the last step.
    ahead = BATCH * (1 + 2 * workers)
    limit = BATCH * STEPS + ahead + 16 * (2 + 2 * bool(workers)) + 2 * shards
    compared = {"single": 0, "ddp": 2}.get(
        mode, 3 + ("4" in mode)
    )  # processes that compare first rows before they train
    assert len(read) <= limit + compared * stream_readers.FIRST_ROWS and sorted(set(read)) == list(
        range(shards * ROWS)
    )
    assert max(map(read.count, read)) <= -(-limit // (shards * ROWS)) + compared, "as often as there are epochs"
    assert len(decoded) <= BATCH * STEPS + ahead


@pytest.mark.parametrize(
    "before, after", [("ddp", "single"), ("single", "ddp-3"), slow("ddp-3", "ddp"), slow("ddp", "ddp")]
)
@pytest.mark.parametrize("workers", [2, slow(0)])
def test_a_stream_goes_on_with_other_processes_and_reads_no_row_again(tmp_path, before, after, workers):
    stream = lambda: pictures(tmp_path, shuffled=True)  # noqa: E731
    whole = run(before, tmp_path, "before", stream, save_steps=5, dataloader_num_workers=workers)
    for path in tmp_path.glob("read-*"):
        path.unlink()
    resume = str(tmp_path / "before" / "checkpoint-5")  # 60 rows: in the fourth round
    rest = run(after, tmp_path, "after", stream, resume=resume, dataloader_num_workers=2 - workers)
    assert sum(rest, []) == sum(whole[5:], []) and len(rest) == STEPS - 5
    # A generator cannot skip, so a reader begins with the first row of its shard: 11 rows here, in the first epoch.
    read = noted(tmp_path, "read")
    assert len(read) <= 88 + 60 + 16 * 4 + BATCH * 5


def test_processes_that_would_shuffle_differently_are_refused(tmp_path):
    with pytest.raises(AssertionError, match=r"Give shuffle\(seed=...\)"):
        run("ddp", tmp_path, "out", lambda: pictures(tmp_path).shuffle(buffer_size=16))
