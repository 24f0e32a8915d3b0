"""Steps that are not finite, on one process: skipped, counted, and the end after too many in a row."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from hf_dist_ext.checkpoints.folder import checkpoint_to_resume
from hf_dist_ext.engine.losses import InfoNCELoss, LossOutput
from hf_dist_ext.errors import RunError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.meter import StepMeter
from hf_dist_ext.training.nonfinite import NonFiniteGuard, check_weights, describe_rows
from hf_dist_ext.training.trainer import DistTrainer
from tests.training.test_trainer import Tiny, collate


class Regression(nn.Module):
    """The model's own loss is that of its rows; a row of 1e30 makes it infinite, one of NaN not a number."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.line = nn.Linear(1, 1, dtype=dtype)

    def forward(self, x, labels=None):
        return {"loss": (self.line(x) - labels).pow(2).mean()}


def rows(bad: dict[int, float], count: int = 24) -> list[dict]:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(1, generator=draw) for _ in range(count)]
    return [{"x": torch.tensor([bad.get(i, v.item())]), "labels": 2 * v} for i, v in enumerate(values)]


def train(folder, model=None, data=None, callbacks=(), resume=None, **more) -> DistTrainer:
    torch.manual_seed(0)
    options = dict(per_device_train_batch_size=4, max_steps=6, logging_steps=1, learning_rate=0.1, weight_decay=0.5)
    options["max_nonfinite_steps"] = 20  # a run with the model's own loss, which has no limit by itself
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, train_sampling_strategy="sequential",
        **{"save_strategy": "no", **options, **more},
    )  # fmt: skip
    given = dict(train_dataset=data or rows({}), eval_dataset=rows({}), callbacks=list(callbacks))
    trainer = DistTrainer(model or Regression(), args, **given)
    trainer.weights = []
    step = trainer.training_step
    trainer.training_step = lambda *a, **k: (
        trainer.weights.append(copy.deepcopy(trainer.model.state_dict())),
        step(*a, **k),
    )[1]
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    trainer.weights.append(copy.deepcopy(trainer.model.state_dict()))
    return trainer


def moved(trainer: DistTrainer) -> list[bool]:
    pairs = zip(trainer.weights, trainer.weights[1:], strict=False)
    return [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairs]


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_bad_step_moves_no_weight_and_the_next_one_does(tmp_path, value):
    trainer = train(tmp_path, data=rows({9: value}))  # of the third batch
    assert moved(trainer) == [True, True, False, True, True, True]
    logged = [line.get("nonfinite_steps") for line in trainer.state.log_history if "learning_rate" in line]
    assert logged == [None, None, 1, 1, 1, 1]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_without_the_guard_one_bad_row_ruins_every_weight(tmp_path):
    trainer = train(tmp_path, data=rows({9: float("nan")}), max_nonfinite_steps=None)
    assert not any(p.isfinite().all() for p in trainer.model.parameters())


def test_the_guard_changes_no_number_of_a_healthy_run(tmp_path):
    found = [train(tmp_path, max_nonfinite_steps=limit, gradient_accumulation_steps=2) for limit in (20, None)]
    assert any(moved(found[0]))
    for first, second in zip(*(t.weights for t in found), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in found]
    assert losses[0] == losses[1] and losses[0][0] > 0


def test_too_many_bad_steps_in_a_row_end_the_run_with_the_step(tmp_path):
    data = rows({i: float("nan") for i in range(8, 16)})
    with pytest.raises(RunError, match="step 4: the loss of rank 0 is nan; 2 steps in a row"):
        train(tmp_path, data=data, max_nonfinite_steps=2)
    assert train(tmp_path, data=data, max_nonfinite_steps=3).health.guard.total == 2


def blows_up_at(step: int, trains_on: int = 20, **more):
    """What a run leaves behind whose update of `step` is finite and makes weights of 1e30."""

    class Ruins(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **others):
            if state.global_step == step:
                with torch.no_grad():
                    model.line.weight.fill_(1e30)

    return dict(max_steps=trains_on, max_nonfinite_steps=3, save_strategy="steps", callbacks=[Ruins()], **more)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("saved_every, ruined_at", [(1, 4), (2, 4), (2, 5)])
def test_a_run_that_blows_up_keeps_its_last_good_checkpoint(tmp_path, saved_every, ruined_at, limit, is_async):
    """With (2, 5) the newest checkpoint is from before the ruin; else it holds ruined weights."""
    options = blows_up_at(ruined_at, save_steps=saved_every, save_total_limit=limit, save_async=is_async)
    good = saved_every * ((ruined_at - 1) // saved_every)
    with pytest.raises(RunError, match=f"no checkpoint was written meanwhile. checkpoint-{good} is good: resume"):
        train(tmp_path, **options)
    assert checkpoint_to_resume(True, tmp_path) == tmp_path / f"checkpoint-{good}"
    newest = max(int(path.name[11:]) for path in tmp_path.glob("checkpoint-*"))
    assert newest == saved_every * (ruined_at // saved_every), "nothing was saved while updates were skipped"
    assert load_file(tmp_path / f"checkpoint-{good}" / "model.safetensors")["line.weight"].abs() < 10
    resumed = train(tmp_path, resume=True, max_steps=8, save_strategy="steps", save_steps=1, save_total_limit=limit)
    assert resumed.health.guard.total == 0 and resumed.state.global_step == 8
    assert checkpoint_to_resume(True, tmp_path) == tmp_path / "checkpoint-8"


def test_a_checkpoint_is_good_where_the_bad_steps_after_it_came_later(tmp_path):
    data = rows({i: float("nan") for i in range(12, 24)})  # from step 4 on
    with pytest.raises(RunError, match="checkpoint-2 is good"):
        train(tmp_path, data=data, save_strategy="steps", save_steps=2, max_nonfinite_steps=3, save_total_limit=1)
    assert checkpoint_to_resume(True, tmp_path) == tmp_path / "checkpoint-2"


def test_a_first_checkpoint_that_no_step_proved_is_neither_praised_nor_replaced(tmp_path):
    with pytest.raises(RunError, match="No step after checkpoint-1 was finite.* none before it. Start afresh"):
        train(tmp_path, **blows_up_at(1, save_steps=1))
    assert checkpoint_to_resume(True, tmp_path) == tmp_path / "checkpoint-1"


def test_what_is_due_at_a_skipped_update_waits_for_the_next_one(tmp_path):
    trainer = train(
        tmp_path,
        data=rows({9: float("nan")}),
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
    )
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [4, 6]


@pytest.mark.parametrize("filters", [True, False])
def test_the_logged_loss_is_the_mean_of_the_updates_that_count(tmp_path, filters):
    data, options = rows({9: float("nan")}), dict(logging_nan_inf_filter=filters, gradient_accumulation_steps=1)
    single = train(tmp_path, data=data, **options)
    lines = {line["step"]: line.get("loss") for line in single.state.log_history if "learning_rate" in line}
    assert set(lines) == set(range(1, 7)) and lines[3] is None and all(lines[step] > 0 for step in (1, 2, 4, 5, 6))
    wide = train(tmp_path, data=data, logging_steps=3, **options)
    found = [line["loss"] for line in wide.state.log_history if "loss" in line]
    expected = [(lines[1] + lines[2]) / 2, (lines[4] + lines[5] + lines[6]) / 3]
    assert found == pytest.approx(expected, rel=1e-6)
    assert wide.output.training_loss == pytest.approx((2 * expected[0] + 3 * expected[1]) / 5, rel=1e-6)
    assert wide.output.metrics["train_loss"] == wide.output.training_loss


def test_lines_that_somebody_else_logs_stay_and_change_no_mean():
    meter, sums = StepMeter(None), torch.zeros(())
    for is_skipped in (True, False, False):
        theirs = {"loss": 7.0, "train_loss": 8.0}
        meter.correct(theirs)
        assert theirs == {"loss": 7.0, "train_loss": 8.0}
        meter.end_update(sums, is_skipped)
    line, end = {"loss": 2.0, "learning_rate": 0.1}, {"train_loss": 4.0, "train_runtime": 1.0}
    meter.correct(line)
    meter.correct(end)
    assert line["loss"] == 3.0 and end["train_loss"] == 6.0


def test_one_bad_micro_batch_skips_the_whole_update(tmp_path):
    trainer = train(tmp_path, data=rows({9: float("nan")}), gradient_accumulation_steps=2, max_steps=3)
    assert trainer.health.guard.total == 1
    assert moved(trainer) == [False, True, False, False, False, True]


class BrokenLoss(InfoNCELoss):
    calls = 0

    def forward(self, own, everyone=None, row_offset=0, ids=None):
        self.calls += 1
        found = super().forward(own, everyone, row_offset, ids)
        return LossOutput(found.loss * (float("nan") if self.calls == 2 else 1), found.metrics)


def test_a_loss_over_embeddings_is_guarded_with_its_own_parameters(tmp_path):
    args = DistTrainingArguments(
        output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", max_steps=2,
        per_device_train_batch_size=8, gradient_cache_chunk_size=3, logging_steps=1,
    )  # fmt: skip
    loss = BrokenLoss(learnable_temperature=True)
    trainer = DistTrainer(Tiny(), args, data_collator=collate, train_dataset=list(range(32)), loss=loss)
    start, temperature = copy.deepcopy(trainer.model.state_dict()), loss.temperature
    trainer.args.max_steps = 1
    trainer.train()
    assert loss.temperature != temperature, "the first step trains"
    state, temperature = copy.deepcopy(trainer.model.state_dict()), loss.temperature
    trainer.train()  # its one step is the second call of the loss
    assert loss.calls == 2 and trainer.health.guard.total == 1 and loss.temperature == temperature
    assert all(torch.equal(state[name], value) for name, value in trainer.model.state_dict().items())
    assert any(not torch.equal(state[name], start[name]) for name in state)


def test_a_first_step_that_is_skipped_is_none_in_which_nothing_trains(tmp_path):
    """As the first ones of fp16 are, while the scale is found."""
    trained = train(tmp_path, data=rows({0: float("nan")}), trainable_modules=["line"], max_steps=4)
    assert trained.health.guard.total == 1 and trained.state.global_step == 4


def test_an_overflow_that_the_fp16_scaler_handles_counts_only_in_a_row():
    guard = NonFiniteGuard(3)
    inf = float("inf")
    answers = [guard.count_update([1.0, 2.0], norm, has_scaler=True) for norm in (inf, 1.0, inf, inf)]
    assert answers == [True, False, True, True]
    assert guard.total == 0 and guard.in_a_row == 2
    guard.report(3, [1.0, 2.0], inf, "", has_scaler=True)
    guard.count_update([1.0, 2.0], inf, has_scaler=True)
    with pytest.raises(RunError, match="the gradient norm is inf"):
        guard.report(4, [1.0, 2.0], inf, "", has_scaler=True)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    trainer = train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    assert (tmp_path / "checkpoint-2").is_dir()
    with torch.no_grad():
        trainer.model.line.bias.fill_(float("inf"))
    trainer.state.global_step = 3
    with pytest.raises(RunError, match=r"checkpoint-3 was not written: trained weights \('line.bias'\).* rank 0"):
        trainer._save_checkpoint(trainer.model, None)
    assert not (tmp_path / "checkpoint-3").exists()
    trainer.model.line.bias.requires_grad_(False)  # frozen: not what this run trained
    check_weights(trainer.model.named_parameters(), "it")


def test_rows_are_named_by_index_or_by_their_text():
    from tests.tiny_models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    encoded = dict(tokenizer(["parse a date", "sort the numbers"], padding=True, return_tensors="pt"))
    assert describe_rows({"query": encoded}, tokenizer) == "'parse a date', 'sort the numbers'"
    assert describe_rows(encoded, tokenizer) == describe_rows({"query": encoded}, tokenizer)
    assert describe_rows({"query": encoded, "ids": {"row": torch.tensor([7, 3])}}, tokenizer) == "dataset indices 7, 3"
    assert describe_rows({"x": torch.ones(2)}, None) == "not known"
    assert "and 4 more" in describe_rows({"ids": {"row": torch.arange(12)}})
    assert json.dumps(describe_rows(encoded, tokenizer))
