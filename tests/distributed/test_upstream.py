"""Tells when a workaround is no longer needed: each test fails once upstream does what we do by hand."""

import textwrap
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaModel, Trainer, TrainingArguments

from tests.distributed.forked import run_python


def run(code: str, **variables: str) -> str:
    """The last line that a process says which has these variables."""
    return run_python(f"import os\nos.environ.update({variables})\n{textwrap.dedent(code)}").splitlines()[-1]


def test_accelerate_still_ignores_fsdp_on_cpu_processes():
    """distributed.sharded_on_cpu: remove it when this prints FSDP."""
    code = """
        from accelerate import Accelerator, PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU  # what several processes get
        print(Accelerator(cpu=True).distributed_type.value)
    """
    assert run(code, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2") == "MULTI_CPU"


def test_accelerate_still_refuses_bert_without_named_layers():
    """trainer._name_layers_to_shard: accelerate's own choice for Bert names modules that lie inside each other."""
    code = """
        from transformers import BertConfig, BertModel

        from hf_dist_ext.strategies.layers import repeated_layer_classes

        model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48))
        print(set(model._no_split_modules) == set(repeated_layer_classes(model)))
    """
    assert run(code) == "False"


def test_trainer_still_cannot_resume_a_model_split_at_load(tmp_path):
    """TensorParallel.constructing."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="steps")
    model = LlamaModel(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    Trainer(model, args)
    model._is_distributed_loading_by_transformers = True
    with pytest.raises(ValueError, match="Resuming is not supported"):
        Trainer(model, args)


def test_accelerate_still_refuses_a_mesh_of_cpu_processes():
    """distributed.sharded_on_cpu: remove has_mesh when this passes."""
    processes = SimpleNamespace(
        num_processes=2, is_fsdp2=False, multi_device=False, distributed_type=DistributedType.MULTI_CPU,
        is_main_process=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="MULTI_CPU"):
        ParallelismConfig(tp_size=2)._validate_accelerator(processes)
