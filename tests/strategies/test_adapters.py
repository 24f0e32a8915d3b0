"""Which adapters tensor parallelism takes. Their gradients are in tests/parity, their runs in tests/distributed."""

from types import SimpleNamespace

import pytest
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import adapters, splitting
from tests.tiny_models import embedding_model, model_config, needs_tensor_parallelism

pytestmark = needs_tensor_parallelism
ARGS = SimpleNamespace(bf16=False, optim="adamw_torch")


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=59, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "does not go with use_dora=true.*plain LoRA"),
        ({"init_lora_weights": "pissa"}, "does not go with init_lora_weights='pissa'"),
        ({"modules_to_save": ["lm_head"]}, "splits 'lm_head', and modules_to_save were not made exact"),
        ({"modules_to_save": ["layers.1"]}, r"splits 'model.layers.1', and modules_to_save were not"),
        ({"target_modules": ["lm_head"]}, "splits 'lm_head', and adapters were not made exact"),
        ({"target_modules": ["embed_tokens"]}, "splits 'model.embed_tokens', and adapters were not made exact"),
    ],
)
def test_adapters_that_were_not_made_exact_are_refused(options, words):
    model = get_peft_model(llama(), LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | options))
    with pytest.raises(UsageError, match=words):
        splitting.check_what_trains(model, ARGS)


def test_other_kinds_of_adapters_are_refused():
    model = get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(UsageError, match="adapters of the kind IA3"):
        splitting.check_what_trains(model, ARGS)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_plain_adapters_pass_beside_what_is_not_split(kind):
    model = embedding_model(model_config(kind), projection_dim=8)
    splitting.check_what_trains(get_peft_model(model, LoraConfig(target_modules="all-linear", r=2)), ARGS)


def test_names_of_a_folder_lead_to_the_models_own_tensors():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    held, own = adapters.held_here(model), model.state_dict()
    assert len(held) == 2 * 2 * 2
    for name, tensor in held.items():
        assert tensor.data_ptr() == own[name.replace(".weight", ".default.weight")].data_ptr()
