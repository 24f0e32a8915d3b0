"""Which backward of an update reduces, and how often: one of a full-size chunk, once, with torch.compile too."""

from __future__ import annotations

import collections
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.parity import exactness_worker
from tests.parity.exactness_worker import Case
from tests.tiny_models import embedding_model

LIMIT = 600  # seconds


class Watch(TrainerCallback):
    """Of every update: gloo's all-reduces, and the tokens of every chunk, in the order of their backwards."""

    def __init__(self) -> None:
        self.updates: list[dict] = []

    def on_train_begin(self, args, state, control, model=None, **others):
        model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module, given, options, output) -> None:
        if torch.is_grad_enabled():
            features = given[0] if given else options  # of a SentenceTransformer, or of a module of one's own
            tokens = features["input_ids"].numel()
            embeddings = output["sentence_embedding"] if given else output
            embeddings.register_hook(lambda gradient: self.tokens.append(tokens))

    def on_step_begin(self, args, state, control, **others):
        self.tokens: list[int] = []
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiler.start()

    def on_pre_optimizer_step(self, args, state, control, **others):
        self.profiler.stop()
        counts = collections.Counter(event.name() for event in self.profiler.profiler.kineto_results.events())
        self.updates.append({"all_reduce": counts["gloo:all_reduce"], "tokens": self.tokens})


def measured(say, case: Case) -> str:
    signal.alarm(LIMIT)
    original, watch = exactness_worker.DistTrainer, Watch()

    def watched(*arguments, callbacks, **options):
        return original(*arguments, callbacks=[*callbacks, watch], **options)

    exactness_worker.DistTrainer = watched
    exactness_worker.BERT["num_hidden_layers"] = 1
    error = exactness_worker.measure(case)
    return json.dumps({"error": error, "updates": watch.updates})


def found(mode: str, folder: Path, case: Case) -> dict:
    return json.loads(Run(mode, folder, partial(measured, case=case)).result())


@pytest.mark.parametrize("model", ["bert", pytest.param("towers", marks=pytest.mark.slow)])
def test_a_compiled_model_reduces_once_per_update(model, tmp_path):
    arguments = {"torch_compile": True, "torch_compile_backend": "eager"}
    compiled = found("ddp", tmp_path / "run", Case("compiled", model=model, arguments=arguments))
    assert compiled["error"] < 1e-10
    # the gradients, and what the ranks say of their loss
    assert [update["all_reduce"] for update in compiled["updates"]] == [2]


@pytest.mark.parametrize("keep", [0, 2, 99])
@pytest.mark.parametrize("mode", ["ddp", "fsdp-sharded", pytest.param("hsdp-sharded", marks=pytest.mark.slow)])
def test_the_backward_that_reduces_is_of_a_full_size_chunk(mode, keep, tmp_path):
    arguments = {"gradient_cache_chunk_size": 5, "gradient_cache_keep_graph": keep}
    plain = found(mode, tmp_path / "run", Case("full size", columns=exactness_worker.THREE, arguments=arguments))
    assert plain["error"] < 1e-10
    (update,) = plain["updates"]
    *others, last = update["tokens"]
    assert len(others) == 5 and max(update["tokens"]) > 2 * min(others)
    assert last > 0.6 * max(others) and last > min(others)


def of_version_1(say, folder: Path) -> str:
    signal.alarm(LIMIT)
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
    args = DistTrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as with an accelerator
    try:
        DistTrainer(model=embedding_model(exactness_worker.BERT), args=args, loss=InfoNCELoss())
    except UsageError as error:
        return str(error)
    return "not refused"


def test_fsdp_version_1_is_refused_on_accelerators_too(tmp_path):
    said = Run("ddp", tmp_path / "run", partial(of_version_1, folder=tmp_path / "run")).result()
    assert "FSDP version 1" in said and "Set fsdp_version: 2" in said


def with_learned_temperature(say, folder: Path) -> str:
    """Clipped steps of sharded weights and of a temperature that is whole on every rank."""
    signal.alarm(LIMIT)
    case = Case("cuda")
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=exactness_worker.BATCH, gradient_cache_chunk_size=4,
        max_steps=2, learning_rate=0.01, max_grad_norm=0.01, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    trainer = DistTrainer(
        model=embedding_model(exactness_worker.BERT), args=args, loss=InfoNCELoss(learnable_temperature=True),
        data_collator=lambda rows: exactness_worker.collate(case, rows, rank()), train_dataset=list(range(24)),
    )  # fmt: skip
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    temperatures = [line["temperature"] for line in trainer.state.log_history if "temperature" in line]
    return json.dumps({"norms": norms, "temperatures": temperatures})


@pytest.mark.parametrize("mode", [
    "fsdp-sharded",
    pytest.param("fsdp-sharded+cuda", marks=[
        pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    ]),
])  # fmt: skip
def test_a_learned_temperature_is_clipped_and_steps_beside_sharded_weights(mode, tmp_path, monkeypatch):
    if not mode.endswith("cuda"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = json.loads(
        Run(mode, tmp_path / "run", partial(with_learned_temperature, folder=tmp_path / "run")).result()
    )
    assert len(found["norms"]) == 2 and all(norm > 0.01 for norm in found["norms"])
    assert found["temperatures"][0] != found["temperatures"][1]
