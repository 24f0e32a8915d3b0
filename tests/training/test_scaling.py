"""Throughput is of training alone, and efficiency is what it says against a stored figure."""

import json
from unittest import mock

import pytest

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training import scaling
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.scaling import read_baseline
from hf_dist_ext.training.trainer import DistTrainer
from tests.parity.exactness_worker import BERT, Case, collate
from tests.tiny_models import embedding_model
from tests.training.test_timing import Clock

LOADING, BATCH = 2.0, 4


class SlowEvaluation(Clock):
    def on_evaluate(self, args, state, control, **others):
        self.pass_(100.0)  # before Scaling's own, as callbacks run in order


def trained(folder, steps=5, **arguments):
    clock = SlowEvaluation()

    def load(rows):
        clock.pass_(LOADING)
        return collate(Case("scaling"), rows, 0)

    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, max_steps=steps,
        use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = DistTrainer(
        model=embedding_model(BERT), args=args, data_collator=load, train_dataset=list(range(80)),
        eval_dataset=list(range(8)), loss=InfoNCELoss(), callbacks=[clock],
    )  # fmt: skip
    with mock.patch.object(scaling, "time", clock):
        trainer.train()
    return trainer, clock.ends


def stored(folder, **content):
    path = folder / "metrics.json"
    path.write_text(json.dumps({"world_size": 1, "per_device_train_batch_size": BATCH} | content))
    return str(path)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_throughput_counts_waiting_for_data_and_every_micro_batch_but_not_evaluation(tmp_path, accumulation):
    evaluates = {"eval_strategy": "steps", "eval_steps": 2}
    trainer, ends = trained(tmp_path, gradient_accumulation_steps=accumulation, **evaluates)
    found = trainer.scaling.report["samples_per_second"]
    assert ends[-1] - ends[0] > 200 + 4 * accumulation * LOADING, "two evaluations took their time"
    assert found == BATCH / LOADING
    assert "scaling_efficiency" not in trainer.scaling.report


def test_efficiency_is_the_share_of_the_stored_figure(tmp_path):
    trainer, _ = trained(tmp_path, scaling_baseline=stored(tmp_path, samples_per_second=7.0))
    report = trainer.scaling.report
    assert report["scaling_efficiency"] == pytest.approx(report["samples_per_second"] / 7, abs=1e-3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["scaling_efficiency"] for line in lines if "scaling_efficiency" in line]


def test_one_update_says_nothing(tmp_path):
    trainer, _ = trained(tmp_path, steps=1)
    assert trainer.scaling.report == {}


@pytest.mark.parametrize(("content", "words"), [
    ({}, "no samples_per_second"),
    ({"samples_per_second": 3.0, "world_size": 2}, "is of 2 processes"),
    (None, "cannot be read"),
])  # fmt: skip
def test_a_figure_that_is_none_ends_the_run_before_its_first_step(tmp_path, content, words):
    path = str(tmp_path / "absent.json") if content is None else stored(tmp_path, **content)
    with pytest.raises(UsageError, match=words):
        trained(tmp_path, scaling_baseline=path)


def test_a_staged_run_is_compared_stage_by_stage(tmp_path):
    of_stages = [
        {"name": name, "samples_per_second": rate, "world_size": 1, "per_device_train_batch_size": BATCH}
        for name, rate in (("first", 2.0), ("second", 3.0))
    ]
    path = stored(tmp_path, stages=of_stages)
    assert read_baseline(path, "second", BATCH) == 3.0
    with pytest.raises(UsageError, match="for stage 'third'"):
        read_baseline(path, "third", BATCH)
