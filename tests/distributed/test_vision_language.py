"""Vision-language models that embed rows of texts, pictures and both: gradient, loss and metrics of the plain step.

Processes are forked; a rank's rows may hold no picture at all. Everything is float64, also where a model's code casts
to float32 inside.
"""

from __future__ import annotations

import functools
import json
import signal
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoProcessor

from hf_dist_ext.data.sentence_collator import SentenceCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.metrics import retrieval_metrics
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import MODES, Run
from tests.parity.exactness_worker import GradientRecorder, naive_loss
from tests.tiny_models import embedding_model
from tests.tiny_processors import FAMILIES, WORDS, mixed_row, tiny_vision_language

COLUMNS = ("query", "positive", "negative")
BATCH = 4
LIMIT = 600  # seconds
# Before the forks.
MODELS = [transformers.AutoModel._model_mapping[transformers.CONFIG_MAPPING[name]] for name in FAMILIES]


def rows(processes: int, is_mixed: bool) -> list[dict]:
    """Of a global batch; not mixed: those of the last rank are words alone."""
    made = [mixed_row(number) for number in range(BATCH * processes)]
    for number, row in enumerate(made[BATCH * (processes - 1) :] if not is_mixed else ()):
        row |= {name: f"{WORDS.split()[number]} boat {place}" for place, name in enumerate(COLUMNS)}
    return made


def build(family: str) -> tuple[SentenceTransformer, SentenceCollator]:
    processor, config = tiny_vision_language(family)
    torch.manual_seed(0)
    with mock.patch.object(AutoProcessor, "from_pretrained", lambda *args, **options: processor):  # without videos
        model = embedding_model(config, tokenizer=processor, dtype=torch.float64, pooling="last")
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            nn.init.normal_(parameter.data, std=0.2)  # Gemma's projection would hide the pictures
    prompts = {"query": "find it", "positive": "", "negative": ""}
    options = {"tokenizer": model.tokenizer, "processor": processor, "is_of_run": True}
    return model, SentenceCollator(model.preprocess, COLUMNS, prompts, **options)


def whole_batch(model: SentenceTransformer, collate: SentenceCollator, batch: list[dict]) -> dict:
    collated = collate(batch)
    constants = collated.get("constants", {})
    return {name: embedder_of(model).call(model, collated[name], constants=constants.get(name)) for name in COLUMNS}


def errors(folder: Path, family: str, processes: int, is_mixed: bool) -> dict:
    model, collate = build(family)
    made = rows(processes, is_mixed)
    embeddings = whole_batch(model.train(), collate, made)
    wanted_loss = naive_loss(embeddings, 0.1, symmetric=False)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(wanted_loss, parameters, allow_unused=True)
    wanted = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}

    model, collate = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)  # CLIP's last norm, of which LLaVA has no use
    recorder, loss = GradientRecorder(), InfoNCELoss(temperature=0.1).double()
    recorder.loss = loss
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, max_steps=1,
        optim="sgd", learning_rate=0.0, max_grad_norm=0, save_strategy="no", report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", use_cpu=True, gradient_cache_chunk_size=2, remove_unused_columns=False,
    )  # fmt: skip
    trainer = DistTrainer(
        model=model, args=args,
        data_collator=collate, train_dataset=made, eval_dataset=made, loss=loss, callbacks=[recorder],
        processing_class=collate.processor,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()
    found = {name.removeprefix("module."): gradient for name, gradient in recorder.steps[-1].items()}
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    found, vision, wanted = (
        torch.cat([gradient.flatten() for gradient in some])
        for some in (
            [found[name] for name in wanted], [g for name, g in wanted.items() if "vis" in name], wanted.values()
        )
    )  # fmt: skip
    return {
        "norm": float(wanted.norm()),
        "norm of the image part": float(vision.norm()),
        "gradient": float((found - wanted).norm() / wanted.norm()),
        "loss": abs(evaluated["eval_loss"] - float(wanted_loss)),
        "metrics": [
            abs(evaluated[f"eval_{name}"] - value)
            for name, value in retrieval_metrics(*[embeddings[name].detach() for name in COLUMNS[:2]]).items()
        ],
    }


def of_families(say, folder: Path, mode: str, families: list[str]) -> str:
    signal.alarm(LIMIT)  # ends a process that waits for others
    torch.Tensor.float, torch.float32 = torch.Tensor.double, torch.float64
    processes = MODES[mode][0]
    return json.dumps({
        f"{family} {is_mixed}": errors(folder, family, processes, is_mixed)
        for family in families
        for is_mixed in ((True, False) if processes > 1 else (True,))
    })  # fmt: skip


@functools.cache
def found_of(mode: str, families: tuple[str, ...]) -> dict[str, dict]:
    with TemporaryDirectory() as name:
        folder = Path(name, "run")
        target = partial(of_families, folder=folder, mode=mode, families=list(families))
        return json.loads(Run(mode, folder, target).result())


SENTINELS = ("qwen3_vl",)
OTHERS = tuple(name for name in FAMILIES if name not in SENTINELS)


@pytest.mark.parametrize("mode, families", [
    ("ddp", SENTINELS),
    *(
        pytest.param(mode, families, marks=pytest.mark.slow)
        for mode, families in [
            ("single", (*SENTINELS, *OTHERS)), ("ddp", OTHERS), ("fsdp-sharded", (*SENTINELS, *OTHERS)),
        ]
    ),
])  # fmt: skip
def test_processes_train_with_the_gradient_of_the_whole_batch(mode, families):
    for name, found in found_of(mode, families).items():
        assert found["norm"] > 0.1 and found["norm of the image part"] > 1e-4, name
        assert found["gradient"] < 1e-10, name
        assert found["loss"] < 1e-6, name  # accelerate gathers it in float32
        assert found["metrics"] and max(found["metrics"]) < 1e-9, name
