"""The parts of a step add up to it, and the profiler writes its steps."""

import itertools
import json
import time

import pytest
import torch
from transformers import TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.meter import memory_used
from hf_dist_ext.training.timing import PARTS, StepClock
from hf_dist_ext.training.trainer import DistTrainer
from tests.parity.exactness_worker import BERT, Case, collate

SLOW_LOADING = 0.05


class WallTime(TrainerCallback):
    def __init__(self) -> None:
        self.ends = []

    def on_step_end(self, args, state, control, **others):
        self.ends.append(time.perf_counter())


def trained(folder, **arguments) -> tuple[DistTrainer, WallTime]:
    def load(rows):
        time.sleep(SLOW_LOADING)
        return collate(Case("timing"), rows, 0)

    torch.manual_seed(0)
    wall = WallTime()
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=6, max_steps=6, logging_steps=2, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = DistTrainer(
        EmbeddingModel.from_config(BERT), args, data_collator=load, train_dataset=list(range(60)),
        loss=InfoNCELoss(), callbacks=[wall],
    )  # fmt: skip
    trainer.train()
    return trainer, wall


def test_the_parts_of_a_step_add_up_to_it(tmp_path):
    trainer, wall = trained(tmp_path, gradient_cache_chunk_size=2)
    line = [line for line in trainer.state.log_history if "seconds_data" in line][-1]  # of the last two steps
    seconds = {name: line[f"seconds_{name}"] for name in PARTS}
    assert all(value > 0 for value in seconds.values()), seconds
    step = (wall.ends[-1] - wall.ends[-3]) / 2
    assert 0.5 * step < sum(seconds.values()) <= 1.02 * step
    assert seconds["data"] >= 0.9 * SLOW_LOADING


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
