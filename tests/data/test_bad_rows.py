"""Rows that cannot be used: named where nothing may be replaced, else replaced by a row of their batch."""

import json

import datasets
import pytest
import torch

from hf_dist_ext.data.bad_rows import BatchMaker
from hf_dist_ext.data.mixture import RowNumbers
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer
from tests.training.test_nonfinite import rows as regression_rows
from tests.training.test_nonfinite import train as train_regression


def pairs(bad: dict[int, str | None]) -> datasets.Dataset:
    rows = [{"query": f"{WORDS[i % 9]} {i}", "positive": bad.get(i, f"{WORDS[i % 7]} read {i}")} for i in range(24)]
    return datasets.Dataset.from_list(rows)


def trainer(folder, dataset, loss=None, **more) -> DistTrainer:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1,
        per_device_train_batch_size=8, num_train_epochs=2, no_duplicates_in_batch=False,
        **{"save_strategy": "no"} | more,
    )  # fmt: skip
    return DistTrainer(
        model=embedding_model(model_config("bert")), args=args, train_dataset=dataset, processing_class=tokenizer,
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive"]), loss=loss or InfoNCELoss(),
    )  # fmt: skip


def maker(collate, dataset, can_replace: bool) -> BatchMaker:
    return BatchMaker(collate, dataset, "the rows", can_replace, torch.zeros(1, dtype=torch.long))


def collator(**more) -> ContrastiveCollator:
    return ContrastiveCollator(tiny_tokenizer(), ["query", "positive", *more.pop("columns", [])], **more)


def logged(of: DistTrainer, name: str) -> list:
    return [line.get(name) for line in of.state.log_history if "loss" in line]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_is_named_with_dataset_row_and_column(tmp_path, workers):
    found = trainer(tmp_path, pairs({5: None}).select([*range(20, 3, -1)]), dataloader_num_workers=workers)
    with pytest.raises(UsageError, match=r'training set.*, row 5 .*, column "positive", cannot be used') as error:
        found.train()
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_are_replaced_and_counted_without_a_shorter_batch(tmp_path, workers, monkeypatch):
    def warn(text: str) -> None:  # in a worker too
        with open(tmp_path / "said", "a") as file:
            file.write(f"{text}\n")

    monkeypatch.setattr("hf_dist_ext.data.bad_rows.logger.warning", warn)
    found = trainer(tmp_path, pairs({5: None, 11: ""}), max_bad_rows=2, dataloader_num_workers=workers)
    found.train()
    assert logged(found, "contrastive_batch_size") == [8] * 6
    assert max(filter(None, logged(found, "bad_rows"))) == 2
    said = (tmp_path / "said").read_text()
    for row in (5, 11):
        assert said.count(f'row {row} (counted from 0), column "positive", cannot be used') == 2, "two epochs"
    assert said.count("Another row of its batch takes its place.") == 4


def test_a_copy_is_no_negative_of_the_row_that_it_repeats():
    """Its ids are those of that row, so the loss is that of a batch in which the row itself stands twice."""
    batch = maker(collator(), pairs({3: None}), can_replace=True)([0, 1, 2, 3])
    assert batch["ids"]["row"].tolist() == [0, 1, 2, 0]
    for column in ("query", "positive"):
        ids = batch["ids"][column].tolist()
        assert ids[3] == ids[0] and len({*ids}) == 3
    rows = {name: torch.randn(4, 5) for name in ("query", "positive")}
    rows = {name: torch.cat([values[:3], values[:1]]) for name, values in rows.items()}
    given = {name: batch["ids"][name] for name in rows}
    masked = InfoNCELoss(mask_false_negatives=True)(rows, rows, 0, given).loss
    scores = rows["query"] @ rows["positive"].T
    assert masked.isfinite() and scores[0, 0] == scores[0, 3]
    assert masked != InfoNCELoss(mask_false_negatives=False)(rows, rows, 0, given).loss


@pytest.mark.parametrize("make", [
    lambda: InfoNCELoss(mask_false_negatives=False),
    lambda: SentenceTransformersLoss("MultipleNegativesRankingLoss", 32),
    lambda: SumOfLosses({"a": InfoNCELoss(), "b": SentenceTransformersLoss("MultipleNegativesRankingLoss", 32)}),
])  # fmt: skip
def test_a_loss_that_masks_no_copy_replaces_no_row(tmp_path, make):
    loss = make()
    with pytest.raises(UsageError, match="max_bad_rows .* does not mask"):
        trainer(tmp_path, pairs({}), max_bad_rows=1, loss=loss)
    trainer(tmp_path, pairs({}), max_bad_rows=1, loss=SentenceTransformersLoss("CoSENTLoss", 32))


def test_where_no_row_of_a_batch_is_good_the_error_is_raised_as_it_is():
    """Such as that of a tokenizer that cannot pad: it is none of a row."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None

    def collate(rows):
        return tokenizer([row["query"] for row in rows], padding=True)

    for can_replace in (True, False):
        with pytest.raises(ValueError, match="^Asking to pad but the tokenizer does not have a padding token"):
            maker(collate, pairs({}), can_replace)([0, 1, 2])
        with pytest.raises(UsageError, match=r'the rows, row 3 .*, column "positive", cannot be used: Column'):
            maker(collator(), pairs({3: None}), can_replace)([3])  # alone in its batch


def test_one_more_than_the_limit_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="2 rows of this epoch .* could not be used, more than max_bad_rows=1"):
        trainer(tmp_path, pairs({5: None, 11: None}), max_bad_rows=1).train()


def test_a_relaunch_has_the_same_batches_and_counts_from_its_start(tmp_path):
    """Three steps an epoch; a loader reads ahead of the checkpoint."""
    bad = pairs({3: None, 9: None, 14: None, 20: None})
    options = {"max_bad_rows": 4, "dataloader_num_workers": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path, bad, **options)
    whole.train()
    assert logged(whole, "bad_rows")[2] == logged(whole, "bad_rows")[-1] == 4
    resumed = trainer(tmp_path, bad, **options | {"save_strategy": "no", "max_bad_rows": 4})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(resumed, "loss")[-2:] == logged(whole, "loss")[-2:]
    assert logged(resumed, "bad_rows")[-1] < 4, "those of the first step of the epoch were met before"
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Unreadable(torch.utils.data.Dataset):
    """Rows 4 and 5 raise, as a file that is cut does."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index in (4, 5):
            raise OSError("truncated")
        return regression_rows({})[index]


def test_a_row_that_cannot_be_read_is_replaced_by_one_of_its_batch(tmp_path):
    with pytest.raises(UsageError, match=r"Unreadable\), row 4 .*, cannot be used: OSError: truncated"):
        train_regression(tmp_path, data=Unreadable())
    found = train_regression(tmp_path, data=Unreadable(), max_bad_rows=2)
    by_hand = regression_rows({})
    by_hand[4], by_hand[5] = by_hand[6], by_hand[7]  # the good rows of the batch of 4 to 7
    expected = train_regression(tmp_path, data=by_hand)
    assert torch.equal(found.model.line.weight, expected.model.line.weight) and found.model.line.weight.grad is None


def test_a_column_that_cannot_be_decoded_is_named():
    images = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "image": [{"bytes": b"no image", "path": None}] * 2},
        features=datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()}),
    )
    with pytest.raises(UsageError, match='the rows, row 1 .*, column "image", cannot be used'):
        maker(list, images, can_replace=False)([1])


def test_a_bad_row_of_a_stream_is_replaced_by_one_of_its_batch_or_shown():
    stream = list(pairs({9: None}))
    made = maker(collator(), None, can_replace=True)
    batch = made(stream[8:16])
    assert batch["ids"]["positive"][1] == collator()([stream[10]])["ids"]["positive"][0] and made.counts.tolist() == [
        1
    ]
    with pytest.raises(UsageError, match=r'the row \{.query.: .* 9.*, column "positive", cannot be used'):
        maker(collator(), None, can_replace=False)(list(pairs({9: None}))[8:16])


def triplets(few: tuple[int, ...]) -> datasets.Dataset:
    negatives = [["read", "list"][: 1 if i in few else 2] for i in range(24)]
    return pairs({}).add_column("negative", negatives)


def test_a_row_with_fewer_negatives_than_others_is_a_bad_row():
    """Alone it could be used, so it is known by the rows beside it: as the first row of a batch too."""
    collate, rows = collator(columns=["negative"], same_number_of_negatives=True), triplets((0, 5, 9))
    for few, numbers in ((0, range(0, 5)), (5, range(1, 8)), (9, range(6, 12))):
        made = maker(collate, rows, can_replace=True)
        batch = made(list(numbers))
        assert few not in batch["ids"]["row"].tolist() and made.counts.tolist() == [1]
        assert len(batch["ids"]["negative"]) == 2 * len(numbers)
        with pytest.raises(
            UsageError, match=rf"row {few} \(counted from 0\).*one row has 2 negatives and another one 1"
        ):
            maker(collate, rows, can_replace=False)(list(numbers))


def test_an_error_of_the_batch_and_not_of_a_row_stays_what_it_is():
    def collate(rows):
        if len(rows) > 1:
            raise RuntimeError("rows do not fit together")
        return rows

    with pytest.raises(RuntimeError, match="do not fit together"):
        maker(collate, [1, 2, 3], can_replace=True)([0, 1])


def test_a_row_that_fails_once_ends_no_run_that_may_replace_rows():
    class FailsOnce(list):
        failed = False

        def __getitem__(self, index):
            if index == 1 and not self.failed:
                self.failed = True
                raise ValueError("a random crop does not fit")
            return super().__getitem__(index)

    assert maker(list, FailsOnce("abc"), can_replace=True)([0, 1]) == ["a", "b"]
    with pytest.raises(ValueError, match="does not fit"):
        maker(list, FailsOnce("abc"), can_replace=False)([0, 1])


def test_healthy_batches_are_the_same_and_carry_their_row_numbers_to_reports_only(tmp_path):
    data = pairs({})
    plain = collator()
    guarded = maker(plain, data, can_replace=False)([3, 7])
    assert guarded["ids"].pop("row").tolist() == [3, 7]
    expected = plain([data[3], data[7]])
    for column in expected:
        assert all(torch.equal(expected[column][name], guarded[column][name]) for name in expected[column])
    rows = RowNumbers(data)
    assert len(rows) == 24 and rows.column_names == data.column_names
    assert json.dumps(rows.column_names)
