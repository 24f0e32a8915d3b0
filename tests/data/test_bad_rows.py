"""Rows that cannot be used: named where nothing may be replaced, else replaced without a shorter batch."""

import json

import datasets
import pytest
import torch

from hf_dist_ext.data.bad_rows import BatchMaker, RowNumbers, Tally
from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.health import BadRowCount
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer
from tests.training.test_nonfinite import rows as regression_rows
from tests.training.test_nonfinite import train as train_regression


def pairs(bad: dict[int, str | None], count: int = 24) -> datasets.Dataset:
    rows = [{"query": f"{WORDS[i % 9]} {i}", "positive": bad.get(i, f"{WORDS[i % 7]} read {i}")} for i in range(count)]
    return datasets.Dataset.from_list(rows)


def trainer(folder, dataset, **more) -> DistTrainer:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1,
        per_device_train_batch_size=8, num_train_epochs=2, no_duplicates_in_batch=False,
        **{"save_strategy": "no"} | more,
    )  # fmt: skip
    return DistTrainer(
        model=embedding_model(model_config("bert")), args=args, train_dataset=dataset, processing_class=tokenizer,
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive"]), loss=InfoNCELoss(),
    )  # fmt: skip


def logged(of: DistTrainer, name: str) -> list:
    return [line.get(name) for line in of.state.log_history if "loss" in line]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_is_named_with_dataset_row_column_and_rank(tmp_path, workers):
    found = trainer(tmp_path, pairs({5: None}).select([*range(20, 3, -1)]), dataloader_num_workers=workers)
    with pytest.raises(UsageError, match=r'training set.*, row 5 .*, column "positive", on rank 0 cannot') as error:
        found.train()
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_are_replaced_counted_and_listed_without_a_shorter_batch(tmp_path, workers, monkeypatch):
    said = []
    monkeypatch.setattr("hf_dist_ext.training.health.logger.warning", said.append)
    found = trainer(tmp_path, pairs({5: None, 11: ""}), max_bad_rows=2, dataloader_num_workers=workers)
    found.train()
    assert logged(found, "contrastive_batch_size") == [8] * 6
    assert max(filter(None, logged(found, "bad_rows"))) == 2
    (line,) = [text for text in said if "could not be used" in text]
    assert "4 rows replaced, 5, 11" in line, "two epochs"


def test_rows_of_the_batch_can_not_stand_for_another_and_that_is_said(tmp_path):
    """Rows 0 to 7 are the batch; 8 is bad too."""
    data = pairs({3: None, 8: ""}, 9)
    collate = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"])
    maker = BatchMaker(collate, data, "the rows", Tally(0), can_replace=True)
    with pytest.raises(
        UsageError, match="row 3 cannot be used. Of the 8 rows after it 7 are in the batch already and 1 "
    ):
        maker(list(range(8)))
    maker.can_replace = False
    with pytest.raises(UsageError, match=r"row 3 .* Like it are 2 rows of this batch.$"):
        maker(list(range(9)))


def test_one_more_than_the_limit_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="2 rows of this epoch .* could not be used, more than max_bad_rows=1"):
        trainer(tmp_path, pairs({5: None, 11: None}), max_bad_rows=1).train()


BAD = {3: None, 9: None, 14: None, 20: None}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 5])
def test_bad_rows_are_counted_over_the_epoch_also_behind_a_resume(tmp_path, workers, stop):
    """Three steps an epoch; a loader reads ahead of the checkpoint, and what it has read is read once more."""
    options = {"max_bad_rows": 4, "dataloader_num_workers": workers, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path, pairs(BAD), **options)
    whole.train()
    assert logged(whole, "bad_rows")[-1] == 4
    resumed = trainer(tmp_path, pairs(BAD), **options | {"save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert logged(resumed, "bad_rows")[-1] == 4 and logged(resumed, "bad_rows")[2] == 4
    if stop == 4:
        with pytest.raises(RunError, match="4 rows of this epoch .* could not be used, more than max_bad_rows=3"):
            trainer(tmp_path, pairs(BAD), **options | {"max_bad_rows": 3}).train(
                resume_from_checkpoint=str(tmp_path / "checkpoint-5")
            )


def test_a_row_that_a_worker_meets_after_the_count_is_none_that_a_checkpoint_has_counted():
    counted = BadRowCount(4, None)
    counted._tally = Tally(1)
    counted.begin_epoch(None)
    counted._tally.add(3)
    new_ones = counted.new_ones()
    counted._tally.add(9)
    counted.add_up(new_ones, step=1)
    assert counted.of_epoch() == {"count": 1, "rows": [3]}


class Unreadable(torch.utils.data.Dataset):
    """Rows 4 and 5 raise, as a file that is cut does."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index in (4, 5):
            raise OSError("truncated")
        return regression_rows({})[index]


def test_a_row_that_cannot_be_read_is_replaced_by_the_next_good_one(tmp_path):
    with pytest.raises(UsageError, match=r"Unreadable\), row 4 .* on rank 0 cannot be used: OSError: truncated"):
        train_regression(tmp_path, data=Unreadable())
    found = train_regression(tmp_path, data=Unreadable(), max_bad_rows=2)
    by_hand = regression_rows({})
    by_hand[4], by_hand[5] = by_hand[8], by_hand[9]  # 6 and 7 are in the batch already
    expected = train_regression(tmp_path, data=by_hand)
    assert torch.equal(found.model.line.weight, expected.model.line.weight) and found.model.line.weight.grad is None


def test_a_column_that_cannot_be_decoded_is_named():
    images = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "image": [{"bytes": b"no image", "path": None}] * 2},
        features=datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()}),
    )
    maker = BatchMaker(list, images, "pictures", Tally(0), can_replace=False)
    with pytest.raises(UsageError, match='pictures, row 1 .*, column "image"'):
        maker([1])


def test_a_bad_row_of_a_stream_is_replaced_by_the_last_good_one():
    collate = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"])
    stream = list(pairs({9: None}))
    guarded, tally = [], Tally(0)
    one = BatchMaker(collate, None, "the stream", tally, can_replace=True)
    guarded = [one(stream[:8]), one(stream[8:16])]
    assert tally.rows() == [9] and tally.count() == 1
    assert guarded[1]["ids"]["positive"][1] == collate([stream[7]])["ids"]["positive"][0]
    strict = BatchMaker(collate, None, "the stream", tally, can_replace=False)
    strict(stream[:8])
    with pytest.raises(UsageError, match='row 9 .* of those that loader worker 0 read, column "positive"'):
        strict(stream[8:16])


def triplets(few: tuple[int, ...], count: int = 24) -> datasets.Dataset:
    negatives = [["read", "list"][: 1 if i in few else 2] for i in range(count)]
    return pairs({}, count).add_column("negative", negatives)


def test_a_row_with_fewer_negatives_than_others_is_a_bad_row():
    """Alone it could be used, so it is known by the rows beside it: in a first batch too, and as the first row."""
    collate = ContrastiveCollator(tiny_tokenizer(), ["query", "positive", "negative"], same_number_of_negatives=True)
    for few in ((5, 9), (0, 9), (0, 1)):
        stream, tally = list(triplets(few)), Tally(0)
        one = BatchMaker(collate, None, "the stream", tally, can_replace=True)
        batches = [one(stream[start : start + 8]) for start in range(0, 24, 8)]
        assert tally.rows() == [*few]
        assert [len(batch["ids"]["negative"]) for batch in batches] == [16] * 3
    rows, tally = triplets((5, 6, 9)), Tally(0)
    batch = BatchMaker(collate, rows, "it", tally, can_replace=True)([4, 5])
    assert batch["ids"]["row"].tolist() == [4, 7] and tally.rows() == [5], "6 cannot take the place of 5 either"
    batch = BatchMaker(collate, rows, "it", Tally(0), can_replace=True)([5, 4])
    assert batch["ids"]["row"].tolist() == [7, 4], "rows are compared with the first of the dataset"
    strict = BatchMaker(collate, rows, "it", tally, can_replace=False)
    with pytest.raises(UsageError, match=r"it, row 5 \(counted from 0\).*one row has 2 negatives and another one 1"):
        strict([4, 5])


def test_a_bad_row_of_a_mixed_stream_is_replaced_by_one_of_its_source():
    collate = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"])
    first, second = [[row | {SOURCE: name} for row in pairs({9: None})] for name in ("first", "second")]
    tally = Tally(0)
    one = BatchMaker(collate, None, "the streams", tally, can_replace=True)
    batches = [one(rows) for rows in (first[:8], second[:8], first[8:16])]
    assert batches[2]["ids"]["positive"][1] == collate([first[7]])["ids"]["positive"][0] and tally.count() == 1


def test_an_error_of_the_batch_and_not_of_a_row_stays_what_it_is():
    def collate(rows):
        if len(rows) > 1:
            raise RuntimeError("rows do not fit together")
        return rows

    with pytest.raises(RuntimeError, match="do not fit together"):
        BatchMaker(collate, [1, 2, 3], "it", Tally(0), can_replace=True)([0, 1])


def test_a_row_that_fails_once_ends_no_run_that_may_replace_rows():
    class FailsOnce(list):
        failed = False

        def __getitem__(self, index):
            if index == 1 and not self.failed:
                self.failed = True
                raise ValueError("a random crop does not fit")
            return super().__getitem__(index)

    assert BatchMaker(list, FailsOnce("abc"), "it", Tally(0), can_replace=True)([0, 1]) == ["a", "b"]
    with pytest.raises(ValueError, match="does not fit"):
        BatchMaker(list, FailsOnce("abc"), "it", Tally(0), can_replace=False)([0, 1])


def test_healthy_batches_are_the_same_and_carry_their_row_numbers_to_reports_only(tmp_path):
    data = pairs({})
    plain = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"])
    guarded = BatchMaker(plain, data, "it", Tally(0), can_replace=False)([3, 7])
    assert guarded["ids"].pop("row").tolist() == [3, 7]
    expected = plain([data[3], data[7]])
    for column in expected:
        assert all(torch.equal(expected[column][name], guarded[column][name]) for name in expected[column])
    rows = RowNumbers(data)
    assert len(rows) == 24 and rows.column_names == data.column_names
    assert json.dumps(rows.column_names)
