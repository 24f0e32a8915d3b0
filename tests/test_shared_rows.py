"""A loss over embeddings never meets processes that share rows."""

import pytest
from accelerate import ParallelismConfig
from transformers import LlamaConfig, LlamaModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.losses import InfoNCELoss
from hf_dist_ext.modeling import EmbeddingModel
from hf_dist_ext.planner import STRATEGIES
from hf_dist_ext.presets import ABSENT, find_preset, presets
from hf_dist_ext.shared_rows import check
from hf_dist_ext.trainer import DistTrainer
from hf_dist_ext.training_args import DistTrainingArguments


def embedder() -> EmbeddingModel:
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return EmbeddingModel(LlamaModel(config), pooling="last")


@pytest.mark.parametrize(("name", "words"), [("tp", "tensor"), ("cp", "context"), ("sp", "sequence")])
def test_a_yaml_that_shares_rows_is_refused(monkeypatch, tmp_path, name, words):
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    check(embedder(), args)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    check(embedder(), args)  # every process has rows of its own
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "2")
    with pytest.raises(UsageError, match=f"{name}_size=2.*{words} parallelism.*multi_gpu_fsdp"):
        DistTrainer(embedder(), args, loss=InfoNCELoss())


def test_a_parallelism_config_of_the_arguments_is_refused(tmp_path):
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    args.parallelism_config = ParallelismConfig(tp_size=4)
    with pytest.raises(UsageError, match="tp_size=4"):
        check(embedder(), args)


@pytest.mark.parametrize("by_init", [False, True])
def test_a_model_split_at_load_is_refused_inside_another_one_too(tmp_path, by_init):
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    model = embedder()
    model.backbone._is_distributed_loading_by_transformers = True  # what from_pretrained(distributed_config=) sets
    given = {"model_init": lambda: model} if by_init else {"model": model}
    with pytest.raises(UsageError, match="LlamaModel was split.*multi_gpu_hsdp"):
        DistTrainer(args=args, loss=InfoNCELoss(), **given)


def test_the_preset_that_is_not_there_says_why_and_the_planner_never_takes_it():
    with pytest.raises(UsageError, match="Tensor parallelism.*multi_gpu_fsdp"):
        find_preset("multi_gpu_tp")
    assert not set(ABSENT) & set(presets())
    assert {s.preset for s in STRATEGIES} - set(presets()) == set(ABSENT)
