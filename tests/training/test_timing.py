"""The parts of a step add up to it, and the profiler writes its steps."""

import itertools
import json
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training import meter
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.meter import PARTS, StepClock, memory_used
from hf_dist_ext.training.trainer import DistTrainer
from tests.parity.exactness_worker import BERT, Case, collate
from tests.tiny_models import embedding_model
from tests.training.test_nonfinite import rows


class Clock(TrainerCallback):
    """Stands for the module `time`; only `pass_` moves it. `ends`: what it shows at the end of each step."""

    def __init__(self) -> None:
        self.seconds, self.ends = 0.0, []

    def perf_counter(self) -> float:
        return self.seconds

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds

    def on_step_end(self, args, state, control, **others):
        self.ends.append(self.seconds)


def trained(folder, **arguments) -> tuple[DistTrainer, Clock]:
    """Loading a batch takes 16 s, a forward 4, the loss 2, a backward 1, the optimizer 8."""
    clock = Clock()

    def load(rows):
        clock.pass_(16.0)
        return collate(Case("timing"), rows, 0)

    torch.manual_seed(0)
    model, loss = embedding_model(BERT), InfoNCELoss()
    model.register_forward_hook(lambda *_: clock.pass_(4.0))
    loss.register_forward_hook(lambda *_: clock.pass_(2.0))
    next(model.parameters()).register_hook(lambda gradient: clock.pass_(1.0))
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=6, max_steps=6, logging_steps=2, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = DistTrainer(
        model=model, args=args, data_collator=load, train_dataset=list(range(60)), loss=loss, callbacks=[clock]
    )
    trainer.create_optimizer().register_step_pre_hook(lambda *_: clock.pass_(8.0))
    with mock.patch.object(meter, "time", clock):
        trainer.train()
    return trainer, clock


def test_the_parts_of_a_step_add_up_to_it(tmp_path):
    trainer, clock = trained(tmp_path, gradient_cache_chunk_size=2)
    line = [line for line in trainer.state.log_history if "seconds_data" in line][-1]  # of the last two steps
    seconds = {name: line[f"seconds_{name}"] for name in PARTS}
    assert sum(seconds.values()) == (clock.ends[-1] - clock.ends[-3]) / 2
    # Six chunks, three of each column: a forward each without a graph, then a forward and a backward each.
    assert seconds == {
        "data": 16.0, "encode": 6 * 4.0, "loss": 2.0, "replay": 5 * 5.0, "last_backward": 5.0, "optimizer": 8.0
    }  # fmt: skip


class TwoLines(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.line = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.line(self.frozen(x)) - labels).pow(2).mean()}


@pytest.mark.parametrize("named", [["line"], None])
def test_a_step_with_a_models_own_loss_is_loading_computing_and_the_update(tmp_path, named):
    clock, model = Clock(), TwoLines()

    def load(rows):
        clock.pass_(16.0)
        return torch.utils.data.default_collate(rows)

    model.line.register_forward_hook(lambda *_: clock.pass_(4.0))
    args = DistTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=6, gradient_accumulation_steps=2, max_steps=4,
        logging_steps=2, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, trainable_modules=named,
    )  # fmt: skip
    trainer = DistTrainer(model, args, data_collator=load, train_dataset=rows({}, 48), callbacks=[clock])
    trainer.create_optimizer().register_step_pre_hook(lambda *_: clock.pass_(8.0))
    with mock.patch.object(meter, "time", clock):
        trainer.train()
    lines = [{name: one[name] for name in one if name.startswith("seconds_")} for one in trainer.state.log_history]
    lines = [line for line in lines if line]
    assert len(lines) == (2 if named else 0), "a run of which nothing is ours logs what Trainer does"
    assert sum(2 * line.pop("seconds_data") for line in lines) == (8 * 16.0 if named else 0)  # one batch ahead
    assert all(line == {"seconds_compute": 2 * 4.0, "seconds_optimizer": 8.0} for line in lines)
    assert not trainer.clock._spans


def test_a_run_that_logs_nothing_keeps_no_times(tmp_path):
    trainer, _ = trained(tmp_path, gradient_cache_chunk_size=2, logging_strategy="no")
    assert not trainer.clock._spans
    assert {f"seconds_{name}" for name in PARTS} == trainer.clock.read().keys()


def test_on_an_accelerator_only_what_the_device_has_not_reached_is_kept():
    class Event:
        def __init__(self, number: int):
            self.number = number

        def query(self) -> bool:
            return self.number <= reached

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later) -> float:
            return 1000.0 * (later.number - self.number)

    clock, numbers = StepClock(torch.device("cuda")), itertools.count()
    clock._now = lambda: Event(next(numbers))
    for step in range(50):
        reached = 2 * step - 3  # the device is two parts behind
        with clock.part("encode"):
            pass
        clock.on_step_end(None, None, None)
        assert len(clock._spans) <= 3
    assert clock.read()["seconds_encode"] == 1.0 and not clock._spans  # 50 parts of a second in 50 steps


def test_a_device_that_counts_no_peak_has_none():
    assert memory_used(torch.device("mps")) == memory_used(torch.device("cpu")) == {}


def test_without_a_cache_nothing_is_encoded_without_a_graph(tmp_path):
    trainer, _ = trained(tmp_path)
    line = [line for line in trainer.state.log_history if "seconds_data" in line][-1]
    assert line["seconds_encode"] == 0.0 < line["seconds_replay"]


@pytest.mark.parametrize("num_steps", [2, 100])
def test_the_profiler_writes_the_steps_that_were_asked_for(tmp_path, num_steps):
    trained(tmp_path, profile_steps=num_steps, gradient_cache_chunk_size=3)
    events = json.loads((tmp_path / "profile_rank0.json").read_text())["traceEvents"]
    steps = sum(event.get("name", "").startswith("Optimizer.step") for event in events)
    assert steps == min(num_steps, 4)
