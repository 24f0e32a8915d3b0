"""Who asks for torch.compile gets graphs for chunks of any shape, with a loss over embeddings alone."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from datasets import Dataset
from transformers import trainer as trainer_of_transformers
from transformers.integrations import liger

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import splitting
from hf_dist_ext.training import compiling
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.parity import exactness_worker
from tests.parity.exactness_worker import BERT, Case
from tests.sentence_models import text_model
from tests.tiny_models import embedding_model


@pytest.mark.parametrize("loss", [InfoNCELoss(), None])
def test_an_accelerate_yaml_compiles_as_the_run_file_does(loss, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")  # what the launcher sets when nobody asked
    options = {} if loss is None else {"gradient_cache_chunk_size": 4}
    args = DistTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **options)
    has_loss = loss is not None
    trainer = DistTrainer(model=embedding_model(BERT) if has_loss else torch.nn.Linear(2, 2), args=args, loss=loss)
    assert trainer.accelerator.state.dynamo_plugin.dynamic is has_loss
    assert trainer.args.torch_compile is has_loss  # so that the replay may differ by what other kernels round
    assert not has_loss or trainer.step.sizes.may_pack


def test_a_yaml_that_compiles_is_refused_where_the_run_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    args = DistTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(UsageError, match="tensor parallelism does not go with dynamo in the accelerate configuration"):
        splitting.check_rest(embedding_model(BERT), args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="a pipeline does not go with dynamo in the accelerate configuration"):
        DistTrainingArguments(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, pipeline_parallel_size=2, gradient_cache_chunk_size=4
        )


@pytest.fixture
def in_tf32(monkeypatch):
    """As Trainer leaves torch on a GPU that computes in TF32, when it compiles."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    torch.backends.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.fp32_precision = "none"


class Watched(InfoNCELoss):
    def forward(self, own, *more, **options):
        self.seen.append(torch.backends.cuda.matmul.fp32_precision)
        return super().forward(own, *more, **options)


@pytest.mark.parametrize("tf32, precision", [(None, "ieee"), (True, "tf32")])
def test_a_loss_keeps_float32_where_compiling_turned_tf32_on_for_the_model(tf32, precision, tmp_path, in_tf32):
    rows, seen = [{"text": [i]} for i in range(8)], []
    model, loss = embedding_model(BERT), Watched()
    loss.seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    args = DistTrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, torch_compile=True, gradient_cache_chunk_size=3, max_steps=2,
        save_strategy="no", eval_strategy="steps", eval_steps=1, disable_tqdm=True,
    )  # fmt: skip
    args.tf32 = tf32  # True is refused where there is no such GPU
    case = Case("in TF32")
    DistTrainer(
        model=model, args=args, loss=loss, train_dataset=rows, eval_dataset=rows,
        data_collator=lambda rows: exactness_worker.collate(case, [row["text"][0] for row in rows], 0),
    ).train()  # fmt: skip
    assert set(seen) == {"tf32"} and set(loss.seen) == {precision} and len(loss.seen) > 2
    assert torch.get_float32_matmul_precision() == "high"  # inductor asks so


@pytest.mark.parametrize("backend, dynamic, is_compiled", [("inductor", True, True), ("no", None, False)])
def test_graphs_are_for_any_shape(backend, dynamic, is_compiled):
    args, plugin = SimpleNamespace(torch_compile=False), TorchDynamoPlugin(backend=backend)
    compiling.prepare(args, plugin)
    assert plugin.dynamic is dynamic and args.torch_compile is is_compiled
    assert not is_compiled or torch._dynamo.config.recompile_limit >= 64


@pytest.mark.parametrize("plugin, asked", [
    ({"mode": "reduce-overhead"}, 'torch_compile_mode="reduce-overhead"'),
    ({"mode": "max-autotune"}, 'torch_compile_mode="max-autotune"'),
    ({"backend": "cudagraphs"}, 'torch_compile_backend="cudagraphs"'),
    ({"mode": "max-autotune-no-cudagraphs"}, None), ({}, None), ({"backend": "no", "mode": "reduce-overhead"}, None),
])  # fmt: skip
def test_cuda_graphs_are_refused(plugin, asked):
    with pytest.raises(UsageError, match=f"{asked} replays CUDA graphs") if asked else nullcontext():
        compiling.check(TorchDynamoPlugin(**{"backend": "inductor"} | plugin))


def test_ligers_kernels_go_into_the_backbone_and_none_into_a_head(tmp_path, monkeypatch):
    """Their package needs a GPU: what it would be told is noted."""
    told: list[tuple] = []
    package = SimpleNamespace(_apply_liger_kernel_to_instance=lambda model, **given: told.append((model, given)))
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    model = text_model(tmp_path / "model")
    args = DistTrainingArguments(
        str(tmp_path / "run"), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", use_liger_kernel=True,
        liger_kernel_config={"rope": False, "fused_linear_cross_entropy": True}, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"query": ["parse a date"] * 8, "positive": ["sort the numbers"] * 8})
    DistTrainer(model, args, train_dataset=rows, loss=InfoNCELoss()).train()
    heads = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert [given for _, given in told] == [{"rope": False, **heads}] and told[0][0] is model.transformers_model
    assert trainer_of_transformers.apply_liger_kernel is liger.apply_liger_kernel
