"""A loss over embeddings meets processes that share rows only where it is exact: tensor parallelism, by name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import BertConfig, LlamaConfig, LlamaModel, MixtralConfig
from transformers.distributed import DistributedConfig

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import splitting
from hf_dist_ext.strategies.base import WHOLE, Strategy, meanwhile
from hf_dist_ext.strategies.choose import of_accelerator, of_model
from hf_dist_ext.strategies.fsdp import FSDP
from hf_dist_ext.strategies.gathering import Rows
from hf_dist_ext.strategies.splitting import check_can_be_split, launched_config
from hf_dist_ext.strategies.zero import ZeRO
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import around, needs_tensor_parallelism


def embedder() -> SentenceTransformer:
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return around(LlamaModel(config), pooling="last")


@pytest.mark.parametrize(
    ("name", "words"),
    [("tp", "whole on every process"), ("cp", "context parallelism"), ("sp", "sequence parallelism")],
)
def test_a_yaml_that_shares_rows_is_refused(monkeypatch, tmp_path, name, words):
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    of_model(embedder(), args)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    of_model(embedder(), args)  # every process has rows of its own
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "2")
    with pytest.raises(UsageError, match=f"{name}_size=2.*{words}.*multi_gpu_fsdp"):
        DistTrainer(embedder(), args, loss=InfoNCELoss())


def test_a_parallelism_config_of_the_arguments_is_looked_at(tmp_path):
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    args.parallelism_config = ParallelismConfig(tp_size=4)
    with pytest.raises(UsageError, match="tp_size=4"):
        of_model(embedder(), args)


@needs_tensor_parallelism
@pytest.mark.parametrize("by_init", [False, True])
@pytest.mark.parametrize(
    ("sizes", "is_inside", "words"),
    [
        ({"fsdp_size": 2}, False, "LlamaModel was split with tp_size=1.*multi_gpu_hsdp"),
        ({"tp_size": 2, "dp_replicate_size": 2}, False, "dp_replicate_size=2"),
        ({"tp_size": 2}, True, "inside Sequential"),
    ],
)
def test_other_splits_are_refused(tmp_path, by_init, sizes, is_inside, words):
    args = DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    backbone = embedder().transformers_model
    backbone._is_distributed_loading_by_transformers = True  # what from_pretrained(distributed_config=) sets
    backbone.config.distributed_config = DistributedConfig(**sizes)
    model = around(backbone, pooling="last")
    model = nn.Sequential(backbone) if is_inside else model
    given = {"model_init": lambda: model} if by_init else {"model": model}
    with pytest.raises(UsageError, match=words):
        DistTrainer(args=args, loss=InfoNCELoss(), **given)


@needs_tensor_parallelism
@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (BertConfig(), 2, 'no tensor-parallel plan for "bert"'),
        (LlamaConfig(num_attention_heads=8), 16, "num_attention_heads=8.*groups of 16"),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4, "num_key_value_heads=2.*groups of 4"),
        (MixtralConfig(), 2, "was not measured to be exact"),
    ],
)
def test_what_can_not_be_split_is_said_before_weights_are_read(config, size, words):
    with pytest.raises(UsageError, match=words):
        check_can_be_split(config, size)


@pytest.mark.skipif(splitting.is_supported(), reason="this transformers has what splitting needs")
def test_a_transformers_without_the_plans_is_refused_before_weights_are_read():
    with pytest.raises(UsageError, match="needs transformers 5.23"):
        check_can_be_split(LlamaConfig(), 2)


@pytest.mark.parametrize("processes", [3, 5])
def test_processes_that_make_no_groups_are_refused(monkeypatch, processes):
    assert launched_config() is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UsageError, match=f"{processes} processes do not make groups of 2"):
        launched_config()


@pytest.mark.parametrize(
    ("before", "now"),
    [("tp 2", ""), ("", "tp 2"), ("tp 2", "tp 2 x fsdp 2"), ("pp 2", "tp 2"), ("pp 2 x tp 2", "tp 2")],
)
def test_a_checkpoint_of_another_way_of_splitting_is_refused(before, now):
    content = {"sharding": before or "ddp", "tensor_parallel_size": 2 if before else 1}
    strategy = Strategy()
    strategy.split = now
    with pytest.raises(UsageError, match="tensor parallelism.*resume_weights_only"):
        strategy.check_resumable(Path("checkpoint-2"), content, world_size=4)
    strategy.split = "tp 2 x fsdp 8"  # other groups
    content |= {"sharding": "tp 2 x fsdp 2", "tensor_parallel_size": 2}
    strategy.check_resumable(Path("checkpoint-2"), content, world_size=4)


FORMATS = ["optimizer.pt", "optimizer.bin", "optimizer_0", "global_step4"]


@pytest.mark.parametrize("written", FORMATS)
@pytest.mark.parametrize("runs", FORMATS)
def test_a_checkpoint_whose_optimizer_is_in_another_strategys_file_is_refused(tmp_path, written, runs):
    kinds = {"optimizer.bin": "FULL_STATE_DICT", "optimizer_0": "SHARDED_STATE_DICT"}
    strategy = {"optimizer.pt": Strategy, "global_step4": ZeRO}.get(runs, FSDP)()
    plugin = SimpleNamespace(state_dict_type=kinds.get(runs), fsdp_version=2)
    strategy.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / written).touch() if written in WHOLE else (folder / written).mkdir()
    if written == runs or (written in WHOLE and runs != "global_step4"):  # whole tensors are converted
        strategy.check_resumable(folder, {}, world_size=2)
        if written == runs:
            return None
        (folder / "pytorch_model_fsdp.bin").touch()  # of an earlier version: accelerate reads such weights
    with pytest.raises(UsageError, match=r"checkpoint-2 was (not )?written .*resume_weights_only=true") as error:
        strategy.check_resumable(folder, {}, world_size=2)
    words = {"optimizer.pt": "by one process or under DDP", "global_step4": "under DeepSpeed"} | kinds
    wanted = "was not written under DeepSpeed" if runs == "global_step4" else words[written]
    others = {*words.values(), "was not written under DeepSpeed"} - {wanted}
    assert wanted in str(error.value) and not [
        other for other in others if other in str(error.value).replace(wanted, "")
    ]


@pytest.mark.parametrize(("plugins", "processes", "name", "is_collective", "graphs"), [
    ({}, 1, "none", False, None),
    ({}, 2, "ddp", False, None),
    ({"fsdp_plugin": SimpleNamespace(state_dict_type=SimpleNamespace(name="FULL"))}, 2, "fsdp FULL", True, None),
    ({"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, 2, "deepspeed", False, None),
    ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, 2, "deepspeed", True, 1),
])  # fmt: skip
def test_an_accelerator_says_which_strategy_runs(plugins, processes, name, is_collective, graphs):
    kind = SimpleNamespace(value="MULTI_CPU" if processes > 1 else "NO")
    state = SimpleNamespace(**plugins)
    accelerator = SimpleNamespace(state=state, num_processes=processes, distributed_type=kind, mixed_precision="bf16")
    strategy = of_accelerator(accelerator, Strategy())
    assert strategy.casts_to == ("bfloat16" if name == "deepspeed" else None)
    assert (strategy.name, strategy.forwards_are_collective) == (name, is_collective)
    assert strategy.max_live_graphs == graphs and strategy.can_redo == (processes == 1)
    assert of_accelerator(None, strategy) is strategy


def test_the_gather_takes_one_rank_of_each_group():
    assert Rows().one_of_each([0, 1, 2, 3]) == [0, 1, 2, 3]
    assert Rows(shared_by=2).one_of_each([0, 1, 2, 3]) == [0, 2]


def test_attributes_come_back_where_one_could_not_be_set():
    class Owner:
        fixed = property(lambda self: 1)

    owner = Owner()
    with pytest.raises(AttributeError, match="no setter"), meanwhile(owner, one=1, fixed=2, other=3):
        pass
    assert not vars(owner)
