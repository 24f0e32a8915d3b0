"""Tells when a workaround is no longer needed: each test fails once upstream does what we do by hand."""

import subprocess
import sys
import textwrap

from tests.launching import environment


def run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment(**variables)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_accelerate_still_ignores_fsdp_on_cpu_processes():
    """distributed.fsdp_on_cpu: remove it when this prints FSDP."""
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

        from hf_dist_ext.layer_classes import repeated_layer_classes

        model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48))
        print(set(model._no_split_modules) == set(repeated_layer_classes(model)))
    """
    assert run(code) == "False"
