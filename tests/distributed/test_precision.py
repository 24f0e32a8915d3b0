"""bf16: what is rounded does not depend on the number of chunks, nor on whether weights are sharded."""

import functools
import json
import logging
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.distributed.fsdp import FSDPModule

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.parity.exactness_worker import BERT, Case, collate, measure, rounding
from tests.tiny_models import embedding_model


def rounding_errors(say, arguments: dict, chunks: list[int]) -> str:
    cases = [rounding(num_chunks) for num_chunks in chunks]
    for case in cases:
        case.arguments |= arguments
    return json.dumps([measure(case) for case in cases])


@functools.cache
def errors(mode: str, arguments: str = "{}", chunks: tuple[int, ...] = (1, 8, 64)) -> list[float]:
    """Of the gradients of bf16 against those of float32, by number of chunks."""
    target = partial(rounding_errors, arguments=json.loads(arguments), chunks=chunks)
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(Run(mode, Path(folder, "run"), target).result())


@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp-full"])
def test_the_error_of_bf16_does_not_grow_with_the_number_or_size_of_chunks(mode):
    found = errors(mode)
    assert 1e-4 < min(found) and max(found) < 1.5 * min(found) < 1.5 * 8e-3


@pytest.mark.parametrize("arguments", ["{}", '{"gradient_cache_fsdp": "memory"}', '{"cpu_offload": true}'])
def test_fsdp_rounds_what_ddp_rounds(arguments):
    """The same operations in the same precision; two processes add up in one order."""
    found = errors("fsdp-full", arguments, chunks=(8,)) if arguments != "{}" else errors("fsdp-full")[1:2]
    assert found == pytest.approx(errors("ddp")[1:2], rel=0.02)


def test_gradients_are_added_up_in_half_precision_when_asked_for():
    (many,) = errors("fsdp-full", '{"reduce_dtype": "bfloat16"}', (64,))
    assert many > 1.5 * errors("fsdp-full")[2]


# ---- what is gathered ----


def make_trainer(folder: Path, model: SentenceTransformer | None = None) -> DistTrainer:
    torch.manual_seed(0)
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=1, bf16=True,
        report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True, gradient_cache_chunk_size=2,
    )  # fmt: skip
    model = model or embedding_model(BERT, projection_dim=16)
    rows, loss = list(range(16)), InfoNCELoss(temperature=0.1)
    case = Case("precision")
    return DistTrainer(
        model=model, args=args, data_collator=lambda rows: collate(case, rows, 0), train_dataset=rows,
        eval_dataset=rows, loss=loss,
    )  # fmt: skip


def trained_and_evaluated(say, folder: Path) -> str:
    trainer = make_trainer(folder)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    model = trainer.model_wrapped
    units = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    parameters = [parameter for unit in filter(None, units) for parameter in unit.fsdp_params]
    return json.dumps({
        "loss": loss,
        "half": [p._param_fqn for p in parameters if p.unsharded_param.dtype == torch.bfloat16],
        "whole": [p._param_fqn for p in parameters if p.unsharded_param.dtype == torch.float32],
        "gradients": sorted({str(p.unsharded_param.grad_dtype) for p in parameters}),
    })  # fmt: skip


def test_matrices_alone_are_gathered_in_half_precision(tmp_path):
    ddp, fsdp = (
        json.loads(Run(mode, tmp_path / mode, partial(trained_and_evaluated, folder=tmp_path / mode)).result())
        for mode in ("ddp", "fsdp-sharded")
    )
    assert fsdp["loss"] == pytest.approx(ddp["loss"], rel=1e-6)
    assert fsdp["gradients"] == ["torch.float32"]
    assert len(fsdp["half"]) == 2 * 6 + 1 and all(
        name.endswith(("query.weight", "key.weight", "value.weight", "dense.weight", "projection.linear.weight"))
        for name in fsdp["half"]
    )
    assert any("LayerNorm" in name for name in fsdp["whole"]) and any("word_emb" in name for name in fsdp["whole"])


def test_weights_that_train_in_half_precision_are_said_with_the_remedy(tmp_path, caplog):
    """Small updates are lost in them, with autocast and without."""
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, model=embedding_model(BERT).bfloat16())
    assert '"dtype": "float32"' in caplog.text and "bfloat16" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path)
    assert not caplog.text
