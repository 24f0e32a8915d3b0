"""What goes wrong in silence with the stock classes, each beside what ours do about it.

Every test has a stock half, which shows the failure: when it does not any more, upstream has mended it.
"""

import logging
import os
from functools import partial
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

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import fsdp
from hf_dist_ext.strategies.collectives import sharded_on_cpu
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run, look

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
    monkeypatch.setattr("hf_dist_ext.training.own_loss.logger.warning", found.append)
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


def test_fsdps_own_checkpointing_is_refused_where_names_decide_what_trains():
    with pytest.raises(UsageError, match='"gradient_checkpointing": true'):
        fsdp.check_names(SimpleNamespace(activation_checkpointing=True))
    fsdp.check_names(SimpleNamespace(activation_checkpointing=False))


# ---- two processes ----


def of_two_processes(folder: Path) -> dict:
    warnings: list[str] = []
    logging.getLogger("hf_dist_ext.training.own_loss").warning = lambda text, *others: warnings.append(text)
    model = bert()
    model.accepts_loss_kwargs = False
    found = {"stock": first_loss(STOCK, bert(), folder), "ours": first_loss(OURS, bert(), folder)}
    found["true"] = first_loss(OURS, model, folder)
    of_ranks: list = [None, None]
    torch.distributed.all_gather_object(of_ranks, warnings)
    return found | {"warnings": of_ranks}


def test_a_loss_times_the_processes_is_said_by_the_first():
    found = look("multi_gpu_ddp", 2, of_two_processes)
    assert found["true"] > 0.1
    assert found["stock"] == found["ours"] == pytest.approx(2 * found["true"], rel=0.02)
    (said,), of_second = found["warnings"]
    assert not of_second and f"2 {WORDS} (2 process(es) x 1" in said


# ---- FSDP2 with sharded checkpoints, two processes ----


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 2}, attention_dropout=0.5))


def sharded_run(say, folder: Path, classes: tuple, checkpointing: bool) -> str:
    """One process: the weights after one plain step of gradient descent."""
    if checkpointing:
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
    trainer_class, arguments = classes

    class OnCPU(trainer_class):
        def create_accelerator_and_postprocess(self):
            with sharded_on_cpu():  # without it the stock class trains DDP on a CPU
                super().create_accelerator_and_postprocess()

    args = arguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = OnCPU(with_dropout(), args, train_dataset=rows(True))
    trainer.train()
    weights = [parameter.full_tensor().detach().flatten() for parameter in trainer.model.parameters()]
    if trainer.is_world_process_zero():
        torch.save(torch.cat(weights), folder.with_suffix(".pt"))
    return "done"


def test_fsdps_own_checkpointing_recomputes_with_the_same_dropout(tmp_path):
    start, differences = torch.cat([p.detach().flatten() for p in with_dropout().parameters()]), []
    for name, classes in (("stock", STOCK), ("ours", OURS)):
        ends = []
        for checkpointing in (False, True):
            path = tmp_path / f"{name}-{checkpointing}"
            target = partial(sharded_run, folder=path, classes=classes, checkpointing=checkpointing)
            Run("fsdp-sharded", path, target).result()
            ends.append(torch.load(path.with_suffix(".pt")))
        assert (ends[0] - start).abs().max() > 1e-4
        differences.append((ends[0] - ends[1]).abs().max())
    assert differences[1] < 1e-7 < 1e-4 < differences[0]
