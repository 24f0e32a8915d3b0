"""A run that is resumed with another batch, accumulation or number of processes repeats no row and skips none."""

import random
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler

from hf_dist_ext.data.fingerprint import data_fingerprint
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer

ROWS = 30


class Model(nn.Module):
    """Notes which rows it was given."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), []

    def forward(self, x, labels=None):
        self.seen += x[:, 0].int().tolist()
        return {"loss": (self.weight * x.sum()).sum() * 1e-6, "logits": x}


def table(rows: int = ROWS, shift: int = 0) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": [[float(i + shift)] for i in range(rows)]})


def run(folder, dataset=None, resume=None, epochs: float = 2, model: nn.Module | None = None, **options) -> Model:
    model = model or Model()
    args = DistTrainingArguments(
        **{"output_dir": str(folder if resume is None else folder / "resumed"), "num_train_epochs": epochs,
           "per_device_train_batch_size": 4, "save_steps": 1, "save_strategy": "steps" if resume is None else "no",
           "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"} | options
    )  # fmt: skip
    trainer = DistTrainer(model, args, train_dataset=table() if dataset is None else dataset)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    model.last_step, model.max_steps = trainer.state.global_step, trainer.state.max_steps
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder with a checkpoint of every step, the rows in the order they were seen) of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder).seen


CHANGES = {
    "smaller batch": {"per_device_train_batch_size": 3},
    "larger batch": {"per_device_train_batch_size": 7},
    "accumulation": {"gradient_accumulation_steps": 3},
    "same batch in parts": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "workers": {"per_device_train_batch_size": 3, "dataloader_num_workers": 1},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stopped", [3, 8, 11])
def test_every_row_is_seen_once_per_epoch(whole, name, stopped):
    folder, order = whole
    rows = {3: 12, 8: ROWS, 11: ROWS + 12}[stopped]  # an epoch is 8 steps, the last of two rows
    after = run(folder, resume=stopped, **CHANGES[name])
    assert len(after.seen) == 2 * ROWS - rows > 0
    assert Counter(order[:rows] + after.seen) == Counter(list(range(ROWS)) * 2)
    assert order[:rows] + after.seen == order  # the order goes on as it was, in other batches


def test_a_short_last_batch_that_is_dropped_counts_as_no_step(whole):
    after = run(whole[0], resume=3, per_device_train_batch_size=7, dataloader_drop_last=True)
    assert len(after.seen) == (18 // 7 + ROWS // 7) * 7
    assert after.max_steps == after.last_step == 3 + 18 // 7 + ROWS // 7


@pytest.mark.parametrize("given", [{}, {"max_steps": 9}])
def test_an_epoch_of_which_less_than_a_batch_is_left_is_followed_by_the_next(whole, given):
    after = run(whole[0], resume=7, per_device_train_batch_size=8, dataloader_drop_last=True, **given)
    assert len(after.seen) == 8 * (after.last_step - 7)
    assert after.max_steps == after.last_step == given.get("max_steps", 7 + ROWS // 8)


def test_an_unchanged_run_is_trainers_own_resume(whole):
    folder, order = whole
    assert run(folder, resume=3).seen == order[12:]


def test_without_skipping_the_epoch_begins_anew(whole):
    folder, order = whole
    options = {"resume": 11, "ignore_data_skip": True, "per_device_train_batch_size": 5}
    assert run(folder, **options).seen == order[ROWS : ROWS + 5]  # one step is left, of 5 rows


def test_a_sequential_order_goes_on(tmp_path):
    run(tmp_path, train_sampling_strategy="sequential", epochs=0.5)
    after = run(tmp_path, resume=3, train_sampling_strategy="sequential", per_device_train_batch_size=5)
    assert after.seen == [*range(12, ROWS), *range(ROWS)]


def test_a_run_may_be_changed_twice(whole, tmp_path):
    folder, order = whole
    resumed = {"resume": 3, "per_device_train_batch_size": 3, "max_steps": 5, "save_strategy": "steps"}
    assert run(folder, output_dir=str(tmp_path), **resumed).seen == order[12:18]
    assert run(tmp_path, resume=5).seen == order[18:]


@pytest.mark.parametrize("batch", [2, 8])
def test_a_number_of_steps_is_kept_with_another_batch(whole, batch):
    folder, order = whole
    after = run(folder, resume=10, max_steps=20, per_device_train_batch_size=batch)
    assert after.last_step == 20
    assert after.seen[: min(10 * batch, 22)] == order[ROWS + 8 :][: 10 * batch]


class Stream(IterableDataset):
    """Not of `datasets`: it has no state."""

    def __iter__(self):
        return iter({"x": torch.tensor([float(i)])} for i in range(60))


def test_a_stream_without_a_state_goes_on_behind_what_was_read(tmp_path):
    before = run(tmp_path, Stream(), max_steps=12, save_steps=4)
    after = run(tmp_path, Stream(), resume=4, max_steps=12, per_device_train_batch_size=2)
    assert after.seen == before.seen[16 : 16 + 2 * 8] and len(after.seen) == 16
    with pytest.raises(UsageError, match="dataloader_num_workers"):
        run(tmp_path, Stream(), resume=4, max_steps=12, per_device_train_batch_size=2, dataloader_num_workers=1)


@pytest.mark.parametrize("step", [4, 16])
@pytest.mark.parametrize("options", [{}, {"per_device_train_batch_size": 2}])
def test_a_finished_run_takes_no_further_step(whole, options, step):
    after = run(whole[0], resume=step, max_steps=step, **options)
    assert after.seen == [] and after.last_step == step


@pytest.mark.parametrize(
    "options, words",
    [
        ({"seed": 7}, "seed of the order was 42, now it is 7"),
        ({"dataset": table(29)}, "had 30 rows, now it has 29"),
        ({"dataset": table(shift=1)}, "rows of the training set are others"),
    ],
)
def test_other_data_are_refused_unless_they_are_meant(whole, options, words):
    with pytest.raises(UsageError, match=words):
        run(whole[0], resume=3, **options)
    assert run(whole[0], resume=3, allow_changed_data=True, **options).seen


class OwnOrder(DistTrainer):
    def __init__(self, sampler, folder, **options):
        args = DistTrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2, seed=1,
            **{"per_device_train_batch_size": 4, "save_steps": 1} | options,
        )  # fmt: skip
        self.sampler = sampler
        super().__init__(Model(), args, train_dataset=table())

    def _get_train_sampler(self, dataset=None):
        return self.sampler

    def seen(self, resume=None) -> list[int]:
        self.train(resume_from_checkpoint=resume)
        return self.model.seen


class DrawsOn(Sampler):
    """Its order follows from how often it was asked."""

    def __init__(self):
        self.draw = random.Random(0)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(self.draw.sample(range(ROWS), ROWS))


@pytest.mark.parametrize("batch", [4, 3])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler(torch.ones(ROWS), ROWS, replacement=False),
        lambda: WeightedRandomSampler(
            torch.ones(ROWS), ROWS, replacement=False, generator=torch.Generator().manual_seed(3)
        ),
    ],
    ids=["global generator", "a generator of its own"],
)
def test_the_order_of_a_sampler_that_draws_from_a_torch_generator_goes_on(tmp_path, sampler, batch):
    order = OwnOrder(sampler(), tmp_path).seen()
    assert order[:ROWS] != order[ROWS:] and sorted(order[ROWS:]) == [*range(ROWS)]
    torch.rand(7)  # the global generator is elsewhere
    after = OwnOrder(sampler(), tmp_path / "b", per_device_train_batch_size=batch, save_strategy="no")
    assert after.seen(str(tmp_path / "checkpoint-10")) == order[ROWS + 8 :]


@pytest.mark.parametrize("batch", [4, 3])
def test_an_order_that_only_its_run_knows_is_refused(tmp_path, batch):
    order = OwnOrder(DrawsOn(), tmp_path).seen()
    options = {"per_device_train_batch_size": batch, "save_strategy": "no"}
    with pytest.raises(UsageError, match="the order of epoch 1 that DrawsOn gives now is not the one .* has begun"):
        OwnOrder(DrawsOn(), tmp_path / "b", **options).seen(str(tmp_path / "checkpoint-10"))
    meant = OwnOrder(DrawsOn(), tmp_path / "c", allow_changed_data=True, **options)
    assert len(meant.seen(str(tmp_path / "checkpoint-10"))) == len(order[ROWS + 8 :])
    begun = OwnOrder(DrawsOn(), tmp_path / "d", **options)  # the first epoch's is drawn first again
    assert begun.seen(str(tmp_path / "checkpoint-3"))[: ROWS - 12] == order[12:ROWS]


def test_an_epoch_has_the_rows_of_its_sampler_not_those_of_the_dataset(tmp_path):
    twice = lambda: WeightedRandomSampler(torch.ones(ROWS), 2 * ROWS)  # noqa: E731
    order = OwnOrder(twice(), tmp_path).seen()
    assert len(order) == 4 * ROWS
    after = OwnOrder(twice(), tmp_path / "b", per_device_train_batch_size=3, save_strategy="no")
    assert after.seen(str(tmp_path / "checkpoint-20")) == order[2 * ROWS + 20 :]


def test_a_fingerprint_is_the_content_not_the_object():
    assert data_fingerprint(table()) == data_fingerprint(table().map(lambda row: row)) is not None
    assert data_fingerprint(table()) != data_fingerprint(table(shift=1))
    assert data_fingerprint([1, 2]) is None


def pictures(shift: int = 0) -> datasets.Dataset:
    """Rows of lists of pictures, a picture, and lists of pictures within a mapping, beside text."""
    rows = [[np.full((4, 4, 3), i + j + shift, dtype=np.uint8) for j in range(i % 3)] for i in range(12)]
    columns = {
        "text": [f"row {i}" for i in range(12)],
        "images": [[Image.fromarray(picture) for picture in row] for row in rows],
        "image": [Image.fromarray(np.full((4, 4, 3), i, dtype=np.uint8)) for i in range(12)],
        "turns": [{"who": "user", "images": [Image.fromarray(picture) for picture in row]} for row in rows],
    }
    kinds = {
        "text": datasets.Value("string"),
        "images": datasets.List(datasets.Image()),
        "image": datasets.Image(),
        "turns": {"who": datasets.Value("string"), "images": datasets.List(datasets.Image())},
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def test_pictures_are_fingerprinted_as_they_are_stored_not_as_objects(tmp_path):
    first = data_fingerprint(pictures())
    assert first == data_fingerprint(pictures()) == data_fingerprint(pictures().with_format("torch")) is not None
    assert first != data_fingerprint(pictures(shift=1))
    assert data_fingerprint(pictures().select(range(11))) != first != data_fingerprint(pictures().shuffle(seed=0))
    pictures().save_to_disk(tmp_path / "saved")
    assert data_fingerprint(datasets.load_from_disk(tmp_path / "saved")) == first
