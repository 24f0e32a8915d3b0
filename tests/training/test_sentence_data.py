"""A training on datasets by name: batches of one dataset each, and the same after a resume."""

import datasets
import pytest
from datasets import Dataset, DatasetDict

from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_data import prepare_sentence_data
from hf_dist_ext.training.trainer import DistTrainer
from tests.sentence_models import text_model
from tests.tiny_models import WORDS, dual_encoder
from tests.training.test_trainer import Tiny

PROMPTS = ["search : ", "text from ", "a "]


def rows(count: int, word: str) -> Dataset:
    return Dataset.from_list([{"anchor": f"{word} {WORDS[i]}", "positive": f"{WORDS[-i]} {i}"} for i in range(count)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("model"))


def trainer(folder, model, seen: list, **options) -> DistTrainer:
    """Of a small model, which takes the same tokens. `seen`: (source, anchor -> its tokens) of every batch."""
    sources = DatasetDict({"code": rows(10, "parse"), "other": rows(5, "read")})
    options = {"max_steps": 10, "save_steps": 5, "per_device_train_batch_size": 4} | options
    args = DistTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, gradient_cache_chunk_size=2, **options
    )
    args.prompts = {"code": {"anchor": PROMPTS}, "other": "text "}
    train, evaluation, collator = prepare_sentence_data(model, args, sources, sources)
    args.prompts = None  # the model of this test is none of theirs, and their prompts are the collator's now
    made = DistTrainer(
        Tiny(), args, train_dataset=train, eval_dataset=evaluation, data_collator=collator, loss=InfoNCELoss()
    )
    run = made.step.train

    def recording(model, inputs, *more):
        tokens = inputs["anchor"]["input_ids"].split(inputs["anchor"]["offsets"].diff().tolist())
        of_row = zip(inputs["ids"]["anchor"].tolist(), tokens, strict=True)
        seen.append((inputs["ids"][SOURCE], {row: ids.tolist() for row, ids in of_row}))
        return run(model, inputs, *more)

    made.step.train = recording
    return made


def test_a_resumed_run_sees_the_batches_and_the_prompts_that_it_would_have_seen(tmp_path, model, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole, rest, ended = [], [], []
    trainer(tmp_path / "whole", model, whole).train()
    names = [name for name, _ in whole]
    assert len(whole) == 10 and sorted(names[:5]) == sorted(names[5:]) == ["code"] * 3 + ["other"] * 2
    first, second = (
        {row: ids for _, tokens in part for row, ids in tokens.items()} for part in (whole[:5], whole[5:])
    )
    assert len(first) == 15 and first.keys() == second.keys(), "every row once in an epoch"
    others = {row for name, tokens in whole if name == "other" for row in tokens}
    again = {row for row in first if first[row] == second[row]}
    assert others < again < first.keys(), "some rows of code have drawn another prompt"
    trainer(tmp_path / "cut", model, ended, max_steps=7, save_steps=7, lr_scheduler_type="constant").train()
    resumed = trainer(tmp_path / "cut", model, rest, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=True)
    assert ended + rest == whole
    figures = resumed.evaluate()
    assert {"eval_code_loss", "eval_other_loss"} <= figures.keys()


def test_an_epoch_of_such_batches_goes_on_with_batches_as_large_only(tmp_path, model):
    trainer(tmp_path, model, [], max_steps=7, save_steps=7).train()
    with pytest.raises(UsageError, match="ProportionalBatchSampler made the batches .* of 4 rows .* has 2 now"):
        trainer(tmp_path, model, [], per_device_train_batch_size=2).train(resume_from_checkpoint=True)


def test_a_siglips_text_has_one_vector_whatever_stands_beside_it(tmp_path):
    model, pairs = dual_encoder("siglip"), Dataset.from_dict({"anchor": WORDS[:2], "positive": WORDS[2:4]})
    *_, collator = prepare_sentence_data(model, DistTrainingArguments(str(tmp_path), use_cpu=True), pairs, None)
    assert collator.features("anchor", ["parse"])["input_ids"].shape == (1, 16)
    beside, alone = model.encode(["parse", "parse a date"])[0], model.encode("parse")  # what evaluators call
    assert abs(beside - alone).max() < 1e-6
    with pytest.raises(UsageError, match="max_length=8: this model reads texts of 16 tokens"):
        prepare_sentence_data(model, DistTrainingArguments(str(tmp_path), use_cpu=True, max_length=8), pairs, None)
