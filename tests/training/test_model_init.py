"""`model_init` makes a model for every training: what was decided and trained of one says nothing of the next."""

import math

import optuna
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import BertConfig, TrainingArguments

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.training import learning_rate
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import embedding_model
from tests.training.test_trainer import Tiny, collate


def trainer(folder, make, loss=None, **more) -> DistTrainer:
    arguments = dict(gradient_cache_chunk_size=3, per_device_train_batch_size=8, max_steps=3, logging_steps=1) | more
    arguments = dict(save_strategy="no", learning_rate=0.05) | arguments
    args = DistTrainingArguments(output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **arguments)
    return DistTrainer(
        args=args, model_init=make, data_collator=collate, train_dataset=list(range(32)),
        eval_dataset=list(range(20)), loss=loss or InfoNCELoss(learnable_temperature=True),
    )  # fmt: skip


def one_after_another(*models):
    """A `model_init` that gives these; the first one again and again at the end, where there is but one."""
    made = iter(models)
    return lambda: next(made)


def tiny_bert(attention: str = "sdpa") -> SentenceTransformer:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    return embedding_model(config, attn_implementation=attention)


def test_a_later_model_with_a_batch_norm_is_refused(tmp_path):
    later = Tiny(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    made = trainer(tmp_path, one_after_another(Tiny(), Tiny(), later))
    made.train()
    with pytest.raises(UsageError, match="'middle.1'"):
        made.train()


def test_whether_rows_are_packed_is_decided_for_every_model(tmp_path):
    made = trainer(tmp_path, one_after_another(*map(tiny_bert, ("sdpa", "sdpa", "eager", "sdpa"))))
    found = []
    for _ in range(3):
        made.train()
        found.append(made.step.sizes.may_pack)
    assert found == [True, False, True]


def test_a_training_of_a_new_model_is_that_of_a_new_trainer(tmp_path):
    """Down to the loss's own parameter and its optimizer state."""

    def losses(of: DistTrainer) -> list[float]:
        of.train()
        return [line["loss"] for line in of.state.log_history if "loss" in line]

    made = trainer(tmp_path, lambda: Tiny())
    first, temperature = losses(made), made.loss.temperature
    assert temperature != pytest.approx(0.05) and first[0] != first[-1]
    assert losses(made) == first and made.loss.temperature == temperature
    made.loss.log_inverse_temperature.grad.fill_(1e3)  # what an interrupted training has left
    assert losses(made) == first


def test_a_resume_of_weights_alone_reaches_the_model_that_trains(tmp_path):
    trainer(tmp_path / "first", lambda: Tiny(), save_strategy="steps", save_steps=3).train()
    checkpoint = tmp_path / "first" / "checkpoint-3"
    resumed = trainer(tmp_path / "second", lambda: Tiny(), learning_rate=0.0, resume_weights_only=True)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for module, file in ((resumed.model, "model.safetensors"), (resumed.loss, "loss.safetensors")):
        torch.testing.assert_close(module.state_dict(), load_file(checkpoint / file), rtol=0, atol=0)


def test_the_digests_of_frozen_weights_are_those_of_the_model_that_trains(tmp_path):
    def make():
        torch.manual_seed(next(seeds))
        return Tiny()

    seeds, found = iter(range(9)), []
    made = trainer(tmp_path, make, trainable_modules=["middle"])
    for _ in range(2):
        made.train()
        found.append(dict(made.files.frozen_digests))
    assert found[0] and found[0].keys() == found[1].keys() and found[0] != found[1]


def test_optuna_searches_through_a_loss_with_a_learnable_temperature(tmp_path):
    """Each trial is what a run of its own with its rate is, and its folder has its checkpoints."""
    made = trainer(tmp_path, lambda: Tiny(), eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3)
    rates = [0.05, 0.2, 0.001]
    sampler = optuna.samplers.GridSampler({"learning_rate": rates}, seed=0)
    tried = {}

    def objective(metrics):
        tried[made.args.learning_rate] = metrics["eval_loss"], made.loss.temperature
        return metrics["eval_loss"]

    best = made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        compute_objective=objective, n_trials=3, direction="minimize", backend="optuna", sampler=sampler,
    )  # fmt: skip
    assert tried.keys() == set(rates) and best.objective == min(loss for loss, _ in tried.values())
    for rate, (loss, temperature) in tried.items():
        alone = trainer(tmp_path / "alone", lambda: Tiny(), learning_rate=rate)
        alone.train()
        assert (alone.evaluate()["eval_loss"], alone.loss.temperature) == (loss, temperature)
    assert len(list(tmp_path.glob("run-*/checkpoint-3/loss.safetensors"))) == 3


def test_a_searched_rate_is_scaled_as_a_given_one(tmp_path):
    made = trainer(tmp_path, lambda: Tiny(), lr_scale_rule="linear", lr_base_batch_size=4, logging_steps=1)
    used = []
    made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [0.01])},
        compute_objective=lambda metrics: used.append(made.args.learning_rate) or metrics["eval_loss"],
        n_trials=2, direction="minimize", backend="optuna",
    )  # fmt: skip
    assert used == [0.02, 0.02]


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, labels):
        predicted = self.linear(x)[:, 0]
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


@pytest.mark.parametrize("kind", [TrainingArguments, DistTrainingArguments])
def test_optuna_searches_without_a_field_of_this_package(tmp_path, kind):
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(16)]
    args = kind(
        output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, max_steps=2, eval_strategy="steps",
        eval_steps=2, save_strategy="no",
    )  # fmt: skip
    made = DistTrainer(args=args, model_init=Regression, train_dataset=rows, eval_dataset=rows)
    best = made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
        n_trials=2, direction="minimize", backend="optuna",
    )  # fmt: skip
    assert 1e-3 <= best.hyperparameters["learning_rate"] <= 1e-1


def test_early_stopping_of_one_training_does_not_end_the_next(tmp_path):
    steps = dict(eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", max_steps=9)
    made = trainer(tmp_path, lambda: Tiny(), learning_rate=0.0, early_stopping_patience=2, **steps)
    found = []
    for _ in range(2):
        made.train()
        found.append(made.state.global_step)
    assert found == [3, 3], "the first is the best, and two are no better"


def test_a_search_that_sets_one_rate_leaves_the_others_scaled_once(tmp_path):
    args = DistTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=8, lr_scale_rule="linear",
        lr_base_batch_size=4, learning_rate=0.1, learning_rates={"middle": 1e-3},
    )  # fmt: skip
    for given, scaled in ((0.1, 0.2), (None, 0.2), (0.3, 0.6), (0.5, 1.0)):  # None: as it is
        args.learning_rate = given or args.learning_rate
        learning_rate.scale(args, 1)
        assert args.learning_rate == pytest.approx(scaled) and args.learning_rates == {"middle": pytest.approx(2e-3)}


def test_updates_that_one_training_skipped_do_not_count_in_the_next(tmp_path):
    calls = iter([math.nan] * 4 + [1.0] * 9)

    def loss(own, everyone=None, row_offset=0, ids=None):
        first, second = own.values()
        return (first * second).sum() * next(calls)

    made = trainer(tmp_path, lambda: Tiny(), loss=loss, max_nonfinite_steps=3, learning_rate=1e-3, max_steps=4)
    with pytest.raises(RunError, match="3 steps in a row"):
        made.train()
    made.train()
    assert [line.get("nonfinite_steps") for line in made.state.log_history if "learning_rate" in line] == [1] * 4


def test_a_search_may_set_the_warmup_ratio(tmp_path):
    made, used = trainer(tmp_path, lambda: Tiny()), []
    made.hyperparameter_search(
        hp_space=lambda trial: {"warmup_ratio": (0.25, 0.5)[trial.number]},
        compute_objective=lambda metrics: used.append(made.args.get_warmup_steps(4)) or metrics["eval_loss"],
        n_trials=2, direction="minimize", backend="optuna",
    )  # fmt: skip
    assert used == [1, 2]
