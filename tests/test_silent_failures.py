"""What goes wrong in silence with the stock classes, each beside what ours do about it.

Others stand where their parts are tested: a frozen tower that is back-propagated in test_frozen_mode.py, unfreezing in
a run of parts in test_frozen_training.py, dropout under our own checkpointing in parity/test_exactness.py, models that
FSDP's `save_model` does not write in distributed/test_resume.py, torn checkpoints in distributed/test_kills.py,
NaN in test_guard.py, the gradient of a temperature in parity/test_exactness.py.
"""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_dist_ext import sharding
from hf_dist_ext.errors import UsageError
from hf_dist_ext.losses import InfoNCELoss
from hf_dist_ext.trainer import DistTrainer
from hf_dist_ext.training_args import DistTrainingArguments
from tests.launching import launch

STOCK, OURS = (Trainer, TrainingArguments), (DistTrainer, DistTrainingArguments)
SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=40)
WORDS = "times the mean"


def bert() -> nn.Module:
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SMALL, **rates, num_labels=2))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def rows(is_causal: bool) -> list[dict]:
    torch.manual_seed(1)
    ids = [torch.randint(3, 40, (8,)) for _ in range(16)]
    return [{"input_ids": row, "labels": row if is_causal else torch.tensor(i % 2)} for i, row in enumerate(ids)]


def first_loss(classes: tuple, model: nn.Module, folder: Path, **options) -> float:
    trainer_class, arguments = classes
    args = arguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=0.0, **options,
    )  # fmt: skip
    trainer = trainer_class(model, args, train_dataset=rows(isinstance(model, LlamaForCausalLM)))
    trainer.train()
    return trainer.state.log_history[0]["loss"]


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("hf_dist_ext.loss_scale.logger.warning", found.append)
    return found


# ---- a loss times accumulation and processes ----


def test_a_loss_that_trainer_multiplies_is_said_once_and_can_be_switched_off(tmp_path, warnings):
    true_loss = first_loss(STOCK, bert(), tmp_path)
    twice = first_loss(STOCK, bert(), tmp_path, gradient_accumulation_steps=2)
    assert twice == pytest.approx(2 * true_loss, rel=0.1) and true_loss > 0.1
    assert first_loss(OURS, bert(), tmp_path, gradient_accumulation_steps=2) == twice  # a drop-in
    assert len(warnings) == 1 and "BertForSequenceClassification takes num_items_in_batch" in warnings[0]
    assert f"2 {WORDS}" in warnings[0] and "accepts_loss_kwargs = False" in warnings[0]
    model = bert()
    model.accepts_loss_kwargs = False
    assert first_loss(OURS, model, tmp_path, gradient_accumulation_steps=2) == pytest.approx(true_loss, rel=0.1)
    assert len(warnings) == 1


def test_a_model_that_divides_by_its_items_is_left_alone(tmp_path, warnings):
    stock = first_loss(STOCK, llama(), tmp_path, gradient_accumulation_steps=2)
    assert first_loss(OURS, llama(), tmp_path, gradient_accumulation_steps=2) == stock
    assert not warnings


# ---- one process ----


def test_mixed_precision_of_the_yaml_is_in_the_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # what the launcher makes of the YAML's line
    found = {}
    for trainer_class, arguments in (STOCK, OURS):
        AcceleratorState._reset_state(reset_partial_state=True)
        args = arguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
        trainer = trainer_class(llama(), args)
        found[trainer_class] = (args.bf16, trainer.accelerator.mixed_precision)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert found == {Trainer: (False, "bf16"), DistTrainer: (True, "bf16")}


def test_several_gpus_in_one_process_are_refused_where_trainer_wraps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    stock = Trainer(llama(), TrainingArguments(**options))
    assert isinstance(stock._wrap_model(stock.model), nn.DataParallel)
    with pytest.raises(UsageError, match="DataParallel"):
        DistTrainer(llama(), DistTrainingArguments(**options), loss=InfoNCELoss())


@pytest.mark.parametrize("checkpoints, dropout, is_said", [(True, 0.1, True), (True, 0.0, False), (False, 0.1, False)])
def test_fsdps_checkpointing_with_dropout_is_said(monkeypatch, checkpoints, dropout, is_said):
    found: list[str] = []
    monkeypatch.setattr(sharding.logger, "warning", found.append)
    plugin = SimpleNamespace(activation_checkpointing=checkpoints)
    sharding.warn_of_other_masks(plugin, nn.Sequential(nn.Linear(2, 2), nn.Dropout(dropout)))
    assert len(found) == is_said and all('"activation_checkpointing": true' in text for text in found)


# ---- two processes ----


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    launch("multi_gpu_ddp", 2, Path(__file__), str(folder))
    return [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(2)]


def test_ranks_do_not_train_alone_without_a_gpu(on_two):
    assert [found["world_size"] for found in on_two] == [{"stock": 1, "ours": 2}] * 2


def test_a_loss_times_the_processes_is_said_by_the_first(on_two):
    for found in on_two:
        assert found["true loss"] > 0.1
        assert found["stock loss"] == found["our loss"] == pytest.approx(2 * found["true loss"], rel=0.02)
    assert [len(found["warnings"]) for found in on_two] == [1, 0]
    assert f"2 {WORDS} (2 process(es) x 1" in on_two[0]["warnings"][0]


def test_weights_unfrozen_under_ddp_are_refused_where_they_drift_apart(on_two):
    first, second = (found["unfrozen"] for found in on_two)
    assert first["stock"] != second["stock"]
    assert all("model.layers.0" in found["ours"] and "step 2" in found["ours"] for found in (first, second))


def two_processes(folder: Path) -> None:
    """What each of the two runs and writes down."""
    from transformers import TrainerCallback

    class Unfreeze(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **others):
            getattr(model, "module", model).model.layers.requires_grad_(True)

    stock_args = TrainingArguments(output_dir=str(folder), report_to=[])
    found: dict = {"world_size": {"stock": stock_args.world_size}}
    AcceleratorState._reset_state(reset_partial_state=True)
    args = DistTrainingArguments(output_dir=str(folder), report_to=[])
    rank = args.process_index
    found["world_size"]["ours"] = args.world_size

    warnings: list[str] = []
    logger = logging.getLogger("hf_dist_ext.loss_scale")
    logger.warning = lambda text, *others: warnings.append(text)
    found["stock loss"] = first_loss(STOCK, bert(), folder)
    found["our loss"] = first_loss(OURS, bert(), folder)
    model = bert()
    model.accepts_loss_kwargs = False
    found["true loss"], found["warnings"] = first_loss(OURS, model, folder), warnings

    options = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.1, "logging_strategy": "no",
    }  # fmt: skip
    model = llama()
    model.model.layers.requires_grad_(False)
    parameters = [{"params": [p for p in model.parameters()]}]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    stock = Trainer(
        model, TrainingArguments(**options), train_dataset=rows(True), callbacks=[Unfreeze()],
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    stock.train()
    weight = model.model.layers[0].mlp.down_proj.weight
    found["unfrozen"] = {"stock": weight.double().sum().item()}
    ours = DistTrainer(
        llama(), DistTrainingArguments(frozen_modules=["layers"], **options), train_dataset=rows(True),
        callbacks=[Unfreeze()],
    )  # fmt: skip
    try:
        ours.train()
    except UsageError as error:
        found["unfrozen"]["ours"] = str(error)
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    ours.accelerator.end_training()


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))
