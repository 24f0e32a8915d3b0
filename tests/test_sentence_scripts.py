"""Scripts written for sentence-transformers train the same with DistTrainer in the place of their trainer.

A run's losses of three steps, the gradients of the first and the figures of its evaluations are compared, in float64:
with the class's name changed and nothing else, with our arguments and the gradient cache, with rows end to end, and on
two processes.
"""

import os
from functools import partial
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed import forked
from tests.retrieval_data import texts
from tests.sentence_scripts import ROWS, SCRIPTS, Script, store

OPTIONS = {
    "output_dir": "out", "max_steps": 3, "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS,
    "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "use_cpu": True, "seed": 5,
}  # fmt: skip
ON_TWO = ["matryoshka, cached", "two datasets", "router", "adapter", "clip", "token vectors"]
READ = texts(5, seed=9)


class FirstGradients(TrainerCallback):
    def __init__(self):
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        for name, parameter in model.named_parameters() if not self.found else ():
            if parameter.grad is not None and parameter.grad.any():  # DDP has zeros where nothing was read
                self.found[name.removeprefix("module.")] = parameter.grad.clone()


def trained(script: Script, trainer: type, arguments: type, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The trainer, and what its run has shown."""
    torch.manual_seed(0)
    made = script.run(trainer, partial(arguments, **OPTIONS | options))
    for part in (made.model, *(made.loss.values() if isinstance(made.loss, dict) else [made.loss])):
        part.double()
    losses, step, first = [], made.training_step, FirstGradients()
    made.training_step = lambda *inputs: losses.append(step(*inputs)) or losses[-1]
    made.add_callback(first)
    made.train()
    logs = [log for log in made.state.log_history if any(name.startswith("eval") for name in log)]
    times = ("runtime", "per_second")
    figures = [{name: value for name, value in log.items() if not name.endswith(times)} for log in logs]
    return made, {"losses": torch.stack(losses), "gradients": first.found, "figures": figures}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(found["losses"], expected["losses"])
    close(found["gradients"], expected["gradients"])
    for own, other in zip(found["figures"], expected["figures"], strict=True):
        assert {name: own[name] for name in other} == pytest.approx(other)  # beside them are figures of ours


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    store(folder)
    return folder


@pytest.fixture
def script(request, folder, monkeypatch) -> Script:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # their scores of token vectors are in float32
    return SCRIPTS[request.param]


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_losses_gradients_and_figures_are_those_of_their_trainer(script):
    _, expected = trained(script, script.trainer, script.arguments)
    assert len(set(expected["losses"].tolist())) > 1 and expected["gradients"]
    assert_same(trained(script, DistTrainer, script.arguments)[1], expected)
    for is_packed in (False, True) if script.packs else (False,):
        chunks = {"gradient_cache_chunk_size": 3, "gradient_cache_packing": is_packed}
        assert_same(trained(script, DistTrainer, DistTrainingArguments, **chunks)[1], expected)


@pytest.mark.parametrize(
    ("script", "mode"), [*((name, "ddp") for name in ON_TWO), ("adapter", "zero3")], indirect=["script"]
)
def test_two_processes_train_and_save_what_one_does(script, mode, tmp_path):
    theirs, expected = trained(script, script.trainer, script.arguments)

    def run(say) -> str:
        torch.set_num_threads(1)
        half = {"per_device_train_batch_size": ROWS // 2, "gradient_cache_chunk_size": 3}
        ours, found = trained(script, DistTrainer, DistTrainingArguments, **half)
        ours.save_model(str(tmp_path / "saved"))
        torch.save(found, tmp_path / f"found.{os.environ['RANK']}")
        return "saved"

    if mode == "zero3":  # which keeps gradients to itself, and updates in float32
        expected["gradients"] = {}
    forked.Run(mode, tmp_path / "log", run).result()
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"found.{rank}"), expected, 1e-7 if mode == "zero3" else 1e-10)
    saved = type(theirs.model)(str(tmp_path / "saved"))
    torch.testing.assert_close(saved.encode(READ), theirs.model.encode(READ), rtol=1e-6, atol=1e-6)
