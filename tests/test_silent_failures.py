"""What goes wrong in silence with the stock classes, each beside what ours do about it.

Every test has a stock half, which shows the failure: when it does not any more, upstream has mended it. What happens
to checkpoints, and to a run from outside, stands beside the stock classes in parity/stock_events.py.
"""

import json
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
    TrainerCallback,
    TrainingArguments,
)

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import fsdp
from hf_dist_ext.strategies.collectives import sharded_on_cpu
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run, launch
from tests.tiny_models import CHECKPOINTING
from tests.tiny_vision_language import BlankPictures, Calls, collate, row, tiny_llava
from tests.training.test_trainer import Tiny
from tests.training.test_trainer import collate as pairs

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


def test_several_gpus_in_one_process_are_refused_where_trainer_wraps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    stock = Trainer(llama(), TrainingArguments(**options))
    assert isinstance(stock._wrap_model(stock.model), nn.DataParallel)
    with pytest.raises(UsageError, match="DataParallel"):
        DistTrainer(llama(), DistTrainingArguments(**options), loss=InfoNCELoss())


def tower_passes(trainer_class: type, arguments: type, folder: Path, **options) -> tuple[int, int]:
    """Forwards and backwards of a frozen tower's layer in one step with activation checkpointing."""
    model = tiny_llava()
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    layer = "model.vision_tower.encoder.layers.0"
    calls = Calls(model, [layer, f"{layer}.mlp"])
    args = arguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", remove_unused_columns=False, **options, **{CHECKPOINTING: True},
    )  # fmt: skip
    rows = [row(True, index) for index in range(2)]
    trainer_class(model, args, train_dataset=rows, data_collator=collate, processing_class=BlankPictures()).train()
    return calls.forward[f"{layer}.mlp"], calls.backward[layer]


def test_a_frozen_tower_is_not_back_propagated_where_checkpointing_makes_trainer_do_so(tmp_path):
    forwards, backwards = tower_passes(*STOCK, tmp_path)
    assert forwards == 2 and backwards > 0
    assert tower_passes(*OURS, tmp_path, trainable_modules=["projector"]) == (1, 0)


def test_fsdps_own_checkpointing_is_refused_where_names_decide_what_trains():
    with pytest.raises(UsageError, match='"gradient_checkpointing": true'):
        fsdp.check_names(SimpleNamespace(activation_checkpointing=True))
    fsdp.check_names(SimpleNamespace(activation_checkpointing=False))


# ---- the gradient of a temperature ----

SCALE = 1024.0  # of a gradient scaler


class Gradient(TrainerCallback):
    """The gradient of a parameter at the end of the first step, without the scaler's factor."""

    def __init__(self, parameter: nn.Parameter, trainer: Trainer, is_scaled: bool):
        self.parameter, self.trainer, self.found = parameter, trainer, 0.0
        if is_scaled:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.scale = SCALE if is_scaled else 1.0

    def on_pre_optimizer_step(self, args, state, control, **others):
        self.found = self.parameter.grad.item() / self.scale


TEMPERATURE_RUN = {
    "max_steps": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "report_to": [],
    "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "max_grad_norm": 0.0, "learning_rate": 0.0,
}  # fmt: skip


def others_gradient(loss_class: str, folder: Path, is_scaled: bool = False) -> float:
    """Of sentence-transformers' scale, the inverse of a temperature, over 2 x 8 pairs per process."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.modules import BoW

    words = [f"w{number}" for number in range(40)]
    torch.manual_seed(0)
    from sentence_transformers.base.modules import Dense

    model = SentenceTransformer(modules=[BoW(vocab=words), Dense(40, 8)], device="cpu")
    scale = nn.Parameter(torch.tensor(20.0))
    options = {"mini_batch_size": 3} if "Cached" in loss_class else {}
    loss = getattr(losses, loss_class)(model, scale=scale, **options)
    draw = torch.Generator().manual_seed(1)
    text = lambda: " ".join(words[i] for i in torch.randint(40, (5,), generator=draw))  # noqa: E731
    columns = {"anchor": [text() for _ in range(32)], "positive": [text() for _ in range(32)]}
    args = Arguments(output_dir=str(folder), **TEMPERATURE_RUN)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=Dataset.from_dict(columns), loss=loss)
    trainer.add_callback(gradient := Gradient(scale, trainer, is_scaled))
    trainer.train()
    return gradient.found


def our_gradient(chunk: int | None, folder: Path, is_scaled: bool = False) -> float:
    torch.manual_seed(0)
    model, loss = Tiny(), InfoNCELoss(temperature=0.05, learnable_temperature=True)
    args = DistTrainingArguments(output_dir=str(folder), gradient_cache_chunk_size=chunk, **TEMPERATURE_RUN)
    trainer = DistTrainer(model, args, train_dataset=list(range(32)), data_collator=pairs, loss=loss)
    trainer.add_callback(gradient := Gradient(next(loss.parameters()), trainer, is_scaled))
    trainer.train()
    return gradient.found


@pytest.mark.parametrize("is_scaled", [False, True], ids=["accumulation", "scaler"])
def test_a_temperature_gets_its_gradient_through_a_cached_loss(tmp_path, is_scaled):
    true = others_gradient("MultipleNegativesRankingLoss", tmp_path, is_scaled)
    cached = others_gradient("CachedMultipleNegativesRankingLoss", tmp_path, is_scaled)
    assert abs(true) > 1e-4 and abs(cached / true - 1) > 0.5
    true, cached = our_gradient(None, tmp_path), our_gradient(3, tmp_path, is_scaled)
    assert abs(true) > 1e-4 and cached == pytest.approx(true, rel=1e-4)


# ---- two processes ----


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    launch("multi_gpu_ddp", 2, partial(two_processes, folder))
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


def test_the_gradient_of_a_temperature_is_of_all_processes(on_two):
    first, second = (found["temperature"] for found in on_two)
    assert first["stock"] != pytest.approx(second["stock"], rel=1e-3)
    assert first["cached"] == second["cached"] == pytest.approx(first["plain"], rel=1e-4)
    assert abs(first["plain"]) > 1e-4


def two_processes(folder: Path) -> None:
    """What each of the two runs and writes down."""

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
    logger = logging.getLogger("hf_dist_ext.training.own_loss")
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
    found["temperature"] = {
        "stock": others_gradient("CachedMultipleNegativesRankingLoss", folder),
        "plain": our_gradient(None, folder),
        "cached": our_gradient(3, folder),
    }
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    ours.accelerator.end_training()


# ---- FSDP2 with sharded checkpoints, two processes ----


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 2}, attention_dropout=0.5))


def sharded_run(say, folder: Path, classes: tuple, checkpointing: bool) -> str:
    """One process: the weights after one plain step of gradient descent, and what `save_model` wrote."""
    if checkpointing:
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
    trainer_class, arguments = classes

    class OnCPU(trainer_class):
        def create_accelerator_and_postprocess(self):
            with sharded_on_cpu():  # without it the stock class trains DDP on a CPU
                super().create_accelerator_and_postprocess()

    model = with_dropout()
    args = arguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = OnCPU(model, args, train_dataset=rows(True))
    trainer.train()
    trainer.save_model()
    weights = [parameter.full_tensor().detach().flatten() for parameter in trainer.model.parameters()]
    if trainer.is_world_process_zero():
        torch.save(torch.cat(weights), folder.with_suffix(".pt"))
    return "done"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict:
    folder, found = tmp_path_factory.mktemp("sharded"), {"models": {}, "differences": {}}
    for name, classes in (("stock", STOCK), ("ours", OURS)):
        ends = []
        for checkpointing in (False, True):
            path = folder / f"{name}-{checkpointing}"
            target = partial(sharded_run, folder=path, classes=classes, checkpointing=checkpointing)
            Run("fsdp-sharded", path, target).result()
            ends.append(torch.load(path.with_suffix(".pt")))
            found["models"][path.name] = sorted(file.name for file in path.glob("*.safetensors"))
        found["differences"][name] = (ends[0] - ends[1]).abs().max().item()
        found["moved"] = (
            (ends[0] - torch.cat([p.detach().flatten() for p in with_dropout().parameters()])).abs().max().item()
        )
    return found


def test_fsdps_own_checkpointing_recomputes_with_the_same_dropout(sharded):
    assert sharded["differences"]["stock"] > 1e-4
    assert sharded["differences"]["ours"] < 1e-7 < 1e-4 < sharded["moved"]


def test_save_model_of_a_sharded_run_writes_a_model(sharded):
    assert sharded["models"] == {
        "stock-False": [], "stock-True": [], "ours-False": ["model.safetensors"], "ours-True": ["model.safetensors"]
    }  # fmt: skip
